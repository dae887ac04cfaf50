"""verl's load balancer under StaleFlow's routing rule: where a request gains most, or held until a place is worth it.

verl publishes weights to all replicas at once, so every replica has the newest version and "most stale first" is the
order in which conversations began. A conversation stays on its replica (prefix cache), as under verl's own balancer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from cachetools import LRUCache

from seamless_verl.config import RouterConfig
from seamless_verl.staleness.cost_model import PUBLISHED
from seamless_verl.staleness.routing import MarginalGain, PendingRequest, ReplicaLoad, Route
from seamless_verl.verl_adapter.balancer import MeteredLoadBalancer

# Every call that is held back occupies one of the 1,000 places that Ray gives an asynchronous actor; were all taken,
# no release could come through. Beyond this many, requests go where they are served soonest.
_MOST_HELD = 500
_UNBOUNDED = 1 << 30


class MarginalGainBalancer(MeteredLoadBalancer):
    """See the module; made by `balancer_class`, since verl hands a balancer nothing but its replicas."""

    settings = RouterConfig()
    max_running = _UNBOUNDED

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._policy = MarginalGain(cost=PUBLISHED[self.settings.cost], mu=self.settings.mu)
        self._held: dict[str, tuple[int, asyncio.Future[None]]] = {}  # request -> prompt tokens, its waiter
        self._begun: LRUCache = LRUCache(maxsize=self._request_id_to_server.maxsize)  # conversation -> order
        self._conversations = 0
        self._tokens: dict[tuple[str, str], int] = {}  # (replica, request) -> prompt tokens while it runs
        self._kv: dict[str, int] = dict.fromkeys(self._inflight_requests, 0)

    def require_acquire_fields(self) -> list[str]:
        return ["prompt_ids"]

    def require_release_fields(self) -> list[str]:
        return ["request_id"]

    async def acquire_server(self, request_id: str, prompt_ids: Any = ()) -> tuple[str, Any]:
        """As verl's, except that the answer may take until another request has ended."""
        if request_id not in self._begun:
            self._begun[request_id] = self._conversations
            self._conversations += 1
        known = self._request_id_to_server.get(request_id) in self._inflight_requests
        if self._inflight_requests and not known and len(self._held) < _MOST_HELD:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._held[request_id] = (len(prompt_ids), waiter)
            self._route()
            try:
                await waiter
            finally:
                self._held.pop(request_id, None)
        server_id, handle = super().acquire_server(request_id)
        self._tokens[server_id, request_id] = len(prompt_ids)
        self._kv[server_id] = self._kv.get(server_id, 0) + len(prompt_ids)
        return server_id, handle

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        super().release_server(server_id, request_id)
        if server_id in self._kv:
            self._kv[server_id] -= self._tokens.pop((server_id, request_id or ""), 0)
        self._route()

    def add_servers(self, servers: dict[str, Any]) -> None:
        super().add_servers(servers)
        self._kv |= dict.fromkeys(servers, 0)
        self._route()

    def remove_servers(self, server_ids: list[str]) -> None:
        super().remove_servers(server_ids)
        for server_id in server_ids:
            self._kv.pop(server_id, None)
        self._tokens = {key: tokens for key, tokens in self._tokens.items() if key[0] in self._kv}
        self._route()

    def _route(self) -> None:
        """Wake those that have a place now; each takes it when it runs, which `super().acquire_server` counts."""
        waiting = [request for request, (_, waiter) in self._held.items() if not waiter.done()]
        if not waiting:
            return
        if not self._inflight_requests:
            for request in waiting:
                self._held[request][1].set_result(None)  # to be refused there, as verl expects
            return
        waiting.sort(key=lambda request: self._begun.get(request, 0))
        requests = [PendingRequest(request=request, version=0, tokens=self._held[request][0]) for request in waiting]
        for decision in self._policy.route(requests, self._loads()):
            if isinstance(decision, Route):
                self._request_id_to_server[decision.request] = decision.replica
                self._held[decision.request][1].set_result(None)

    def _loads(self) -> list[ReplicaLoad]:
        """Requests in flight, and those that were told their place and have not taken it yet."""
        promised = [
            (self._request_id_to_server[request], tokens)
            for request, (tokens, waiter) in self._held.items()
            if waiter.done()
        ]
        loads = []
        for server_id, in_flight in self._inflight_requests.items():
            coming = [tokens for place, tokens in promised if place == server_id]
            requests = in_flight + len(coming)
            loads.append(
                ReplicaLoad(
                    replica=server_id,
                    version=0,
                    running=min(requests, self.max_running),
                    waiting=max(0, requests - self.max_running),
                    kv_tokens=self._kv.get(server_id, 0) + sum(coming),
                    kv_room=_UNBOUNDED,
                    max_running=self.max_running,
                )
            )
        return loads


def balancer_class(settings: RouterConfig, max_running: int) -> type[MeteredLoadBalancer]:
    """The load balancer that ``seamless.router`` asks for.

    Args:
        max_running: requests that a replica decodes at a time (``rollout.max_num_seqs``); more wait in its queue.
    """
    if settings.policy == "least_requests":
        return MeteredLoadBalancer
    return type("MarginalGainRouter", (MarginalGainBalancer,), {"settings": settings, "max_running": max_running})
