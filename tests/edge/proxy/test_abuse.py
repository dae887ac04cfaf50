"""Strangers, late comers, and bodies nobody should send: always a 4xx in OpenAI's shape, never a 5xx, never a hang."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seamless_verl.errors import ConfigError
from seamless_verl.proxy.client import ProxyRefused
from seamless_verl.proxy.deploy.http_server import ProxyServer
from seamless_verl.proxy.limits import Limits
from tests.fakes import Served, serving

HI: list[Any] = [{"role": "user", "content": "hi"}]
CHAT = {"model": "m", "messages": HI}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f"}}]
BAD = "invalid_value"


def error_of(response: httpx.Response) -> tuple[int, str]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return response.status_code, error["code"]


async def _send(proxy: Served, path: str, key: str | None, body: Any = CHAT, method: str = "POST") -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return await proxy.http.request(method, path, json=body, headers=headers)


async def test_keys_open_their_own_doors_only() -> None:
    async with serving() as proxy:
        mine, other = await proxy.open(), await proxy.open()
        chat = "/v1/chat/completions"
        assert error_of(await _send(proxy, chat, None)) == (401, "missing_api_key")
        assert error_of(await _send(proxy, chat, "sk-nonsense")) == (401, "invalid_api_key")
        assert error_of(await _send(proxy, chat, "admin-key")) == (401, "invalid_api_key")
        foreign = f"/sessions/{other.id}"
        assert error_of(await _send(proxy, f"{foreign}/v1/chat/completions", mine.api_key)) == (403, "wrong_session")
        assert error_of(await _send(proxy, foreign, mine.api_key, method="GET")) == (403, "wrong_session")
        for path in ("/sessions", f"{foreign}/close", f"{foreign}/reward", f"/sessions/{mine.id}/close"):
            assert error_of(await _send(proxy, path, mine.api_key, {})) == (403, "admin_only")
        assert error_of(await _send(proxy, foreign, mine.api_key, method="DELETE")) == (403, "admin_only")
        assert error_of(await _send(proxy, "/sessions/nobody", "admin-key", method="GET")) == (404, "session_not_found")
        assert (await _send(proxy, f"/sessions/{mine.id}", mine.api_key, method="GET")).json()["id"] == mine.id
        assert (await proxy.http.get("/v1/models", headers={"x-api-key": mine.api_key})).status_code == 200
        both = {"authorization": f"Bearer {mine.api_key}", "x-api-key": other.api_key}
        assert error_of(await proxy.http.get("/v1/models", headers=both)) == (400, "duplicate_header")
        for scheme in (f"Bearer {mine.api_key}", "Basic eDp5", "Bearer"):  # the same key, and none
            same = {"authorization": scheme, "x-api-key": mine.api_key}
            assert (await proxy.http.get(f"/sessions/{mine.id}/v1/models", headers=same)).status_code == 200
        basic = {"authorization": "Basic eDp5"}
        assert error_of(await proxy.http.get("/v1/models", headers=basic)) == (401, "missing_api_key")
        twice = [("authorization", f"Bearer {mine.api_key}"), ("authorization", "Bearer x")]
        assert error_of(await proxy.http.post(chat, json=CHAT, headers=twice)) == (400, "duplicate_header")
        assert error_of(await proxy.http.get("/nowhere")) == (404, "unknown_path")
        assert error_of(await proxy.http.get(chat)) == (405, "method_not_allowed")


async def test_keys_are_kept_as_digests_only() -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        (session,) = proxy.deps.sessions
        assert handle.api_key not in repr(vars(session))
        assert handle.api_key not in json.dumps(await proxy.admin.view_session(handle.id))


async def test_a_closed_session_says_so_and_is_forgotten() -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        assert (await proxy.post(handle, CHAT)).status_code == 200
        admin = {"authorization": "Bearer admin-key"}
        first = await proxy.http.post(f"/sessions/{handle.id}/close", json={"reward": 1.0}, headers=admin)
        result = await proxy.admin.close_session(handle.id)  # the first answer may have been lost
        assert result.reward == 1.0
        assert first.json()["rows"][0]["token_ids"] == list(result.rows[0].token_ids)
        for _ in range(8):
            await proxy.admin.close_session((await proxy.open()).id)
        late = await proxy.post(handle, CHAT)
        assert error_of(late) == (409, "session_closed")
        assert late.headers["x-should-retry"] == "false"
        with pytest.raises(ProxyRefused, match="409 session_closed"):
            await proxy.admin.close_session(handle.id)
        assert len(proxy.deps.sessions) == 0
        gone = await proxy.open()
        await proxy.admin.delete_session(gone.id)
        assert error_of(await proxy.post(gone, CHAT)) == (409, "session_closed")


async def test_the_deadline_ends_requests_and_sessions() -> None:
    async with serving(delay_s=5.0) as proxy:
        handle = await proxy.open(deadline_s=0.3)
        start = time.monotonic()
        assert error_of(await proxy.post(handle, CHAT)) == (504, "deadline_exceeded")
        assert time.monotonic() - start < 2
        assert error_of(await proxy.post(handle, CHAT)) == (409, "session_expired")
        result = await proxy.admin.close_session(handle.id, 0.0)
        assert (result.rows, result.reward) == ((), 0.0)


async def test_sessions_that_nobody_closes_are_reaped() -> None:
    async with serving(limits=Limits(expired_grace_s=0.0)) as proxy:
        await proxy.open(deadline_s=0.01)
        await asyncio.sleep(0.05)
        await proxy.open()
        assert len(proxy.deps.sessions) == 1


async def test_budgets_are_429_that_no_sdk_repeats() -> None:
    async with serving(lambda prompt: "one two three four five") as proxy:
        turns = await proxy.open(max_turns=1)
        assert (await proxy.post(turns, CHAT)).status_code == 200
        refused = await proxy.post(turns, CHAT)
        assert error_of(refused) == (429, "turn_budget_exhausted")
        assert refused.headers["x-should-retry"] == "false"
        tokens = await proxy.open(max_tokens=3)
        clipped = await proxy.post(tokens, {**CHAT, "max_tokens": 100})
        assert clipped.json()["usage"]["completion_tokens"] == 3
        assert clipped.headers["x-seamless-overrides"] == "max_tokens=3"
        assert error_of(await proxy.post(tokens, CHAT)) == (429, "token_budget_exhausted")
        short = await proxy.open(max_model_len=5)
        assert error_of(await proxy.post(short, CHAT)) == (400, "context_length_exceeded")


async def test_concurrency_caps_are_429_with_retry_after() -> None:
    async with serving(delay_s=0.3, limits=Limits(max_in_flight=2, max_sessions=2)) as proxy:
        one, two = await proxy.open(max_parallel=1), await proxy.open()
        with pytest.raises(ProxyRefused, match="429 too_many_sessions"):
            await proxy.open()
        bodies = [{"model": "m", "messages": [{"role": "user", "content": f"{n}"}]} for n in range(4)]
        first = asyncio.create_task(proxy.post(one, bodies[0]))
        await proxy.engine.started.wait()
        busy = await proxy.post(one, bodies[1])
        assert error_of(busy) == (429, "too_many_requests")
        assert busy.headers["retry-after"] == "1"
        second = asyncio.create_task(proxy.post(two, bodies[2]))
        await asyncio.sleep(0.05)
        assert error_of(await proxy.post(two, bodies[3])) == (429, "too_many_requests")
        assert [(await task).status_code for task in (first, second)] == [200, 200]
        async with proxy.sdk(one, max_retries=3) as sdk:  # the SDK waits as told and succeeds
            waiting = asyncio.create_task(proxy.post(one, bodies[3]))
            await asyncio.sleep(0.05)
            assert (await sdk.chat.completions.create(model="m", messages=HI)).choices
            assert (await waiting).status_code == 200


async def test_caps_on_bodies_and_messages() -> None:
    async with serving(limits=Limits(max_body_bytes=2000, max_messages=3, body_timeout_s=0.3)) as proxy:
        handle = await proxy.open()
        long = {"model": "m", "messages": [{"role": "user", "content": "x" * 3000}]}
        assert error_of(await proxy.post(handle, long)) == (413, "body_too_large")
        assert error_of(await proxy.post(handle, {"model": "m", "messages": HI * 4})) == (413, "too_many_messages")
        auth = {"authorization": f"Bearer {handle.api_key}"}

        async def chunks(pause_s: float) -> Any:
            for _ in range(30):
                yield b" " * 100
                await asyncio.sleep(pause_s)

        chunked = await proxy.http.post("/v1/chat/completions", content=chunks(0), headers=auth)
        assert error_of(chunked) == (413, "body_too_large")
        slow = await proxy.http.post("/v1/chat/completions", content=chunks(0.1), headers=auth)
        assert error_of(slow) == (408, "body_too_slow")


ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
}


@pytest.mark.parametrize("path", ASKED)
async def test_caps_are_told_in_the_shape_of_the_dialect(path: str) -> None:
    def kind_of(answer: httpx.Response) -> str:
        body = answer.json()
        assert (body.get("type") == "error") == (path == "/v1/messages")
        assert ("param" in body["error"]) == (path != "/v1/messages")
        return str(body["error"]["type"])

    limits = Limits(max_in_flight=1, max_body_bytes=2000)
    async with serving(delay_s=5.0, limits=limits) as proxy:
        one, two = await proxy.open(), await proxy.open()
        body = {"model": "m", **ASKED[path]}
        holding = asyncio.create_task(proxy.post(one, body, path))
        await proxy.engine.started.wait()
        busy = await proxy.post(two, body, path)
        assert (busy.status_code, kind_of(busy), busy.headers["retry-after"]) == (429, "rate_limit_error", "1")
        long = await proxy.post(two, {**body, "user": "x" * 3000}, path)
        assert (long.status_code, kind_of(long)) == (413, "request_too_large")
        await proxy.admin.delete_session(one.id)
        assert (await holding).status_code == 409


BAD_BODIES: list[tuple[bytes, str]] = [
    (b"", "invalid_json"),
    (b"{", "invalid_json"),
    (b"[]", "invalid_value"),
    (b'"\xff\xfe"', "invalid_json"),
    (b'{"model": "m", "messages": [{"role": "user", "content": "\xff"}]}', "invalid_json"),
    (b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', "invalid_json"),
    (b'{"model": "m", "messages": ' + b"[" * 100_000, "invalid_json"),
    (b'{"model": "m", "metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}", "invalid_json"),
    (b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "seed": 1' + b"0" * 5000 + b"}", "invalid_json"),
    (b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "seed": 1' + b"0" * 50 + b"}", "invalid_value"),
    (b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', "invalid_value"),
    (b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "top_p": NaN}', "invalid_value"),
]


@pytest.mark.parametrize(("body", "code"), BAD_BODIES)
async def test_broken_bodies(body: bytes, code: str) -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        headers = {"authorization": f"Bearer {handle.api_key}"}
        response = await proxy.http.post("/v1/chat/completions", content=body, headers=headers)
        assert error_of(response) == (400, code)


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"made_up": 1}, "made_up", "unsupported_parameter"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 129}, "n", "unsupported_value"),
        ({"n": 17}, "n", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "unsupported_value"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs", "unsupported_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": "maybe"}, "tool_choice", "invalid_value"),
        ({"tool_choice": "required", "tools": TOOLS}, "tool_choice", "unsupported_value"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": TOOLS}, "tool_choice", BAD),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "tool_choice", BAD),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools", "unsupported_value"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format", BAD),
        ({"response_format": {"type": "poem"}}, "response_format", BAD),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "unsupported_parameter"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format", "unsupported_parameter"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "grammar": "x"}}},
            "response_format",
            "unsupported_parameter",
        ),
        ({"parallel_tool_calls": False, "tools": TOOLS}, "parallel_tool_calls", "unsupported_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"stop": [""]}, "stop", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "owl", "content": "x"}]}, "messages.0", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]},
            "messages.0.tool_calls",
            "invalid_value",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages.0.tool_calls", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0",
            "unsupported_content",
        ),
        ({"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]}, "messages.0.audio", "invalid_value"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "invalid_value"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(change: dict[str, Any], param: str, code: str) -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        response = await proxy.post(handle, {**CHAT, **change})
        assert error_of(response) == (400, code)
        assert response.json()["error"]["param"] == param
        assert proxy.engine.requests == []


async def test_harmless_values_that_clients_send_by_habit_are_taken() -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        habits = {
            "n": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0.0,
            "user": "me",
            "store": False,
            "metadata": {"a": "b"},
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "response_format": {"type": "text"},
            "stream": False,
            "stop": None,
            "tools": [],
        }
        parts = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
        assert (await proxy.post(handle, {**CHAT, **habits, "messages": [*parts, *HI]})).status_code == 200
        assert "<|im_start|>system\na\nb<|im_end|>" in proxy.engine.tokenizer.decode(
            proxy.engine.requests[0].prompt_ids
        )


async def test_session_options_are_checked() -> None:
    async with serving() as proxy:
        for body in (
            {"deadline_s": -1},
            {"max_turns": 0},
            {"sampling": {"temperature": 9}},
            {"sampling": {"n": 2}},
            {"x": 1},
        ):
            assert (await _send(proxy, "/sessions", "admin-key", body)).status_code == 400
        handle = await proxy.open()
        bad = await _send(proxy, f"/sessions/{handle.id}/reward", "admin-key", {"reward": "much"})
        assert error_of(bad) == (400, "invalid_value")
        await proxy.admin.set_reward(handle.id, 0.25, {"style": 1.0})
        result = await proxy.admin.close_session(handle.id, rewards={"passed": 0.0})
        assert (result.reward, result.rewards) == (0.25, {"style": 1.0, "passed": 0.0})


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
_FIELDS = ["model", "messages", "tools", "stop", "seed", "temperature", "tool_choice", "stream", "n", "max_tokens"]
_PARTS = ["role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.one_of(
            st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=5),
            st.fixed_dictionaries(
                {
                    "model": st.just("m"),
                    "messages": st.lists(
                        st.dictionaries(st.sampled_from(_PARTS), _JSON | st.sampled_from(["user", "assistant"])),
                        min_size=1,
                        max_size=4,
                    ),
                }
            ),
            _JSON,
        ),
        min_size=5,
        max_size=10,
    )
)
def test_no_body_makes_a_server_error(bodies: list[Any]) -> None:
    async def check() -> None:
        async with serving() as proxy:
            handle = await proxy.open()
            for body in bodies:
                response = await proxy.http.post(
                    "/v1/chat/completions",
                    content=json.dumps(body).encode(),
                    headers={"authorization": f"Bearer {handle.api_key}"},
                )
                assert response.status_code < 500, (body, response.text)
            assert (await proxy.admin.close_session(handle.id)).audit.is_clean

    asyncio.run(check())


async def test_health_and_metrics_need_no_key() -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        await proxy.post(handle, CHAT)
        await _send(proxy, "/v1/chat/completions", "sk-nonsense")
        assert (await proxy.http.get("/healthz")).json() == {"status": "ok", "sessions": 1}
        text = (await proxy.http.get("/metrics")).text
        assert "seamless_proxy_turns_total 1.0" in text
        assert 'seamless_proxy_refusals_total{reason="invalid_api_key"} 1.0' in text
        assert 'seamless_proxy_kinds_total{reason="clean"} 1.0' in text
        assert "seamless_proxy_in_flight 0.0" in text


async def test_a_taken_port_is_named() -> None:
    async with serving() as proxy:
        port = int(proxy.server.base_url.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"--port={port}: cannot listen on 127.0.0.1:{port}"):
            await ProxyServer(proxy.server._app, port=port).start()
        await proxy.server.stop()
        await proxy.server.stop()


async def _answers_of_the_first_when_the_last_gets_one(num_clients: int) -> int:
    """Clients that begin at once and ask again and again."""
    answers = [0] * num_clients
    all_served = asyncio.Event()

    async def client(number: int, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while not all_served.is_set():
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
            answers[number] += 1
            if min(answers):
                all_served.set()
        writer.close()

    async with serving() as proxy:
        port = int(proxy.server.base_url.rsplit(":", 1)[1])
        await asyncio.gather(*(client(number, port) for number in range(num_clients)))
    return max(answers)


def test_agents_that_begin_at_once_are_all_served() -> None:
    uvloop = pytest.importorskip("uvloop", reason="comes with vLLM; asyncio's own loop takes all connections at once")
    assert uvloop.run(_answers_of_the_first_when_the_last_gets_one(300)) < 30
