"""Bodies made by machines, on every route that takes one: never a server error, never a hang, never a broken tree.

Set ``SEAMLESS_FUZZ`` to a number to try that many bodies per route (150 by default). The last test is
schemathesis over our own OpenAPI description. `python -m benchmarks.fuzz` does all of it at length and counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from functools import reduce
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.routing import Route

from seamless_verl.proxy.engine import Ability
from seamless_verl.proxy.http.app import make_app
from seamless_verl.proxy.http.requests import ImpatientProtocol
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.text.parsing import TagParser
from tests.bodies import CALLING, GONE, GOOD, changed, hostile, places_of
from tests.fakes import Served, serving

_PYTHON = os.environ.get("SEAMLESS_FRAMEWORKS_PYTHON", "")
_BATCH = 25
_EXAMPLES = max(1, int(os.environ.get("SEAMLESS_FUZZ", "150")) // _BATCH)
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 2**31, 2**63, 10**30, 1e308, -0.0, float("inf"), float("nan")])
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(["user", "assistant", "text", "image", "\ud800", "\x00", "function", "auto", "required"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def _bodies(draw: st.DrawFn, good: dict[str, Any]) -> Any:
    """A good body, broken in up to three places; sometimes anything at all."""
    if draw(st.integers(0, 19)) == 0:
        return draw(_JSON)
    chosen = draw(st.lists(st.sampled_from(places_of(good)[1:]), max_size=3))
    values = [draw(_JSON | st.just(GONE)) for _ in chosen]
    changes = list(zip(chosen, values, strict=True))
    return reduce(lambda body, change: changed(body, change[0], lambda _: change[1]), changes, good)


async def _try(proxy: Served, path: str, body: Any) -> httpx.Response:
    handle = await proxy.open(max_tokens=1000)
    key = "admin-key" if path.startswith("/sessions") else handle.api_key
    content = json.dumps(body).encode()
    url, headers = path.replace("{id}", handle.id), {"authorization": f"Bearer {key}"}
    response = await asyncio.wait_for(proxy.http.post(url, content=content, headers=headers), 10)
    if not path.endswith("/close"):
        assert (await proxy.admin.close_session(handle.id)).audit.is_clean
    return response


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", GOOD)
def test_no_body_makes_a_server_error(path: str) -> None:
    statuses: set[int] = set()

    @settings(max_examples=_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(_bodies(GOOD[path]), min_size=_BATCH, max_size=_BATCH))
    def check(bodies: list[Any]) -> None:
        async def run() -> None:
            options: Any = {"abilities": frozenset(Ability), "parser": TagParser(("<think>", "</think>"))}
            async with serving(lambda prompt: CALLING, streams=True, **options) as proxy:
                good = await _try(proxy, path, GOOD[path])
                assert good.status_code < 300, good.text
                for body in bodies:
                    response = await _try(proxy, path, body)
                    statuses.add(response.status_code)
                    assert response.status_code < 500, (body, response.text)
                    assert "internal_error" not in response.text, (body, response.text)
                    if response.status_code >= 400:
                        assert response.json()["error"]["message"]

        asyncio.run(run())

    check()
    assert 400 in statuses  # bodies were broken indeed


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/sessions"])
async def test_no_bytes_make_a_server_error(path: str) -> None:
    async with serving(abilities=frozenset(Ability)) as proxy:
        handle = await proxy.open()
        key = "admin-key" if path == "/sessions" else handle.api_key
        headers = {"authorization": f"Bearer {key}"}
        statuses = set()
        for name, content in hostile(GOOD[path]):
            response = await asyncio.wait_for(proxy.http.post(path, content=content, headers=headers), 20)
            assert response.status_code < 500, (name, response.text[:300])
            statuses.add(response.status_code)
        assert {200, 201} & statuses
        assert 400 in statuses
        assert (await proxy.http.get("/healthz")).status_code == 200


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "9" * 400])
async def test_a_number_that_no_answer_could_repeat_is_refused_wherever_it_stands(number: str) -> None:
    deep = '{"anything": [{"deeper": ' + number + "}]}"
    wishes = {
        "/v1/chat/completions": (
            "tools",
            '[{"type": "function", "function": {"name": "f", "parameters": ' + deep + "}}]",
        ),
        "/v1/responses": ("metadata", deep),
        "/v1/messages": ("tools", '[{"name": "f", "input_schema": ' + deep + "}]"),
        "/sessions": ("metadata", deep),
    }
    async with serving(streams=True, abilities=frozenset(Ability)) as proxy:
        for path, (field, value) in wishes.items():
            handle = await proxy.open()
            key = "admin-key" if path == "/sessions" else handle.api_key
            good = {name: value for name, value in GOOD[path].items() if name not in (field, "tool_choice")}
            content = json.dumps({**good, field: 0}).replace(f'"{field}": 0', f'"{field}": {value}').encode()
            response = await proxy.http.post(path, content=content, headers={"authorization": f"Bearer {key}"})
            assert response.status_code == 400, (path, response.text[:300])
            assert "not a finite number" in response.text


async def test_what_looks_like_such_a_number_may_stand_in_a_text() -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        body = {"model": "m", "messages": [{"role": "user", "content": "is NaN > 1e999? " + "9" * 400}]}
        response = await proxy.http.post(
            "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {handle.api_key}"}
        )
        assert response.status_code == 200, response.text


async def _said(proxy: Served, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """All that a server says to these bytes until it hangs up."""
    host, port = proxy.server.base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}", b" 400 "),
        (b"content-length: -1\r\n\r\n{}", b" 400 "),
        (b"content-length: 99999999999999999999\r\n\r\n{}", b" 4"),
        (b"transfer-encoding: chunked\r\n\r\nXYZ\r\n", b" 400 "),
        (b"content-length: 2\r\nauthorization: Bearer x\r\nauthorization: Bearer y\r\n\r\n{}", b" 400 "),
        (b"content-length: 2\r\nx-api-key: x\r\nx-api-key: y\r\n\r\n{}", b" 400 "),
        (b"content-length: 2\r\nauthorization: Bearer \xff\xfe\r\n\r\n{}", b" 401 "),
        (b"content-length: 2\r\nauthorization: " + b"x" * 100_000 + b"\r\n\r\n{}", b" 4"),
        (b"content-length: 2\r\n: x\r\n\r\n{}", b" 400 "),
        (b"content-length: 9\r\nauthorization: Bearer KEY\r\n\r\n{}", b" 408 "),
    ],
)
async def test_heads_that_lie_are_refused_and_end(head: bytes, status: bytes) -> None:
    async with serving(limits=Limits(body_timeout_s=0.3)) as proxy:
        handle = await proxy.open()
        start = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        said = await _said(proxy, start + head.replace(b"KEY", handle.api_key.encode()))
        assert status in said.partition(b"\r\n")[0] or said == b""  # the parser may just hang up


async def test_a_head_that_never_ends_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImpatientProtocol, "head_s", 0.3)
    async with serving(lambda prompt: "ok", delay_s=1.0) as proxy:
        assert await _said(proxy) == b""
        assert await _said(proxy, b"POST /v1/chat", b"/completions", pause_s=0.05) == b""
        handle = await proxy.open()
        answer = await proxy.post(handle, {"model": "m", "messages": [{"role": "user", "content": "hi"}]})
        assert answer.status_code == 200  # an answer that takes longer is no head


async def test_every_route_is_described() -> None:
    async with serving() as proxy:
        described = (await proxy.http.get("/openapi.json")).json()["paths"]
        routes = {
            (route.path.replace(":path}", "}"), method.lower())
            for route in make_app(proxy.deps).routes
            if isinstance(route, Route)
            for method in route.methods or ()
            if method != "HEAD"
        }
        assert {(path, method) for path, methods in described.items() for method in methods} == routes


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not _PYTHON,
    reason="SEAMLESS_FRAMEWORKS_PYTHON is not set; `make test-clients` sets it",
)
@pytest.mark.parametrize("key", ["agent", "admin"])
async def test_schemathesis_finds_no_server_error(key: str) -> None:
    async with serving(lambda prompt: CALLING, streams=True, abilities=frozenset(Ability)) as proxy:
        handle = await proxy.open(max_turns=10_000, max_tokens=1 << 30)
        secret = handle.api_key if key == "agent" else "admin-key"
        command = [
            *(_PYTHON, "-m", "schemathesis.cli", "run", f"{proxy.server.base_url}/openapi.json"),
            *("--checks", "not_a_server_error", "--header", f"Authorization: Bearer {secret}"),
            *("--max-examples", os.environ.get("SEAMLESS_FUZZ", "30"), "--phases", "examples,coverage,fuzzing"),
            *("--request-timeout", "10", "--suppress-health-check", "all", "--generation-database", "none"),
        ]
        ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=850)
        assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
        assert "not_a_server_error" not in ran.stdout
