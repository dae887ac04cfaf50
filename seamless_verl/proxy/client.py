"""The trainer's side of a proxy: open sessions, close them, get rows."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import msgspec

from seamless_verl.errors import SeamlessError
from seamless_verl.proxy.session.sessions import SessionSpec
from seamless_verl.trajectory.rows import AuditReport, Row


class ProxyRefused(SeamlessError):
    """The proxy answered with an error; ``status`` and ``code`` as on the wire."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"the proxy refused ({status} {code}): {message}")
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHandle:
    """An open session. Agents need ``base_url`` and ``api_key``; the key alone works at the proxy's own ``/v1`` too."""

    id: str
    api_key: str
    base_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResult:
    """What a closed session left.

    Attributes:
        rows: one per leaf, the one with the most generated tokens first; empty when the agent never asked anything.
        images: the files of the pictures in the rows, by their digests.
        audit: comparison of the rows with the engine's ledger; ``audit.violations`` must be empty.
        kinds: turns by ``clean``, ``realign``, ``fork``.
        drift: how often each reason kept a turn from being clean.
    """

    id: str
    group: str
    index: int
    metadata: Mapping[str, Any]
    reward: float | None
    rewards: Mapping[str, float]
    rows: tuple[Row, ...]
    images: Mapping[str, bytes] = field(default_factory=dict)
    audit: AuditReport
    kinds: Mapping[str, int]
    drift: Mapping[str, int]


class ProxyAdmin:
    """Admin client of one proxy.

    Args:
        base_url: as :attr:`seamless_verl.proxy.deploy.http_server.ProxyServer.base_url`.
        admin_key: the proxy's admin key.
        timeout_s: for one call; closing a long session transfers its rows.
        app: the proxy's application where it runs in this very process; calls then go to it without a socket.
    """

    def __init__(self, base_url: str, admin_key: str, *, timeout_s: float = 60.0, app: Any = None) -> None:
        # Proxies of the environment are for the outside world; this one is on our own network.
        self._client = httpx.AsyncClient(
            base_url=base_url,
            headers={"authorization": f"Bearer {admin_key}"},
            # httpx looks at every connection of its pool for every request: few of them, and calls wait for their turn.
            timeout=httpx.Timeout(timeout_s, pool=None),
            trust_env=False,
            transport=None if app is None else httpx.ASGITransport(app=app, raise_app_exceptions=False),
            limits=httpx.Limits(max_connections=16, max_keepalive_connections=16),
        )

    async def open_session(self, spec: SessionSpec) -> SessionHandle:
        """Open a session; see :class:`SessionSpec` for what can be asked."""
        data = await self._call("POST", "/sessions", asdict(spec))
        return SessionHandle(id=data["id"], api_key=data["api_key"], base_url=data["base_url"])

    async def set_reward(
        self, session_id: str, reward: float | None = None, rewards: Mapping[str, float] | None = None
    ) -> None:
        """Note a reward; closing may still change it."""
        await self._call("POST", f"/sessions/{session_id}/reward", {"reward": reward, "rewards": dict(rewards or {})})

    async def close_session(
        self, session_id: str, reward: float | None = None, rewards: Mapping[str, float] | None = None
    ) -> SessionResult:
        """End a session and take its rows; whatever it has in flight is cancelled and not part of them.

        The proxy keeps them until they have arrived here, so a lost answer loses no rows.
        """
        path, body = f"/sessions/{session_id}/close", {"reward": reward, "rewards": dict(rewards or {})}
        try:
            data = await self._call("POST", path, body)
        except httpx.TransportError:
            data = await self._call("POST", path, body)
        await self._acknowledge(session_id)
        return msgspec.convert(data, SessionResult)

    async def _acknowledge(self, session_id: str) -> None:
        with contextlib.suppress(httpx.TransportError, ProxyRefused):  # it then keeps them until their time is over
            await self.delete_session(session_id)

    async def view_session(self, session_id: str) -> dict[str, Any]:
        """The session's tree, without tokens."""
        return await self._call("GET", f"/sessions/{session_id}")

    async def delete_session(self, session_id: str) -> None:
        """Forget a session and its rows."""
        await self._call("DELETE", f"/sessions/{session_id}")

    async def pause(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Hold requests back; ``quiet`` says whether the engine has nothing to do any more."""
        return await self._call(
            "POST", "/pause", {"timeout_s": timeout_s}, timeout=httpx.Timeout(timeout_s + 30.0, pool=None)
        )

    async def resume(self, version: int | None = None) -> None:
        """Let requests go on, from now on under weight version ``version``, where it changed."""
        await self._call("POST", "/resume", {"version": version})

    async def stats(self) -> dict[str, Any]:
        """The proxy's counters; see :class:`seamless_verl.proxy.metrics.Counters`."""
        return await self._call("GET", "/stats")

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        try:
            response = await self._client.request(method, path, json=body, **options)
        except (httpx.NetworkError, httpx.RemoteProtocolError):
            # It died, and is started again at its address. A session that was opened twice is never used, and expires.
            response = await self._client.request(method, path, json=body, **options)
        if response.is_error:
            error = response.json().get("error", {})
            raise ProxyRefused(response.status_code, str(error.get("code")), str(error.get("message")))
        data: dict[str, Any] = response.json() if response.content else {}
        return data
