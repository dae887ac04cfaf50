"""OpenAI responses with the real SDK, and the translation on recorded shapes."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from seamless_verl.proxy.calls import ApiError
from seamless_verl.proxy.dialects.responses import parse_responses
from seamless_verl.proxy.text.parsing import TagParser
from tests.edge.proxy.test_anthropic import agent
from tests.fakes import serving

TOOLS: list[Any] = [{"type": "function", "name": "run", "parameters": {"type": "object"}, "strict": False}]
THINKS = TagParser(("<think>", "</think>"))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_with_tools_and_reasoning_is_one_row(stream: bool, streams: bool) -> None:
    async with serving(agent, streams=streams, parser=THINKS) as proxy:
        handle = await proxy.open()
        items: list[Any] = [{"role": "user", "content": "hi"}]
        said: list[Any] = []
        async with proxy.sdk(handle) as sdk:
            for _ in range(2):
                options: Any = dict(model="m", input=items, tools=TOOLS, instructions="be good")
                if stream:
                    async with sdk.responses.stream(**options) as events:
                        said.append(await events.get_final_response())
                else:
                    said.append(await sdk.responses.create(**options))
                items += [item.model_dump(exclude_none=True) for item in said[-1].output]
                for item in said[-1].output:
                    if item.type == "function_call":
                        items.append({"type": "function_call_output", "call_id": item.call_id, "output": "out"})
        thought, text, call = said[0].output
        assert (thought.type, text.type, call.type) == ("reasoning", "message", "function_call")
        assert thought.content[0].text == "let me look"
        assert said[0].output_text == "I look."
        assert (call.name, json.loads(call.arguments)) == ("run", {"b": 1, "a": "é"})
        assert (said[1].output_text, said[1].status) == ("done", "completed")
        assert said[1].usage.input_tokens_details.cached_tokens > 0
        result = await proxy.admin.close_session(handle.id)
        assert result.audit.is_clean
        assert (len(result.rows), result.kinds) == (1, {"clean": 2})


async def test_the_stream_is_numbered_and_every_item_is_closed() -> None:
    async with serving(agent, streams=True, parser=THINKS) as proxy:
        handle = await proxy.open()
        async with proxy.sdk(handle) as sdk:
            stream = await sdk.responses.create(model="m", input="hi", tools=TOOLS, stream=True)
            events: list[Any] = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        names = [event.type for event in events]
        assert names[:2] == ["response.created", "response.in_progress"]
        assert names[-1] == "response.completed"
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.model_dump() for item in done] == [item.model_dump() for item in events[-1].response.output]
        added = [event.output_index for event in events if event.type == "response.output_item.added"]
        assert added == [0, 1, 2]
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == "I look."
        assert len(deltas) > 1
        assert "response.function_call_arguments.done" in names


async def test_limits_and_log_probs() -> None:
    async with serving(lambda prompt: "one two three") as proxy:
        handle = await proxy.open(sampling={"temperature": 1.0})
        async with proxy.sdk(handle) as sdk:
            raw = await sdk.responses.with_raw_response.create(
                model="m",
                input="hi",
                max_output_tokens=2,
                temperature=0.1,
                include=["message.output_text.logprobs"],
            )
            assert raw.headers["x-seamless-overrides"] == "temperature=1.0"
            response: Any = raw.parse()
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        part = response.output[0].content[0]
        assert "".join(token.token for token in part.logprobs) == part.text


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": "rules"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "look"}]},
        {"type": "function_call", "call_id": "c1", "name": "run", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "run", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "message", "role": "assistant", "content": "first"},
        {"type": "message", "role": "assistant", "content": "second"},
        {"role": "user", "content": "go"},
    ]
    call = parse_responses(json.dumps({"model": "m", "instructions": "s", "input": items, "tools": TOOLS}).encode())
    function = {"type": "function", "function": {"name": "run", "arguments": "{}"}}
    assert call.raw_messages == [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "look",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", **function},
                {"id": "c2", "type": "function", "function": {"name": "run", "arguments": '{"x": 1}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "assistant", "content": "first"},
        {"role": "assistant", "content": "second"},
        {"role": "user", "content": "go"},
    ]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input.0.content.0"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input.0.name"),
        ({"input": [{"role": "owl", "content": "x"}]}, "input.0.role"),
        ({"input": []}, "input"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "local_shell"}]}, "tools.0.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}, "tools": TOOLS}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text"),
        ({"text": {"format": {"type": "text", "name": "x"}}}, "text"),
        ({"background": True}, "background"),
        ({"truncation": "middle"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(change: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_responses(json.dumps({"model": "m", "input": "hi", **change}).encode())
    assert (refused.value.status, refused.value.param) == (400, param)


async def test_errors_reach_the_sdk_by_name() -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        async with proxy.sdk(handle) as sdk:
            with pytest.raises(openai.BadRequestError) as refused:
                await sdk.responses.create(model="m", input="hi", previous_response_id="resp_1")
        assert refused.value.param == "previous_response_id"


def called(prompt: str) -> str:
    """A call of a tool first, text once its result is there."""
    if "assistant" in prompt.rpartition("<|im_start|>assistant")[0]:
        return "done"
    return '<tool_call>\n{"name": "run", "arguments": {"x": 1}}\n</tool_call>'


@pytest.mark.parametrize("refers", ["previous_response_id", "item_reference"])
async def test_what_is_referred_to_is_what_would_have_been_sent_again(refers: str) -> None:
    async with serving(called) as proxy:
        prompts, kinds = [], []
        for way in ("whole", refers):
            handle = await proxy.open()
            body: dict[str, Any] = {"model": "m", "instructions": "be brief", "tools": TOOLS}
            first = (await proxy.post(handle, {**body, "input": "hi"}, "/v1/responses")).json()
            (call,) = first["output"]
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "one"}
            asked: dict[str, Any] = {"input": [{"role": "user", "content": "hi"}, call, result]}
            if way == "previous_response_id":
                asked = {"input": [result], "previous_response_id": first["id"]}
            elif way == "item_reference":
                asked["input"][1] = {"type": "item_reference", "id": call["id"]}
            second = (await proxy.post(handle, {**body, **asked}, "/v1/responses")).json()
            assert second["output"][0]["content"][0]["text"] == "done"
            more = {"input": "more", "previous_response_id": second["id"]}  # also after one that referred itself
            third = await proxy.post(handle, {**body, **more}, "/v1/responses")
            assert third.json()["previous_response_id"] == second["id"]
            prompts.append([list(request.prompt_ids) for request in proxy.engine.requests[-2:]])
            kinds.append(proxy.deps.sessions.by_id(handle.id).view()["kinds"])
        assert prompts[0] == prompts[1]
        assert kinds[0] == kinds[1]
        assert kinds[0]["clean"] == 3


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_not_found"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "item_not_found"),
        ({"input": [{"type": "item_reference"}]}, "input.0.id", "invalid_value"),
    ],
)
async def test_a_reference_to_what_this_session_never_said_is_refused(
    change: dict[str, Any], param: str, code: str
) -> None:
    async with serving() as proxy:
        other = await proxy.post(await proxy.open(), {"model": "m", "input": "hi"}, "/v1/responses")
        assert other.status_code == 200
        response = await proxy.post(await proxy.open(), {"model": "m", "input": "hi", **change}, "/v1/responses")
        assert response.status_code == 400
        assert (response.json()["error"]["param"], response.json()["error"]["code"]) == (param, code)
