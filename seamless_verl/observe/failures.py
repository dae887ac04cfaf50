"""What becomes of attempts: which failed, with what, in which line of the user's code; which hang, and where.

    rollout worker: AttemptLog ── AttemptNews, when asked ──► trainer: AttemptBook ──► lines for the console

An attempt fails when it raises (then verl leaves out its whole group), or when its agent's runner says so (then it is
trained with the reward that it was given). A kind of failure is an exception and the place where it was raised: the
first of a kind is told at once, with the user's own lines, the others are counted. Pure: whoever calls brings the time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

_MOST_KINDS = 8  # told in full; the others are counted only
_MOST_TASKS = 3
_MOST_KEPT = 256  # failures that a worker keeps until it is asked
ALARM_SHARE = 0.2
LATE = 1.2  # of the deadline; what is graded after its deadline does not hang


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One attempt that failed.

    Attributes:
        task: as the data calls it, e.g. ``train/17``.
        error: type and message, in one line.
        places: lines of the user's code, the innermost last.
        validation: whether it was of a validation.
    """

    task: str
    error: str
    places: tuple[str, ...] = ()
    validation: bool = False

    @property
    def kind(self) -> tuple[str, str]:
        """Type of the exception and where it was raised; numbers (of processes, of tries) make no other kind."""
        return re.sub(r"\d+", "#", self.error.partition(":")[0]), self.places[-1] if self.places else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangingAttempt:
    """An attempt that should have ended.

    Attributes:
        seconds: since it began.
        reward: whether its agent has ended and it waits for the reward.
        places: lines of the user's code where it waits.
    """

    task: str
    seconds: float
    reward: bool
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptNews:
    """What a rollout worker tells since it was asked last.

    Attributes:
        ended: attempts that ended, and how many of them failed; training, then validation.
        failures: those that failed, `_MOST_KEPT` at most.
        hanging: attempts that are under way for longer than they may be, now.
        blocked: where its event loop stands, and for how many seconds it has not turned; None: it turns.
        notes: what else the user should know.
    """

    ended: tuple[int, int]
    failed: tuple[int, int]
    failures: tuple[Failure, ...]
    hanging: tuple[HangingAttempt, ...] = ()
    blocked: tuple[float, tuple[str, ...]] | None = None
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class UnderWay:
    """An attempt under way; ``where`` says in which lines it waits."""

    task: str
    validation: bool
    began: float
    where: Callable[[], tuple[str, ...]]
    reward: bool = False
    failure: Failure | None = None


class AttemptLog:
    """The attempts of a rollout worker.

    Args:
        clock: seconds.
        explain: of an exception, its line for people and the user's lines.
    """

    def __init__(
        self, clock: Callable[[], float], explain: Callable[[BaseException], tuple[str, tuple[str, ...]]]
    ) -> None:
        self._clock = clock
        self._explain = explain
        self._under_way: dict[int, UnderWay] = {}
        self._current: ContextVar[UnderWay | None] = ContextVar("attempt", default=None)
        self._ended = [0, 0]
        self._failed = [0, 0]
        self._failures: list[Failure] = []
        self._notes: tuple[str, ...] = ()

    def note(self, words: str) -> None:
        """Something of the whole run that the user should know; told once, whichever worker says it."""
        self._notes += (words,)

    @contextmanager
    def attempt(self, task: str, *, validation: bool, where: Callable[[], tuple[str, ...]]) -> Iterator[None]:
        """Watch one attempt: an exception raised inside is its failure. A cancelled attempt was surplus, and is not."""
        attempt = UnderWay(task, validation, self._clock(), where)
        self._under_way[id(attempt)] = attempt
        token = self._current.set(attempt)
        try:
            yield
            self._end(attempt)
        except Exception as error:
            words, places = self._explain(error)
            attempt.failure = Failure(task=task, error=words, places=places, validation=validation)
            self._end(attempt)
            raise
        finally:
            self._current.reset(token)
            del self._under_way[id(attempt)]

    def begins_now(self) -> None:
        """The attempt of this context had to wait for its place until now."""
        if (attempt := self._current.get()) is not None:
            attempt.began = self._clock()

    def agent_ended(self) -> bool:
        """What is left of this context's attempt is to compute its reward; returns whether it is of a validation."""
        if (attempt := self._current.get()) is not None:
            attempt.reward = True
        return attempt is not None and attempt.validation

    def failed(self, error: str) -> None:
        """The agent of this context's attempt failed, which goes on to be graded and trained."""
        if (attempt := self._current.get()) is not None:
            attempt.failure = Failure(task=attempt.task, error=error, validation=attempt.validation)

    def _end(self, attempt: UnderWay) -> None:
        self._ended[attempt.validation] += 1
        if attempt.failure is not None:
            self._failed[attempt.validation] += 1
            if len(self._failures) < _MOST_KEPT:
                self._failures.append(attempt.failure)

    def take(self, late_s: float) -> AttemptNews:
        """What became of attempts since the last call, and those under way for more than ``late_s`` seconds."""
        now = self._clock()
        late = [a for a in list(self._under_way.values()) if now - a.began > late_s]
        failures, self._failures = self._failures, []
        ended, self._ended = self._ended, [0, 0]
        failed, self._failed = self._failed, [0, 0]
        notes, self._notes = self._notes, ()
        return AttemptNews(
            ended=(ended[0], ended[1]),
            failed=(failed[0], failed[1]),
            failures=tuple(failures),
            notes=notes,
            hanging=tuple(
                HangingAttempt(task=a.task, seconds=now - a.began, reward=a.reward, places=a.where()) for a in late
            ),
        )


@dataclass(slots=True)
class _Kind:
    first: Failure
    count: int = 0
    tasks: dict[str, None] = field(default_factory=dict)

    def add(self, failure: Failure) -> None:
        self.count += 1
        if len(self.tasks) < _MOST_TASKS:
            self.tasks[failure.task] = None

    def lines(self) -> list[str]:
        """``81 × KeyError: 'x' (tasks train/1, train/7, …)`` and the user's lines."""
        tasks = ", ".join(self.tasks) + (", …" if self.count > len(self.tasks) == _MOST_TASKS else "")
        return [f"{self.count} × {self.first.error} (tasks {tasks})", *_indented(self.first.places)]


class AttemptBook:
    """The attempts of a run, as the trainer knows them."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[bool, tuple[str, str]], _Kind] = {}
        self._told: set[tuple[str, str]] = set()
        self._told_once: set[tuple[str, ...]] = set()
        self._ended = Counter[bool]()
        self._failed = Counter[bool]()
        self._of_step = (0, 0)

    def take(self, news: AttemptNews) -> list[str]:
        """Take in what a worker tells; returns lines for the console: what has not been told yet."""
        for validation in (False, True):
            self._ended[validation] += news.ended[validation]
            self._failed[validation] += news.failed[validation]
        self._of_step = (self._of_step[0] + news.ended[0], self._of_step[1] + news.failed[0])
        lines = [note for words in news.notes for note in self._once((words,), words)]
        for failure in news.failures:
            self._kinds.setdefault((failure.validation, failure.kind), _Kind(failure)).add(failure)
            if failure.kind in self._told:
                continue
            if len(self._told) < _MOST_KINDS:
                self._told.add(failure.kind)
                lines += _first_of_kind(failure)
            else:
                many = f"attempts fail in more than {_MOST_KINDS} ways; further ones are counted, not told"
                lines += self._once((many,), many)
        return lines + self._stuck(news)

    def _stuck(self, news: AttemptNews) -> list[str]:
        """What hangs, once per place."""
        lines: list[str] = []
        if news.blocked is not None:
            seconds, places = news.blocked
            said = f"a rollout worker's event loop has stood for {seconds:.0f} s, and with it all of its attempts, in:"
            advice = "code of `async def` must not block: await asyncio.to_thread(…) there"
            lines += self._once(places, said, *_indented(places), f"  ({advice})")
        by_place: dict[tuple[str, ...], list[HangingAttempt]] = {}
        for attempt in news.hanging:
            by_place.setdefault(attempt.places, []).append(attempt)
        for places, them in by_place.items():
            longest = max(them, key=lambda attempt: attempt.seconds)
            waits = "waits for its reward, whose function stands in" if longest.reward else "waits in"
            said = (
                f"attempts that should have ended by now: {len(them)}; the longest (task {longest.task}) has been "
                f"under way for {longest.seconds:.0f} s; it {waits}:"
            )
            advice = "if attempts need that long, raise seamless.agent.deadline_s"
            lines += self._once(places, said, *_indented(places), f"  ({advice})")
        return lines

    def _once(self, what: tuple[str, ...], *lines: str) -> list[str]:
        if what in self._told_once:
            return []
        self._told_once.add(what)
        return list(lines)

    def close_step(self) -> tuple[int, int]:
        """Attempts of training that ended since the last call, and how many of them failed."""
        ended, self._of_step = self._of_step, (0, 0)
        return ended

    def story(self, *, validation: bool) -> str:
        """What failed up to now, for the error that ends a run; "" where nothing is known of any failure."""
        ended, failed = self._ended[validation], self._failed[validation]
        of_these = [kind for (when, _), kind in self._kinds.items() if when == validation]
        kinds = sorted(of_these, key=lambda kind: -kind.count)
        if not kinds:
            return ""
        lines = [f"{failed} of {ended} attempts failed:"]
        for kind in kinds[:_MOST_TASKS]:
            lines += [f"  {line}" for line in kind.lines()]
        rest = sum(kind.count for kind in kinds[_MOST_TASKS:])
        return "\n".join([*lines, *([f"  {rest} × something else"] if rest else [])])


def alarm(step: int, ended: int, failed: int) -> str | None:
    """A line when more than `ALARM_SHARE` of a step's attempts failed."""
    if not ended or failed <= ALARM_SHARE * ended:
        return None
    return (
        f"ALARM: {failed / ended:.0%} of the attempts that ended in step {step} failed ({failed} of {ended}); "
        "the first of each kind was told when it came"
    )


def _first_of_kind(failure: Failure) -> list[str]:
    where = "validation" if failure.validation else "training"
    return [
        f"an attempt of {where} failed (task {failure.task}): {failure.error}",
        *_indented(failure.places),
        "  (more of this kind are counted, not told)",
    ]


def _indented(places: Sequence[str]) -> list[str]:
    return [f"    {place}" for place in places]
