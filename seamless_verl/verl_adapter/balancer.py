"""verl's least-requests load balancer with a stopwatch: how long was each replica busy."""

from __future__ import annotations

import time
from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer


class MeteredLoadBalancer(GlobalRequestLoadBalancer):
    """Routes exactly as its parent; a replica counts as busy while at least one request is out on it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._busy_since: dict[str, float] = {}
        self._busy_s: dict[str, float] = dict.fromkeys(self._inflight_requests, 0.0)

    def acquire_server(self, request_id: str) -> tuple[str, Any]:
        server_id, handle = super().acquire_server(request_id)
        if self._inflight_requests[server_id] == 1:
            self._busy_since[server_id] = time.monotonic()
        return server_id, handle

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        super().release_server(server_id, request_id)
        if self._inflight_requests.get(server_id) == 0:
            self._stop_clock(server_id)

    def add_servers(self, servers: dict[str, Any]) -> None:
        super().add_servers(servers)
        for server_id in servers:
            self._busy_s.setdefault(server_id, 0.0)

    def remove_servers(self, server_ids: list[str]) -> None:
        super().remove_servers(server_ids)
        for server_id in server_ids:
            self._stop_clock(server_id)
            self._busy_s.pop(server_id, None)

    def busy_seconds(self) -> dict[str, float]:
        """Seconds that each replica now registered has been busy since it was registered."""
        now = time.monotonic()
        running = {server_id: now - since for server_id, since in self._busy_since.items()}
        return {server_id: total + running.get(server_id, 0.0) for server_id, total in self._busy_s.items()}

    def _stop_clock(self, server_id: str) -> None:
        since = self._busy_since.pop(server_id, None)
        if since is not None:
            self._busy_s[server_id] = self._busy_s.get(server_id, 0.0) + time.monotonic() - since
