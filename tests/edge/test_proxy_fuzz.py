"""Bodies made by machines, on every route that takes one: never a server error, never a hang, never a broken tree.

Set ``SEAMLESS_FUZZ`` to a number to try that many bodies per route (a few hundred by default). The second test is
schemathesis over our own OpenAPI description; it needs that package, which is no part of the development environment.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seamless_verl.proxy.engine import Ability
from seamless_verl.proxy.parsing import TagParser
from tests.fakes import Served, serving

_BATCH = 25
_EXAMPLES = max(1, int(os.environ.get("SEAMLESS_FUZZ", "300")) // _BATCH)
_CALL = '<think>hm</think>\n\nso <tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
_TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
_TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
        "role": "assistant",
        "content": "x",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "run", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "out"},
]
_SAMPLING = {"temperature": 0.5, "top_p": 0.9, "stream": True}
# One good body per route; the fuzzer breaks it in a few places.
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **_SAMPLING,
        "model": "m",
        "messages": _TURNS,
        "tools": [_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "run"}},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        "stop": ["x"],
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 9,
        "seed": 1,
        "stream_options": {"include_usage": True},
        "parallel_tool_calls": False,
    },
    "/v1/completions": {**_SAMPLING, "model": "m", "prompt": [[1, 2]], "max_tokens": 9, "logprobs": 1, "stop": "x"},
    "/v1/responses": {
        **_SAMPLING,
        "model": "m",
        "instructions": "s",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "run", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "out"},
        ],
        "tools": [{"type": "function", "name": "run", "parameters": {"type": "object"}, "strict": True}],
        "tool_choice": {"type": "function", "name": "run"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "max_output_tokens": 9,
    },
    "/v1/messages": {
        **_SAMPLING,
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "run", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "out"}]},
        ],
        "tools": [{"name": "run", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "run", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "stop_sequences": ["x"],
    },
}
GOOD["/v1/messages/count_tokens"] = {
    key: GOOD["/v1/messages"][key] for key in ("model", "system", "messages", "tools", "tool_choice")
}
GOOD["/sessions"] = {
    "group": "g",
    "index": 1,
    "deadline_s": 5.0,
    "max_turns": 5,
    "max_tokens": 50,
    "max_parallel": 2,
    "sampling": {"temperature": 1.0, "seed": 3},
    "metadata": {"a": [1]},
}
GOOD["/sessions/{id}/reward"] = {"reward": 1.0, "rewards": {"style": 0.5}}
GOOD["/sessions/{id}/close"] = GOOD["/sessions/{id}/reward"]

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


def _places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every value inside a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(place for key, item in inner for place in _places(item, (*here, key)))]


def _changed(body: Any, place: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """The body with one value replaced; a key whose value becomes ``_GONE`` is left out."""
    if not place:
        return change(body)
    copy = dict(body) if isinstance(body, dict) else list(body) if isinstance(body, list) else body
    try:
        value = _changed(copy[place[0]], place[1:], change)
        if value is _GONE and isinstance(copy, dict):
            del copy[place[0]]
        else:
            copy[place[0]] = None if value is _GONE else value
    except (KeyError, IndexError, TypeError):
        pass  # an earlier change took this place away
    return copy


_GONE = object()


@st.composite
def _bodies(draw: st.DrawFn, good: dict[str, Any]) -> Any:
    """A good body, broken in up to three places; sometimes anything at all."""
    if draw(st.integers(0, 19)) == 0:
        return draw(_JSON)
    places = draw(st.lists(st.sampled_from(_places(good)[1:]), max_size=3))
    values = [draw(_JSON | st.just(_GONE)) for _ in places]
    changes = list(zip(places, values, strict=True))
    return reduce(lambda body, change: _changed(body, change[0], lambda _: change[1]), changes, good)


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
            async with serving(lambda prompt: _CALL, streams=True, **options) as proxy:
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


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None,
    reason="schemathesis is not installed; pip install it beside the development environment to run this",
)
@pytest.mark.parametrize("key", ["agent", "admin"])
async def test_schemathesis_finds_no_server_error(key: str) -> None:
    async with serving(lambda prompt: _CALL, streams=True, abilities=frozenset(Ability)) as proxy:
        handle = await proxy.open(max_turns=10_000, max_tokens=1 << 30)
        secret = handle.api_key if key == "agent" else "admin-key"
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{proxy.server.base_url}/openapi.json"),
            *("--checks", "not_a_server_error", "--header", f"Authorization: Bearer {secret}"),
            *("--max-examples", os.environ.get("SEAMLESS_FUZZ", "30"), "--phases", "examples,coverage,fuzzing"),
            *("--request-timeout", "10", "--suppress-health-check", "all"),
        ]
        ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=850)
        assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
        assert "not_a_server_error" not in ran.stdout
