"""One client's request: its key, its body on the way in, its answers on the way out.

What comes in is bounded and ends in a 4xx otherwise, a head that never comes in silence. How many bodies of a session,
and how much memory in all, is decided before anything is read or parsed: an answer counts against the session's
``max_parallel`` only once its body was read; a client that sends many bodies slowly would otherwise hold memory beyond
every limit. Requests that wait for the answer to another one count as well.

What goes out is one body at the end, or server-sent events meanwhile. A stream begins with the first settled text, or
after ``keep_alive_s`` without any; until then a failure is still an HTTP status. Afterwards it is an event of the
dialect, and the stream ends as the dialect says. Each client writes at its own pace: what came meanwhile goes out as
one delta.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from seamless_verl.proxy.calls import Answer, ApiError, Call, Delta, EventWriter, Token, bad_request
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.session.attempts import Attempt
from seamless_verl.proxy.session.sessions import Session

_log = logging.getLogger(__name__)
_PIECE = 1 << 16  # bytes of a whole answer: what uvicorn lets wait in a socket
_NUM_ALWAYS = 8  # requests that a session may have here, however few answers it may have in flight


class ClientGone(Exception):
    """The client has gone."""


class ImpatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Closes connections whose client does not finish the head of a request; uvicorn would wait for ever.

    Bodies have a limit of their own (:class:`Limits`), idle connections have uvicorn's.
    """

    head_s = 20.0
    _hanging_up: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._hanging_up is not None:
            self._hanging_up.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if not self._waits_for_head():
            if self._hanging_up is not None:
                self._hanging_up.cancel()
                self._hanging_up = None
        elif self._hanging_up is None:
            self._hanging_up = self.loop.call_later(self.head_s, self._hang_up)

    def _waits_for_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _hang_up(self) -> None:
        if self._waits_for_head():
            self.transport.close()


async def read_body(request: Request, limits: Limits, *, take: Callable[[int], None] = lambda num_bytes: None) -> bytes:
    """The body, unless it is too long or too slow.

    Args:
        take: told of the bytes of each piece; may refuse it.

    Raises:
        ApiError: 413 or 408, or whatever ``take`` refuses with.
        ClientGone: the client left while it was sending.
    """
    too_long = ApiError(413, "body_too_large", f"The body may have {limits.max_body_bytes} bytes.")
    announced = request.headers.get("content-length", "0")
    if len(announced) > 18 or (announced.isdigit() and int(announced) > limits.max_body_bytes):
        raise too_long

    async def read() -> bytes:
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limits.max_body_bytes:
                raise too_long
            take(len(chunk))
            chunks.append(chunk)
        return b"".join(chunks)

    try:
        return await asyncio.wait_for(read(), limits.body_timeout_s)
    except asyncio.TimeoutError:
        story = f"The body did not arrive within {limits.body_timeout_s:g} s."
        raise ApiError(408, "body_too_slow", story) from None
    except ClientDisconnect:
        raise ClientGone from None


class BodyIntake:
    """See the module; one per proxy, and one per front."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_bytes = 0

    @asynccontextmanager
    async def held(self, request: Request) -> AsyncIterator[bytes]:
        """The body of any request; its bytes count until the block ends.

        Raises:
            ApiError: 429, too many bytes are on their way already; or what :func:`read_body` refuses.
            ClientGone: the client left while it was sending.
        """
        num_taken = 0

        def take(num_bytes: int) -> None:
            nonlocal num_taken
            num_taken += num_bytes
            self._num_bytes += num_bytes
            if self._num_bytes > self._limits.max_arriving_bytes:
                story = f"Bodies of {self._limits.max_arriving_bytes} bytes are on their way, which is the limit."
                raise ApiError(429, "too_many_requests", story, retry_after_s=1.0)

        try:
            yield await read_body(request, self._limits, take=take)
        finally:
            self._num_bytes -= num_taken

    async def read(self, request: Request, session: Session) -> bytes:
        """The body of a request to this session.

        Raises:
            ApiError: 429, too much is on its way already; or what :func:`read_body` refuses.
            ClientGone: the client left while it was sending.
        """
        # Twice: each answer in flight may be asked for again before its first client is known to be gone.
        most = max(_NUM_ALWAYS, 2 * session.spec.max_parallel)
        if session.num_arriving + session.num_users >= most:
            story = f"Session {session.id} has {most} requests here, which is its limit."
            raise ApiError(429, "too_many_requests", story, retry_after_s=1.0)
        session.num_arriving += 1
        try:
            async with self.held(request) as body:
                return body
        finally:
            session.num_arriving -= 1


def api_key_of(request: Request) -> str:
    """The key of a request: ``Authorization: Bearer …`` or ``x-api-key``.

    Raises:
        ApiError: 401, there is none; 400, there are two.
    """
    bearers, plain = request.headers.getlist("authorization"), request.headers.getlist("x-api-key")
    if len(bearers) > 1 or len(plain) > 1:
        raise bad_request("The key was sent more than once.", code="duplicate_header")
    keys = set(plain)
    if bearers:
        scheme, _, key = bearers[0].partition(" ")
        if scheme.lower() == "bearer":  # others, like Basic, are for a gateway in front
            keys.add(key.strip())
    keys.discard("")
    if len(keys) > 1:
        raise bad_request("Authorization and x-api-key hold different keys.", code="duplicate_header")
    if keys:
        return keys.pop()
    raise ApiError(401, "missing_api_key", "Send the session's key as 'Authorization: Bearer KEY'.")


def retry_count_of(request: Request) -> int | None:
    """What the client says about how often it has tried; None when it says nothing."""
    text = request.headers.get("x-stainless-retry-count", "")
    return min(int(text), 1000) if text.isascii() and text.isdigit() and len(text) < 10 else None


async def client_left(request: Request) -> None:
    """Returns when the client has gone. The body has been read, so other messages are ignored."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTiming:
    """How long a stream may be silent, and how long a client may not read.

    Attributes:
        keep_alive_s: seconds without anything to say after which a stream says that it is alive.
        write_timeout_s: seconds after which a client that takes nothing counts as gone.
    """

    keep_alive_s: float = 10.0
    write_timeout_s: float = 30.0


class Reply(Response):
    """The response to one request; it lives as long as its client waits, and has its part in the attempt's fate.

    Args:
        attempt: begins the attempt when entered.
        delivered: told of an attempt whose answers its client has.
        failed: told of a refusal that could no longer become an HTTP status.
    """

    def __init__(
        self,
        request: Request,
        call: Call,
        attempt: AbstractAsyncContextManager[Attempt],
        *,
        timing: StreamTiming,
        orphan_grace_s: float,
        delivered: Callable[[Attempt], None],
        failed: Callable[[ApiError], None],
    ) -> None:
        super().__init__()
        self._request = request
        self._call = call
        self._attempt = attempt
        self._timing = timing
        self._orphan_grace_s = orphan_grace_s
        self._delivered = delivered
        self._failed = failed
        self._news = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the answers and write them.

        Raises:
            ApiError: nothing has been sent.
            ClientGone: the client left before anything was sent.
        """
        async with self._attempt as attempt:
            left = asyncio.ensure_future(client_left(self._request))
            landing = asyncio.ensure_future(attempt.landed())
            for task in (left, landing):
                task.add_done_callback(lambda _: self._news.set())
            try:
                with attempt.attended(self._news, orphan_grace_s=self._orphan_grace_s):
                    await self._first_sign(attempt, landing, left)
                    if left.done():
                        raise ClientGone
                    if not landing.done():
                        await self._send_stream(attempt, landing, left, send)
                    elif await self._send_whole(self._whole(landing.result()), left, send):
                        self._delivered(attempt)
            finally:
                left.cancel()
                landing.cancel()

    async def _first_sign(
        self, attempt: Attempt, landing: asyncio.Future[Sequence[Answer]], left: asyncio.Future[None]
    ) -> None:
        """Returns when all answers are there, the client is gone, or a stream should begin."""
        is_stream = self._call.stream
        while not landing.done() and not left.done():
            if is_stream and attempt.deltas:
                return
            self._news.clear()
            try:
                # A stream may be silent once its prompt is known to be one that the model can answer.
                patience_s = self._timing.keep_alive_s if is_stream and attempt.answers else None
                await asyncio.wait_for(self._news.wait(), patience_s)
            except asyncio.TimeoutError:
                return

    def _whole(self, answers: Sequence[Answer]) -> Response:
        headers = _headers(answers)
        headers["x-seamless-match"] = ", ".join(dict.fromkeys(answer.match for answer in answers))
        if not self._call.stream:
            return Response(self._call.body(answers), headers=headers, media_type="application/json")
        writer = self._call.writer()
        content = writer.start(answers[0])
        content += _written(writer, _Sent(len(answers)).rest(answers)) + writer.end(answers)
        return Response(content, headers=headers | {"cache-control": "no-cache"}, media_type="text/event-stream")

    async def _send_whole(self, whole: Response, left: asyncio.Future[None], send: Send) -> bool:
        """Whether the client took it, but for the last piece."""
        await send({"type": "http.response.start", "status": 200, "headers": whole.raw_headers})
        body = bytes(whole.body)
        await send({"type": "http.response.body", "body": body[:_PIECE], "more_body": len(body) > _PIECE})
        for at in range(_PIECE, len(body), _PIECE):
            if left.done() or not await self._write(body[at : at + _PIECE], send, is_last=at + _PIECE >= len(body)):
                return False
        return True

    async def _send_stream(
        self, attempt: Attempt, landing: asyncio.Future[Sequence[Answer]], left: asyncio.Future[None], send: Send
    ) -> None:
        headers = _headers(attempt.answers)
        headers |= {"cache-control": "no-cache", "content-type": "text/event-stream; charset=utf-8"}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        writer, sent = self._call.writer(), _Sent(attempt.num_answers)
        data = writer.start(attempt.answers[0])
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        while not left.done():
            self._news.clear()
            if landing.done():
                if await self._send_end(landing, writer, sent, data, send):
                    self._delivered(attempt)
                return
            data += _written(writer, sent.more(attempt.deltas))
            if data and not await self._write(data, send):
                return
            data = b""
            try:
                await asyncio.wait_for(self._news.wait(), self._timing.keep_alive_s)
            except asyncio.TimeoutError:
                data = writer.keep_alive()

    async def _send_end(
        self, landing: asyncio.Future[Sequence[Answer]], writer: EventWriter, sent: _Sent, data: bytes, send: Send
    ) -> bool:
        """Whether the client has all of the answers."""
        error = landing.exception()
        if error is None:
            answers = landing.result()
            data += _written(writer, sent.rest(answers)) + writer.end(answers)
        else:
            if not isinstance(error, ApiError):
                _log.error("%s failed in mid-stream", self._request.url.path, exc_info=error)
                error = ApiError(500, "internal_error", f"{type(error).__name__} inside the proxy.")
            self._failed(error)
            data += writer.fail(error)
        is_sent = await self._write(data, send) and await self._write(b"", send, is_last=True)
        return is_sent and error is None

    async def _write(self, data: bytes, send: Send, *, is_last: bool = False) -> bool:
        """Whether the client took what was written before; servers wait before a write only."""
        message = {"type": "http.response.body", "body": data, "more_body": not is_last}
        try:
            await asyncio.wait_for(send(message), self._timing.write_timeout_s)
        except (asyncio.TimeoutError, OSError):
            return False
        return True


class _Sent:
    """What a client has got of the answers: how many deltas, and of each answer how much in all."""

    def __init__(self, num_answers: int) -> None:
        self._num_deltas = 0
        self._reasoning, self._content, self._tokens = ([0] * num_answers for _ in range(3))

    def more(self, deltas: Sequence[Delta]) -> list[Delta]:
        """What came since the last call, as one delta of each answer."""
        new = deltas[self._num_deltas :]
        self._num_deltas += len(new)
        return [
            self._counted(
                index,
                "".join(delta.reasoning for delta in new if delta.index == index),
                "".join(delta.content for delta in new if delta.index == index),
                tuple(token for delta in new if delta.index == index for token in delta.tokens),
            )
            for index in sorted({delta.index for delta in new})
        ]

    def rest(self, answers: Sequence[Answer]) -> list[Delta]:
        """What deltas did not carry of the whole answers."""
        rest = [
            self._counted(
                index,
                answer.message.reasoning[self._reasoning[index] :],
                answer.message.content[self._content[index] :],
                answer.tokens[self._tokens[index] :],
            )
            for index, answer in enumerate(answers)
        ]
        return [delta for delta in rest if delta.reasoning or delta.content or delta.tokens]

    def _counted(self, index: int, reasoning: str, content: str, tokens: tuple[Token, ...]) -> Delta:
        self._reasoning[index] += len(reasoning)
        self._content[index] += len(content)
        self._tokens[index] += len(tokens)
        return Delta(index=index, reasoning=reasoning, content=content, tokens=tokens)


def _written(writer: EventWriter, deltas: Iterable[Delta]) -> bytes:
    return b"".join(writer.delta(delta) for delta in deltas)


def _headers(answers: Sequence[Answer]) -> dict[str, str]:
    overrides = dict.fromkeys(name for answer in answers for name in answer.overrides)
    return {"x-seamless-overrides": ", ".join(overrides)} if overrides else {}
