"""Routing rules that hold requests back, as verl's load balancer, and which balancer a run gets.

`HoldingBalancer` sends a request where its rule says, or holds it until a place is worth it. `staleness.routing` has
StaleFlow's rule; with `staleness.cache_aware` sessions lose and get places (`CacheAwareBalancer`).

    acquire ─► hold ─► place ─► replica ─► release ─► loads differ too much? ─► abort requests there; their client keeps
                 ▲                                                                   the tokens and acquires again ─┐
                 └──────────────────────────────────────────────────────────────────────────────────────────────────┘

Where all replicas take new weights together nobody tells their versions, and "most stale first" is the order in which
conversations began.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

from cachetools import LRUCache

from seamless_verl.config import RouterConfig
from seamless_verl.staleness.cache_aware import CacheAware, Residents
from seamless_verl.staleness.router import router_of
from seamless_verl.staleness.routing import LeastRequests, MarginalGain, PendingRequest, ReplicaLoad, Route
from seamless_verl.verl_adapter.rollout.load_balancer import POLL_LOADS_S, UNBOUNDED, MeteredLoadBalancer, Request

# Every call that is held back occupies one of the 1,000 places that Ray gives an asynchronous actor; were all taken,
# no release could come through. Beyond this many, requests go where they are served soonest.
_MOST_HELD = 500
# A client that was interrupted acquires again at once; after this long its conversation has ended.
_REACQUIRE_S = 1.0


@dataclass(slots=True)
class _Held:
    """A request that waits; ``place`` becomes the replica where it is to go."""

    request: Request
    place: asyncio.Future[str]


class HoldingBalancer(MeteredLoadBalancer):
    """See the module; a conversation stays on its replica, as under its parent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, _Held] = {}  # by a number of their own: a conversation may ask several times at once
        self._numbers = itertools.count()
        self._arrivals: LRUCache[str, int] = LRUCache(maxsize=self._request_id_to_server.maxsize)  # of conversations
        self._order = itertools.count()
        self._leaving: set[tuple[str, str]] = set()  # asked to leave their replica, and still there
        self._cooling_down, self._route_pending = False, False  # see `_route`
        self._moving: dict[str, float] = {}  # conversation between two replicas -> since when

    async def acquire_server(  # type: ignore[override]  # Ray awaits it, and hands over the required fields by name
        self, request_id: str, *args: Any, **named: Any
    ) -> tuple[str, Any]:
        """As its parent's, except that the answer may have to wait until another request has ended."""
        request = Request(request_id, *args, **named)
        if request_id not in self._arrivals:
            self._arrivals[request_id] = next(self._order)
        self._begin_turn(request)
        able = self._able(request.floor)
        at_home = self._request_id_to_server.get(request_id) in able
        if able and not at_home and not self._full_determinism and len(self._held) < _MOST_HELD:
            await self._hold(request)
        if at_home or self._request_id_to_server.get(request_id) not in self._able(request.floor):
            self._choose(request)
        seat = self._seat(request)
        self._moving.pop(request_id, None)
        return seat

    async def _hold(self, request: Request) -> None:
        """Wait until its conversation is pinned to a replica that is worth it."""
        number = str(next(self._numbers))
        held = self._held[number] = _Held(request, asyncio.get_running_loop().create_future())
        self._route()
        self._poll_later()
        try:
            await held.place
        finally:
            del self._held[number]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        super().release_server(server_id, request_id)
        key = (server_id, request_id or "")
        if key in self._leaving and key not in self._running:
            self._leaving.remove(key)
            self._moving[key[1]] = time.monotonic()
        self._route()
        self._migrate()

    def add_servers(self, servers: dict[str, Any]) -> None:
        super().add_servers(servers)
        self._migrate()

    def _replicas_changed(self) -> None:
        super()._replicas_changed()
        self._route()

    def _has_place(self, floor: int) -> bool:
        may_hold = len(self._held) < _MOST_HELD  # then what finds a replica new enough is held here, not refused
        return bool(self._able(floor)) and (may_hold or super()._has_place(floor))

    def wanted(self) -> int | None:
        return self._versions.wanted(self._inflight_requests, (held.request.floor for held in self._held.values()))

    async def _poll(self, server_id: str, method: str) -> None:
        await super()._poll(server_id, method)
        self._route()
        if any(not held.place.done() for held in self._held.values()):
            self._poll_later()

    def _poll_later(self) -> None:
        """Poll although no request ends: an engine's queue may go meanwhile."""
        asyncio.get_running_loop().call_later(POLL_LOADS_S, self._poll_replicas)

    def remove_servers(self, server_ids: list[str]) -> None:
        super().remove_servers(server_ids)
        self._leaving &= self._running.keys()

    def worker_died(self, worker: str) -> None:
        for held in self._held.values():
            if held.request.worker == worker:
                held.place.cancel()
        super().worker_died(worker)
        self._route()

    def _route(self) -> None:
        """Route now; then at most every T seconds, where T is how long the last pass took (duty cycle <= 50 %)."""
        waiting = next((held for held in self._held.values() if not held.place.done()), None)
        if waiting is None or self._cooling_down:
            self._route_pending = True
            return
        began, self._route_pending = time.perf_counter(), False
        self._place_held()
        self._cooling_down = True
        waiting.place.get_loop().call_later(time.perf_counter() - began, self._cooldown_over)

    def _cooldown_over(self) -> None:
        self._cooling_down = False
        if self._route_pending:
            self._route()

    def _place_held(self) -> None:
        """Wake held requests that have a place now; each takes it when its task runs, which `_seat` counts."""
        waiting = {number: held for number, held in self._held.items() if not held.place.done()}
        if not self._inflight_requests:
            for held in waiting.values():
                held.place.set_result("")  # to be refused there, as verl expects
            return
        order = sorted(waiting, key=lambda number: self._arrivals.get(waiting[number].request.conversation, 0))
        requests = [self._pending(number, waiting[number].request, place) for place, number in enumerate(order)]
        for decision in self.rules.policy.route(requests, self._loads()):
            if not isinstance(decision, Route) or waiting[decision.request].place.done():
                continue
            conversation = waiting[decision.request].request.conversation
            self._request_id_to_server[conversation] = decision.replica
            for held in waiting.values():  # what else it asked for at the same time goes to the same prefix cache
                if held.request.conversation == conversation and not held.place.done():
                    held.place.set_result(decision.replica)

    def _pending(self, number: str, request: Request, place: int) -> PendingRequest:
        return PendingRequest(
            request=number,
            version=request.floor,
            tokens=request.tokens,
            arrival=(place,),
            long=request.session in self._outlasting,
            near=self._near(request),
        )

    def _begin_turn(self, request: Request) -> None:
        """Hook: a conversation's context grew to ``request.tokens``; evict others if its replica is over its limit."""

    def _near(self, request: Request) -> str:
        """Hook: the replica that may hold its prefix; empty: unknown."""
        return ""

    def _migrate(self) -> None:
        """Interrupt conversations where the rule says so, those that came last first: they have the least to lose.

        One round at a time: until those of the last one run elsewhere, the loads do not show what it brought.
        """
        asks_since = time.monotonic() - _REACQUIRE_S
        self._moving = {conversation: left for conversation, left in self._moving.items() if left > asks_since}
        if self.rules.migration is None or self._leaving or self._moving or self._held or not self._inflight_requests:
            return
        loads = self._loads()
        for command in self.rules.migration.migrations(loads, self.rules.cost):
            to = [load for load in loads if load.version >= self._versions.of(command.replica)]
            starving = min(to, key=lambda load: (load.running + load.waiting, load.replica))
            here = [key for key in self._running if key[0] == command.replica]
            for server_id, conversation in list(reversed(here))[: command.count]:
                if self._interrupt(server_id, conversation):
                    self._leaving.add((server_id, conversation))
                    self._let_go([conversation])
                    self._request_id_to_server[conversation] = starving.replica

    def _loads(self) -> list[ReplicaLoad]:
        """Requests in flight, and those that were told their place and have not taken it yet."""
        told = (held for held in self._held.values() if held.place.done() and not held.place.cancelled())
        promised = [(held.place.result(), held.request.tokens) for held in told]
        loads = []
        for server_id, in_flight in self._inflight_requests.items():
            coming = [tokens for place, tokens in promised if place == server_id]
            loads.append(self._load(server_id, in_flight + len(coming), sum(coming)))
        return loads


class CacheAwareBalancer(HoldingBalancer):
    """Sessions keep their place as long as their contexts fit into the cache there; else the youngest lose theirs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._residents = Residents()
        size = self._request_id_to_server.maxsize
        self._workers: LRUCache[str, str] = LRUCache(maxsize=size)  # conversation -> rollout worker
        self._over: LRUCache[str, bool] = LRUCache(maxsize=size)

    def conversations_over(self, request_ids: list[str]) -> None:
        """Their sessions have ended: free what was kept for them."""
        super().conversations_over(request_ids)
        self._residents.over(request_ids)
        self._over.update(dict.fromkeys(request_ids, True))
        self._route()

    def worker_died(self, worker: str) -> None:
        super().worker_died(worker)
        self.conversations_over([name for name, asker in self._workers.items() if asker == worker])

    def clear_sticky_cache(self) -> dict[str, Any]:
        self._residents.caches_lost()
        return super().clear_sticky_cache()

    def remove_servers(self, server_ids: list[str]) -> None:
        self._residents.left(server_ids)
        super().remove_servers(server_ids)

    def _unpin(self, conversation: str, *, moves: bool = False) -> None:
        super()._unpin(conversation, moves=moves)
        (self._residents.moved if moves else self._residents.displaced)(conversation)

    def _begin_turn(self, request: Request) -> None:
        self._workers[request.conversation] = request.worker
        home = self._request_id_to_server.get(request.conversation)
        if home is None:
            return
        cache = self._cache_tokens.get(home, UNBOUNDED)
        for other in self._residents.grown(request.conversation, request.tokens, cache, self._runs_on(home)):
            self._unpin(str(other))

    def _runs_on(self, replica: str) -> Callable[[Hashable], bool]:
        return lambda conversation: (replica, conversation) in self._running

    def _near(self, request: Request) -> str:
        return self._residents.near(request.conversation, request.group)

    def _seat(self, request: Request) -> tuple[str, Any]:
        server_id, handle = super()._seat(request)
        if request.conversation not in self._over:  # else its session ended meanwhile, and gives the seat back
            self._residents.placed(request.conversation, request.group, server_id, request.tokens)
        return server_id, handle

    def _load(self, server_id: str, requests: int, coming_tokens: int) -> ReplicaLoad:
        kept = self._residents.kept(server_id) + coming_tokens
        return replace(super()._load(server_id, requests, coming_tokens), kept=kept)


_BALANCERS: dict[type, type[MeteredLoadBalancer]] = {
    LeastRequests: MeteredLoadBalancer,
    MarginalGain: HoldingBalancer,
    CacheAware: CacheAwareBalancer,
}


def balancer_class(
    settings: RouterConfig, max_running: int, *, full_determinism: bool = False
) -> type[MeteredLoadBalancer]:
    """The load balancer that ``seamless.router`` asks for.

    Args:
        max_running: requests that a replica decodes at a time, in all its engine cores; more wait in its queue.
        full_determinism: ``rollout.full_determinism``, which verl 0.9.1 hands to a balancer of its own only.
    """
    rules = router_of(settings)
    base = _BALANCERS[type(rules.policy)]
    told = {"rules": rules, "max_running": max_running, "full_determinism": full_determinism}
    return type(base.__name__, (base,), told)
