"""Sessions that keep their cache, and those that wait until there is room (`seamless.router.policy=cache_aware`).

    a turn ─► its session has its cache on a replica ─► there
                 no ─► replicas with room for its context ─► the one that holds its prompt's prefix, else the emptiest
                          none ─► it waits, and so do all that came later

A prefix cache forgets what nobody has used for longest. Where the contexts of all sessions do not fit, that is the one
whose turn comes next, and each turn computes its whole context again. Here the oldest sessions keep their places as
far as they fit; the others wait until one of those has ended. A replica that decodes so few requests that it would
yield more with one whose context is computed again in each turn takes one nevertheless: so nobody waits for sessions
whose agents are busy with their tools.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

from cachetools import LRUCache

from seamless_verl.decode_cost import EnginePace
from seamless_verl.staleness.affinity import MovePrice
from seamless_verl.staleness.routing import Hold, LeastRequests, PendingRequest, ReplicaLoad, Route

# Share of a cache that sessions may keep: the rest takes what they add until their next turn, and what ended ones left.
_CACHE_FILL_LIMIT = 0.9
_MAX_PREFIXES = 10_000
_PREFILLS_PER_EVICTION = 2  # of its own context, and of the one that it evicts


class CacheAware:
    """Places turns whose sessions have no place.

    Args:
        pace: of replicas that have not been measured.
        price: of leaving the replica that holds a prefix, likewise.
    """

    def __init__(self, *, pace: EnginePace, price: MovePrice) -> None:
        self._pace = pace
        self._price = price

    def route(self, requests: Iterable[PendingRequest], replicas: Sequence[ReplicaLoad]) -> list[Route | Hold]:
        loads = {load.replica: load for load in replicas}
        decisions: list[Route | Hold] = []
        full = ""
        asked = sorted(requests, key=lambda request: (request.version, request.arrival))
        for place, request in enumerate(asked, 1):
            if full:  # none overtakes: it would take the room that the older one waits for
                decisions.append(Hold(request=request.request, reason=full))
                continue
            roomy = [load for load in loads.values() if self._admits(load, request.tokens)]
            if roomy:
                decision = self._place(request, roomy, len(asked) - place)
            else:
                full = f"no cache has room for {request.tokens} tokens more"
                decision = Hold(request=request.request, reason=full)
            if isinstance(decision, Route):
                load = loads[decision.replica].with_request(request.tokens)
                loads[decision.replica] = replace(load, kept=load.kept + request.tokens)
            decisions.append(decision)
        return decisions

    def _admits(self, load: ReplicaLoad, tokens: int) -> bool:
        if load.running + load.waiting == 0:
            return True  # whatever the sessions do that keep their caches there
        if load.waiting or load.running >= load.max_running:
            return False
        return load.kept + tokens <= _CACHE_FILL_LIMIT * load.cache_tokens or self._gains_by_thrashing(load, tokens)

    def _gains_by_thrashing(self, load: ReplicaLoad, tokens: int) -> bool:
        """Whether one more request yields more tokens per second, although contexts are computed again for it."""
        pace = load.pace or self._pace
        step_s = pace.decode.step_s(load.running + 1, load.kv_tokens + tokens)
        turn_s = pace.turn_tokens * step_s + _PREFILLS_PER_EVICTION * tokens * pace.prefill_s_per_token
        now = pace.decode.throughput(load.running, load.kv_tokens)
        return (load.running + 1) * pace.turn_tokens > now * turn_s

    def _place(self, request: PendingRequest, roomy: Sequence[ReplicaLoad], behind: int) -> Route | Hold:
        (decision,) = LeastRequests(behind).route([request], roomy)
        near = next((load for load in roomy if load.replica == request.near and load.version >= request.version), None)
        if near is None or not isinstance(decision, Route):
            return decision
        there = next(load for load in roomy if load.replica == decision.replica)
        if self._price.told_by(near.pace).pays(request.tokens, near.running, there.running):
            return decision
        return Route(request=request.request, replica=near.replica, reason="its prefix is there")


class Residents:
    """Which sessions keep their cache on which replica: the oldest ones, as far as their contexts fit."""

    def __init__(self) -> None:
        self._places: dict[Hashable, tuple[str, int]] = {}  # session -> replica, tokens of its context
        # Session or group -> where its prefix was computed last; what is forgotten costs a prefill.
        self._last: LRUCache[Hashable, str] = LRUCache(maxsize=_MAX_PREFIXES)
        self._tokens: Counter[str] = Counter()
        self._began: dict[Hashable, int] = {}
        self._sessions = 0

    def kept(self, replica: str) -> int:
        """Tokens of the sessions that have their place there."""
        return self._tokens[replica]

    def near(self, session: Hashable, group: Hashable) -> str:
        """Where the prefix of a session without a place may still be; empty: unknown, or it is to go elsewhere."""
        return self._last[session] if session in self._last else self._last.get(group, "")

    def began(self, session: Hashable) -> int:
        """Its number in the order in which sessions asked first."""
        if session not in self._began:
            self._began[session] = self._sessions
            self._sessions += 1
        return self._began[session]

    def grown(
        self, session: Hashable, tokens: int, cache_tokens: int, runs: Callable[[Hashable], bool]
    ) -> list[Hashable]:
        """A session asks for its next turn, with a context of ``tokens`` now.

        Args:
            cache_tokens: of its replica.
            runs: whether a session has a request in flight.

        Returns:
            Sessions that lose their places there, since not all fit any more: the youngest without requests. The one
            that asks may be among them.
        """
        if session not in self._places:
            return []
        place, before = self._places[session]
        self._places[session] = (place, tokens)
        self._tokens[place] += tokens - before
        if self._tokens[place] <= cache_tokens:
            return []
        idle = [other for other, (replica, _) in self._places.items() if replica == place and not runs(other)]
        lost = []
        for other in sorted(idle, key=self.began, reverse=True):
            if self._tokens[place] <= _CACHE_FILL_LIMIT * cache_tokens:
                break
            self.displaced(other)
            lost.append(other)
        return lost

    def placed(self, session: Hashable, group: Hashable, replica: str, tokens: int) -> None:
        """``replica`` serves ``session``, and keeps its cache."""
        self.displaced(session)
        self.began(session)
        self._places[session] = (replica, tokens)
        self._tokens[replica] += tokens
        self._last[session] = replica
        if group:
            self._last[group] = replica

    def over(self, sessions: Iterable[Hashable]) -> None:
        """``sessions`` have ended."""
        for session in sessions:
            self.displaced(session)
            self._began.pop(session, None)
            self._last.pop(session, None)

    def left(self, replicas: Iterable[str]) -> None:
        """These replicas left the router; their sessions have no place."""
        gone = set(replicas)
        for session in [session for session, (place, _) in self._places.items() if place in gone]:
            self.displaced(session)
        for name in [name for name, place in self._last.items() if place in gone]:
            del self._last[name]

    def caches_lost(self) -> None:
        """All replicas lost their caches."""
        self._places.clear()
        self._last.clear()
        self._tokens.clear()

    def moved(self, session: Hashable) -> None:
        """``session`` gives way to others, at the price of its prefix, and must not be sent back to it."""
        self.displaced(session)
        self._last[session] = ""

    def displaced(self, session: Hashable) -> None:
        """``session`` has no place any more, if it had one."""
        place, tokens = self._places.pop(session, ("", 0))
        self._tokens[place] -= tokens
