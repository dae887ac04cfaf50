"""When will groups be ready, if so many slices generate from when on?

    Work      the sessions that are out: tokens to come, tokens in the cache, their group, in order of age
    Capacity  the slices that generate, by speed, and their seats (requests that an engine decodes at once)
    phases    a plan: which capacity there is from when on, since lent slices wake and are taken back
    n, kv     requests on a slice and the tokens of cache that they hold; a step takes ``step_s(n, kv)`` seconds

Decoding is lock-step: on slices of one speed every session that has a seat gains a token per step. Slices of other
speeds have their own pace; the router gives them as many requests as the others (least requests). Sessions without a
seat queue, the oldest is served first (`seamless.router.oldest_first`). When slices are taken back, sessions lose their
seats and queue with the tokens that they have. A group is ready with its longest member.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SpeedClass:
    """Slices of one speed.

    Attributes:
        speed: of each, in average slices.
        slices: how many.
        seats: requests that they decode at once; infinity when unknown.
    """

    speed: float
    slices: float
    seats: float = math.inf


@dataclass(frozen=True, slots=True)
class Capacity:
    """Slices that generate, of one or several speeds."""

    kinds: tuple[SpeedClass, ...] = ()

    def __add__(self, other: Capacity) -> Capacity:
        kinds = {kind.speed: kind for kind in self.kinds}
        for more in other.kinds:
            had = kinds.get(more.speed, SpeedClass(more.speed, 0.0, 0.0))
            kinds[more.speed] = SpeedClass(more.speed, had.slices + more.slices, had.seats + more.seats)
        return Capacity(tuple(sorted(kinds.values(), key=lambda kind: -kind.speed)))

    def part(self, share: float) -> Capacity:
        """A share of the slices of each speed; also: all of them for that share of the time."""
        if share <= 0:
            return Capacity()
        return Capacity(tuple(SpeedClass(kind.speed, kind.slices * share, kind.seats * share) for kind in self.kinds))

    @property
    def slices(self) -> float:
        return sum(kind.slices for kind in self.kinds)

    @property
    def seats(self) -> float:
        return sum(kind.seats for kind in self.kinds)

    @property
    def power(self) -> float:
        """How many slices of average speed generate as much."""
        return sum(kind.slices * kind.speed for kind in self.kinds)


def uniform(slices: float, seats: float = math.inf, speed: float = 1.0) -> Capacity:
    """Slices of one speed."""
    return Capacity((SpeedClass(speed, slices, seats),)) if slices > 0 else Capacity()


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Sessions that are out, those that have a seat first, then the others in the order in which they will get one.

    Attributes:
        remaining: tokens to come.
        contexts: tokens that each holds in the cache by now, aligned.
        groups: number of the session's group, aligned.
        homes: speed of the slice that each runs on, aligned; None: on none.
        awaited: numbers of the groups that must be in the batch.
        others: groups beside those that the batch has room for; further ones do not make it ready.
        weight: real sessions (and groups) per listed one; > 1 when the list is a sample.
        busy_share: share of its time that a session generates or waits for a seat; the rest is tools and rewards.
        step_s: seconds per step of an average slice with so many requests over so many tokens of cache.
        prefill_s: seconds in which an average slice prefills a token, by itself; 0 while nothing tells.
        cached: tokens in the caches of all slices by now.
    """

    remaining: Sequence[float]
    contexts: Sequence[float]
    groups: Sequence[int]
    homes: Sequence[float | None]
    awaited: frozenset[int]
    others: float
    weight: float
    busy_share: float
    step_s: Callable[[float, float], float]
    prefill_s: float = 0.0
    cached: float = 0.0

    def pace(self, sessions: float, held: float, kind: SpeedClass) -> float:
        """Seconds until each of so many sessions, which hold so many tokens in all, has another token."""
        load = sessions * self.busy_share / kind.slices
        return self.step_s(load, held * self.busy_share / kind.slices) / (kind.speed * self.busy_share)

    def rate(self, sessions: float, held: float, capacity: Capacity) -> float:
        """Tokens per second of so many sessions, evenly spread over slices."""
        shares = [(kind, kind.slices / capacity.slices) for kind in capacity.kinds]
        return sum(sessions * share / self.pace(sessions * share, held * share, kind) for kind, share in shares)

    def room(self, seats: float) -> float:
        """Sessions that so many seats serve at a time."""
        return round(seats / self.busy_share) if seats < math.inf else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class NextBatch:
    """The batch that is submitted when a step ends.

    Attributes:
        lengths: tokens of its sessions, a sample.
        weight: real sessions per listed one.
        context: tokens of a prompt.
        capacity: slices that will generate then, on average over a step; at least one.
        train_s: seconds of training on the batch before it.
    """

    lengths: Sequence[float]
    weight: float
    context: float
    capacity: Capacity
    train_s: float


@dataclass(slots=True)
class Projection:
    """What comes of a plan: tokens of all sessions and ready groups over time, ascending in time.

    Attributes:
        phases: the plan.
        done_at: when the last session that was out at the start is done; infinity if that never happens.
        left_behind: tokens that are in the caches of slices when these are taken back.
    """

    phases: Sequence[tuple[float, Capacity]]
    times: list[float] = field(default_factory=lambda: [0.0])
    tokens: list[float] = field(default_factory=lambda: [0.0])
    ready_at: list[float] = field(default_factory=list)
    done_at: float = math.inf
    left_behind: float = 0.0

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
    """The sessions that have a seat on slices of one kind, and how far they are.

    Attributes:
        room: sessions that its seats serve at a time.
        made: steps so far.
        ends: (step with which it ends, number) of those with a seat, a heap.
        n: real sessions with a seat.
        held: tokens of cache beyond ``made`` per session, of all that have a seat.
    """

    kind: SpeedClass
    room: float
    made: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    n: float = 0.0
    held: float = 0.0

    def pace(self, work: Work) -> float:
        """Seconds per step until the first of its sessions ends."""
        left = self.ends[0][0] - self.made
        return work.pace(self.n, self.held + self.n * (self.made + left / 2), self.kind)


class _OpenSessions:
    """All sessions that are out: those with a seat on an engine, and those that wait.

    Attributes:
        remaining, contexts, weights: of each session by its number; while it has a seat, a context is what it would
            have been had the session generated from its engines' first step on.
    """

    def __init__(self, work: Work, capacity: Capacity) -> None:
        out = len(work.remaining)
        self.remaining = list(work.remaining)
        self.contexts = list(work.contexts)
        self.weights = [work.weight] * out
        self.homes = list(work.homes)
        self.queue = deque(range(out))
        self.engines = [_Engines(kind, work.room(kind.seats)) for kind in capacity.kinds]
        self._work = work

    def admit(self) -> None:
        """Waiting sessions take free seats, the oldest first."""
        while self.queue:
            number = self.queue[0]
            free = [e for e in self.engines if not e.ends or e.n + self.weights[number] / 2 <= e.room]
            if not free:
                return
            engines = self._choose(free, self.homes[number]) if len(free) > 1 else free[0]
            self.queue.popleft()
            self.homes[number] = None
            self.contexts[number] -= engines.made
            self._seat(engines, number, 1)
            heapq.heappush(engines.ends, (engines.made + self.remaining[number], number))

    @staticmethod
    def _choose(free: Sequence[_Engines], home: float | None) -> _Engines:
        """Engines of the speed on which the session runs, else those with the fewest sessions per slice."""
        return min(free, key=lambda engines: (engines.kind.speed != home, (engines.n + 1) / engines.kind.slices))

    def change(self, capacity: Capacity) -> None:
        """The slices change. Sessions on slices that go lose their seats, whatever their age, and queue: an engine does
        not stop a younger session for an older one. Of slices of several speeds each gets its share of the sessions;
        those that got their seats last move."""
        old = {engines.kind.speed: engines for engines in self.engines}
        each = sum(engines.n for engines in self.engines) / capacity.slices if len(capacity.kinds) > 1 else math.inf
        self.engines = []
        for kind in capacity.kinds:
            room = self._work.room(kind.seats)
            engines = old.pop(kind.speed, None) or _Engines(kind, room)
            shrinks = kind.slices < engines.kind.slices
            engines.kind, engines.room = kind, room
            if shrinks:
                self._evict(engines, room, at_least=1, any_age=True)
            self._evict(engines, min(room, each * kind.slices), at_least=1)
            self.engines.append(engines)
        for engines in old.values():
            self._evict(engines, 0.0, at_least=0)

    def _evict(self, engines: _Engines, room: float, *, at_least: int, any_age: bool = False) -> None:
        latest = sorted(engines.ends, key=lambda entry: entry[1])
        if any_age and engines.n > room:  # who is to go stands last
            count, going = len(latest), max(1, round(len(latest) * (1.0 - room / engines.n)))
            places = {(2 * i + 1) * count // (2 * going) for i in range(going)}
            latest = [x for i, x in enumerate(latest) if i not in places] + [latest[i] for i in sorted(places)]
        gone = []
        while len(latest) > at_least and engines.n - self.weights[latest[-1][1]] / 2 > room:
            end, number = latest.pop()
            self._seat(engines, number, -1)
            self.remaining[number] = end - engines.made
            self.contexts[number] += engines.made
            gone.append(number)
        if gone:
            self.queue = deque(sorted([*gone, *self.queue]))
            heapq.heapify(latest)
            engines.ends = latest

    def held(self) -> float:
        """Tokens in the cache of all that have a seat."""
        return sum(engines.held + engines.n * engines.made for engines in self.engines)

    def finish(self, engines: _Engines) -> int:
        """The first session to end on these engines ends; return its number."""
        engines.made, number = heapq.heappop(engines.ends)
        self._seat(engines, number, -1)
        return number

    def join(self, next_batch: NextBatch) -> None:
        first = len(self.remaining)
        self.remaining += next_batch.lengths
        self.contexts += [next_batch.context] * len(next_batch.lengths)
        self.weights += [next_batch.weight] * len(next_batch.lengths)
        self.homes += [None] * len(next_batch.lengths)
        self.queue.extend(range(first, len(self.remaining)))

    def _seat(self, engines: _Engines, number: int, sign: int) -> None:
        engines.n += sign * self.weights[number]
        engines.held += sign * self.weights[number] * self.contexts[number]


def project(
    work: Work, phases: Sequence[tuple[float, Capacity]], joining: tuple[float, NextBatch] | None = None
) -> Projection:
    """Play a plan forward until all of the work is done.

    Args:
        phases: ``(from when on, capacity)``, ascending, the first at 0.
        joining: a batch that joins the queue at a time. It ends with the last session that was there before.
    """
    out, capacity = len(work.remaining), phases[0][1]
    projection, progress = Projection(phases=phases), _Groups(work)
    sessions = _OpenSessions(work, capacity)
    changes = deque(phases[1:])
    now, total = 0.0, 0.0
    while out:
        sessions.admit()
        change_at = changes[0][0] if changes else math.inf
        stop = min(change_at, joining[0] if joining else math.inf)
        busy = [(engines, engines.pace(work)) for engines in sessions.engines if engines.ends]
        first, took = _first_to_end(busy)
        ends = now + took
        if first is None or ends > stop:
            first, took, ends = None, stop - now, stop
        if ends == math.inf:
            return projection  # nothing generates any more
        now = ends
        for engines, pace in busy:
            if engines is first:
                total += (engines.ends[0][0] - engines.made) * engines.n
            else:
                total += took / pace * engines.n
                engines.made += took / pace
        if first is not None:
            number = sessions.finish(first)
            if number < len(work.remaining):
                out -= 1
                projection.ready_at += [now] * progress.finished(number)
        elif joining and stop == joining[0]:
            sessions.join(joining[1])
            joining = None
        else:
            before, capacity = capacity, changes.popleft()[1]
            if 0 < capacity.slices < before.slices:  # all slices have about as much in their caches
                projection.left_behind += sessions.held() * (1.0 - capacity.slices / before.slices)
            sessions.change(capacity)
        projection.times.append(now)
        projection.tokens.append(total)
    projection.done_at = now
    return projection


def _first_to_end(busy: Sequence[tuple[_Engines, float]]) -> tuple[_Engines | None, float]:
    """Where the next session ends, and in how many seconds; ``busy``: engines and seconds per step."""
    first, took = None, math.inf
    for engines, pace in busy:
        until = (engines.ends[0][0] - engines.made) * pace
        if until < took:
            first, took = engines, until
    return first, took


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
