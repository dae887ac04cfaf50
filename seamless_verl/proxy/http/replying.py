"""From answers to bytes on the wire: a body at the end, or server-sent events while it comes.

A stream begins with the first settled text, or after ``keep_alive_s`` without any; until then a failure is still an
HTTP status. Afterwards it is an event of the dialect, and the stream ends as the dialect says. Each client writes at
its own pace: what came meanwhile goes out as one delta.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from seamless_verl.proxy.attempt.turns import Ask
from seamless_verl.proxy.calls import Answer, ApiError, Delta, EventWriter, Exchange, StreamHead
from seamless_verl.proxy.http.requests import ClientGone, client_left
from seamless_verl.proxy.session.flights import Flight, Progress, Served

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTiming:
    """How long a stream may be silent, and how long a client may not read.

    Attributes:
        keep_alive_s: seconds without anything to say after which a stream says that it is alive.
        write_timeout_s: seconds after which a client that takes nothing counts as gone.
    """

    keep_alive_s: float = 10.0
    write_timeout_s: float = 30.0


class Running(Response):
    """A response that writes itself."""

    def __init__(self, run: ASGIApp) -> None:
        super().__init__()
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._run(scope, receive, send)


class Reply:
    """The response to one request; it lives as long as its client waits, and takes part in the flights' fate.

    Args:
        on_failure: told of a refusal that could no longer become an HTTP status.
    """

    def __init__(
        self,
        request: Request,
        exchange: Exchange,
        ask: Ask,
        *,
        timing: StreamTiming,
        on_failure: Callable[[ApiError], None],
    ) -> None:
        self._request = request
        self._exchange = exchange
        self._ask = ask
        self._timing = timing
        self._on_failure = on_failure

    async def send(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the answer and write it.

        Raises:
            ApiError: nothing has been sent.
            ClientGone: the client left before anything was sent.
        """
        left = asyncio.ensure_future(client_left(self._request))
        landing = asyncio.ensure_future(self._ask.landed())
        for task in (left, landing):
            task.add_done_callback(lambda _: self._ask.news.set())
        try:
            with self._ask.attended():
                await self._first_sign(landing, left)
                if landing.done():
                    await self._send_whole(landing.result(), left, scope, receive, send)
                elif left.done():
                    raise ClientGone
                else:
                    await self._send_stream(landing, left, send)
        finally:
            left.cancel()
            landing.cancel()

    async def _first_sign(self, landing: asyncio.Future[list[Served]], left: asyncio.Future[None]) -> None:
        """Returns when all answers are there, the client is gone, or a stream should begin."""
        if not self._exchange.call.stream:
            while not landing.done() and not left.done():
                self._ask.news.clear()
                await self._ask.news.wait()
            return
        progresses = [flight.progress for flight in self._ask.flights]
        while not landing.done() and not left.done():
            is_known = all(progress.head is not None for progress in progresses)
            if is_known and any(progress.has_text for progress in progresses):
                return
            self._ask.news.clear()
            try:
                await asyncio.wait_for(self._ask.news.wait(), self._timing.keep_alive_s if is_known else None)
            except asyncio.TimeoutError:
                return

    async def _send_whole(
        self, answers: list[Served], left: asyncio.Future[None], scope: Scope, receive: Receive, send: Send
    ) -> None:
        if left.done():
            raise ClientGone
        headers = _headers([name for served in answers for name in served.overrides])
        headers["x-seamless-match"] = ", ".join(dict.fromkeys(served.match for served in answers))
        said = [served.answer for served in answers]
        if self._exchange.call.stream:
            writer = self._exchange.writer()
            content = writer.start(_head_of(said[0])) + _rest(writer, said, [_Sent() for _ in said]) + writer.end(said)
            media_type = "text/event-stream"
            headers["cache-control"] = "no-cache"
        else:
            content, media_type = self._exchange.body(said), "application/json"
        await Response(content, headers=headers, media_type=media_type)(scope, receive, send)
        self._ask.delivered(answers)

    async def _send_stream(self, landing: asyncio.Future[list[Served]], left: asyncio.Future[None], send: Send) -> None:
        heads = [_seen(part)[0] for part in self._ask.parts]
        assert heads[0] is not None
        headers = _headers([name for part in self._ask.parts for name in _overrides(part)])
        headers |= {"cache-control": "no-cache", "content-type": "text/event-stream; charset=utf-8"}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        writer = self._exchange.writer()
        sent = [_Sent() for _ in self._ask.parts]
        data = writer.start(heads[0])
        while not left.done():
            self._ask.news.clear()
            if landing.done():
                await self._send_end(landing, writer, sent, data, send)
                return
            data += b"".join(
                writer.delta(delta)
                for number, part in enumerate(self._ask.parts)
                if (delta := sent[number].more(number, _seen(part)[1])) is not None
            )
            if data and not await self._write(data, send):
                return
            data = b""
            try:
                await asyncio.wait_for(self._ask.news.wait(), self._timing.keep_alive_s)
            except asyncio.TimeoutError:
                data = writer.keep_alive()

    async def _send_end(
        self, landing: asyncio.Future[list[Served]], writer: EventWriter, sent: list[_Sent], data: bytes, send: Send
    ) -> None:
        error = landing.exception()
        if error is None:
            answers = landing.result()
            said = [served.answer for served in answers]
            data += _rest(writer, said, sent) + writer.end(said)
            if await self._write(data, send) and await self._write(b"", send, is_last=True):
                self._ask.delivered(answers)
            return
        if not isinstance(error, ApiError):
            _log.error("%s failed in mid-stream", self._request.url.path, exc_info=error)
            error = ApiError(500, "internal_error", f"{type(error).__name__} inside the proxy.")
        self._on_failure(error)
        await self._write(data + writer.fail(error), send)
        await self._write(b"", send, is_last=True)

    async def _write(self, data: bytes, send: Send, *, is_last: bool = False) -> bool:
        """Whether the client took what was written before; servers only wait in front of a write."""
        message = {"type": "http.response.body", "body": data, "more_body": not is_last}
        try:
            await asyncio.wait_for(send(message), self._timing.write_timeout_s)
        except (asyncio.TimeoutError, OSError):
            return False
        return True


class _Sent:
    """What of one answer a client has got."""

    def __init__(self) -> None:
        self._reasoning = self._content = self._tokens = 0

    def more(self, index: int, seen: Progress | Answer) -> Delta | None:
        """What it has not; None for nothing."""
        if isinstance(seen, Answer):
            reasoning, content = seen.message.reasoning, seen.message.content
        else:
            reasoning, content = seen.reasoning, seen.content
        delta = Delta(
            index=index,
            reasoning=reasoning[self._reasoning :],
            content=content[self._content :],
            tokens=tuple(seen.tokens[self._tokens :]),
        )
        self._reasoning, self._content, self._tokens = len(reasoning), len(content), len(seen.tokens)
        return delta if delta.reasoning or delta.content or delta.tokens else None


def _rest(writer: EventWriter, answers: list[Answer], sent: list[_Sent]) -> bytes:
    deltas = (sent[number].more(number, answer) for number, answer in enumerate(answers))
    return b"".join(writer.delta(delta) for delta in deltas if delta is not None)


def _seen(part: Flight | Served) -> tuple[StreamHead | None, Progress | Answer]:
    if isinstance(part, Flight):
        return part.progress.head, part.progress
    return _head_of(part.answer), part.answer


def _overrides(part: Flight | Served) -> tuple[str, ...]:
    return part.progress.overrides if isinstance(part, Flight) else part.overrides


def _head_of(answer: Answer) -> StreamHead:
    return StreamHead(
        id=answer.id,
        created=answer.created,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
    )


def _headers(overrides: list[str]) -> dict[str, str]:
    return {"x-seamless-overrides": ", ".join(dict.fromkeys(overrides))} if overrides else {}
