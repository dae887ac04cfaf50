"""Keep-alive connections to one HTTP/1.1 server, as cheap as asyncio allows.

A turn's share of the proxy's own time is mostly its call of the engine; a general client takes ten times as long for
what is needed here: one request, one whole answer, an end when nobody waits any more.

::

    IDLE ──post──▶ BUSY ──answer complete──▶ IDLE        cancelled, timed out or broken: the connection is cut,
                                                          which is how a vLLM server learns that nobody listens
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from seamless_verl.errors import ConfigError

_CONNECT_S = 10.0
# Servers close connections that stayed idle (uvicorn: 5 s); one that is about to be closed must not be taken.
_IDLE_S = 3.0


class HttpFailed(Exception):
    """No whole answer came; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    body: bytes


class HttpPool:
    """Requests to one server.

    Args:
        base_url: ``http[s]://host[:port]``, without a path.
        headers: sent with every request, e.g. an API key.

    Raises:
        ConfigError: the URL cannot be one of a server.
    """

    def __init__(self, base_url: str, headers: dict[str, str] | None = None) -> None:
        parts = urlsplit(base_url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.path.strip("/"):
            fix = "write it as http://host:port, without a path"
            raise ConfigError("--engine", base_url, "is not the address of a server", fix)
        self.base_url = f"{parts.scheme}://{parts.netloc}"
        self._host, self._port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        fixed = {"host": parts.netloc, "accept": "application/json", **(headers or {})}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())
        self._idle: deque[tuple[_Connection, float]] = deque()

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        timeout_s: float,
        on_chunk: Callable[[bytes], None] | None = None,
    ) -> Answer:
        """Send one request and wait for its whole answer. Cancelling cuts the connection.

        Args:
            on_chunk: takes the body of a 200 as it comes; what is returned in the end then has none.

        Raises:
            HttpFailed: no connection, a broken one, or no answer in time.
        """
        head = f"{method} {path} HTTP/1.1\r\n{self._head}content-type: application/json\r\n"
        head = f"{head}content-length: {len(body)}\r\n\r\n"
        # asyncio of Python 3.12 keeps an empty part in its buffer and wakes up for it again and again.
        message = [part for part in (head.encode("latin-1"), body) if part]
        loop = asyncio.get_running_loop()
        connection = self._take(loop.time()) or await self._connect(loop)
        answer = connection.send(message, loop, on_chunk)
        timer = loop.call_later(timeout_s, connection.expire, timeout_s)
        try:
            found = await answer
        except BaseException:
            connection.cut()
            raise
        finally:
            timer.cancel()
        if connection.reusable:
            self._idle.append((connection, loop.time()))
        else:
            connection.cut()
        return found

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[0].cut()

    def _take(self, now: float) -> _Connection | None:
        """The connection used last, unless it has been idle for too long; those idle longer than it go with it."""
        if self._idle and now - self._idle[-1][1] > _IDLE_S:
            self.close()
        while self._idle:
            connection, _ = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> _Connection:
        try:
            _, connection = await asyncio.wait_for(
                loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl), _CONNECT_S
            )
        except (OSError, asyncio.TimeoutError) as error:
            raise HttpFailed(f"{type(error).__name__} from {self.base_url}: {error}") from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection; at most one request at a time."""

    def __init__(self) -> None:
        self.reusable = False
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._parser: Any = None
        self._chunks: list[bytes] = []
        self._on_chunk: Callable[[bytes], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.reusable = True

    def send(
        self, message: list[bytes], loop: asyncio.AbstractEventLoop, on_chunk: Callable[[bytes], None] | None
    ) -> asyncio.Future[Answer]:
        assert self._transport is not None
        self._on_chunk = on_chunk
        self._answer = loop.create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._chunks = []
        if self._transport.is_closing():
            self._fail("the connection was closed")
        else:
            self._transport.writelines(message)
        return self._answer

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.cut()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is not HTTP: {error}")
            self.cut()

    def on_body(self, chunk: bytes) -> None:
        if self._on_chunk is not None and self._parser.get_status_code() == 200:
            self._on_chunk(chunk)
        else:
            self._chunks.append(chunk)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._answer is None or self._answer.done():
            return
        self.reusable = self.reusable and self._parser.should_keep_alive()
        self._answer.set_result(Answer(status=status, body=b"".join(self._chunks)))

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        self._fail(f"the connection broke: {error or 'the server closed it'}")

    def expire(self, timeout_s: float) -> None:
        self._fail(f"no answer within {timeout_s:g} s")

    def cut(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, story: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(HttpFailed(story))
