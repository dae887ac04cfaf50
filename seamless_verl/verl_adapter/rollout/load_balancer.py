"""verl's load balancer that knows prefixes, weight versions and how busy replicas are.

`MeteredLoadBalancer` routes by least requests, as verl's; `holding_balancer` puts StaleFlow's rule on top of it. verl
forgets where conversations are whenever replicas join; each then prefills its context somewhere else. Here they stay
until new weights empty all caches together, or their replica leaves, or moving pays (`staleness.affinity`): between
turns, and for requests that run or queue as soon as the newcomer is awake (`even_out`). It also knows how long each
replica had something to do.

No request goes to a replica whose weights are older than its floor (`staleness.floors`). Where all replicas take new
weights together nobody tells their versions.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from cachetools import LRUCache
from ray.exceptions import RayActorError, RayError
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from seamless_verl.config import RouterConfig
from seamless_verl.decode_cost import EnginePace
from seamless_verl.observe.time_ledger import ReplicaSeconds, SliceSeconds
from seamless_verl.staleness.affinity import Newcomers, queued_to_move, requests_to_move
from seamless_verl.staleness.floors import UNTOLD, ServingVersions
from seamless_verl.staleness.router import router_of
from seamless_verl.staleness.routing import EngineLoad, LeastRequests, PendingRequest, Reckoned, ReplicaLoad, Route

NONE_NEW_ENOUGH = "No replica takes requests for version"
"""Message of the RuntimeError when no replica is both new enough and below its fair share; the client waits in
`someone_serves` and retries."""

UNBOUNDED = 1 << 30
POLL_LOADS_S = 1.0
_POLL_EVERY_S = {"engine_load": POLL_LOADS_S, "pace": 10.0}  # by method of a replica
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a conversation, from when it asks for a replica until it ends there; ``""`` is unknown.

    The conversation is what verl calls ``request_id``; the client sends the other fields under these names.

    Attributes:
        context_tokens: of the prompt; None: nobody said, then the conversation never leaves its replica.
        engine_name: what the replica will call it; without it, it is never interrupted.
        worker: the rollout worker that waits for it; without it, it keeps its place when that worker dies.
        floor: oldest version that may serve it.
        session: what the scheduler calls the conversation's session (`RequestLog.session_of`).
        group: whose prompt it is; conversations of one group begin with the same tokens.
    """

    conversation: str
    context_tokens: int | None = None
    engine_name: str = ""
    worker: str = ""
    floor: int = 0
    session: str = ""
    group: str = ""

    @property
    def tokens(self) -> int:
        return self.context_tokens or 0


class MeteredLoadBalancer(GlobalRequestLoadBalancer):
    """Routes as its parent, except that conversations stay with their prefix when replicas join, and while replicas are
    lent, among equals, long sessions go to those that stay.

    Made by `holding_balancer.balancer_class`, since verl hands a balancer nothing but its replicas. What subclasses
    override, and where ``super()`` stands:

        HoldingBalancer     acquire_server, wanted, _loads      not called: requests that are held count, too
                            _has_place                          asked last: what can be held needs no free seat
                            release_server, add_servers, remove_servers, _replicas_changed, _poll
                                                                first; then held requests are placed, others migrated
                            worker_died                         after the requests held for it are cancelled
        CacheAwareBalancer  _begin_turn, _near                  not called: HoldingBalancer has nothing there
                            _seat, _load, _unpin, conversations_over, worker_died
                                                                first; then `Residents` is told, or asked
                            remove_servers, clear_sticky_cache  last: `Residents` is told before it routes
    """

    rules = router_of(RouterConfig())
    max_running = UNBOUNDED
    full_determinism = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"full_determinism": self.full_determinism} | kwargs)
        self._running: dict[tuple[str, str], list[Request]] = {}  # (replica, conversation), in order of arrival
        self._kv: dict[str, int] = dict.fromkeys(self._inflight_requests, 0)
        self._cache_tokens: dict[str, int] = {}  # by replica, for as long as the run lasts; it may leave and come back
        self._prompts: LRUCache[str, int] = LRUCache(maxsize=self._request_id_to_server.maxsize)  # first ones, tokens
        self._dead: set[str] = set()  # rollout workers
        self._lent: set[str] = set()
        self._outlasting: frozenset[str] = frozenset()
        self._newcomers = Newcomers(self.rules.price)
        self._versions = ServingVersions()
        # Conversations that wait to ask again, and for which rollout worker. Each raises the share of a replica that is
        # new enough, so those that were given up have to go.
        self._refused: LRUCache[str, str] = LRUCache(maxsize=self._request_id_to_server.maxsize)
        self._seconds = ReplicaSeconds()
        self._seconds.joined(time.monotonic(), self._inflight_requests)
        self._more = asyncio.Event()  # a replica joined, or has newer weights
        self._paces: dict[str, EnginePace] = {}
        self._engine_loads: dict[str, tuple[EngineLoad, Reckoned]] = {}  # with what was reckoned when it was asked
        self._polled_at: dict[str, float] = {}  # by method
        self._polls: dict[tuple[str, str], asyncio.Task[None]] = {}  # (replica, method)
        self._failed_polls: set[tuple[str, str]] = set()

    async def someone_serves(self, floor: int = 0) -> None:
        """Return when a replica can serve ``floor``: until then all are with the trainer, dead, too old, or new enough
        and at their share of requests."""
        self._versions.waits(floor)
        try:
            while not self._has_place(floor):
                await self._more.wait()
        finally:
            self._versions.waits_no_more(floor)

    def set_version(self, server_ids: list[str], version: int) -> None:
        """These replicas generate with ``version`` from now on; called before their gates open or they join."""
        self._newcomers.emptied(name for name in server_ids if self._versions.of(name) not in (UNTOLD, version))
        self._versions.tell(server_ids, version)
        self._replicas_changed()

    def set_cache_tokens(self, sizes: Mapping[str, int]) -> None:
        """Tokens that the KV caches of these replicas hold. A cache of unknown size counts as endless."""
        self._cache_tokens |= sizes
        self._replicas_changed()

    def oldest_version(self) -> int | None:
        """Of the replicas that serve; None: none is known."""
        return self._versions.oldest(self._inflight_requests)

    def wanted(self) -> int | None:
        """The highest floor that a request waits for and no replica serves."""
        return self._versions.wanted(self._inflight_requests)

    def _able(self, floor: int) -> Mapping[str, int]:
        """Requests in flight of each replica that may begin one with this floor."""
        return self._versions.able(floor, self._inflight_requests)

    def _has_place(self, floor: int) -> bool:
        waits = PendingRequest(request="", version=floor, tokens=0)
        others = max(0, len(self._refused) - 1)
        return any(isinstance(found, Route) for found in LeastRequests(others).route([waits], self._loads()))

    def _replicas_changed(self) -> None:
        """Hook: replicas joined or left, or have other versions or caches."""
        self._wake_refused()

    def _wake_refused(self) -> None:
        more, self._more = self._more, asyncio.Event()
        more.set()

    def set_horizon(self, server_ids: list[str], outlasting: frozenset[str]) -> None:
        """These replicas are lent until they are removed, and these sessions will probably last longer."""
        self._lent.update(server_ids)
        self._outlasting = outlasting

    def require_acquire_fields(self) -> list[str]:
        return [field.name for field in fields(Request) if field.name != "conversation"]

    def require_release_fields(self) -> list[str]:
        return ["request_id"]

    def acquire_server(self, request_id: str, *args: Any, **named: Any) -> tuple[str, Any]:
        """As verl's, with the fields of a `Request`. A conversation goes to the replica of its last turn unless moving
        pays, or that one is too old.

        Raises:
            RuntimeError: there is no replica, or none that is new enough (`NONE_NEW_ENOUGH`).
        """
        request = Request(request_id, *args, **named)
        self._choose(request)
        return self._seat(request)

    def _choose(self, request: Request) -> None:
        """Pin the conversation to a replica, where verl's rule would not do: else `_seat` takes the least loaded."""
        name, able = request.conversation, self._able(request.floor)
        if self._inflight_requests and not able:
            self._refuse(request)
        home = self._request_id_to_server.get(name)
        if home is not None and home in able:
            place = self._newcomers.place_of(home, request.context_tokens, able, self._pace(home))
            if place != home:
                self._let_go([name])
            self._request_id_to_server[name] = place
        elif (self._lent or len(able) < len(self._inflight_requests)) and not self._full_determinism:
            is_long = request.session in self._outlasting
            others = len(self._refused) - (name in self._refused)
            asks = PendingRequest(request=name, version=request.floor, tokens=0, long=is_long)
            (decision,) = LeastRequests(others).route([asks], self._loads())
            if isinstance(decision, Route):
                self._request_id_to_server[name] = decision.replica
            elif able:
                self._refuse(request)

    def _refuse(self, request: Request) -> NoReturn:
        self._refused[request.conversation] = request.worker
        raise RuntimeError(f"{NONE_NEW_ENOUGH} {request.floor} yet")

    def _seat(self, request: Request) -> tuple[str, Any]:
        """Count it as running on the replica that its conversation is pinned to."""
        name = request.conversation
        if request.worker in self._dead:  # it asked before it died
            raise RuntimeError(f"rollout worker {request.worker} is dead")
        server_id, handle = super().acquire_server(name)
        self._refused.pop(name, None)
        self._newcomers.placed(name, server_id)
        self._prompts.setdefault(name, request.tokens)
        self._running.setdefault((server_id, name), []).append(request)
        self._kv[server_id] = self._kv.get(server_id, 0) + request.tokens
        if self._inflight_requests[server_id] == 1:
            self._seconds.busy(time.monotonic(), server_id)
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
            self._seconds.idle(time.monotonic(), server_id)
        if self._refused:
            self._wake_refused()
        self._poll_replicas()

    def _poll_replicas(self) -> None:
        """Ask every replica now and then what it has to do and what its steps take; no request waits for that."""
        for method, every_s in _POLL_EVERY_S.items():
            if time.monotonic() > self._polled_at.get(method, -math.inf) + every_s:
                self._polled_at[method] = time.monotonic()
                for name, each in self._servers.items():
                    owed = self._polls.get((name, method))  # by one whose engine takes weights, or hangs
                    if hasattr(each, method) and (owed is None or owed.done()):
                        poll = self._poll(name, method)
                        self._polls[name, method] = asyncio.get_running_loop().create_task(poll)

    async def _poll(self, server_id: str, method: str) -> None:
        then = Reckoned(self._inflight_requests[server_id], self._kv[server_id])
        try:
            answer = await getattr(self._servers[server_id], method).remote()
        except RayActorError:  # it has died, or is about to
            return
        except RayError as error:
            if (server_id, method) not in self._failed_polls:
                self._failed_polls.add((server_id, method))
                _log.warning("routing goes by old figures: %s of replica %s failed: %s", method, server_id, error)
            return
        if isinstance(answer, EnginePace):
            self._paces[server_id] = answer
        elif isinstance(answer, EngineLoad):
            self._engine_loads[server_id] = (answer, then)

    def _pace(self, server_id: str) -> EnginePace | None:
        """Measured, or that of another replica until then: they run the same model."""
        return self._paces.get(server_id) or next(iter(self._paces.values()), None)

    def conversations_over(self, request_ids: list[str]) -> None:
        """Their sessions have ended."""
        self._let_go(request_ids)
        for request_id in request_ids:
            self._refused.pop(request_id, None)

    def _let_go(self, conversations: Iterable[str]) -> None:
        """Tell the replicas that these prefixes can be evicted first."""
        homes: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        for name in conversations:
            homes[self._request_id_to_server.get(name, "")].append((name, self._prompts.get(name, 0)))
        for home, left in homes.items():
            if hasattr(self._servers.get(home), "let_go"):
                self._servers[home].let_go.remote(left)

    def worker_died(self, worker: str) -> None:
        """End the requests of this rollout worker and free their places: no client waits for them any more."""
        self._dead.add(worker)
        for request_id in [name for name, waiting in self._refused.items() if waiting == worker]:
            del self._refused[request_id]
        left = [(key[0], each) for key, running in self._running.items() for each in running if each.worker == worker]
        for server_id, request in left:
            handle = self._servers[server_id]
            if request.engine_name and hasattr(handle, "abort_request"):
                handle.abort_request.remote(request.engine_name, reset_prefix_cache=False)
            self.release_server(server_id, request.conversation)

    def even_out(self) -> None:
        """Replicas have joined and are awake: move requests of the others to them, as far as that pays. They keep their
        tokens, and their clients ask for a place again. No request moves to older weights than it had."""
        newest = max((self._versions.of(server_id) for server_id in self._inflight_requests), default=0)
        empty = [name for name, n in self._inflight_requests.items() if not n and self._versions.of(name) == newest]
        if self._full_determinism or not empty:
            return
        for server_id, count in requests_to_move(self._loads(), empty, self.rules.price).items():
            here = [conversation for replica, conversation in self._running if replica == server_id]
            queued = queued_to_move(count, len(here[self.max_running :]))
            chosen = [here[self.max_running + index] for index in queued] if queued else here[-count:]
            for conversation in chosen:
                if self._interrupt(server_id, conversation):
                    self._unpin(conversation, moves=True)

    def _unpin(self, conversation: str, *, moves: bool = False) -> None:
        """Unpin the conversation: its next request is routed afresh. One that ``moves`` must not come back."""
        self._let_go([conversation])
        self._request_id_to_server.pop(conversation, None)

    def _interrupt(self, server_id: str, conversation: str) -> bool:
        """Abort the conversation's requests there; False, and none is, where the name of one is unknown."""
        names = [request.engine_name for request in self._running[server_id, conversation]]
        if not all(names):
            return False
        for name in names:
            self._servers[server_id].abort_request.remote(name, reset_prefix_cache=False)
        return True

    def _loads(self) -> list[ReplicaLoad]:
        """By requests in flight."""
        return [self._load(server_id, requests, 0) for server_id, requests in self._inflight_requests.items()]

    def _load(self, server_id: str, requests: int, coming_tokens: int) -> ReplicaLoad:
        said, then = self._engine_loads.get(server_id, (None, None))
        reckoned = Reckoned(requests, self._kv.get(server_id, 0) + coming_tokens, said, then)
        held, waiting = reckoned.cached(), reckoned.waiting(self.max_running)
        return ReplicaLoad(
            replica=server_id,
            version=self._versions.of(server_id),
            running=requests - waiting,
            waiting=waiting,
            kv_tokens=held,
            kv_room=max(0, self._cache_tokens.get(server_id, UNBOUNDED) - held),
            max_running=self.max_running,
            lent=server_id in self._lent,
            pace=self._pace(server_id),
        )

    def add_servers(self, servers: dict[str, Any]) -> None:
        known = set(self._inflight_requests)
        super().add_servers(servers)
        new = [server_id for server_id in servers if server_id not in known]
        self._kv |= dict.fromkeys(new, 0)
        self._newcomers.joined(new)
        self._seconds.joined(time.monotonic(), new)
        self._replicas_changed()

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Unpin all conversations: every cache is lost, or about to be."""
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
            self._engine_loads.pop(server_id, None)
        for key in [key for key in self._polls if key[0] in server_ids]:
            self._polls.pop(key).cancel()
        self._running = {key: running for key, running in self._running.items() if key[0] in self._kv}
        self._newcomers.left(server_ids)
        self._lent.difference_update(server_ids)
        self._versions.forget(server_ids)
        self._seconds.left(time.monotonic(), server_ids)
        self._replicas_changed()

    def books(self) -> tuple[SliceSeconds, ...]:
        """Seconds of every replica, by address, while it was registered: busy and idle."""
        return self._seconds.books(time.monotonic())
