"""Which replica a request goes to (routing of StaleFlow, arXiv 2601.12784), and who should give requests back.

    requests, most stale first ──► oldest replica version that may take it ──► largest gain of throughput
                                     gain < mu * gain on an empty replica ──► next version ──► hold back

A request that is held back costs nothing: its slot is reserved and it takes the first place that is worth taking. A
request that is pushed onto a full replica slows down everybody there.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from seamless_verl.decode_cost import DecodeCost, EnginePace


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine says that it has to do.

    Attributes:
        running, waiting: requests that it computes, and those in its queue.
        kv_tokens: of its cache that the former hold; what several share counts once.
    """

    running: int
    waiting: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Reckoned:
    """What a router counts on a replica, and what its engine said when that was ``then``.

    The router knows at once who comes and who goes, the engine how far contexts have grown and who waits for room.
    """

    requests: int
    kv_tokens: int
    said: EngineLoad | None = None
    then: Reckoned | None = None

    def waiting(self, max_running: int) -> int:
        """Requests in the engine's queue: it may be full before it computes ``max_running``."""
        beyond = max(0, self.requests - max_running)
        if self.said is None or self.then is None or not self.said.waiting:
            return beyond
        return min(self.requests, max(beyond, self.said.waiting + self.requests - self.then.requests))

    def cached(self) -> int:
        """Tokens that requests hold in the cache."""
        if self.said is None or self.then is None or not self.requests:
            return self.kv_tokens
        return max(0, self.said.kv_tokens + self.kv_tokens - self.then.kv_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What a replica carries.

    Attributes:
        version: weight version it generates with.
        running: requests that it decodes.
        waiting: requests in its queue.
        kv_tokens: tokens cached by the running requests.
        kv_room: further tokens that its cache can hold.
        max_running: requests that it decodes at a time; more would wait.
        lent: it will be taken back, and what it still runs then goes on elsewhere, without its cache.
        kept: tokens of sessions that are to find their cache there at their next turn, those that run included.
        pace: what it takes, where that was measured.
    """

    replica: str
    version: int
    running: int
    waiting: int
    kv_tokens: int
    kv_room: int
    max_running: int = 1 << 30
    lent: bool = False
    kept: int = 0
    pace: EnginePace | None = None

    @property
    def cache_tokens(self) -> int:
        """What its cache holds, in all."""
        return self.kv_tokens + self.kv_room

    def decode(self, otherwise: DecodeCost) -> DecodeCost:
        """What its decode steps take; ``otherwise`` until that was measured."""
        return otherwise if self.pace is None else self.pace.decode

    def can_start(self, tokens: int) -> bool:
        """Whether a request with ``tokens`` of context would be decoded at once."""
        return self.waiting == 0 and self.running < self.max_running and self.kv_room >= tokens

    def with_request(self, tokens: int) -> ReplicaLoad:
        return replace(self, running=self.running + 1, kv_tokens=self.kv_tokens + tokens, kv_room=self.kv_room - tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRequest:
    """A generation to place.

    Attributes:
        version: lowest weight version it may run on: V_traj once it has started (partial rollout), else the lowest for
            which its group was granted a slot.
        tokens: context it brings, prompt and what was generated so far.
        arrival: when its session began, in any order that tells older from younger.
        long: it is expected to last longer than what is lent.
        near: the replica that computed its prefix last; empty: nobody knows.
    """

    request: str
    version: int
    tokens: int
    arrival: tuple[int, ...] = ()
    long: bool = False
    near: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Send ``request`` to ``replica``."""

    request: str
    replica: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Keep ``request``; ask again when a load or a version changes."""

    request: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrate:
    """Interrupt ``count`` requests of ``replica``, the waiting ones first, keep their tokens and route them anew."""

    replica: str
    count: int
    reason: str


class LeastRequests:
    """verl's own rule: the replica with the fewest requests, whatever they weigh.

    Among equals a long request takes one that stays, any other one that is lent. Only among equals: giving up level
    loads for it gained nothing in the simulator (docs/scheduling.md).

    It holds back only while replicas have unlike versions, what is too new for some of them: those that are new enough
    take their share of all requests, the others get theirs when they have taken newer weights. Else the first replica
    with a version would be given every prompt that needs it, and have them to the end.

    Args:
        others: requests that wait beside those that `route` is asked about.
    """

    def __init__(self, others: int = 0) -> None:
        self._others = others

    def route(self, requests: Iterable[PendingRequest], replicas: Sequence[ReplicaLoad]) -> list[Route | Hold]:
        requests = list(requests)
        oldest = min((load.version for load in replicas), default=0)
        total = sum(load.running + load.waiting for load in replicas) + len(requests) + self._others
        share = -(-total // max(1, len(replicas)))
        staying = _Fewest([load for load in replicas if not load.lent])
        lent = _Fewest([load for load in replicas if load.lent])
        decisions: list[Route | Hold] = []
        for request in requests:
            here, there = (staying, lent) if request.long else (lent, staying)
            mine, other = here.first(request.version), there.first(request.version)
            if mine is None or (other is not None and other[0] < mine[0]):
                here, mine = there, other
            if mine is None:
                decisions.append(Hold(request=request.request, reason=f"no replica has version {request.version}"))
                continue
            fewest, chosen = mine
            if fewest >= share and request.version > oldest:
                reason = f"replicas of version {request.version} have their share of {share}"
                decisions.append(Hold(request=request.request, reason=reason))
                continue
            here.add_to(mine)
            decisions.append(Route(request=request.request, replica=chosen, reason=f"fewest requests: {fewest}"))
        return decisions


class _Fewest:
    """Replicas by the number of their requests."""

    def __init__(self, loads: Sequence[ReplicaLoad]) -> None:
        self._order = [(load.running + load.waiting, load.replica) for load in loads]
        self._versions = {load.replica: load.version for load in loads}
        heapq.heapify(self._order)

    def first(self, version: int) -> tuple[int, str] | None:
        """The fewest requests, and who has them, among those that have this version or a newer one."""
        if self._order and self._versions[self._order[0][1]] >= version:
            return self._order[0]
        return min((entry for entry in self._order if self._versions[entry[1]] >= version), default=None)

    def add_to(self, entry: tuple[int, str]) -> None:
        fewer, replica = entry
        if entry == self._order[0]:
            heapq.heapreplace(self._order, (fewer + 1, replica))
        else:
            self._order[self._order.index(entry)] = (fewer + 1, replica)
            heapq.heapify(self._order)


class MarginalGain:
    """The staleness-aware rule of StaleFlow.

    Args:
        cost: model of a decode step of replicas that have not been measured.
        mu: share of the gain on an empty replica that a placement must bring, else the request is held back.
    """

    def __init__(self, *, cost: DecodeCost, mu: float = 0.3) -> None:
        self.cost = cost
        self.mu = mu

    def route(self, requests: Iterable[PendingRequest], replicas: Sequence[ReplicaLoad]) -> list[Route | Hold]:
        loads = {load.replica: load for load in replicas}
        decisions: list[Route | Hold] = []
        refused: dict[tuple[int, int], str] = {}  # what is held back stays so for its like until a load changes
        for request in sorted(requests, key=lambda request: (request.version, request.arrival)):  # most stale first
            alike = (request.version, request.tokens)
            if alike in refused:
                decisions.append(Hold(request=request.request, reason=refused[alike]))
                continue
            decision = self._place(request, loads)
            if isinstance(decision, Route):
                loads[decision.replica] = loads[decision.replica].with_request(request.tokens)
                refused.clear()
            else:
                refused[alike] = decision.reason
            decisions.append(decision)
        return decisions

    def _place(self, request: PendingRequest, loads: dict[str, ReplicaLoad]) -> Route | Hold:
        for version in sorted({load.version for load in loads.values() if load.version >= request.version}):
            gains = []
            for load in loads.values():
                if load.version == version and load.can_start(request.tokens):
                    cost = load.decode(self.cost)
                    ideal = cost.gain(0, 0, request.tokens)
                    gain = cost.gain(load.running, load.kv_tokens, request.tokens)
                    if gain >= self.mu * ideal:  # of its own, so that an empty one is always good enough
                        gains.append((gain, load.replica, ideal))
            if gains:
                gain, chosen, ideal = max(gains)
                reason = f"gain {gain:.0f} of {ideal:.0f} token/s at version {version}"
                return Route(request=request.request, replica=chosen, reason=reason)
        return Hold(request=request.request, reason=f"no replica gains {self.mu:.0%} of what it would if it were empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRule:
    """When a replica gives requests back; the defaults are what others report of StaleFlow.

    Only where another one of the same or newer weights could take them over: what a request has generated by then is of
    its replica's version, and it must not go on with older weights.

    Attributes:
        phi_wait: a longer queue is given back, as long as another replica has no queue.
        phi_throughput: ratio between the throughputs of the fullest and the emptiest replica above which the fullest
            gives back half of the difference.
    """

    phi_wait: int = 3
    phi_throughput: float = 5.0

    def migrations(self, replicas: Sequence[ReplicaLoad], cost: DecodeCost) -> list[Migrate]:
        """What to interrupt now; empty when nobody could take it over or the model expects nothing from it.

        Args:
            cost: of replicas that have not been measured.
        """

        def throughput(load: ReplicaLoad, more: int = 0, more_kv: int = 0) -> float:
            return load.decode(cost).throughput(load.running + more, load.kv_tokens + more_kv)

        if all(load.waiting for load in replicas):
            return []
        newest = max(load.version for load in replicas if not load.waiting)  # of those that could
        commands = [
            Migrate(replica=load.replica, count=load.waiting, reason=f"{load.waiting} waiting > {self.phi_wait}")
            for load in replicas
            if load.waiting > self.phi_wait and load.version <= newest
        ]
        by_throughput = sorted(replicas, key=lambda load: (throughput(load), load.replica))
        full = by_throughput[-1]
        starving = next(load for load in by_throughput if load.version >= full.version)
        count = (full.running - starving.running) // 2
        low, high = throughput(starving), throughput(full)
        if starving.waiting or count < 1 or high <= self.phi_throughput * low:
            return commands
        moved = count * full.kv_tokens // full.running
        after = throughput(full, -count, -moved) + throughput(starving, count, moved)
        if after > low + high:
            reason = f"{high:.0f} token/s against {low:.0f} on {starving.replica}; {after - low - high:+.0f} expected"
            commands.append(Migrate(replica=full.replica, count=count, reason=reason))
        return commands
