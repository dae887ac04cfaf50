"""One address in front of several shards: opens sessions, knows which shard has which, and forwards requests.

::

    opener ──POST /sessions──▶ front ──▶ shard k          answer: the shard's own base_url
    agent  ──that base_url────────────▶ shard k          the usual way; the front sees nothing of it
    agent  ──key alone, to the front──▶ front ──▶ shard k  works too, one hop more

The front keeps no state: the owner of a session is in its name (:mod:`seamless_verl.proxy.session.address_book`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from seamless_verl.errors import ConfigError
from seamless_verl.proxy.calls import ApiError, encoded
from seamless_verl.proxy.http.openapi import describe_front
from seamless_verl.proxy.http.requests import BodyIntake, ClientGone, api_key_of, client_left
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.session.address_book import AddressBook
from seamless_verl.proxy.session.store import same_key

_NOT_PASSED = frozenset(
    {b"host", b"content-length", b"connection", b"transfer-encoding", b"keep-alive", b"date", b"server", b"expect"}
)
_IDLE_S = 3.0  # shards close connections that stayed idle for 5 s; one that is about to be closed must not be taken
_PIECE = 1 << 16
_METHODS = ["GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"]


class Front:
    """See the module. Made inside a running event loop.

    Args:
        book: the table as it is now.
        admin_key: the key of the shards; the front asks for it where it answers by itself.
        add_shard: starts one more shard and returns once it is in the table.
    """

    def __init__(
        self,
        *,
        book: Callable[[], AddressBook],
        admin_key: str,
        limits: Limits,
        add_shard: Callable[[], Awaitable[int]],
    ) -> None:
        self._book = book
        self._admin_key = admin_key
        self._intake = BodyIntake(limits)
        self._add_shard = add_shard
        self._client = aiohttp.ClientSession(  # httpx's pool looks at all connections for every request
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
            auto_decompress=False,
        )

    async def some(self, request: Request) -> Response:
        """What any shard can answer, a new session first of all."""
        try:
            shard = self._book().place(uuid.uuid4().hex)
        except LookupError as error:
            raise ApiError(503, "no_shard", f"{error}.", retry_after_s=5.0) from None
        return await self._pass_on(request, shard)

    async def any(self, request: Request) -> Response:
        """Whatever names a session, by its path or by its key; what names none, any shard refuses or answers."""
        named = request.path_params.get("session_id", "")
        with contextlib.suppress(ApiError):  # it has no key
            named = named or api_key_of(request)
        shard = self._book().owner(named)
        if shard is not None:
            return await self._pass_on(request, shard)
        if "session_id" in request.path_params:
            raise ApiError(404, "session_not_found", "No shard knows this session.")
        return await self.some(request)

    async def for_each(self, request: Request) -> Response:
        raise ApiError(400, "for_each_shard", "The front holds nothing back: send this to each shard (GET /shards).")

    async def shards(self, request: Request) -> Response:
        """The address book; ``POST`` adds a shard."""
        self._require_admin(request)
        try:
            added = await self._add_shard() if request.method == "POST" else None
        except ConfigError as error:
            raise ApiError(503, "shard_failed", f"No shard was added: {error}") from None
        book = self._book()
        table = {str(shard): url for shard, url in sorted(book.addresses.items())}
        content = {"shards": table, "retired": sorted(book.retired), **({} if added is None else {"added": added})}
        return Response(encoded(content), media_type="application/json", status_code=200 if added is None else 201)

    async def stats(self, request: Request) -> Response:
        self._require_admin(request)
        answers = await self._ask_all("/stats", {"authorization": f"Bearer {self._admin_key}"})
        content = {str(shard): answer and json.loads(answer[1]) for shard, answer in answers.items()}
        return Response(encoded(content), media_type="application/json")

    async def healthz(self, request: Request) -> Response:
        answers = await self._ask_all("/healthz", {})
        down = [shard for shard, answer in answers.items() if answer is None or answer[0] >= 400]
        sessions = sum(json.loads(answer[1])["sessions"] for answer in answers.values() if answer is not None)
        content = {"status": "ok" if not down else "degraded", "sessions": sessions, "down": down}
        return Response(encoded(content), media_type="application/json", status_code=503 if down else 200)

    async def metrics(self, request: Request) -> Response:
        answers = await self._ask_all("/metrics", {})
        texts = {shard: answer[1].decode() for shard, answer in answers.items() if answer is not None}
        return Response(_merged(texts), media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        return Response(encoded(describe_front()), media_type="application/json")

    async def close(self) -> None:
        await self._client.close()

    def _require_admin(self, request: Request) -> None:
        if not same_key(api_key_of(request), self._admin_key):
            raise ApiError(403, "admin_only", "This route needs the admin key.")

    async def _ask_all(self, path: str, headers: dict[str, str]) -> dict[int, tuple[int, bytes] | None]:
        """Status and body of each shard's answer; None of one that gives none."""

        async def ask(url: str) -> tuple[int, bytes] | None:
            try:
                async with self._client.get(url + path, headers=headers, timeout=aiohttp.ClientTimeout(5.0)) as answer:
                    return answer.status, await answer.read()
            except (aiohttp.ClientError, asyncio.TimeoutError):
                return None

        shards = sorted(self._book().addresses.items())
        answers = await asyncio.gather(*(ask(url) for _, url in shards))
        return {shard: answer for (shard, _), answer in zip(shards, answers, strict=True)}

    async def _pass_on(self, request: Request, shard: int) -> Response:
        async with self._intake.held(request) as body:  # until the shard answers
            return await self._send_on(request, shard, body)

    async def _send_on(self, request: Request, shard: int, body: bytes) -> Response:
        address = self._book().addresses[shard]
        # aiohttp writes UTF-8; nothing that a shard reads has other bytes.
        headers = [
            (name.decode("latin-1"), value.decode("utf-8", "replace"))
            for name, value in request.headers.raw
            if name not in _NOT_PASSED
        ]
        # The shard tells openers its own address under the name by which they reached this machine.
        headers.append(("host", f"{request.url.hostname or '127.0.0.1'}:{urlsplit(address).port}"))
        headers += [("content-length", str(len(body)))] if body else []
        query = f"?{request.url.query}" if request.url.query else ""

        async def pieces() -> AsyncIterator[bytes]:  # the whole would be copied: what waits is counted once
            for start in range(0, len(body), _PIECE):
                yield body[start : start + _PIECE]

        onward = self._client.request(
            request.method,
            f"{address}{request.url.path}{query}",
            headers=headers,
            data=pieces() if body else None,
            allow_redirects=False,
        )
        try:
            answer = await _while_client_waits(request, onward)
        except aiohttp.ClientError as error:
            story = f"Shard {shard} does not answer ({type(error).__name__}); it is started again."
            raise ApiError(503, "shard_down", story, retry_after_s=1.0) from None

        async def content() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.content.iter_any():
                    yield chunk
            finally:
                answer.close()

        response = StreamingResponse(content(), status_code=answer.status)
        kept = ((name.lower(), value) for name, value in answer.raw_headers)
        response.raw_headers = [header for header in kept if header[0] not in _NOT_PASSED]
        return response


async def _while_client_waits(
    request: Request, sending: Coroutine[Any, Any, aiohttp.ClientResponse]
) -> aiohttp.ClientResponse:
    """The head of a shard's answer. Cancelling closes the connection, which tells the shard that nobody waits.

    Raises:
        ClientGone: the client left before there was one.
    """
    left, sent = asyncio.ensure_future(client_left(request)), asyncio.ensure_future(sending)
    try:
        await asyncio.wait({left, sent}, return_when=asyncio.FIRST_COMPLETED)
        if not left.done():
            return sent.result()
        if sent.done():
            sent.result().close()
        raise ClientGone
    finally:
        left.cancel()
        sent.cancel()
        await asyncio.gather(left, sent, return_exceptions=True)


def make_front(front: Front) -> FastAPI:
    """The front as an ASGI application."""
    app = FastAPI(title="seamless_verl proxy front", openapi_url=None, docs_url=None, redoc_url=None)
    routes: tuple[tuple[list[str], str, Callable[[Request], Awaitable[Response]]], ...] = (
        (["GET"], "/healthz", front.healthz),
        (["GET"], "/metrics", front.metrics),
        (["GET"], "/openapi.json", front.openapi),
        (["GET"], "/stats", front.stats),
        (["GET", "POST"], "/shards", front.shards),
        (["POST"], "/sessions", front.some),
        (["POST"], "/pause", front.for_each),
        (["POST"], "/resume", front.for_each),
        (_METHODS, "/sessions/{session_id}", front.any),
        (_METHODS, "/sessions/{session_id}/{rest:path}", front.any),
        (_METHODS, "/{rest:path}", front.any),
    )
    for methods, path, handler in routes:
        app.router.add_route(path, handler, methods=methods)

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return Response(encoded(error.body(request.url.path)), status_code=error.status, headers=dict(error.headers()))

    async def nobody(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    app.add_exception_handler(ApiError, refuse)
    app.add_exception_handler(ClientGone, nobody)
    return app


def _merged(texts: dict[int, str]) -> bytes:
    """Prometheus texts of all shards as one, each sample with its shard."""
    from prometheus_client import generate_latest
    from prometheus_client.metrics_core import Metric
    from prometheus_client.parser import text_string_to_metric_families

    merged: dict[str, Metric] = {}
    for shard, text in texts.items():
        for family in text_string_to_metric_families(text):
            whole = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                whole.add_sample(sample.name, {"shard": str(shard), **sample.labels}, sample.value)

    return generate_latest(SimpleNamespace(collect=merged.values))
