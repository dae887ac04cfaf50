"""When will groups be ready, if so many slices generate from when on?

Decoding is lock-step: on slices that share the work evenly, every session that generates gains a token per step; the
next ``d`` tokens of ``n`` sessions on slices as fast as ``s`` average ones take ``d * step_time(n / s)``. An engine
decodes so many requests at once, of those that wait the oldest session first (`seamless.router.oldest_first`). A group
is ready with its longest member. A plan changes the slices at known times: more when lent ones are awake, fewer when
they are taken back; who loses a seat then queues with its tokens.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Crew:
    """Slices that generate together.

    Attributes:
        speed: in average slices.
        seats: requests that they decode at once; infinity when unknown.
    """

    speed: float
    seats: float = math.inf

    def __add__(self, other: Crew) -> Crew:
        return Crew(self.speed + other.speed, self.seats + other.seats)

    def part(self, share: float) -> Crew:
        """As if there were fewer of each kind, or for only so much of the time."""
        return Crew(self.speed * share, self.seats * share if share > 0 else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Sessions that are out, those that have a seat first, then the others in the order in which they will get one.

    Attributes:
        remaining: tokens to come.
        contexts: tokens that each holds in the cache by now, aligned.
        groups: number of the session's group, aligned.
        awaited: numbers of the groups that must be in the batch.
        others: groups beside those that the batch has room for; further ones do not make it ready.
        weight: real sessions (and groups) per listed one; > 1 when the list is a sample.
        duty: share of its time that a session generates or waits for a seat; the rest is tools and rewards.
        step_s: seconds per step of a slice with so many requests over so many tokens of cache.
    """

    remaining: Sequence[float]
    contexts: Sequence[float]
    groups: Sequence[int]
    awaited: frozenset[int]
    others: float
    weight: float
    duty: float
    step_s: Callable[[float, float], float]

    def pace(self, sessions: float, held: float, speed: float) -> float:
        """Seconds until each of so many sessions, which hold so many tokens in all, has another token."""
        if speed <= 0:
            return math.inf
        load = sessions * self.duty / speed
        return self.step_s(load, held * self.duty / speed) / self.duty

    def room(self, seats: float) -> float:
        """Sessions that so many seats serve at a time."""
        return round(seats / self.duty) if seats < math.inf else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh:
    """The batch that is submitted when a step ends.

    Attributes:
        lengths: tokens of its sessions, a sample.
        weight: real sessions per listed one.
        context: tokens of a prompt.
        crew: that will generate then, on average over a step; its speed is > 0.
        train_s: seconds of training on the batch before it.
    """

    lengths: Sequence[float]
    weight: float
    context: float
    crew: Crew
    train_s: float


@dataclass(slots=True)
class Course:
    """How a plan would go: tokens of all sessions and ready groups over time, ascending in time.

    Attributes:
        phases: from when on who generates.
        done_at: when the last session that was out at the start is done; infinity if that never happens.
    """

    phases: Sequence[tuple[float, Crew]]
    times: list[float] = field(default_factory=lambda: [0.0])
    tokens: list[float] = field(default_factory=lambda: [0.0])
    ready_at: list[float] = field(default_factory=list)
    done_at: float = math.inf

    def tokens_by(self, at: float) -> float:
        right = bisect.bisect_right(self.times, at)
        if right >= len(self.times):
            return self.tokens[-1]
        t0, t1 = self.times[right - 1], self.times[right]
        share = (at - t0) / (t1 - t0) if t1 > t0 else 1.0
        return self.tokens[right - 1] + share * (self.tokens[right] - self.tokens[right - 1])

    def when_ready(self, groups: float) -> float:
        """When so many more groups are ready; infinity if these sessions do not suffice."""
        index = math.ceil(groups) - 1
        if index < 0:
            return 0.0
        return self.ready_at[index] if index < len(self.ready_at) else math.inf


@dataclass(slots=True)
class _Engines:
    """The sessions that have a seat, those that queue for one, and how far they are.

    Attributes:
        remaining, contexts, weights: of each session by its number; a context is what it would have been had the
            session generated from the first step on, while it has a seat.
        made: steps so far.
        ends: (step with which it ends, number) of those with a seat, a heap.
        n: real sessions with a seat.
        held: tokens of cache beyond ``made`` per session, of all that have a seat.
    """

    remaining: list[float]
    contexts: list[float]
    weights: list[float]
    queue: deque[int]
    made: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    n: float = 0.0
    held: float = 0.0

    def admit(self, room: float) -> None:
        while self.queue and (not self.ends or self.n + self.weights[self.queue[0]] / 2 <= room):
            number = self.queue.popleft()
            self.contexts[number] -= self.made
            self._seat(number, 1)
            heapq.heappush(self.ends, (self.made + self.remaining[number], number))

    def evict(self, room: float) -> None:
        """Those that were admitted last lose their seats."""
        latest = sorted(self.ends, key=lambda entry: entry[1])
        gone = []
        while len(latest) > 1 and self.n - self.weights[latest[-1][1]] / 2 > room:
            end, number = latest.pop()
            self._seat(number, -1)
            self.remaining[number] = end - self.made
            self.contexts[number] += self.made
            gone.append(number)
        if gone:
            self.queue = deque(sorted([*gone, *self.queue]))
            heapq.heapify(latest)
            self.ends = latest

    def finish(self) -> int:
        """The first to end does; its number."""
        self.made, number = heapq.heappop(self.ends)
        self._seat(number, -1)
        return number

    def join(self, fresh: Fresh) -> None:
        first = len(self.remaining)
        self.remaining += fresh.lengths
        self.contexts += [fresh.context] * len(fresh.lengths)
        self.weights += [fresh.weight] * len(fresh.lengths)
        self.queue.extend(range(first, len(self.remaining)))

    def _seat(self, number: int, sign: int) -> None:
        self.n += sign * self.weights[number]
        self.held += sign * self.weights[number] * self.contexts[number]


def play(work: Work, phases: Sequence[tuple[float, Crew]], joining: tuple[float, Fresh] | None = None) -> Course:
    """Run the work down.

    Args:
        phases: ``(from time, who generates)``, ascending, the first at 0.
        joining: sessions that join the queue at a time. The course ends with the last of those that were there before.
    """
    out = len(work.remaining)
    course = Course(phases=phases)
    engines = _Engines(list(work.remaining), list(work.contexts), [work.weight] * out, deque(range(out)))
    progress = _Groups(work)
    changes = deque(phases[1:])
    crew, now, total = phases[0][1], 0.0, 0.0
    while out:
        engines.admit(work.room(crew.seats))
        change_at = changes[0][0] if changes else math.inf
        stop = min(change_at, joining[0] if joining else math.inf)
        left = engines.ends[0][0] - engines.made
        pace = work.pace(engines.n, engines.held + engines.n * (engines.made + left / 2), crew.speed)
        if pace < math.inf and now + left * pace <= stop:
            now += left * pace
            total += left * engines.n
            number = engines.finish()
            course.times.append(now)
            course.tokens.append(total)
            if number < len(work.remaining):
                out -= 1
                course.ready_at += [now] * progress.finished(number)
            continue
        if stop == math.inf:
            return course  # nobody generates any more
        gained = (stop - now) / pace
        total += gained * engines.n
        engines.made += gained
        now = stop
        course.times.append(now)
        course.tokens.append(total)
        if joining and stop == joining[0]:
            engines.join(joining[1])
            joining = None
        else:
            _, crew = changes.popleft()
            engines.evict(work.room(crew.seats))
    course.done_at = now
    return course


class _Groups:
    """Counts groups that get ready."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._open = Counter(work.groups)
        self._others = work.others
        self._credit = 0.0

    def finished(self, number: int) -> int:
        """Groups that are ready with this session."""
        group = self._work.groups[number]
        self._open[group] -= 1
        awaited = group in self._work.awaited
        if self._open[group] or not (awaited or self._others > 0):
            return 0
        self._others -= 0.0 if awaited else self._work.weight
        self._credit += self._work.weight
        ready = math.floor(self._credit + 1e-9)
        self._credit -= ready
        return ready
