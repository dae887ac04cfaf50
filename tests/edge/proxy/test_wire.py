"""What every dialect promises alike: several calls at once, several answers, stops, usage, images, rewards."""

from __future__ import annotations

import json
from typing import Any

import pytest

from seamless_verl.proxy.client import SessionHandle
from tests.agents import chat_message
from tests.fakes import Served, serving

HI: list[Any] = [{"role": "user", "content": "hi"}]
_PARAMETERS = {"type": "object"}
_CALLS = (
    'both. <tool_call>\n{"name": "run", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "read", "arguments": {"b": "é"}}\n</tool_call>'
)


def _two_tools(prompt: str) -> str:
    return "done" if "<|im_start|>tool" in prompt else _CALLS


_Calls = list[tuple[str, Any]]
_NAMES = ("run", "read")


async def _chat(proxy: Served, handle: SessionHandle, stream: bool) -> _Calls:
    tools = [{"type": "function", "function": {"name": name, "parameters": _PARAMETERS}} for name in _NAMES]
    messages: list[Any] = list(HI)
    calls: _Calls = []
    async with proxy.sdk(handle) as sdk:
        for _ in range(2):
            said = await chat_message(sdk, stream=stream, model="m", messages=messages, tools=tools)
            made = said.get("tool_calls", [])
            calls += [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in made]
            messages.append(said)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["name"]}
                for call in reversed(made)
            ]
    return calls


async def _responses(proxy: Served, handle: SessionHandle, stream: bool) -> _Calls:
    tools = [{"type": "function", "name": name, "parameters": _PARAMETERS} for name in _NAMES]
    items: list[Any] = list(HI)
    calls: _Calls = []
    async with proxy.sdk(handle) as sdk:
        for _ in range(2):
            options: Any = dict(model="m", input=items, tools=tools)
            if stream:
                async with sdk.responses.stream(**options) as events:
                    said: Any = await events.get_final_response()
            else:
                said = await sdk.responses.create(**options)
            made = [item for item in said.output if item.type == "function_call"]
            calls += [(item.name, json.loads(item.arguments)) for item in made]
            items += [item.model_dump(exclude_none=True) for item in said.output]
            items += [
                {"type": "function_call_output", "call_id": item.call_id, "output": item.name}
                for item in reversed(made)
            ]
    return calls


async def _messages(proxy: Served, handle: SessionHandle, stream: bool) -> _Calls:
    tools = [{"name": name, "input_schema": _PARAMETERS} for name in _NAMES]
    turns: list[Any] = list(HI)
    calls: _Calls = []
    async with proxy.claude(handle) as claude:
        for _ in range(2):
            options: Any = dict(model="m", max_tokens=500, messages=turns, tools=tools)
            if stream:
                async with claude.messages.stream(**options) as events:
                    said: Any = await events.get_final_message()
            else:
                said = await claude.messages.create(**options)
            uses = [block for block in said.content if block.type == "tool_use"]
            calls += [(use.name, use.input) for use in uses]
            results = [{"type": "tool_result", "tool_use_id": u.id, "content": u.name} for u in reversed(uses)]
            turns += [{"role": "assistant", "content": said.content}, {"role": "user", "content": results}]
    return calls


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("talk", [_chat, _responses, _messages])
async def test_two_calls_in_one_answer_go_out_and_come_back(talk: Any, stream: bool) -> None:
    """Their results come back in the other order, which is for the agent to decide."""
    async with serving(_two_tools, streams=True) as proxy:
        handle = await proxy.open()
        assert await talk(proxy, handle, stream) == [("run", {"a": 1}), ("read", {"b": "é"})]
        result = await proxy.admin.close_session(handle.id)
        assert result.audit.is_clean
        assert (len(result.rows), result.kinds) == (1, {"clean": 2})
        text = proxy.engine.tokenizer.decode(list(result.rows[0].token_ids))
        assert text.index("tool\nread") < text.index("tool\nrun")


async def test_several_answers_stream_side_by_side_and_their_prompt_counts_once() -> None:
    numbers = iter(range(10))
    async with serving(lambda prompt: f"answer {next(numbers)}", streams=True) as proxy:
        handle = await proxy.open()
        async with proxy.sdk(handle) as sdk:
            stream = await sdk.chat.completions.create(
                model="m", messages=HI, n=3, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
        texts, ends = ["", "", ""], []
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends += [choice.index] if choice.finish_reason else []
        assert sorted(texts) == ["answer 0", "answer 1", "answer 2"]
        assert sorted(ends) == [0, 1, 2]
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.prompt_tokens == len(proxy.engine.requests[0].prompt_ids)
        assert usage.completion_tokens == sum(
            row.num_trained for row in (await proxy.admin.close_session(handle.id)).rows
        )


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_tells_what_the_session_already_held(stream: bool) -> None:
    async with serving(streams=True) as proxy:
        handle = await proxy.open()
        history = [*HI, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
        usages: list[Any] = []
        async with proxy.sdk(handle) as sdk:
            for messages in (HI, history):
                options: Any = dict(model="m", messages=messages)
                if stream:
                    chunks = await sdk.chat.completions.create(
                        stream=True, stream_options={"include_usage": True}, **options
                    )
                    usages += [chunk.usage async for chunk in chunks if chunk.usage]
                else:
                    usages.append((await sdk.chat.completions.create(**options)).usage)
        first, second = usages
        assert first.prompt_tokens_details.cached_tokens == 0
        assert second.prompt_tokens_details.cached_tokens == first.total_tokens
        assert second.prompt_tokens == len(proxy.engine.requests[1].prompt_ids)


async def test_a_stop_string_that_ends_with_the_budgets_last_token_is_a_stop() -> None:
    async with serving(lambda prompt: "one STOP") as proxy:
        handle = await proxy.open()
        num_tokens = len(proxy.engine.tokenizer.encode("one STOP", add_special_tokens=False))
        body = {"model": "m", "messages": HI, "stop": "STOP", "max_tokens": num_tokens}
        choice = (await proxy.post(handle, body)).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("one ", "stop")


_PIXEL = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0"),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": _PIXEL}]}]},
            "input.0.content.0",
        ),
        (
            "messages",
            {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content.0",
        ),
        (
            "messages",
            {
                "max_tokens": 9,
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}],
                    },
                ],
            },
            "messages.2.content.0",
        ),
    ],
)
async def test_images_are_refused_by_place_in_the_dialects_shape(path: str, body: dict[str, Any], where: str) -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        refused = await proxy.post(handle, {"model": "m", **body}, f"/v1/{path}")
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["code"] == "unsupported_content"
        assert where in error["message"]
        assert refused.json().get("type") == ("error" if path == "messages" else None)
        assert proxy.engine.requests == []


@pytest.mark.parametrize(("path", "body"), [("chat/completions", {"messages": HI}), ("responses", {"input": "hi"})])
async def test_hints_that_change_no_answer_are_taken(path: str, body: dict[str, Any]) -> None:
    hints = {"prompt_cache_key": "k", "safety_identifier": "s", "user": "u", "metadata": {"a": "b"}, "store": False}
    async with serving() as proxy:
        answer = await proxy.post(await proxy.open(), {"model": "m", **body, **hints}, f"/v1/{path}")
        assert answer.status_code == 200, answer.text


async def test_rewards_add_up_and_are_numbers() -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        await proxy.admin.set_reward(handle.id, rewards={"style": 1.0, "passed": 0.0})
        await proxy.admin.set_reward(handle.id, 0.5, {"passed": 1.0})
        admin = {"authorization": "Bearer admin-key"}
        for reward in ("NaN", "1e999", "-Infinity", "[]"):
            body = f'{{"reward": {reward}}}'.encode()
            refused = await proxy.http.post(f"/sessions/{handle.id}/reward", content=body, headers=admin)
            assert refused.status_code == 400, reward
        result = await proxy.admin.close_session(handle.id, rewards={"speed": 2.0})
        assert result.reward == 0.5
        assert result.rewards == {"style": 1.0, "passed": 1.0, "speed": 2.0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": HI}),
        ("completions", {"prompt": "hi"}),
        ("responses", {"input": "hi"}),
        ("messages", {"messages": HI, "max_tokens": 9}),
        ("messages/count_tokens", {"messages": HI}),
    ],
)
async def test_path_and_key_alone_reach_the_same_session(path: str, body: dict[str, Any]) -> None:
    async with serving() as proxy:
        handle, other = await proxy.open(), await proxy.open()
        for prefix in ("", f"/sessions/{handle.id}"):
            assert (await proxy.post(handle, {"model": "m", **body}, f"{prefix}/v1/{path}")).status_code == 200
        refused = await proxy.post(handle, {"model": "m", **body}, f"/sessions/{other.id}/v1/{path}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "wrong_session")
        headers = {"authorization": f"Bearer {handle.api_key}"}
        view = (await proxy.http.get(f"/sessions/{handle.id}", headers=headers)).json()
        assert len(view["turns"]) == (0 if path.endswith("count_tokens") else 2)
        assert (await proxy.admin.view_session(other.id))["turns"] == []
