"""verl's least-requests load balancer, which keeps books (how long had each replica something to do) and prefixes.

verl forgets where conversations are whenever replicas join; each then prefills its context somewhere else. Here they
stay until new weights have emptied every cache, or their replica leaves, or moving pays (`staleness.affinity`).
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer

from seamless_verl.observe.flight import RequestEnded, RequestStarted, SliceAdded, SliceRemoved, SliceState
from seamless_verl.observe.time_ledger import Ledger, SliceSeconds
from seamless_verl.staleness.affinity import Newcomers
from seamless_verl.staleness.routing import LeastRequests, PendingRequest, ReplicaLoad, Route

_ANY = "any"  # all requests on a replica count as one: it is busy while at least one is out


class MeteredLoadBalancer(GlobalRequestLoadBalancer):
    """Routes as its parent, except that conversations stay with their prefix when replicas join, and while replicas are
    lent, among equals, long sessions go to those that stay."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
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

    def keeps_prefixes(self) -> None:
        """Who adds replicas asks whether this is there: if it is, routes need not be cleared for it."""

    def require_acquire_fields(self) -> list[str]:
        return ["context_tokens"]

    def acquire_server(self, request_id: str, context_tokens: int | None = None) -> tuple[str, Any]:
        """
        Args:
            context_tokens: of the prompt; without it a conversation never leaves the replica of its last turn.
        """
        home = self._request_id_to_server.get(request_id)
        if home in self._inflight_requests:
            place = self._newcomers.place_of(home, context_tokens, self._inflight_requests)
            self._request_id_to_server[request_id] = place
        elif self._lent and not self._full_determinism:
            self._choose(request_id)
        server_id, handle = super().acquire_server(request_id)
        self._newcomers.placed(request_id, server_id)
        if self._inflight_requests[server_id] == 1:
            self._ledger.handle(RequestStarted(at=time.monotonic(), request=_ANY, slice=server_id, prompt_tokens=0))
        return server_id, handle

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        super().release_server(server_id, request_id)
        if self._inflight_requests.get(server_id) == 0:
            self._ledger.handle(
                RequestEnded(at=time.monotonic(), request=_ANY, slice=server_id, tokens=0, finish="completed")
            )

    def _choose(self, request_id: str) -> None:
        request = PendingRequest(request=request_id, version=0, tokens=0, long=request_id in self._outlasting)
        loads = [
            ReplicaLoad(
                replica=server_id,
                version=0,
                running=requests,
                waiting=0,
                kv_tokens=0,
                kv_room=0,
                lent=server_id in self._lent,
            )
            for server_id, requests in self._inflight_requests.items()
        ]
        for decision in LeastRequests().route([request], loads):
            if isinstance(decision, Route):
                self._request_id_to_server[request_id] = decision.replica

    def add_servers(self, servers: dict[str, Any]) -> None:
        known = set(self._inflight_requests)
        super().add_servers(servers)
        new = [server_id for server_id in servers if server_id not in known]
        self._newcomers.joined(new)
        self._open(new)

    def clear_sticky_cache(self) -> dict:
        """Every cache is lost, or about to be: conversations are placed anew."""
        self._newcomers.caches_lost()
        cleared: dict = super().clear_sticky_cache()
        return cleared

    def remove_servers(self, server_ids: list[str]) -> None:
        """Routes to them are forgotten at once: they may come back under the same name, with empty caches."""
        super().remove_servers(server_ids)
        gone = [name for name, place in self._request_id_to_server.items() if place not in self._inflight_requests]
        for conversation in gone:
            del self._request_id_to_server[conversation]
        self._newcomers.left(server_ids)
        self._lent.difference_update(server_ids)
        if not self._inflight_requests:
            self._serving.clear()
        for server_id in server_ids:
            self._ledger.handle(SliceRemoved(at=time.monotonic(), slice=server_id))

    def books(self) -> tuple[SliceSeconds, ...]:
        """Of every replica, by address, for the time in which it was registered."""
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
