"""Streams as real clients read them: token by token, alive while nothing comes, whole or not at all."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from seamless_verl.proxy.client import SessionHandle
from seamless_verl.proxy.engine import EngineUnavailable
from seamless_verl.proxy.http.requests import StreamTiming
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.text.parsing import TagParser
from tests.fakes import Served, serving

HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
CALLING = 'let me see <tool_call>\n{"name": "run", "arguments": {"a": "é"}}\n</tool_call>'
STREAMING: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": HI}, "data: [DONE]"),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 100}, "data: [DONE]"),
    ("/v1/responses", {"input": "hi"}, "event: response.completed"),
    ("/v1/messages", {"messages": HI, "max_tokens": 100}, "event: message_stop"),
]


def _auth(handle: SessionHandle) -> dict[str, str]:
    return {"authorization": f"Bearer {handle.api_key}"}


async def _lines(response: httpx.Response, *, until: str) -> list[str]:
    lines = []
    async for line in response.aiter_lines():
        lines.append(line)
        if until in line:
            break
    return lines


async def _settled(proxy: Served) -> None:
    """Returns when nothing is in flight any more."""
    while (await proxy.admin.stats())["in_flight"]:  # noqa: ASYNC110 - the proxy is looked at from outside
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("path", "body", "last"), STREAMING)
async def test_tokens_arrive_while_later_ones_are_not_yet_generated(path: str, body: Any, last: str) -> None:
    async with serving(lambda prompt: "first second third", streams=True) as proxy:
        handle = await proxy.open(sampling={"temperature": 0.5})
        permits = proxy.engine.permits = asyncio.Semaphore(5)
        sent = {"model": "m", "stream": True, "temperature": 1, **body}
        async with proxy.http.stream("POST", path, json=sent, headers=_auth(handle)) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["x-seamless-overrides"] == "temperature=0.5"
            lines = response.aiter_lines()
            async for line in lines:
                if '"f' in line:
                    break
            assert (await proxy.admin.view_session(handle.id))["turns"] == []  # begun, not answered
            for _ in range(100):
                permits.release()
            rest = [line async for line in lines if line]
        assert any(line.startswith(last) for line in rest[-2:])
        assert len((await proxy.admin.view_session(handle.id))["turns"]) == 1
        assert (await proxy.admin.close_session(handle.id)).audit.is_clean


@pytest.mark.parametrize(("path", "body", "last"), STREAMING)
async def test_a_silent_engine_is_covered_by_keep_alives(path: str, body: Any, last: str) -> None:
    async with serving(delay_s=0.5, timing=StreamTiming(keep_alive_s=0.05)) as proxy:
        handle = await proxy.open()
        response = await proxy.post(handle, {"model": "m", "stream": True, **body}, path)
        assert response.status_code == 200
        assert sum(line.startswith((": keep-alive", "event: ping")) for line in response.text.splitlines()) >= 3
        assert any(line.startswith(last) for line in [line for line in response.text.splitlines() if line][-2:])
        assert (await proxy.admin.close_session(handle.id)).audit.is_clean


@pytest.mark.parametrize(("path", "body", "last"), STREAMING)
async def test_a_client_that_leaves_in_mid_stream_leaves_no_half_turn(path: str, body: Any, last: str) -> None:
    limits = Limits(orphan_grace_s=0.05)
    async with serving(lambda prompt: "first second third", streams=True, limits=limits) as proxy:
        handle = await proxy.open()
        proxy.engine.permits = asyncio.Semaphore(5)
        sent = {"model": "m", "stream": True, **body}
        async with proxy.http.stream("POST", path, json=sent, headers=_auth(handle)) as response:
            await _lines(response, until='"f')
        await _settled(proxy)
        assert proxy.engine.num_cancelled == 1
        proxy.engine.permits = None
        assert (await proxy.post(handle, {**sent, "stream": False}, path)).status_code == 200
        result = await proxy.admin.close_session(handle.id)
        assert result.audit.is_clean
        assert (len(result.rows), result.kinds, result.audit.num_generations) == (1, {"clean": 1}, 1)


async def test_a_retry_joins_a_stream_that_broke_and_gets_all_of_it() -> None:
    async with serving(lambda prompt: "first second third", streams=True) as proxy:
        handle = await proxy.open()
        permits = proxy.engine.permits = asyncio.Semaphore(5)
        body = {"model": "m", "stream": True, "messages": HI}
        path = "/v1/chat/completions"
        async with proxy.http.stream("POST", path, json=body, headers=_auth(handle)) as response:
            await _lines(response, until='"f')
        async with proxy.sdk(handle) as sdk:
            again = {"x-stainless-retry-count": "1"}
            stream = await sdk.chat.completions.create(model="m", messages=HI, stream=True, extra_headers=again)
            for _ in range(100):
                permits.release()
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "first second third"
        assert len(proxy.engine.requests) == 1
        assert (await proxy.admin.close_session(handle.id)).kinds == {"clean": 1}


@pytest.mark.parametrize(("path", "body", "last"), STREAMING)
async def test_a_failure_in_mid_stream_is_an_event_of_the_dialect(path: str, body: Any, last: str) -> None:
    async with serving(lambda prompt: "first second third", streams=True) as proxy:
        handle = await proxy.open()
        proxy.engine.failure, proxy.engine.after_tokens = EngineUnavailable("gone"), 5
        response = await proxy.post(handle, {"model": "m", "stream": True, **body}, path)
        assert response.status_code == 200
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        error = events[-1].get("error") or events[-1]["response"]["error"]
        assert "gone" in error["message"]
        assert "stop_reason" not in response.text or '"stop_reason":"end_turn"' not in response.text
        result = await proxy.admin.close_session(handle.id)
        assert (result.rows, result.audit.is_clean) == ((), True)


async def test_a_failure_before_the_first_token_is_a_status() -> None:
    async with serving(streams=True) as proxy:
        handle = await proxy.open()
        proxy.engine.failure, proxy.engine.after_tokens = EngineUnavailable("gone"), 0
        response = await proxy.post(handle, {"model": "m", "stream": True, "messages": HI})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
        async with proxy.sdk(handle, max_retries=0) as sdk:
            proxy.engine.after_tokens = 1
            stream = await sdk.chat.completions.create(model="m", messages=HI, stream=True)
            with pytest.raises(openai.APIError, match="gone"):
                [chunk async for chunk in stream]


async def test_what_is_streamed_equals_what_is_answered_whole() -> None:
    def script(prompt: str) -> str:
        return f"<think>\nsince é\n</think>\n\n{CALLING} and more"

    async with serving(script, streams=True, parser=TagParser(("<think>", "</think>"))) as proxy:
        handle = await proxy.open()
        body = {"model": "m", "messages": HI, "tools": TOOLS}
        whole = (await proxy.post(handle, body)).json()["choices"][0]["message"]
        deltas: list[dict[str, Any]] = []
        async with proxy.sdk(handle) as sdk:
            stream = await sdk.chat.completions.create(model="m", messages=HI, tools=TOOLS, stream=True)
            deltas = [chunk.choices[0].delta.model_dump() async for chunk in stream]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == whole["reasoning_content"]
        assert "".join(delta.get("content") or "" for delta in deltas) == whole["content"] == "let me see  and more"
        assert sum(bool(delta.get("reasoning_content")) for delta in deltas) > 1
        (call,) = [call for delta in deltas for call in delta.get("tool_calls") or []]
        assert call["function"] == whole["tool_calls"][0]["function"]


async def test_stop_strings_never_show_in_a_stream() -> None:
    async with serving(lambda prompt: "one two STOP three", streams=True) as proxy:
        handle = await proxy.open()
        async with proxy.sdk(handle) as sdk:
            stream = await sdk.chat.completions.create(model="m", messages=HI, stream=True, stop=["STOP", "Q"])
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(texts) == "one two "
        assert len([text for text in texts if text]) > 1  # not all at once at the end


async def test_log_probs_stream_with_their_tokens() -> None:
    async with serving(lambda prompt: "one two", streams=True) as proxy:
        handle = await proxy.open()
        async with proxy.sdk(handle) as sdk:
            stream = await sdk.chat.completions.create(model="m", messages=HI, stream=True, logprobs=True)
            shown = [chunk.choices[0].logprobs async for chunk in stream]
            whole = await sdk.chat.completions.create(model="m", messages=HI, logprobs=True)
        tokens = [token.token for part in shown if part and part.content for token in part.content]
        known = whole.choices[0].logprobs
        assert known is not None
        assert tokens == [token.token for token in known.content or []]
        assert "".join(tokens) == "one two"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_does_not_read_is_dropped(stream: bool) -> None:
    timing = StreamTiming(keep_alive_s=0.05, write_timeout_s=0.2)
    long = "the quick brown fox " * 40_000
    async with serving(lambda prompt: long, timing=timing, limits=Limits(orphan_grace_s=0.05)) as proxy:
        handle = await proxy.open()
        asked = {"model": "m", "messages": HI, "stream": stream, "logprobs": True}
        body = json.dumps(asked).encode()
        host, port = proxy.server.base_url.removeprefix("http://").split(":")
        proxy.engine.delay_s = 0.3
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {handle.api_key}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        while not (await proxy.admin.view_session(handle.id))["turns"]:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)
        await asyncio.wait_for(reader.read(64), 5)
        (session,) = proxy.deps.sessions
        while not session.is_idle:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)
        await asyncio.wait_for(reader.read(), 20)  # ends, because the proxy hung up; it would wait for ever otherwise
        writer.close()
        retry = await proxy.post(handle, asked)
        assert retry.status_code == 200  # the answer reached nobody, so the same request gets it again
        assert len(proxy.engine.requests) == 1


def _said(event: dict[str, Any]) -> str:
    """The piece of the answer's text that an event of any dialect brings."""
    if event.get("type", "").endswith(".done"):
        return ""  # all of it once more
    choice = (event.get("choices") or [event])[0]
    delta = choice.get("delta", choice)
    return delta if isinstance(delta, str) else delta.get("content") or delta.get("text") or ""


async def test_no_character_of_an_answer_ends_a_line() -> None:
    """httpx's ``iter_lines`` takes more characters for the end of one than the standard of these streams does."""
    said = "one \u2028two \x85three \u2029four"
    async with serving(lambda prompt: said, streams=True) as proxy:
        for path, body, end in STREAMING:
            handle = await proxy.open()
            answer = await proxy.http.post(
                handle.base_url.removesuffix("/v1") + path,
                json={"model": "m", "stream": True, **body},
                headers=_auth(handle),
            )
            lines = [line for line in answer.text.splitlines() if line]
            assert all(line.startswith(("data: ", "event: ")) for line in lines), path
            assert end in lines[-1] or end in lines[-2]
            told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert "".join(map(_said, told)) == said, path
