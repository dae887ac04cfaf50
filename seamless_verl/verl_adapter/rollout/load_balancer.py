"""verl's load balancer with books and prefixes, and StaleFlow's routing rule on top of it.

`MeteredLoadBalancer` routes by least requests, as verl's. verl forgets where conversations are whenever replicas join;
each then prefills its context somewhere else. Here they stay until new weights have emptied every cache, or their
replica leaves, or moving pays (`staleness.affinity`): between turns, and for requests that run or queue as soon as the
newcomer is awake (`even_out`). It also knows how long each replica had something to do.

`MarginalGainBalancer` sends a request where it gains most, or holds it until a place is worth it:

    acquire ─► hold ─► place ─► replica ─► release ─► loads differ too much? ─► abort attempts there; their client keeps
                 ▲                                                                   the tokens and acquires again ─┐
                 └──────────────────────────────────────────────────────────────────────────────────────────────────┘

verl publishes weights to all replicas at once, so every replica has the newest version and "most stale first" is the
order in which conversations began.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from cachetools import LRUCache
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from seamless_verl.config import RouterConfig
from seamless_verl.decode_cost import PUBLISHED
from seamless_verl.observe.flight import RequestEnded, RequestStarted, SliceAdded, SliceRemoved, SliceState
from seamless_verl.observe.time_ledger import Ledger, SliceSeconds
from seamless_verl.staleness.affinity import MovePrice, Newcomers, queued_to_move, requests_to_move
from seamless_verl.staleness.routing import (
    LeastRequests,
    MarginalGain,
    MigrationRule,
    PendingRequest,
    ReplicaLoad,
    Route,
)

_ANY = "any"  # all requests on a replica count as one: it is busy while at least one is out


# Every call that is held back occupies one of the 1,000 places that Ray gives an asynchronous actor; were all taken,
# no release could come through. Beyond this many, requests go where they are served soonest.
_MOST_HELD = 500
_UNBOUNDED = 1 << 30
# A client asks for its next place right after it left the last one; who has not by then had come to its end.
_ASKS_AGAIN_S = 1.0


@dataclass(slots=True)
class _Attempt:
    """A request that runs, or waits in its replica's queue; ``""`` is unknown.

    Attributes:
        name: what the replica calls it.
        worker: the rollout worker that waits for it.
    """

    name: str
    tokens: int
    worker: str


class MeteredLoadBalancer(GlobalRequestLoadBalancer):
    """Routes as its parent, except that conversations stay with their prefix when replicas join, and while replicas are
    lent, among equals, long sessions go to those that stay.

    Made by `balancer_class`, since verl hands a balancer nothing but its replicas.
    """

    settings = RouterConfig()
    max_running = _UNBOUNDED

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running: dict[tuple[str, str], list[_Attempt]] = {}  # (replica, conversation), in order of arrival
        self._kv: dict[str, int] = dict.fromkeys(self._inflight_requests, 0)
        self._dead: set[str] = set()  # rollout workers
        self._lent: set[str] = set()
        self._outlasting: frozenset[str] = frozenset()
        self._newcomers = Newcomers()
        self._ledger = Ledger()
        self._serving = asyncio.Event()
        self._open(list(self._inflight_requests))

    async def someone_serves(self) -> None:
        """Returns when there is a replica to ask: all of them may be with the trainer, or dead."""
        await self._serving.wait()

    def set_horizon(self, server_ids: list[str], outlasting: frozenset[str]) -> None:
        """These replicas are lent until they are removed, and these sessions will probably last longer."""
        self._lent.update(server_ids)
        self._outlasting = outlasting

    def require_acquire_fields(self) -> list[str]:
        return ["context_tokens", "attempt", "worker"]

    def require_release_fields(self) -> list[str]:
        return ["request_id"]

    def acquire_server(
        self, request_id: str, context_tokens: int | None = None, attempt: str = "", worker: str = ""
    ) -> tuple[str, Any]:
        """As verl's; a conversation goes to the replica of its last turn unless moving pays.

        Args:
            context_tokens: of the prompt; without it a conversation never leaves that replica.
            attempt: what the replica will call the request; without it the request is never interrupted.
            worker: who asks; without it the request keeps its place if the one who asked dies.
        """
        self._choose(request_id, context_tokens)
        return self._seat(request_id, _Attempt(attempt, context_tokens or 0, worker))

    def _choose(self, request_id: str, context_tokens: int | None) -> None:
        home = self._request_id_to_server.get(request_id)
        if home in self._inflight_requests:
            place = self._newcomers.place_of(home, context_tokens, self._inflight_requests)
            self._request_id_to_server[request_id] = place
        elif self._lent and not self._full_determinism:
            request = PendingRequest(request=request_id, version=0, tokens=0, long=request_id in self._outlasting)
            for decision in LeastRequests().route([request], self._loads()):
                if isinstance(decision, Route):
                    self._request_id_to_server[request_id] = decision.replica

    def _seat(self, request_id: str, attempt: _Attempt) -> tuple[str, Any]:
        if attempt.worker in self._dead:  # it asked before it died
            raise RuntimeError(f"rollout worker {attempt.worker} is dead")
        server_id, handle = super().acquire_server(request_id)
        self._newcomers.placed(request_id, server_id)
        self._running.setdefault((server_id, request_id), []).append(attempt)
        self._kv[server_id] = self._kv.get(server_id, 0) + attempt.tokens
        if self._inflight_requests[server_id] == 1:
            self._ledger.handle(RequestStarted(at=time.monotonic(), request=_ANY, slice=server_id, prompt_tokens=0))
        return server_id, handle

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        running = self._running.get((server_id, request_id or ""))
        if request_id is not None and not running:
            return  # its replica left, or its worker died, before it ended
        super().release_server(server_id, request_id)
        if running:
            self._kv[server_id] -= running.pop(0).tokens
            if not running:
                del self._running[server_id, request_id or ""]
        if self._inflight_requests.get(server_id) == 0:
            self._ledger.handle(
                RequestEnded(at=time.monotonic(), request=_ANY, slice=server_id, tokens=0, finish="completed")
            )

    def worker_died(self, worker: str) -> None:
        """Nobody waits for the requests of this rollout worker any more: they end, and give their places back."""
        self._dead.add(worker)
        left = [(key, each) for key, attempts in self._running.items() for each in attempts if each.worker == worker]
        for (server_id, conversation), attempt in left:
            handle = self._servers[server_id]
            if attempt.name and hasattr(handle, "abort_request"):
                handle.abort_request.remote(attempt.name, reset_prefix_cache=False)
            self.release_server(server_id, conversation)

    def even_out(self) -> None:
        """Replicas have joined and are awake: requests of the others move to them, as far as that pays. They keep their
        tokens, and their clients ask for a place again."""
        empty = [server_id for server_id, requests in self._inflight_requests.items() if not requests]
        if self._full_determinism or not empty:
            return
        for server_id, count in requests_to_move(self._loads(), empty, MovePrice()).items():
            here = [conversation for replica, conversation in self._running if replica == server_id]
            queued = queued_to_move(count, len(here[self.max_running :]))
            chosen = [here[self.max_running + index] for index in queued] if queued else here[-count:]
            for conversation in chosen:
                if self._interrupt(server_id, conversation):
                    self._request_id_to_server.pop(conversation, None)

    def _interrupt(self, server_id: str, conversation: str) -> bool:
        """False where the replica's name for one of its requests is unknown: nothing happens."""
        attempts = self._running[server_id, conversation]
        if not all(attempt.name for attempt in attempts):
            return False
        for attempt in attempts:
            self._servers[server_id].abort_request.remote(attempt.name, reset_prefix_cache=False)
        return True

    def _loads(self) -> list[ReplicaLoad]:
        """Requests in flight."""
        return [self._load(server_id, requests, 0) for server_id, requests in self._inflight_requests.items()]

    def _load(self, server_id: str, requests: int, coming_tokens: int) -> ReplicaLoad:
        return ReplicaLoad(
            replica=server_id,
            version=0,
            running=min(requests, self.max_running),
            waiting=max(0, requests - self.max_running),
            kv_tokens=self._kv.get(server_id, 0) + coming_tokens,
            kv_room=_UNBOUNDED,
            max_running=self.max_running,
            lent=server_id in self._lent,
        )

    def add_servers(self, servers: dict[str, Any]) -> None:
        known = set(self._inflight_requests)
        super().add_servers(servers)
        new = [server_id for server_id in servers if server_id not in known]
        self._kv |= dict.fromkeys(new, 0)
        self._newcomers.joined(new)
        self._open(new)

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Every cache is lost, or about to be: conversations are placed anew."""
        self._newcomers.caches_lost()
        cleared: dict[str, Any] = super().clear_sticky_cache()
        return cleared

    def remove_servers(self, server_ids: list[str]) -> None:
        """Routes to them are forgotten at once: they may come back under the same name, with empty caches."""
        super().remove_servers(server_ids)
        gone = [name for name, place in self._request_id_to_server.items() if place not in self._inflight_requests]
        for conversation in gone:
            del self._request_id_to_server[conversation]
        for server_id in server_ids:
            self._kv.pop(server_id, None)
        self._running = {key: attempts for key, attempts in self._running.items() if key[0] in self._kv}
        self._newcomers.left(server_ids)
        self._lent.difference_update(server_ids)
        if not self._inflight_requests:
            self._serving.clear()
        for server_id in server_ids:
            self._ledger.handle(SliceRemoved(at=time.monotonic(), slice=server_id))

    def books(self) -> tuple[SliceSeconds, ...]:
        """Seconds of every replica, by address, while it was registered: busy and idle."""
        return self._ledger.books(time.monotonic())

    def _open(self, server_ids: list[str]) -> None:
        if server_ids:
            self._serving.set()
        for server_id in server_ids:
            self._ledger.handle(
                SliceAdded(
                    at=time.monotonic(),
                    slice=server_id,
                    pool="",
                    devices=1,
                    capabilities=("rollout",),
                    state=SliceState.ROLLOUT,
                )
            )


@dataclass(slots=True)
class _Held:
    """A request that waits; ``place`` becomes the replica where it is to go."""

    conversation: str
    tokens: int
    worker: str
    place: asyncio.Future[str]


class MarginalGainBalancer(MeteredLoadBalancer):
    """See the module; a conversation stays on its replica, as under its parent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._policy = MarginalGain(cost=PUBLISHED[self.settings.cost], mu=self.settings.mu)
        self._held: dict[str, _Held] = {}  # by a number of their own: a conversation may ask several times at once
        self._asked = 0
        self._begun: LRUCache[str, int] = LRUCache(maxsize=self._request_id_to_server.maxsize)  # conversation -> order
        self._conversations = 0
        self._rule = MigrationRule() if self.settings.migrate else None
        self._leaving: set[tuple[str, str]] = set()  # asked to leave their replica, and still there
        self._moving: dict[str, float] = {}  # conversation that has left, and is about to ask again -> since when

    async def acquire_server(  # type: ignore[override]  # Ray awaits it, and hands over the required fields by name
        self, request_id: str, context_tokens: int | None = None, attempt: str = "", worker: str = ""
    ) -> tuple[str, Any]:
        """As its parent's, except that the answer may take until another request has ended."""
        if request_id not in self._begun:
            self._begun[request_id] = self._conversations
            self._conversations += 1
        known = self._request_id_to_server.get(request_id) in self._inflight_requests
        if self._inflight_requests and not known and len(self._held) < _MOST_HELD:
            self._asked += 1
            number = str(self._asked)
            held = _Held(request_id, context_tokens or 0, worker, asyncio.get_running_loop().create_future())
            self._held[number] = held
            self._route()
            try:
                await held.place
            finally:
                del self._held[number]
        else:
            self._choose(request_id, context_tokens)
        seat = self._seat(request_id, _Attempt(attempt, context_tokens or 0, worker))
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
        """Wake those that have a place now; each takes it when it runs, which `super().acquire_server` counts."""
        waiting = {number: held for number, held in self._held.items() if not held.place.done()}
        if not waiting:
            return
        if not self._inflight_requests:
            for held in waiting.values():
                held.place.set_result("")  # to be refused there, as verl expects
            return
        order = sorted(waiting, key=lambda number: self._begun.get(waiting[number].conversation, 0))
        requests = [PendingRequest(request=number, version=0, tokens=waiting[number].tokens) for number in order]
        for decision in self._policy.route(requests, self._loads()):
            if not isinstance(decision, Route) or waiting[decision.request].place.done():
                continue
            conversation = waiting[decision.request].conversation
            self._request_id_to_server[conversation] = decision.replica
            for held in waiting.values():  # what else it asked for at the same time goes to the same prefix cache
                if held.conversation == conversation and not held.place.done():
                    held.place.set_result(decision.replica)

    def _migrate(self) -> None:
        """Interrupt conversations where the rule says so, those that came last first: they have the least to lose.

        One round at a time: until those of the last one run elsewhere, the loads do not show what it brought.
        """
        asks_since = time.monotonic() - _ASKS_AGAIN_S
        self._moving = {conversation: left for conversation, left in self._moving.items() if left > asks_since}
        if self._rule is None or self._leaving or self._moving or self._held or not self._inflight_requests:
            return
        loads = self._loads()
        starving = min(loads, key=lambda load: (load.running + load.waiting, load.replica))
        for command in self._rule.migrations(loads, self._policy.cost):
            here = [key for key in self._running if key[0] == command.replica]
            for server_id, conversation in list(reversed(here))[: command.count]:
                if self._interrupt(server_id, conversation):
                    self._leaving.add((server_id, conversation))
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


def balancer_class(settings: RouterConfig, max_running: int) -> type[MeteredLoadBalancer]:
    """The load balancer that ``seamless.router`` asks for.

    Args:
        max_running: requests that a replica decodes at a time (``rollout.max_num_seqs``); more wait in its queue.
    """
    base = MeteredLoadBalancer if settings.policy == "least_requests" else MarginalGainBalancer
    return type(base.__name__, (base,), {"settings": settings, "max_running": max_running})
