"""What a plan would be worth, from what events say of sessions, the trainer and its speed.

    value of a plan = time at which the trainer ends its batch  -  what was done for the next batch until then

What was done counts in seconds, in one of two ways. Tokens made now need not be made in the next step: tokens / full
rate (`value`). Under a bound on staleness the next batch must have the sessions that are left over, and the longest of
them takes its time however many slices there are: then the value is the mean of both ends, that of the batch and that
of the next one, whose sessions go on beside those that are submitted (`bounded_value`). Lives of batches overlap; what
brings only one of the two ends nearer shortens every other step. Uneven steps cost (`_UNEVEN`): in a short step after a
long one the batch waits for its training, and both batches then start together and crowd the slices.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from seamless_verl.scheduling.cluster import Cluster, Pending
from seamless_verl.scheduling.events import (
    AcquireRequested,
    BatchOpened,
    Event,
    GroupsSubmitted,
    Released,
    SliceFailed,
    StepEnded,
)
from seamless_verl.scheduling.prediction.projection import Capacity, NextBatch, Projection, Work, project, uniform
from seamless_verl.scheduling.prediction.session_forecast import SessionBook
from seamless_verl.scheduling.slices import SliceState, SliceStatus, Tag

_MAX_SESSIONS = 256  # sessions per projection; more are sampled by whole groups
_NEXT_BATCH_QUANTILES = 32  # quantiles that stand for a batch that is not submitted yet
_ENOUGH_LENGTHS = 4
_TRAINING_WINDOW = 5  # steps whose median is taken for training time: the first ones of a run are slow
_UNEVEN = 0.3  # how much longer steps get when they alternate between nothing and twice their mean
# The same, where both batches begin and end together, which lasts for many steps, more than a plan looks ahead. To move
# the border between two steps by a second costs half a second: with both terms it pays where one takes 3.5 times as
# long as the other (with the first alone 11 times, and skewed lengths then stay locked in steps of 60 and 500 s).
_LOCKED = 0.5
_LOCKED_POWER = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """What the trainer wants next.

    Attributes:
        ready: groups it could take now.
        minimum: groups of one local update.
        batch: groups until the end of the step.
        train_s: seconds of training per group.
    """

    ready: int
    minimum: int
    batch: int
    train_s: float


def end_of_training(projection: Projection, trainer: Trainer, free_at: float) -> float:
    """When the last local update of the step ends, if the gang is free from ``free_at`` on."""
    end = free_at
    used = 0
    while used < trainer.batch:
        update = min(trainer.minimum, trainer.batch - used)
        used += update
        end = max(end, projection.when_ready(used - trainer.ready)) + trainer.train_s * update
    return end


def next_end(work: Work, projection: Projection, end: float, next_batch: NextBatch) -> float:
    """When the sessions that are left over at ``end`` are done, beside those that are submitted then."""
    if projection.done_at <= end:
        return end
    phases = [phase for phase in projection.phases if phase[0] < end]
    return project(work, [*phases, (end, next_batch.capacity)], (end, next_batch)).done_at


def value(projection: Projection, trainer: Trainer, free_at: float, full_rate: float) -> float:
    """By tokens; seconds, smaller is better, infinity when the batch never gets ready."""
    end = end_of_training(projection, trainer, free_at)
    return end - projection.tokens_by(end) / full_rate if end < math.inf else math.inf


def bounded_value(
    work: Work, projection: Projection, trainer: Trainer, free_at: float, next_batch: NextBatch, elapsed_s: float
) -> float:
    """Under a bound on staleness; seconds, smaller is better, infinity when the batch never gets ready."""
    end = end_of_training(projection, trainer, free_at)
    if end == math.inf:
        return math.inf
    this = elapsed_s + end
    last = trainer.train_s * trainer.minimum
    following = max(next_end(work, projection, end, next_batch) - end + last, next_batch.train_s, 1e-9)
    uneven = abs(this - following) / (this + following)
    longer = _UNEVEN * uneven**2 + _LOCKED * uneven**_LOCKED_POWER
    return this + following / 2 + longer * (this + following) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAgain:
    """Tokens that had been in a cache and are prefilled once more, and the seconds that this takes from a loan.

        a loan begins with new weights: everything is prefilled anyway, and the lent slices do their share of it
        a loan begins within a step:    only what gains by it moves to the lent slices (`staleness.affinity`)
        slices are taken back:          those that stay prefill what these had cached, and decode nothing meanwhile

    256 sessions of 16,000 tokens are 4 million tokens: at 30 us each (an H100, 8 billion parameters) two minutes. The
    pace of decoding that plans are made with has the usual prefill in it, also what usual loans cause. So a loan is
    charged only where that takes longer than its switches: what is less is no more than a forecast errs by.
    """

    tokens: float = 0.0
    seconds: float = 0.0

    @classmethod
    def of_loan(
        cls, work: Work, standing: Capacity, joining: Capacity, left_behind: float, *, caches_lost: bool, usual_s: float
    ) -> PrefillAgain:
        """What a loan is charged.

        Args:
            left_behind: tokens that the slices which join will have cached when they are taken back.
            caches_lost: the loan begins as new weights go out.
            usual_s: less is not charged.
        """
        seconds = prefill_s(work, left_behind, standing)
        if caches_lost:
            seconds -= prefill_s(work, work.cached, standing) - prefill_s(work, work.cached, standing + joining)
        return cls(tokens=left_behind, seconds=seconds) if seconds > usual_s else cls()

    def __str__(self) -> str:
        """Nothing where it is nothing."""
        if not self.seconds:
            return ""
        return f" and {self.seconds:.2f} s for {self.tokens:.0f} tokens that are prefilled again"


def prefill_s(work: Work, tokens: float, capacity: Capacity) -> float:
    """Seconds in which slices that do nothing else prefill so many tokens; 0 without slices."""
    return tokens * work.prefill_s / capacity.power if capacity.power else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Everything that plans at one moment have in common.

    Attributes:
        standing: the slices that always generate.
        full_rate: tokens per second if every slice generated under the usual load.
        token_s: seconds in which a session that has a seat gains a token then.
        next_batch: the batch after this one; None while no bound on staleness is known.
    """

    trainer: Trainer
    work: Work
    standing: Capacity
    full_rate: float
    token_s: float
    next_batch: NextBatch | None
    elapsed_s: float

    def projection(self, *phases: tuple[float, Capacity]) -> Projection:
        """``phases``: from when on who generates."""
        return project(self.work, phases)

    def worth(self, projection: Projection, free_at: float) -> float:
        """Value of a projection in which the gang is free from ``free_at`` on; seconds, smaller is better."""
        if self.next_batch is None:
            return value(projection, self.trainer, free_at, self.full_rate)
        return bounded_value(self.work, projection, self.trainer, free_at, self.next_batch, self.elapsed_s)

    def latest_free(self, projection: Projection) -> float:
        """When the gang must be free at the latest if its training is not to make the step longer."""
        return end_of_training(projection, self.trainer, 0.0) - self.trainer.train_s * self.trainer.batch


@dataclass(frozen=True, slots=True)
class _Place:
    """A session in the queue; lower turns come first. ``home``: speed of the slice that it runs on."""

    turn: tuple[int, float]
    remaining: float
    context: float
    home: float | None = None


@dataclass(slots=True)
class Forecaster:
    """Fed with every event.

    Attributes:
        between_steps: a step has ended and the trainer has not asked for its gang yet.
    """

    book: SessionBook = field(default_factory=SessionBook)
    between_steps: bool = True
    _needs: AcquireRequested | None = None  # the first acquire of the last step
    _submitted: tuple[int, int] = (0, 0)  # groups, sessions per group of the last submission
    _submitted_since: bool = True  # since the last step ended
    _awaited: frozenset[str] | None = None  # None: nobody said that there is a bound
    _trainings: deque[float] = field(
        default_factory=lambda: deque(maxlen=_TRAINING_WINDOW)
    )  # seconds per group, the last steps
    _trained_before: float = 0.0
    _waited_s: float = 0.0
    _step_s: float = 0.0  # smoothed
    _ended_at: float | None = None

    def observe(self, event: Event, cluster: Cluster) -> None:
        self.book.observe(event, cluster.roofline)
        match event:
            case SliceFailed():
                self.book.lost(event.slice)
            case BatchOpened():
                self._awaited = event.awaited
            case GroupsSubmitted():
                self._submitted = (len(event.groups), event.sessions)
                self._submitted_since = True
            case AcquireRequested(tag=Tag.TRAIN):
                if self.between_steps:
                    self._needs = event
                self.between_steps = False
            case StepEnded():
                self.between_steps, self._submitted_since = True, False
                self._waited_s = event.waited_s
                if self._ended_at is not None:
                    self._step_s = _smoothed(self._step_s, event.at - self._ended_at)
                self._ended_at = event.at
            case Released():
                self._learn_training(cluster)
            case _:
                pass

    def _learn_training(self, cluster: Cluster) -> None:
        if self.between_steps and self._needs is not None and cluster.training_s > self._trained_before:
            busy = max(cluster.training_s - self._trained_before - self._waited_s, 0.0)
            self._trainings.append(busy / max(self._needs.batch, 1))
            self._trained_before = cluster.training_s

    def _train_s(self) -> float:
        return statistics.median(self._trainings) if self._trainings else 0.0

    # ---------------------------------------------------------------- what is known

    def outlook(self, cluster: Cluster, waiting: Pending | None) -> Outlook | None:
        """None while there is nothing to predict from."""
        asked = waiting.event if waiting is not None else self._needs
        if asked is None or asked.batch == 0:
            return None
        if len(self.book.lengths) < _ENOUGH_LENGTHS or not self.book.decode.known:
            return None
        trainer = Trainer(
            ready=cluster.ready, minimum=self.minimum(waiting), batch=asked.batch, train_s=self._train_s()
        )
        work = self._work(cluster, trainer)
        standing = capacity_of(cluster, standing_slices(cluster))
        lendable = capacity_of(cluster, [s for s in cluster if s.slice.lendable and Tag.ROLLOUT in s.usable])
        everyone = standing + lendable
        busy = min(max(self.book.crowd, len(work.remaining) * work.weight), work.room(everyone.seats))
        held = busy * sum(work.contexts) / max(len(work.contexts), 1)
        full_rate = work.rate(busy, held, everyone)
        return Outlook(
            trainer=trainer,
            work=work,
            standing=standing,
            full_rate=full_rate,
            token_s=busy / full_rate,
            next_batch=self._next_batch(standing, lendable),
            elapsed_s=cluster.now - (self._ended_at or 0.0),
        )

    def minimum(self, waiting: Pending | None) -> int:
        """Groups of one local update."""
        asked = waiting.event if waiting is not None else self._needs
        return max(asked.minimum, 1) if asked is not None else 1

    def ready_within(self, cluster: Cluster, trainer: Trainer, tokens: float) -> float:
        """Groups to expect when every session that is out has gained so many tokens: those of the batch, and of the
        others as many as it has room for."""
        book = self.book
        chances: dict[str, float] = {}
        for session in book.sessions.values():
            made, _ = book.progress(session, cluster.now)
            chances[session.group] = chances.get(session.group, 1.0) * book.lengths.ends_within(made, tokens)
        for group in book.unstarted:  # some of its sessions, or all
            chances[group] = 0.0
        awaited = self._awaited or frozenset()
        needed = [chances.pop(group) for group in awaited & chances.keys()]
        room = max(trainer.batch - trainer.ready - len(needed), 0)
        return sum(needed) + min(sum(chances.values()), room)

    def longer_than(self, cluster: Cluster, tokens: float) -> frozenset[str]:
        """Sessions that are out and will rather generate more than so many further tokens than fewer."""
        book = self.book
        return frozenset(
            name
            for name, session in book.sessions.items()
            if book.lengths.remaining(book.progress(session, cluster.now)[0], 0.5) > tokens
        )

    def _next_batch(self, standing: Capacity, lendable: Capacity) -> NextBatch | None:
        if self._awaited is None or not self._step_s or self._needs is None:
            return None
        groups, size = self._submitted
        train_s = self._train_s() * self._needs.batch
        free = max(1e-9, 1.0 - train_s / self._step_s)
        return NextBatch(
            lengths=[
                self.book.lengths.remaining(0, (i + 0.5) / _NEXT_BATCH_QUANTILES) for i in range(_NEXT_BATCH_QUANTILES)
            ],
            weight=groups * size / _NEXT_BATCH_QUANTILES,
            context=self.book.prompt_tokens,
            capacity=standing + lendable.part(free),
            train_s=train_s,
        )

    def _work(self, cluster: Cluster, trainer: Trainer) -> Work:
        """The sessions that are out, and those of the batch that the trainer is about to submit."""
        book = self.book
        members = sorted(self._members(cluster), key=lambda member: not member[0])
        sessions = sum(len(group) for _, group in members)
        every = max(1, round(sessions / _MAX_SESSIONS))
        rows = [(place, group) for group, (_, rows) in enumerate(members[::every]) for place in rows]
        rows.sort(key=lambda row: row[0].turn)
        busy_share = 1.0
        if book.sessions:
            busy_share = min(max(book.asking() / len(book.sessions), 0.05), 1.0)
        return Work(
            remaining=[place.remaining for place, _ in rows],
            contexts=[place.context for place, _ in rows],
            groups=[group for _, group in rows],
            homes=[place.home for place, _ in rows],
            awaited=frozenset(group for group, (awaited, _) in enumerate(members[::every]) if awaited),
            others=trainer.batch - trainer.ready - sum(awaited for awaited, _ in members),
            weight=float(every),
            busy_share=busy_share,
            step_s=book.decode.step_s,
            prefill_s=book.bare.prefill_s(),
            cached=book.cached(cluster.now),
        )

    def _members(self, cluster: Cluster) -> list[tuple[bool, list[_Place]]]:
        """Of each open group, whether the batch waits for it, and its sessions."""
        book = self.book
        kinds = cluster.roofline.kinds()
        groups: dict[str, list[_Place]] = {}
        for session in book.sessions.values():
            made, held = book.progress(session, cluster.now)
            home = book.slice_of(session)
            remaining = book.lengths.remaining(made, session.u)
            place = _Place((0, book.place_of(session)), remaining, held, kinds[home] if home is not None else None)
            groups.setdefault(session.group, []).append(place)
        count, size = self._submitted
        quantiles = enumerate(book.next_quantiles(list(book.unstarted), size))

        def to_come() -> list[_Place]:
            order, group = next(quantiles)
            return [_Place((1, order), book.lengths.remaining(0, u), book.prompt_tokens) for u in group]

        for group in book.unstarted:
            groups.setdefault(group, []).extend(to_come())
        awaited = self._awaited or frozenset()
        members = [(group in awaited, sessions) for group, sessions in groups.items()]
        if self.between_steps and not self._submitted_since:
            members += [(False, to_come()) for _ in range(count)]
        return members


def standing_slices(cluster: Cluster) -> list[SliceStatus]:
    """Slices that generate (or are about to) and never train."""
    alive = (SliceState.WAKING, SliceState.ROLLOUT, SliceState.SYNCING)
    return [s for s in cluster if not s.slice.lendable and s.state in alive]


def capacity_of(cluster: Cluster, statuses: Sequence[SliceStatus]) -> Capacity:
    kinds = cluster.roofline.kinds()
    capacity = Capacity()
    for status in statuses:
        capacity += uniform(1.0, status.slice.seats or math.inf, kinds[status.slice.id])
    return capacity


def _smoothed(before: float, now: float) -> float:
    return now if before == 0.0 else 0.7 * before + 0.3 * now
