"""Agents with the real OpenAI SDK against a real server: what they get, and what is recorded."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import threading
from typing import Any

import openai
import pytest

from seamless_verl.proxy.engine import EngineUnavailable
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.text.parsing import TagParser
from seamless_verl.proxy.text.tokenizer import bytes_of
from tests.fakes import CHATML, serving

HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}
]


NINE = (  # Mistral v0.3's condition
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}{% if c.id|length != 9 %}{{ raise_exception('length 9!') }}{% endif %}"
    "<{{ c.function.name }} {{ c.id }}>{%- endfor %}"
    "{%- if m.role == 'tool' %}{% if m.tool_call_id|length != 9 %}{{ raise_exception('length 9!') }}{% endif %}"
    " to {{ m.tool_call_id }}{% endif %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


async def test_a_template_that_takes_short_ids_of_calls_only_gets_them() -> None:
    call = '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
    async with serving(lambda prompt: "done" if "tool" in prompt else call * 2, template=NINE) as proxy:
        handle = await proxy.open()
        first = await proxy.post(handle, {"model": "m", "messages": HI, "tools": TOOLS})
        answer = first.json()["choices"][0]["message"]
        results = [{"role": "tool", "tool_call_id": made["id"], "content": "ok"} for made in answer["tool_calls"]]
        second = await proxy.post(handle, {"model": "m", "messages": [*HI, answer, *results], "tools": TOOLS})
        assert (second.status_code, second.headers["x-seamless-match"]) == (200, "clean"), second.text
        prompt = proxy.engine.tokenizer.decode(list(proxy.engine.requests[-1].prompt_ids))
        told = re.findall(r" to (\w{9})<", prompt)
        assert len(set(told)) == 2
        # Rendered as a whole, the calls carry the same names.
        third = await proxy.post(
            handle, {"model": "m", "messages": [{"role": "user", "content": "no"}, answer, *results], "tools": TOOLS}
        )
        assert third.status_code == 200, third.text
        prompt = proxy.engine.tokenizer.decode(list(proxy.engine.requests[-1].prompt_ids))
        assert re.findall(r"<run (\w{9})>", prompt) == re.findall(r" to (\w{9})<", prompt) == told


@pytest.mark.parametrize("where", ["tools", "arguments", "reasoning"])
async def test_what_takes_long_to_render_holds_nobody_up(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    long, threads = 100_000 * "x", []
    async with serving() as proxy:
        handle, render = await proxy.open(), proxy.deps.renderer.render_initial
        monkeypatch.setattr(
            proxy.deps.renderer,
            "render_initial",
            lambda *given: threads.append(threading.current_thread()) or render(*given),
        )
        arguments = json.dumps({"a": long if where == "arguments" else ""})
        call = {"id": "a", "type": "function", "function": {"name": "run", "arguments": arguments}}
        answer = {"role": "assistant", "reasoning_content": long if where == "reasoning" else "", "tool_calls": [call]}
        tools = [{"type": "function", "function": {"name": "run", "description": long if where == "tools" else ""}}]
        asked = [*HI, answer, {"role": "tool", "tool_call_id": "a", "content": "out"}]
        body = {"model": "m", "messages": asked, "tools": tools}
        assert (await proxy.post(handle, body)).status_code == 200
        assert threads
        assert threading.main_thread() not in threads


async def test_a_conversation_is_one_row_and_its_audit_is_clean() -> None:
    async with serving(lambda prompt: f"answer {prompt.count('<|im_end|>')}") as proxy:
        handle = await proxy.open(group="g7", index=3, metadata={"task": 1})
        messages = [{"role": "system", "content": "be good"}, *HI]
        async with proxy.sdk(handle) as sdk:
            for number in range(3):
                answer = await sdk.chat.completions.create(model="whatever", messages=messages)
                assert answer.model == "whatever"
                assert answer.choices[0].message.content == f"answer {2 + 2 * number}"
                assert answer.choices[0].finish_reason == "stop"
                assert answer.usage is not None
                assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
                messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
        result = await proxy.admin.close_session(handle.id, 0.5, {"passed": 1.0})
        assert (result.group, result.index, result.metadata) == ("g7", 3, {"task": 1})
        assert (result.reward, result.rewards) == (0.5, {"passed": 1.0})
        assert result.audit.is_clean
        assert (result.kinds, result.drift) == ({"clean": 3}, {})
        (row,) = result.rows
        sent = proxy.engine.requests[-1]
        assert row.token_ids[: len(sent.prompt_ids)] == tuple(sent.prompt_ids)
        assert {span.version for span in row.version_spans} == {3, 4}
        stats = await proxy.admin.stats()
        assert (stats["turns"], stats["rows_audited"], stats["violations"], stats["in_flight"]) == (3, 1, 0, 0)
        assert stats["busy_s"] > 0


async def test_the_key_alone_reaches_the_session() -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        async with openai.AsyncOpenAI(base_url=f"{proxy.server.base_url}/v1", api_key=handle.api_key) as sdk:
            assert [model.id async for model in sdk.models.list()] == ["tiny"]
            await sdk.chat.completions.create(model="tiny", messages=HI)
        assert (await proxy.admin.view_session(handle.id))["turns"][0]["kind"] == "clean"


async def test_streaming_is_well_formed_and_recorded_like_any_other_answer() -> None:
    async with serving(lambda prompt: "some words") as proxy:
        handle = await proxy.open()
        async with proxy.sdk(handle) as sdk:
            stream = await sdk.chat.completions.create(
                model="m", messages=HI, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "some words"
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert len({chunk.id for chunk in chunks}) == 1
        raw = await proxy.post(handle, {"model": "m", "messages": HI, "stream": True})
        assert raw.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in raw.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        assert all(json.loads(line.removeprefix("data: "))["object"] for line in lines[:-1])
        assert (await proxy.admin.close_session(handle.id)).audit.is_clean


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_go_out_and_come_back(stream: bool) -> None:
    def script(prompt: str) -> str:
        if "<|im_start|>tool" in prompt:
            return "done"
        return 'let me see <tool_call>\n{"name": "run", "arguments": {"b": 1, "a": "é"}}\n</tool_call>'

    async with serving(script) as proxy:
        handle = await proxy.open()
        async with proxy.sdk(handle) as sdk:
            if stream:
                events = await sdk.chat.completions.create(model="m", messages=HI, tools=TOOLS, stream=True)
                deltas = [event.choices[0] async for event in events]
                calls = [call for delta in deltas for call in delta.delta.tool_calls or []]
                assert deltas[-1].finish_reason == "tool_calls"
            else:
                answer = await sdk.chat.completions.create(model="m", messages=HI, tools=TOOLS)
                calls = answer.choices[0].message.tool_calls or []  # type: ignore[assignment]
                assert answer.choices[0].finish_reason == "tool_calls"
            (call,) = calls
            assert call.function is not None
            assert json.loads(call.function.arguments or "") == {"b": 1, "a": "é"}
            respelled = json.dumps({"a": "é", "b": 1.0}, indent=1)
            back = [
                *HI,
                {
                    "role": "assistant",
                    "content": "let me see",
                    "tool_calls": [
                        {"id": call.id, "type": "function", "function": {"name": "run", "arguments": respelled}}
                    ],
                },
                {"role": "tool", "tool_call_id": call.id, "content": "out"},
            ]
            await sdk.chat.completions.create(model="m", messages=back, tools=TOOLS)
        result = await proxy.admin.close_session(handle.id)
        assert result.audit.is_clean
        assert len(result.rows) == 1
        assert result.drift == {"arguments_respelled": 1}


async def test_without_tools_a_call_is_just_text() -> None:
    async with serving(lambda prompt: '<tool_call>{"name": "run"}</tool_call>') as proxy:
        handle = await proxy.open()
        for extra in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            answer = await proxy.post(handle, {"model": "m", "messages": HI, **extra})
            assert answer.json()["choices"][0]["message"]["content"].startswith("<tool_call>")


async def test_reasoning_is_kept_apart() -> None:
    async with serving(
        lambda prompt: "<think>\nsince\n</think>\n\nyes", parser=TagParser(("<think>", "</think>"))
    ) as proxy:
        handle = await proxy.open()
        message = (await proxy.post(handle, {"model": "m", "messages": HI})).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("yes", "since")
        history = [*HI, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go"}]
        answer = await proxy.post(handle, {"model": "m", "messages": history})
        assert answer.headers["x-seamless-match"] == "realign"
        assert (await proxy.admin.close_session(handle.id)).drift == {"reasoning_dropped": 1}


async def test_sampling_reaches_the_engine_and_overrides_are_announced() -> None:
    async with serving(lambda prompt: "one two STOP three") as proxy:
        handle = await proxy.open(sampling={"temperature": 1.0, "top_p": 0.9, "seed": 11})
        body = {"model": "m", "messages": HI, "temperature": 0.2, "max_tokens": 50, "stop": "STOP", "top_p": 0.9}
        first = await proxy.post(handle, body)
        assert first.headers["x-seamless-overrides"] == "temperature=1.0"
        assert first.json()["choices"][0]["message"]["content"] == "one two "
        await proxy.post(handle, body)
        one, two = (request.sampling for request in proxy.engine.requests)
        assert {key: one[key] for key in ("temperature", "top_p", "max_tokens", "stop")} == {
            "temperature": 1.0,
            "top_p": 0.9,
            "max_tokens": 50,
            "stop": ["STOP"],
        }
        assert one["seed"] != two["seed"]
        capped = await proxy.open(sampling={"max_tokens": 3})
        for asked, got in ((2, 2), (None, 3), (9, 3)):
            answer = await proxy.post(capped, {"model": "m", "messages": HI, "max_tokens": asked})
            assert answer.json()["usage"]["completion_tokens"] == got
            assert ("x-seamless-overrides" in answer.headers) == (asked == 9)
        plain = await proxy.open()
        await proxy.post(plain, {"model": "m", "messages": HI, "seed": 5, "max_completion_tokens": 2})
        assert proxy.engine.requests[-1].sampling == {"seed": 5, "max_tokens": 2}


async def test_an_agents_seed_makes_no_copies_of_one_answer_in_a_group() -> None:
    async with serving(lambda prompt: "one") as proxy:
        for index in (0, 1, 0):
            handle = await proxy.open(group="task", index=index)
            answer = await proxy.post(handle, {"model": "m", "messages": HI, "seed": 5, "n": 2})
            assert answer.headers["x-seamless-overrides"] == "seed=mixed"
        seeds = [request.sampling["seed"] for request in proxy.engine.requests]
        assert seeds[:2] == seeds[4:], "the same member, the same noise"
        assert len(set(seeds)) == 4


async def test_an_openers_seed_makes_no_copies_of_one_answer_in_a_group() -> None:
    async with serving(lambda prompt: "one") as proxy:
        for index in (0, 1, 0):
            handle = await proxy.open(group="task", index=index, sampling={"seed": 5})
            assert (await proxy.post(handle, {"model": "m", "messages": HI})).status_code == 200
        first, other, again = [request.sampling["seed"] for request in proxy.engine.requests]
        assert first == again != other


async def test_the_bytes_of_a_token_are_its_own_also_where_they_are_part_of_a_character() -> None:
    for streams in (False, True):
        async with serving(lambda prompt: "grü€n", streams=streams) as proxy, proxy.sdk(await proxy.open()) as sdk:
            if streams:
                chunks = await sdk.chat.completions.create(model="m", messages=HI, logprobs=True, stream=True)
                told = [chunk.choices[0].logprobs async for chunk in chunks if chunk.choices]
                tokens = [token for found in told if found for token in found.content or []]
            else:
                answer = await sdk.chat.completions.create(model="m", messages=HI, logprobs=True)
                assert answer.choices[0].logprobs is not None
                tokens = answer.choices[0].logprobs.content or []
            assert bytes(byte for token in tokens for byte in token.bytes or []).decode() == "grü€n"
            assert len(tokens) > len("grü€n"), "some of them are parts of a character"


@pytest.mark.parametrize(
    ("piece", "own"),
    [("\u00e2", b"\xe2"), ("\u0120a", b" a"), ("<0xE2>", b"\xe2"), ("\u0143", b"\xad"), ("\u4e2d", None)],
)
def test_how_vocabularies_spell_bytes(piece: str, own: bytes | None) -> None:
    assert bytes_of(piece) == own


async def test_logprobs_end_with_the_text_where_characters_take_several_tokens() -> None:
    async with serving(lambda prompt: "👍🎉 日本 pass now STOP and on") as proxy:
        handle = await proxy.open()
        answer = await proxy.post(handle, {"model": "m", "messages": HI, "stop": ["STOP"], "logprobs": True})
        choice = answer.json()["choices"][0]
        assert choice["message"]["content"] == "👍🎉 日本 pass now "
        spelled = [byte for token in choice["logprobs"]["content"] for byte in token["bytes"]]
        assert bytes(spelled).decode() == choice["message"]["content"]


async def test_length_and_logprobs() -> None:
    async with serving(lambda prompt: "one two three") as proxy:
        handle = await proxy.open()
        answer = await proxy.post(handle, {"model": "m", "messages": HI, "max_tokens": 2, "logprobs": True})
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert "".join(token["token"] for token in choice["logprobs"]["content"]) == choice["message"]["content"]
        assert all(token["logprob"] < 0 for token in choice["logprobs"]["content"])


async def test_parallel_branches_and_sub_agents() -> None:
    async with serving(lambda prompt: f"a{len(prompt)}", delay_s=0.02) as proxy:
        handle = await proxy.open()
        async with proxy.sdk(handle) as sdk:
            first = await sdk.chat.completions.create(model="m", messages=HI)
            history = [*HI, {"role": "assistant", "content": first.choices[0].message.content}]
            requests = [[*history, {"role": "user", "content": "x" * n}] for n in range(1, 5)]
            requests.append([{"role": "system", "content": "a sub-agent"}, *HI])
            await asyncio.gather(*(sdk.chat.completions.create(model="m", messages=r) for r in requests))
        result = await proxy.admin.close_session(handle.id)
        assert result.audit.is_clean
        assert len(result.rows) == 5
        assert result.drift == {"branched": 3, "system_changed": 1}


async def test_two_identical_requests_at_once_get_one_generation() -> None:
    async with serving(delay_s=0.1) as proxy:
        handle = await proxy.open()
        body = {"model": "m", "messages": HI}
        one, two = await asyncio.gather(proxy.post(handle, body), proxy.post(handle, body))
        assert one.content == two.content
        retry = await proxy.post(handle, body, **{"x-stainless-retry-count": "1"})
        assert retry.content == one.content
        assert len(proxy.engine.requests) == 1
        await proxy.post(handle, body, **{"x-stainless-retry-count": "0"})
        assert len(proxy.engine.requests) == 2
        stats = await proxy.admin.stats()
        assert (stats["retries_joined"], stats["retries_replayed"]) == (1, 1)


async def test_an_sdk_that_times_out_finds_its_answer_when_it_retries() -> None:
    async with serving(delay_s=0.6) as proxy:
        handle = await proxy.open()
        async with proxy.sdk(handle, timeout=0.4, max_retries=2) as sdk:
            answer = await sdk.chat.completions.create(model="m", messages=HI)
        assert answer.choices[0].message.content == "ok"
        assert len(proxy.engine.requests) == 1
        result = await proxy.admin.close_session(handle.id)
        assert (result.audit.num_generations, len(result.rows)) == (1, 1)


async def test_a_client_that_leaves_for_good_leaves_no_trace() -> None:
    async with serving(delay_s=5.0, limits=Limits(orphan_grace_s=0.05)) as proxy:
        handle = await proxy.open()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(proxy.post(handle, {"model": "m", "messages": HI}), 0.3)
        for _ in range(100):
            if proxy.engine.num_cancelled:
                break
            await asyncio.sleep(0.02)
        assert proxy.engine.num_cancelled == 1
        assert (await proxy.admin.stats())["in_flight"] == 0
        result = await proxy.admin.close_session(handle.id)
        assert (result.rows, result.audit.num_generations, result.kinds) == ((), 0, {})


async def test_an_answer_that_lands_after_its_client_left_is_discarded() -> None:
    async with serving(delay_s=0.3, limits=Limits(orphan_grace_s=0.6)) as proxy:
        handle = await proxy.open()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(proxy.post(handle, {"model": "m", "messages": HI}), 0.15)
        await asyncio.sleep(1.0)
        assert (await proxy.admin.view_session(handle.id))["turns"] == []
        result = await proxy.admin.close_session(handle.id)
        assert result.rows == ()
        assert result.audit.is_clean
        assert result.audit.num_generations == 1


async def test_closing_cancels_what_is_in_flight() -> None:
    async with serving(delay_s=5.0) as proxy:
        handle = await proxy.open()
        asking = asyncio.create_task(proxy.post(handle, {"model": "m", "messages": HI}))
        await proxy.engine.started.wait()
        result = await proxy.admin.close_session(handle.id)
        assert result.rows == ()
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_closed")


async def test_an_engine_that_is_away_is_a_503_that_sdks_retry() -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        proxy.engine.failure = EngineUnavailable("all replicas drained")
        answer = await proxy.post(handle, {"model": "m", "messages": HI})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "all replicas drained" in answer.json()["error"]["message"]
        proxy.engine.failure = None
        assert (await proxy.post(handle, {"model": "m", "messages": HI})).status_code == 200
        assert (await proxy.admin.close_session(handle.id)).audit.is_clean


async def test_long_prompts_are_rendered_beside_the_event_loop_with_the_same_result() -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        long = "the quick brown fox " * 3000
        answer = await proxy.post(handle, {"model": "m", "messages": [{"role": "user", "content": long}]})
        assert answer.status_code == 200
        assert long in proxy.engine.tokenizer.decode(proxy.engine.requests[0].prompt_ids)
        assert (await proxy.admin.close_session(handle.id)).audit.is_clean


async def test_an_engine_that_contradicts_itself_trains_nothing() -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        generate = proxy.engine.generate

        async def lying(request: Any) -> Any:
            return dataclasses.replace(await generate(request), log_probs=())

        proxy.engine.generate = lying  # type: ignore[method-assign]
        answer = await proxy.post(handle, {"model": "m", "messages": HI})
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_error")
        proxy.engine.generate = generate  # type: ignore[method-assign]
        await proxy.post(handle, {"model": "m", "messages": HI})
        result = await proxy.admin.close_session(handle.id)
        assert result.audit.is_clean
        assert (len(result.rows), result.audit.num_generations) == (1, 2)


NAMED = CHATML.replace("{{ m.role }}", "{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}")


@pytest.mark.parametrize(("template", "num_rows"), [(CHATML, 1), (NAMED, 2)], ids=["silent", "printed"])
async def test_a_name_that_an_agent_adds_to_its_answer_is_another_history_only_where_the_template_prints_it(
    template: str, num_rows: int
) -> None:
    async with serving(template=template) as proxy:
        handle = await proxy.open()
        async with proxy.sdk(handle) as sdk:
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            said = await sdk.chat.completions.create(model="m", messages=messages)
            messages += [{"role": "assistant", "content": said.choices[0].message.content, "name": "counter"}]
            messages += [{"role": "user", "content": "more"}]
            await sdk.chat.completions.create(model="m", messages=messages)
        result = await proxy.admin.close_session(handle.id)
    assert len(result.rows) == num_rows
    assert result.audit.is_clean
