"""Routing rules that hold requests back, as verl's load balancer, and which balancer a run gets.

`HoldingBalancer` sends a request where its rule says, or holds it until a place is worth it. `staleness.routing` has
StaleFlow's rule; with `staleness.cache_aware` sessions lose and get places (`CacheAwareBalancer`).

    acquire ─► hold ─► place ─► replica ─► release ─► loads differ too much? ─► abort attempts there; their client keeps
                 ▲                                                                   the tokens and acquires again ─┐
                 └──────────────────────────────────────────────────────────────────────────────────────────────────┘

Where all replicas take new weights together nobody tells their versions, and "most stale first" is the order in which
conversations began.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cachetools import LRUCache

from seamless_verl.config import RouterConfig
from seamless_verl.staleness.cache_aware import CacheAware, Residents
from seamless_verl.staleness.router import router_of
from seamless_verl.staleness.routing import LeastRequests, MarginalGain, PendingRequest, ReplicaLoad, Route
from seamless_verl.verl_adapter.rollout.load_balancer import LOOK_EVERY_S, UNBOUNDED, Attempt, MeteredLoadBalancer

# Every call that is held back occupies one of the 1,000 places that Ray gives an asynchronous actor; were all taken,
# no release could come through. Beyond this many, requests go where they are served soonest.
_MOST_HELD = 500
# A client asks for its next place right after it left the last one; who has not by then had come to its end.
_ASKS_AGAIN_S = 1.0


@dataclass(slots=True)
class _Held:
    """A request that waits; ``place`` becomes the replica where it is to go."""

    conversation: str
    tokens: int
    worker: str
    floor: int
    session: str
    place: asyncio.Future[str]


class HoldingBalancer(MeteredLoadBalancer):
    """See the module; a conversation stays on its replica, as under its parent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, _Held] = {}  # by a number of their own: a conversation may ask several times at once
        self._asked = 0
        self._arrivals: LRUCache[str, int] = LRUCache(maxsize=self._request_id_to_server.maxsize)  # of conversations
        self._conversations = 0
        self._leaving: set[tuple[str, str]] = set()  # asked to leave their replica, and still there
        self._rests, self._news = False, False  # after a look at who has a place; something has happened since
        self._moving: dict[str, float] = {}  # conversation that has left, and is about to ask again -> since when

    async def acquire_server(  # type: ignore[override]  # Ray awaits it, and hands over the required fields by name
        self,
        request_id: str,
        context_tokens: int | None = None,
        attempt: str = "",
        worker: str = "",
        floor: int = 0,
        session: str = "",
    ) -> tuple[str, Any]:
        """As its parent's, except that the answer may take until another request has ended."""
        if request_id not in self._arrivals:
            self._arrivals[request_id] = self._conversations
            self._conversations += 1
        self._make_room(request_id, context_tokens or 0)
        able = self._able(floor)
        at_home = self._request_id_to_server.get(request_id) in able
        if able and not at_home and not self._full_determinism and len(self._held) < _MOST_HELD:
            self._asked += 1
            number = str(self._asked)
            place = asyncio.get_running_loop().create_future()
            held = _Held(request_id, context_tokens or 0, worker, floor, session, place)
            self._held[number] = held
            self._route()
            self._look_later()
            try:
                await held.place
            finally:
                del self._held[number]
        if at_home or self._request_id_to_server.get(request_id) not in self._able(floor):
            self._choose(request_id, context_tokens, floor, session, worker)
        seat = self._seat(request_id, Attempt(attempt, context_tokens or 0, worker))
        self._moving.pop(request_id, None)
        return seat

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
        self._route()
        self._migrate()

    def set_version(self, server_ids: list[str], version: int) -> None:
        super().set_version(server_ids, version)
        self._route()

    def set_cache_tokens(self, sizes: Mapping[str, int]) -> None:
        super().set_cache_tokens(sizes)
        self._route()

    def _has_place(self, floor: int) -> bool:
        may_hold = len(self._held) < _MOST_HELD  # then whoever finds somebody new enough is held here, not refused
        return bool(self._able(floor)) and (may_hold or super()._has_place(floor))

    def wanted(self) -> int | None:
        return self._versions.wanted(self._inflight_requests, (held.floor for held in self._held.values()))

    async def _ask(self, name: str, method: Any) -> None:
        await super()._ask(name, method)
        self._route()
        if any(not held.place.done() for held in self._held.values()):
            self._look_later()

    def _look_later(self) -> None:
        """Somebody waits: an engine's queue may go while no request ends."""
        asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._learn)

    def remove_servers(self, server_ids: list[str]) -> None:
        super().remove_servers(server_ids)
        self._leaving &= self._running.keys()
        self._route()

    def worker_died(self, worker: str) -> None:
        for held in self._held.values():
            if held.worker == worker:
                held.place.cancel()
        super().worker_died(worker)
        self._route()

    def _route(self) -> None:
        """Something has happened: `_wake_placed`, but not again for as long as that took. It is long where many wait;
        what happens meanwhile is looked at together."""
        waiting = next((held for held in self._held.values() if not held.place.done()), None)
        if waiting is None or self._rests:
            self._news = True
            return
        began, self._news = time.perf_counter(), False
        self._wake_placed()
        self._rests = True
        waiting.place.get_loop().call_later(time.perf_counter() - began, self._rested)

    def _rested(self) -> None:
        self._rests = False
        if self._news:
            self._route()

    def _wake_placed(self) -> None:
        """Wake those that have a place now; each takes it when it runs, which `super().acquire_server` counts."""
        waiting = {number: held for number, held in self._held.items() if not held.place.done()}
        if not self._inflight_requests:
            for held in waiting.values():
                held.place.set_result("")  # to be refused there, as verl expects
            return
        order = sorted(waiting, key=lambda number: self._arrivals.get(waiting[number].conversation, 0))
        requests = [
            PendingRequest(
                request=number,
                version=waiting[number].floor,
                tokens=waiting[number].tokens,
                arrival=(place,),
                long=waiting[number].session in self._outlasting,
                near=self._near(waiting[number].conversation),
            )
            for place, number in enumerate(order)
        ]
        for decision in self.rules.policy.route(requests, self._loads()):
            if not isinstance(decision, Route) or waiting[decision.request].place.done():
                continue
            conversation = waiting[decision.request].conversation
            self._request_id_to_server[conversation] = decision.replica
            for held in waiting.values():  # what else it asked for at the same time goes to the same prefix cache
                if held.conversation == conversation and not held.place.done():
                    held.place.set_result(decision.replica)

    def _make_room(self, conversation: str, tokens: int) -> None:
        """It asks, with a context of so many tokens."""

    def _near(self, conversation: str) -> str:
        """The replica that may hold its prefix; empty: nobody knows."""
        return ""

    def _migrate(self) -> None:
        """Interrupt conversations where the rule says so, those that came last first: they have the least to lose.

        One round at a time: until those of the last one run elsewhere, the loads do not show what it brought.
        """
        asks_since = time.monotonic() - _ASKS_AGAIN_S
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
        promised = [(held.place.result(), held.tokens) for held in told]
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
        self._askers: LRUCache[str, tuple[str, str]] = LRUCache(maxsize=size)  # conversation -> group, rollout worker
        self._over: LRUCache[str, bool] = LRUCache(maxsize=size)

    def require_acquire_fields(self) -> list[str]:
        return [*super().require_acquire_fields(), "group"]

    async def acquire_server(  # type: ignore[override]
        self, request_id: str, context_tokens: int | None = None, *, group: str = "", **named: Any
    ) -> tuple[str, Any]:
        """As its parent's.

        Args:
            group: whose prompt it is; conversations of one group begin with the same tokens.
        """
        self._askers[request_id] = (group, named.get("worker", ""))
        return await super().acquire_server(request_id, context_tokens, **named)

    def conversations_over(self, request_ids: list[str]) -> None:
        """Their sessions have ended: others may have their room."""
        super().conversations_over(request_ids)
        self._residents.over(request_ids)
        self._over.update(dict.fromkeys(request_ids, True))
        self._route()

    def worker_died(self, worker: str) -> None:
        super().worker_died(worker)
        self.conversations_over([name for name, (_, asker) in self._askers.items() if asker == worker])

    def clear_sticky_cache(self) -> dict[str, Any]:
        self._residents.caches_lost()
        return super().clear_sticky_cache()

    def remove_servers(self, server_ids: list[str]) -> None:
        self._residents.left(server_ids)
        super().remove_servers(server_ids)

    def _displace(self, conversation: str) -> None:
        super()._displace(conversation)
        self._residents.displaced(conversation)

    def _send_away(self, conversation: str) -> None:
        super()._send_away(conversation)
        self._residents.moved(conversation)

    def _make_room(self, conversation: str, tokens: int) -> None:
        home = self._request_id_to_server.get(conversation)
        if home is None:
            return
        cache = self._cache_tokens.get(home, UNBOUNDED)
        for other in self._residents.grown(conversation, tokens, cache, self._runs_on(home)):
            self._displace(str(other))

    def _runs_on(self, replica: str) -> Callable[[Hashable], bool]:
        return lambda conversation: (replica, conversation) in self._running

    def _near(self, conversation: str) -> str:
        return self._residents.near(conversation, self._askers.get(conversation, ("", ""))[0])

    def _seat(self, request_id: str, attempt: Attempt) -> tuple[str, Any]:
        server_id, handle = super()._seat(request_id, attempt)
        if request_id not in self._over:  # else whoever asked has left meanwhile, and gives its seat back
            group, _ = self._askers.get(request_id, ("", ""))
            self._residents.placed(request_id, group, server_id, attempt.tokens)
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
