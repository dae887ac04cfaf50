"""Anthropic messages with the real SDK, and the translation on recorded shapes."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from seamless_verl.proxy.calls import ApiError, OnUnsupported
from seamless_verl.proxy.dialects.anthropic import parse_messages
from seamless_verl.proxy.engine import EngineUnavailable
from seamless_verl.proxy.text.parsing import TagParser
from tests.fakes import serving

HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [{"name": "run", "description": "runs", "input_schema": {"type": "object", "properties": {}}}]
THINKS = TagParser(("<think>", "</think>"))


def agent(prompt: str) -> str:
    if "<|im_start|>tool" in prompt:
        return "<think>\nseen\n</think>\n\ndone"
    call = '<tool_call>\n{"name": "run", "arguments": {"b": 1, "a": "é"}}\n</tool_call>'
    return f"<think>\nlet me look\n</think>\n\nI look. {call}"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_with_tools_and_thinking_is_one_row(stream: bool, streams: bool) -> None:
    async with serving(agent, streams=streams, parser=THINKS) as proxy:
        handle = await proxy.open()
        messages = list(HI)
        said: list[Any] = []
        async with proxy.claude(handle) as sdk:
            for _ in range(2):
                options: Any = dict(model="m", max_tokens=300, system="be good", messages=messages, tools=TOOLS)
                if stream:
                    async with sdk.messages.stream(**options) as events:
                        said.append(await events.get_final_message())
                else:
                    said.append(await sdk.messages.create(**options))
                messages.append({"role": "assistant", "content": said[-1].content})
                uses = [block for block in said[-1].content if block.type == "tool_use"]
                results = [{"type": "tool_result", "tool_use_id": use.id, "content": "out"} for use in uses]
                messages.append({"role": "user", "content": results})
        thought, text, use = said[0].content
        assert (thought.type, text.type, use.type) == ("thinking", "text", "tool_use")
        assert (thought.thinking, text.text, use.input) == ("let me look", "I look.", {"b": 1, "a": "é"})
        assert [message.stop_reason for message in said] == ["tool_use", "end_turn"]
        assert said[1].usage.cache_read_input_tokens
        sent = len(proxy.engine.requests[1].prompt_ids)
        assert said[1].usage.input_tokens + said[1].usage.cache_read_input_tokens == sent
        result = await proxy.admin.close_session(handle.id)
        assert result.audit.is_clean
        assert (len(result.rows), result.kinds) == (1, {"clean": 2})
        assert "<|im_start|>system\nbe good<|im_end|>" in proxy.engine.tokenizer.decode(result.rows[0].token_ids)


async def test_the_stream_is_the_blocks_of_the_message() -> None:
    async with serving(agent, streams=True, parser=THINKS) as proxy:
        handle = await proxy.open()
        body = {"model": "m", "max_tokens": 300, "messages": HI, "tools": TOOLS, "stream": True}
        text = (await proxy.post(handle, body, "/v1/messages")).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        names = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
        assert names == [event["type"] for event in events]
        assert (names[0], names[1], names[-2], names[-1]) == ("message_start", "ping", "message_delta", "message_stop")
        starts = [event for event in events if event["type"] == "content_block_start"]
        stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
        assert [start["content_block"]["type"] for start in starts] == ["thinking", "text", "tool_use"]
        assert [start["index"] for start in starts] == stops == [0, 1, 2]
        assert names.count("content_block_delta") > 6
        assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


async def test_stop_reasons_and_sampling() -> None:
    async with serving(lambda prompt: "one two STOP three") as proxy:
        handle = await proxy.open(sampling={"top_p": 0.5})
        async with proxy.claude(handle) as sdk:
            cut = await sdk.messages.create(model="m", max_tokens=2, messages=HI)
            assert cut.stop_reason == "max_tokens"
            raw = await sdk.messages.with_raw_response.create(
                model="m", max_tokens=99, messages=HI, stop_sequences=["STOP"], extra_body={"top_k": 5, "top_p": 1.0}
            )
            assert raw.headers["x-seamless-overrides"] == "top_p=0.5"
            message = await raw.parse()
            assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
            assert [block.text for block in message.content if block.type == "text"] == ["one two "]
            sampling = proxy.engine.requests[-1].sampling
            assert sampling == {"max_tokens": 99, "stop": ["STOP"], "top_k": 5, "top_p": 0.5}


async def test_count_tokens_is_the_prompt_that_would_be_sent() -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        async with proxy.claude(handle) as sdk:
            options: Any = dict(model="m", messages=HI, system=[{"type": "text", "text": "s"}], tools=TOOLS)
            counted = await sdk.messages.count_tokens(**options)
            answered = await sdk.messages.create(max_tokens=10, **options)
            models = await sdk.models.list()
            one = await sdk.models.retrieve("tiny")
        assert counted.input_tokens == answered.usage.input_tokens == len(proxy.engine.requests[0].prompt_ids)
        assert ([model.id for model in models.data], one.id) == (["tiny"], "tiny")
        assert len((await proxy.admin.view_session(handle.id))["turns"]) == 1


async def test_the_key_alone_reaches_the_session() -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        async with anthropic.AsyncAnthropic(base_url=proxy.server.base_url, api_key=handle.api_key) as sdk:
            await sdk.messages.create(model="m", max_tokens=5, messages=HI)
        assert len((await proxy.admin.view_session(handle.id))["turns"]) == 1


async def test_errors_have_anthropics_shape() -> None:
    async with serving(on_unsupported=OnUnsupported.REFUSE) as proxy:
        handle = await proxy.open()
        async with proxy.claude(handle, max_retries=0) as sdk:
            with pytest.raises(anthropic.BadRequestError, match="thinking cannot be honoured here"):
                await sdk.messages.create(
                    model="m", max_tokens=2000, messages=HI, thinking={"type": "enabled", "budget_tokens": 1024}
                )
            proxy.engine.failure = EngineUnavailable("away")
            with pytest.raises(anthropic.InternalServerError, match="away"):
                await sdk.messages.create(model="m", max_tokens=5, messages=HI)
        async with anthropic.AsyncAnthropic(base_url=proxy.server.base_url, api_key="no") as sdk:
            with pytest.raises(anthropic.AuthenticationError):
                await sdk.messages.create(model="m", max_tokens=5, messages=HI)
        bad = await proxy.post(handle, {"model": "m", "messages": HI}, "/v1/messages")
        assert bad.status_code == 400
        assert bad.json()["type"] == "error"
        assert bad.json()["error"]["type"] == "invalid_request_error"
        assert bad.json()["error"]["message"].startswith("max_tokens: ")


async def test_a_thinking_budget_is_announced_as_not_kept() -> None:
    async with serving(agent, parser=THINKS, on_unsupported=OnUnsupported.REFUSE) as proxy:
        handle = await proxy.open()
        body = {"model": "m", "max_tokens": 90, "messages": HI, "thinking": {"type": "enabled", "budget_tokens": 50}}
        answer = await proxy.post(handle, body, "/v1/messages")
        assert answer.headers["x-seamless-overrides"] == "thinking.budget_tokens=max_tokens"
        off = await proxy.post(handle, {**body, "thinking": {"type": "disabled"}}, "/v1/messages")
        assert (off.status_code, off.json()["error"]["message"][:9]) == (400, "thinking:")


def test_blocks_become_messages() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "look", "citations": None},
                {"type": "tool_use", "id": "t1", "name": "run", "input": {"x": 1}},
                {"type": "tool_use", "id": "t2", "name": "run", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "one"}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": "two"},
                {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    body = {"model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "s"}], "messages": turns, "tools": TOOLS}
    call = parse_messages(json.dumps(body).encode())
    assert call.raw_messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "look",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "run", "arguments": '{"x": 1}'}},
                {"id": "t2", "type": "function", "function": {"name": "run", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: two"},
        {"role": "user", "content": "go on"},
    ]
    assert call.raw_tools[0]["function"]["parameters"] == TOOLS[0]["input_schema"]


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}


@pytest.mark.parametrize(
    ("is_error", "content", "said"),
    [
        (True, "no such file", "Error: no such file"),
        (True, [{"type": "text", "text": "no"}, {"type": "text", "text": "file"}], "Error: no\nfile"),
        (True, "Errors everywhere", "Error: Errors everywhere"),
        (True, "  ERROR 7", "  ERROR 7"),  # says so itself
        (True, "<error>7</error>", "<error>7</error>"),
        (True, "", "Error"),
        (False, "no such file", "no such file"),
        (None, "no such file", "no such file"),
        (True, [PICTURE], [{"type": "text", "text": "Error:"}, ...]),
        (True, [{"type": "text", "text": "error:"}, PICTURE], [{"type": "text", "text": "error:"}, ...]),
    ],
)
def test_a_result_that_is_an_error_says_so(is_error: Any, content: Any, said: Any) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": is_error}
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": [result]}]}
    found = parse_messages(json.dumps(body).encode()).raw_messages[0]["content"]
    if isinstance(said, list):
        assert (found[:1], [part["type"] for part in found[1:]]) == (said[:1], ["image_url"])
    else:
        assert found == said


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("display", ["omitted", "summarized", None])
async def test_thinking_is_shown_as_asked_and_kept_either_way(display: str | None, stream: bool) -> None:
    async with serving(agent, streams=True, parser=THINKS) as proxy:
        handle = await proxy.open()
        thinking = {"type": "adaptive", "display": display}
        body: dict[str, Any] = {"model": "m", "max_tokens": 300, "messages": list(HI), "tools": TOOLS}
        body["thinking"] = thinking
        message: Any
        async with proxy.claude(handle) as sdk:
            for _ in range(2):
                if stream:
                    async with sdk.messages.stream(**body) as events:
                        message = await events.get_final_message()
                else:
                    message = await sdk.messages.create(**body)
                thought = message.content[0]
                hidden = {"let me look", "seen"} & {thought.thinking}
                assert (thought.type, bool(thought.signature), bool(hidden)) == ("thinking", True, display != "omitted")
                uses = [block.id for block in message.content if block.type == "tool_use"]
                results = [{"type": "tool_result", "tool_use_id": use, "content": "out"} for use in uses]
                body["messages"] += [
                    {"role": "assistant", "content": message.content},
                    {"role": "user", "content": results},
                ]
        result = await proxy.admin.close_session(handle.id)
        assert (len(result.rows), result.audit.is_clean) == (1, True)
        assert "let me look" in proxy.engine.tokenizer.decode(result.rows[0].token_ids)


DOCUMENT = {"type": "document", "source": {"type": "url", "url": "x"}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": [{"role": "user", "content": [DOCUMENT]}]}, "messages.0.content.0"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [DOCUMENT]}]}
                ]
            },
            "messages.0.content.0.content.0",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}, *HI]},
            "messages.0.content.0",
        ),
        ({"messages": [*HI, {"role": "assistant", "content": "I say"}]}, "messages.1"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "i"}]}, *HI]},
            "messages.0.content.0.input",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "fly"}, "tools": TOOLS}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"container": "c"}, "container"),
        ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "is_error": 1}]}]},
            "messages.0.content.0.is_error",
        ),
        ({"mcp_servers": []}, "mcp_servers"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(change: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_messages(json.dumps({"model": "m", "max_tokens": 5, "messages": HI, **change}).encode())
    assert (refused.value.status, refused.value.param) == (400, param)
