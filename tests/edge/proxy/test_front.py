"""The front of several shards in one process with one real shard behind it; only the engine is not real."""

from __future__ import annotations

import asyncio
import sys
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from seamless_verl.proxy.client import SessionHandle
from seamless_verl.proxy.deploy.front import Front, make_front
from seamless_verl.proxy.deploy.http_server import ProxyServer
from seamless_verl.proxy.http import app
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.session.address_book import AddressBook, prefix_of
from seamless_verl.proxy.session.store import SessionStore
from tests.fakes import Served, serving

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def _fronted(front_limits: Limits | None = None, **options: Any) -> AsyncIterator[tuple[Served, str]]:
    async def add_shard() -> int:
        raise AssertionError("nobody asked for one")

    async with serving(sessions=SessionStore(prefix=prefix_of(0)), **options) as shard:
        book = AddressBook(addresses={0: shard.server.base_url})
        front = Front(book=lambda: book, admin_key="admin-key", limits=front_limits or Limits(), add_shard=add_shard)
        server = ProxyServer(make_front(front), drain_s=1.0)
        try:
            yield shard, await server.start()
        finally:
            await server.stop()
            await front.close()


def _agent(url: str, handle: SessionHandle) -> httpx.AsyncClient:
    auth = {"authorization": f"Bearer {handle.api_key}"}
    return httpx.AsyncClient(base_url=url, trust_env=False, headers=auth, timeout=30)


async def _leave(http: httpx.AsyncClient, shard: Served) -> None:
    """Ask, and hang up while the engine is at it."""
    asking = asyncio.create_task(http.post("/v1/chat/completions", json=BODY))
    await shard.engine.started.wait()
    asking.cancel()
    await asyncio.wait({asking})


async def _cancelled(shard: Served) -> None:
    """Returns once the engine was told that nobody waits."""
    for _ in range(1000):
        if shard.engine.num_cancelled:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the engine goes on for nobody")


async def test_a_client_that_leaves_the_front_is_missed_by_the_shard() -> None:
    async with _fronted(delay_s=60.0, limits=Limits(orphan_grace_s=0.1)) as (shard, url):
        handle = await shard.open()
        async with _agent(url, handle) as http:
            await _leave(http, shard)
            await _cancelled(shard)
            shard.engine.delay_s = 0.0
            assert (await http.post("/v1/chat/completions", json=BODY)).status_code == 200
        result = await shard.admin.close_session(handle.id)
        assert (len(result.rows), result.audit.num_generations) == (1, 1)


async def test_a_client_that_leaves_a_stream_in_the_middle_is_missed_too() -> None:
    async with _fronted(streams=True, limits=Limits(orphan_grace_s=0.1)) as (shard, url):
        shard.engine.permits = asyncio.Semaphore(1)
        handle = await shard.open()
        async with (
            _agent(url, handle) as http,
            http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as answer,
        ):
            async for line in answer.aiter_lines():
                if "content" in line:
                    break
        await _cancelled(shard)
        assert (await shard.admin.close_session(handle.id)).rows == ()


async def test_a_request_that_is_repeated_through_the_front_joins_the_one_under_way() -> None:
    async with _fronted(delay_s=1.0) as (shard, url):
        handle = await shard.open()
        async with _agent(url, handle) as http:
            await _leave(http, shard)
            assert (await http.post("/v1/chat/completions", json=BODY)).status_code == 200
        assert len(shard.engine.requests) == 1


async def test_the_front_holds_no_more_bodies_than_allowed() -> None:
    long = {"model": "m", "messages": [{"role": "user", "content": "x " * 10_000}]}
    async with _fronted(Limits(max_arriving_bytes=30_000), delay_s=60.0) as (shard, url):
        handle = await shard.open()
        async with _agent(url, handle) as http:
            first = asyncio.create_task(http.post("/v1/chat/completions", json=long))
            await shard.engine.started.wait()
            refused = await http.post("/v1/chat/completions", json={**long, "seed": 1})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
            assert refused.headers["retry-after"]
            shard.engine.delay_s = 0.0
            assert (await http.post("/v1/chat/completions", json=BODY)).status_code == 200
            first.cancel()
            await asyncio.wait({first})
            await _until_accepted(http, long)


async def test_a_body_that_waits_for_its_shard_is_held_once() -> None:
    body, waiting, num = b"x" * (4 << 20), list[asyncio.StreamWriter](), 3
    arrived = asyncio.Semaphore(0)

    async def slow_shard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert f"content-length: {len(body)}" in (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        for _ in range(len(body) >> 16):
            await reader.readexactly(1 << 16)
        arrived.release()
        await reader.read()
        writer.close()

    slow = await asyncio.start_server(slow_shard, "127.0.0.1", 0)
    book = AddressBook(addresses={0: f"http://127.0.0.1:{slow.sockets[0].getsockname()[1]}"})
    nobody: Any = None
    front = Front(book=lambda: book, admin_key="", limits=Limits(), add_shard=nobody)
    server = ProxyServer(make_front(front), drain_s=1.0)
    port = httpx.URL(await server.start()).port
    tracemalloc.start()
    try:
        for _ in range(num):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            waiting.append(writer)
            writer.write(
                f"POST /sessions/0-a/x HTTP/1.1\r\nhost: front\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            )
            for start in range(0, len(body), 1 << 16):
                writer.write(body[start : start + (1 << 16)])
                await writer.drain()
            await arrived.acquire()
        assert tracemalloc.get_traced_memory()[0] < 1.3 * num * len(body)
    finally:
        tracemalloc.stop()
        for writer in waiting:
            writer.close()
        await server.stop()
        await front.close()
        slow.close()


async def _until_accepted(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """Returns once the front has noticed that the first client left."""
    for _ in range(1000):
        if (await http.post("/v1/chat/completions", json={**body, "seed": 2})).status_code == 200:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the bytes of a client that left count for ever")


async def test_what_belongs_to_no_session_is_answered_as_by_one_proxy() -> None:
    admin = {"authorization": "Bearer admin-key"}
    async with _fronted() as (_, url), httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:
        described = (await http.get("/openapi.json")).json()["paths"]
        assert {"/sessions", "/shards"} <= described.keys()
        assert not {"/pause", "/resume"} & described.keys()
        assert [(await http.head(path)).status_code for path in ("/", "/v1")] == [200, 200]
        for headers in ({}, {"authorization": "Bearer sk-seamless-7-abc"}, admin):
            assert (await http.post("/v1/chat/completions", json=BODY, headers=headers)).status_code == 401
            unknown = await http.post("/v1/embeddings", json=BODY, headers=headers)
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_path")
            assert "GET /openapi.json describes every route" in unknown.json()["error"]["message"]
        for path in ("/pause", "/resume"):
            refused = await http.post(path, headers=admin)
            assert refused.status_code == 400
            assert "to each shard (GET /shards)" in refused.json()["error"]["message"]


async def test_a_request_costs_the_front_no_more_because_others_wait() -> None:
    async with _fronted(delay_s=60.0) as (shard, url):
        handle = await shard.open()
        async with _agent(url, handle) as http:
            alone = await _calls_of_a_request(http)
            others = [await _waiting(shard, url) for _ in range(100)]
            beside_others = await _calls_of_a_request(http)
        for writer in others:
            writer.close()
    assert beside_others < 1.3 * alone


async def _waiting(shard: Served, url: str) -> asyncio.StreamWriter:
    """A client whose completion is under way; httpx would look at all of its connections, too."""
    handle = await shard.open()
    shard.engine.started.clear()
    body = httpx.Request("POST", url, json=BODY).content
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: front\r\nauthorization: Bearer {handle.api_key}\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
    writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    await shard.engine.started.wait()
    return writer


async def _calls_of_a_request(http: httpx.AsyncClient) -> int:
    """How many Python functions run in this process, which is the front, the shard and the client, until the answer."""
    num = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num
        num += event == "call"

    await http.get("/v1/models")  # connects
    sys.setprofile(count)
    try:
        assert (await http.get("/v1/models")).status_code == 200
    finally:
        sys.setprofile(None)
    return num


@pytest.mark.parametrize(("sent", "arrives"), [("Café".encode(), "Café"), ("Café".encode("latin-1"), "Caf\ufffd")])
async def test_a_header_may_hold_any_letters(sent: bytes, arrives: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[httpx.Headers] = []
    real = app.api_key_of

    def seen(request: Any) -> str:
        asked.append(httpx.Headers(request.headers.raw, encoding="utf-8"))
        return real(request)

    monkeypatch.setattr(app, "api_key_of", seen)
    async with _fronted() as (shard, url), _agent(url, await shard.open()) as http:
        assert (await http.post("/v1/chat/completions", json=BODY, headers=[(b"x-title", sent)])).status_code == 200
    assert asked[-1]["x-title"] == arrives
