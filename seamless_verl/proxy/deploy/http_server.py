"""Serves an app inside a running event loop, for example that of a Ray actor.

The socket is bound before anything starts, so that the port is known at once and a taken one is a clear error.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import socket
from collections.abc import Iterable, Iterator

import uvicorn
from fastapi import FastAPI

from seamless_verl.errors import ConfigError
from seamless_verl.machine import BIND_ERRORS, bind_refused
from seamless_verl.proxy.http.requests import ImpatientProtocol

_BACKLOG = 2048  # as uvicorn's
# uvloop takes one connection per listening socket and turn of its loop (libuv since 1.45). Of a thousand agents that
# begin at once, the last would wait for a thousand turns in which all the others are served: 47 s instead of 2.
_LISTENERS = 64
# Python looks for cycles after 700 new objects. A request of 1,000 messages makes 2,000, freed without any search.
_GC_AFTER = 50_000
_M_ARENA_MAX = -8


def keep_one_heap() -> None:
    """For a process that does nothing but serve, before it has threads: glibc gives each of them a heap of its own, and
    what one frees stays with it (10 MiB more, and twice the growth from 10,000 to 50,000 turns)."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def search_garbage_rarely() -> None:
    """For a process that does nothing but serve, once all is imported: searching what stays takes tens of milliseconds,
    and searching the messages of one long request a tenth of its time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_AFTER)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process, not to one of its servers."""
        yield


class ProxyServer:
    """One app on one socket.

    Args:
        app: from :func:`seamless_verl.proxy.http.app.make_app`.
        host: address to bind; loopback unless told otherwise.
        port: 0 takes a free one.
        drain_s: how long :meth:`stop` waits for answers under way.
        listener: a socket that is bound already, in place of ``host`` and ``port``.
    """

    def __init__(
        self,
        app: FastAPI,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        drain_s: float = 5.0,
        listener: socket.socket | None = None,
    ) -> None:
        self._app = app
        self._host = host
        self._port = port
        self._drain_s = drain_s
        self._socket = listener
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        """``http://host:port``, once started."""
        if self._socket is None:
            raise RuntimeError("ProxyServer.base_url before start(): the port is not known yet")
        return base_url_of(self._socket)

    async def start(self) -> str:
        """Bind and serve; returns the base URL once requests are taken.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._socket = self._socket or _bind(self._host, self._port)
        config = uvicorn.Config(
            self._app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            http=ImpatientProtocol,
            ws="none",
            proxy_headers=False,
            timeout_graceful_shutdown=max(1, round(self._drain_s)),
        )
        self._server = _Server(config)
        listeners = [self._socket, *(self._socket.dup() for _ in range(_LISTENERS - 1))]
        self._task = asyncio.create_task(self._server.serve(sockets=listeners))
        while not self._server.started:
            if self._task.done():
                await self._task
                raise RuntimeError(f"the server on {self._host}:{self._port} ended before it took requests")
            await asyncio.sleep(0.005)
        return self.base_url

    async def stop(self) -> None:
        """Take no more requests, let those under way finish, close the socket; idempotent."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
        if self._socket is not None:
            self._socket.close()
        self._server = self._task = None


def listen_on(host: str, port: int) -> socket.socket:
    """A socket that takes connections, for a server that may come later; under the trainer, whose keys errors name.

    Raises:
        ConfigError: the address cannot be bound.
    """
    listener = _bind(host, port, ("seamless.proxy.host", "seamless.proxy.port"))
    listener.listen(_BACKLOG)
    return listener


def base_url_of(listener: socket.socket, *, node_ip: str = "") -> str:
    """``http://host:port`` of a bound socket.

    Args:
        node_ip: stands in for a host that means every address of this machine, and so is none to send an agent to.
    """
    host, port = listener.getsockname()[:2]
    return url_of(node_ip if node_ip and is_wide(host) else host, port)


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_wide(host: str) -> bool:
    """Whether an address means all addresses of a machine (0.0.0.0, ::)."""
    return host in ("0.0.0.0", "::")


def _bind(host: str, port: int, keys: tuple[str, str] = ("--host", "--port")) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # The protocol is named because asyncio switches Nagle's delay (40 ms per answer) off only where it reads TCP.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise bind_refused(host, port, error, keys) from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except BIND_ERRORS as error:
        listener.close()
        raise bind_refused(host, port, error, keys) from error
    return listener


def free_port_after(host: str, port: int, offset: int, taken: Iterable[int]) -> int:
    """A port for another server beside the one on ``port``: ``port + offset`` where that is free, otherwise any."""
    for wanted in (port + offset if port else 0, 0):
        if wanted in taken and wanted:
            continue
        try:
            with contextlib.closing(_bind(host, wanted)) as probe:
                return int(probe.getsockname()[1])
        except ConfigError as error:
            if error.key == "--host":
                raise
    raise ConfigError("--shards", offset, f"no free port on {host}", "free some ports")
