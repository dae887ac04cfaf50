"""Tool calls that are none: in requests they are refused, in answers they stay what the model said; never a 5xx."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from seamless_verl.proxy.calls import ApiError
from seamless_verl.proxy.dialects.responses import parse_responses
from seamless_verl.proxy.engine import Ability
from seamless_verl.proxy.journal.sqlite_journal import SqliteJournal
from seamless_verl.proxy.text.parsing import TagParser
from tests.fakes import serving

HI: list[Any] = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CHAT: dict[str, Any] = {"model": "m", "messages": HI, "tools": [{"type": "function", "function": FUNCTION}]}
CLAUDE: dict[str, Any] = {
    "model": "m",
    "messages": HI,
    "max_tokens": 4000,
    "tools": [{"name": "f", "input_schema": {}}],
}


# How deep JSON may be depends on how deep the stack already is, so every depth around the limit is tried.
DEPTHS = (*range(900, 1000), 3000)


def _deep(depth: int) -> str:
    return '{"a": ' + "[" * depth + "]" * depth + "}"


def _call(arguments: str, name: str = "f") -> str:
    return f'so <tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _saying(text: str) -> Callable[[str], str]:
    return lambda prompt: text


@pytest.mark.parametrize("tool", [{}, {"type": "function"}, {"type": "function", "function": {"parameters": {}}}])
@pytest.mark.parametrize(
    "wish",
    [{}, {"tool_choice": "required"}, {"parallel_tool_calls": False}, {"response_format": {"type": "json_object"}}],
)
async def test_a_tool_without_a_name_is_refused_whatever_is_wished_for(
    tool: dict[str, Any], wish: dict[str, Any]
) -> None:
    async with serving(abilities=frozenset(Ability)) as proxy:
        handle = await proxy.open()
        answer = await proxy.post(handle, {"model": "m", "messages": HI, "tools": [tool], **wish})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools.0")


@pytest.mark.parametrize("part", ["text", 7, None, ["text"]])
@pytest.mark.parametrize("item", [{"role": "user"}, {"type": "function_call_output", "call_id": "c"}])
def test_a_part_that_is_no_object_is_refused_by_its_place(part: Any, item: dict[str, Any]) -> None:
    field = "output" if "type" in item else "content"
    with pytest.raises(ApiError) as refused:
        parse_responses(json.dumps({"model": "m", "input": [{**item, field: [part]}]}).encode())
    assert (refused.value.status, refused.value.param) == (400, f"input.0.{field}.0")


@pytest.mark.parametrize(
    "text",
    [
        _call('{"x": NaN}'),
        _call('{"x": 1e999}'),
        _call('{"x": -Infinity}'),
        _call(r'{"x": "\ud83d"}'),
        _call(r'"\ud83d"'),
        _call("{}", name=r"\ud83d"),
        _call(_deep(3000)),
    ],
)
def test_a_call_that_nobody_can_write_stays_content(text: str) -> None:
    parse = partial(TagParser().parse, tools=[{"type": "function", "function": FUNCTION}], thinking=False)
    said = parse(text, call_prefix="c")
    assert (said.content, said.tool_calls) == (text, ())
    both = parse(text + _call("{}"), call_prefix="c")  # what stands beside it is still a call
    assert [(call.id, call.arguments) for call in both.tool_calls] == [("c0", "{}")]
    assert both.content.startswith(text)


ODD = {
    "nan": _call('{"x": NaN}'),
    "infinite": _call('{"x": 1e999}'),
    "half a character": _call(r'{"x": "\ud83d"}'),
    "nan in a text": _call(r'"{\"x\": NaN}"'),
    "infinite in a text": _call(r'"{\"x\": 1e999}"'),
    "half a character in a text": _call(r'"{\"x\": \"\\ud83d\"}"'),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
async def test_what_the_model_makes_of_a_call_reaches_its_agent_and_can_be_continued(
    text: str, stream: bool, tmp_path: Path
) -> None:
    def say(prompt: str) -> str:
        return "done" if "go on" in prompt else text

    journal = SqliteJournal(tmp_path / "journal.db")
    async with serving(say, streams=stream, journal=journal) as proxy:
        handle = await proxy.open()
        async with proxy.claude(handle, max_retries=0) as claude:
            if stream:
                async with claude.messages.stream(**CLAUDE) as events:
                    said = await events.get_final_message()
            else:
                said = await claude.messages.create(**CLAUDE)
            uses = [block for block in said.content if block.type == "tool_use"]
            json.dumps([use.input for use in uses], allow_nan=False)
            results = [{"type": "tool_result", "tool_use_id": use.id, "content": "out"} for use in uses]
            more = {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]}
            history = [*HI, {"role": "assistant", "content": said.content}, more]
            last = await claude.messages.create(**{**CLAUDE, "messages": history})
        assert [block.text for block in last.content] == ["done"]
        result = await proxy.admin.close_session(handle.id)
        assert (result.audit.is_clean, sum(result.kinds.values())) == (True, 2)
    await journal.close()


async def test_calls_of_any_depth_are_no_server_error() -> None:
    async with serving() as proxy:
        for depth in DEPTHS:
            for said in (_call(_deep(depth)), _call(json.dumps(_deep(depth)))):
                proxy.engine.script = _saying(said)
                handle = await proxy.open()
                answer = await proxy.post(handle, {**CLAUDE, "max_tokens": 10_000}, "/v1/messages")
                assert answer.status_code == 200, (depth, answer.text)
                assert answer.json()["stop_reason"] in ("tool_use", "end_turn")


async def test_arguments_of_any_depth_in_a_history_are_no_server_error() -> None:
    async with serving() as proxy:
        for depth in DEPTHS:
            handle = await proxy.open()
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": _deep(depth)}}
            said = {"role": "assistant", "content": "", "tool_calls": [call]}
            history = [*HI, said, {"role": "tool", "tool_call_id": "c", "content": "out"}]
            answer = await proxy.post(handle, {**CHAT, "messages": history})
            assert answer.status_code in (200, 400), (depth, answer.text)
