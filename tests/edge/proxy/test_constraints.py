"""Forced answers: the grammar that goes to the engine, tried on texts with the library that vLLM compiles it with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from seamless_verl.proxy.calls import Call, ToolChoice
from seamless_verl.proxy.engine import Ability
from seamless_verl.proxy.text.parsing import TagParser, structured_outputs
from tests.fakes import serving

HI: list[Any] = [{"role": "user", "content": "hi"}]
_CITY = {"city": {"type": "string"}}
CITY = {"type": "object", "properties": _CITY, "required": ["city"], "additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "weather", "arguments": {"town": 3}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
THINK = "<think>\nhm, <tool_call> or not\n</think>\n\n"
CALL = Call(model="m", raw_messages=HI, raw_tools=TOOLS, sampling={})


def _with(**changes: Any) -> Call:
    import dataclasses

    return dataclasses.replace(CALL, **changes)


def _takes(constraint: dict[str, Any], text: str) -> bool:
    xgrammar: Any = pytest.importorskip("xgrammar", reason="xgrammar comes with vLLM")
    if "json" in constraint:
        grammar = xgrammar.Grammar.from_json_schema(json.dumps(constraint["json"]))
    else:
        grammar = xgrammar.Grammar.from_structural_tag(constraint["structural_tag"])
    return bool(xgrammar.testing._is_grammar_accept_string(grammar, text))


REQUIRED, NONE = ToolChoice.REQUIRED, ToolChoice.NONE


@pytest.mark.parametrize(
    ("changes", "good", "bad"),
    [
        ({"tool_choice": REQUIRED}, [WEATHER, NOW, f"{WEATHER}\n{NOW}"], ["", "hello", WRONG, f"I look {WEATHER}"]),
        ({"tool_choice": REQUIRED, "parallel_tool_calls": False}, [WEATHER], [f"{WEATHER}\n{NOW}", "hello"]),
        ({"tool_choice": REQUIRED, "tool_name": "now"}, [NOW], [WEATHER, f"{NOW}\n{NOW}", ""]),
        ({"parallel_tool_calls": False}, ["hello", NOW, f"I look {WEATHER}", WRONG], [f"{NOW}\n{NOW}"]),
        (
            {"strict_tools": frozenset({"weather"})},
            ["hello", f"{WEATHER}\n{NOW}", f"so: {NOW}"],
            [WRONG, "<tool_call>\nnonsense"],
        ),
        ({"json_schema": CITY}, [WEATHER, '{"city": "Bern"}'], ["hello", '{"town": 3}']),
        ({"json_schema": CITY, "tool_choice": NONE}, ['{"city": "Bern"}'], [WEATHER, "hello"]),
        ({"json_schema": {"type": "object"}, "raw_tools": ()}, ['{"a": [1]}', "{}"], ["[1]", "hello"]),
    ],
)
def test_the_grammar_takes_what_it_should_and_nothing_else(changes: Any, good: list[str], bad: list[str]) -> None:
    call = _with(**changes)
    plain = structured_outputs(call, TagParser(), thinking=False)
    assert plain is not None
    assert [text for text in good if not _takes(plain, text)] == []
    assert [text for text in bad if _takes(plain, text)] == []
    thinks = TagParser(("<think>", "</think>"))
    tagged = structured_outputs(call, thinks, thinking=False)
    opened = structured_outputs(call, thinks, thinking=True)
    assert tagged is not None
    assert opened is not None
    for text in good:
        assert _takes(tagged, THINK + text)
        assert _takes(tagged, text)
        assert _takes(opened, THINK.removeprefix("<think>") + text)
    assert not any(_takes(tagged, THINK + text) for text in bad)
    assert not any(_takes(opened, text) for text in good)


def test_what_the_grammar_takes_is_parsed_as_calls() -> None:
    said = TagParser().parse(f"{WEATHER}\n{NOW}", TOOLS, thinking=False, call_prefix="c")
    assert [(call.name, json.loads(call.arguments)) for call in said.tool_calls] == [
        ("weather", {"city": "Bern"}),
        ("now", {}),
    ]


def test_nothing_is_forced_where_nothing_is_asked() -> None:
    assert structured_outputs(CALL, TagParser(), thinking=False) is None
    assert structured_outputs(_with(tool_choice=NONE, parallel_tool_calls=False), TagParser(), thinking=False) is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI, "tools": TOOLS, "tool_choice": "required"}),
        (
            "/v1/chat/completions",
            {"messages": HI, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}},
        ),
        (
            "/v1/responses",
            {"input": "hi", "tool_choice": "required", "tools": [{"type": "function", "name": "now"}]},
        ),
        (
            "/v1/messages",
            {
                "messages": HI,
                "max_tokens": 100,
                "tools": [{"name": "now", "input_schema": {"type": "object"}}],
                "tool_choice": {"type": "any"},
            },
        ),
    ],
)
async def test_a_required_call_reaches_an_engine_that_can(path: str, body: dict[str, Any]) -> None:
    async with serving(lambda prompt: NOW, abilities=frozenset({Ability.STRUCTURED_OUTPUTS})) as proxy:
        handle = await proxy.open()
        answer = await proxy.post(handle, {"model": "m", **body}, path)
        assert answer.status_code == 200
        assert "now" in answer.text
        assert _takes(proxy.engine.requests[0].sampling["structured_outputs"], NOW)
        assert (await proxy.admin.close_session(handle.id)).audit.is_clean


@pytest.mark.parametrize("form", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": CITY}}])
async def test_json_formats_reach_an_engine_that_can(form: dict[str, Any]) -> None:
    async with serving(lambda prompt: "{}", abilities=frozenset({Ability.STRUCTURED_OUTPUTS})) as proxy:
        handle = await proxy.open()
        answer = await proxy.post(handle, {"model": "m", "messages": HI, "response_format": form})
        assert answer.json()["choices"][0]["message"]["content"] == "{}"
        wanted = CITY if "json_schema" in form else {"type": "object"}
        assert proxy.engine.requests[0].sampling["structured_outputs"] == {"json": wanted}


SCHEMAS: list[tuple[str, dict[str, Any], str]] = [
    (
        "/v1/chat/completions",
        {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": CITY}}},
        "response_format",
    ),
    (
        "/v1/responses",
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "city", "schema": CITY}}},
        "text.format",
    ),
    (
        "/v1/messages",
        {"messages": HI, "max_tokens": 99, "output_config": {"format": {"type": "json_schema", "schema": CITY}}},
        "output_config.format",
    ),
]


@pytest.mark.parametrize(("path", "body", "field"), SCHEMAS, ids=[field for _, _, field in SCHEMAS])
async def test_a_schema_becomes_a_grammar_or_is_refused_by_its_dialects_name(
    path: str, body: dict[str, Any], field: str
) -> None:
    said = '{"city": "Bern"}'
    async with serving(lambda prompt: said, abilities=frozenset({Ability.STRUCTURED_OUTPUTS})) as proxy:
        answer = await proxy.post(await proxy.open(), {"model": "m", **body}, path)
        assert answer.status_code == 200, answer.text
        constraint = proxy.engine.requests[0].sampling["structured_outputs"]
        assert constraint == {"json": CITY}
        assert _takes(constraint, said)
        assert not _takes(constraint, '{"town": 3}')
    async with serving(abilities=frozenset()) as proxy:
        answer = await proxy.post(await proxy.open(), {"model": "m", **body}, path)
        assert answer.status_code == 400
        assert f"This value of {field} is not supported" in answer.text
        assert proxy.engine.requests == []


class _Undescribed(TagParser):
    def tool_format(self, tools: Any, *, required: bool) -> Any:
        return None


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "none", "response_format": {"type": "json_object"}}, None),
        ({"response_format": {"type": "json_object"}}, None),
        ({"tools": TOOLS}, None),
    ],
)
async def test_what_would_shut_calls_out_that_no_grammar_describes_is_refused(more: Any, refused: str | None) -> None:
    abilities = frozenset({Ability.STRUCTURED_OUTPUTS})
    async with serving(lambda prompt: "{}", abilities=abilities, parser=_Undescribed()) as proxy:
        answer = await proxy.post(await proxy.open(), {"model": "m", "messages": HI, **more})
        assert answer.status_code == (200 if refused is None else 400), answer.text
        if refused is not None:
            assert answer.json()["error"]["param"] == refused
            assert "nobody has described this model's tool calls as a grammar" in answer.text


async def test_n_samples_are_n_branches_recorded_together() -> None:
    numbers = iter(range(100))
    async with serving(lambda prompt: f"answer {next(numbers)}") as proxy:
        handle = await proxy.open(max_turns=3)
        async with proxy.sdk(handle) as sdk:
            answer = await sdk.chat.completions.create(model="m", messages=HI, n=3)
            again = {"x-stainless-retry-count": "1"}
            retry = await sdk.chat.completions.create(model="m", messages=HI, n=3, extra_headers=again)
        texts = [choice.message.content or "" for choice in answer.choices]
        assert sorted(texts) == ["answer 0", "answer 1", "answer 2"]
        assert [choice.message.content for choice in retry.choices] == texts
        assert answer.usage is not None
        assert answer.usage.completion_tokens == sum(
            len(proxy.engine.tokenizer.encode(text, add_special_tokens=False)) + 1 for text in texts
        )
        over = await proxy.post(handle, {"model": "m", "messages": HI, "n": 2})
        assert (over.status_code, over.json()["error"]["code"]) == (429, "turn_budget_exhausted")
        result = await proxy.admin.close_session(handle.id)
        assert result.audit.is_clean
        assert len(result.rows) == 3


async def test_when_one_of_n_samples_fails_none_is_recorded() -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        generate, calls = proxy.engine.generate, iter(range(10))

        async def failing(request: Any) -> Any:
            if next(calls) == 1:
                raise RuntimeError("broken")
            return await generate(request)

        proxy.engine.generate = failing  # type: ignore[method-assign]
        answer = await proxy.post(handle, {"model": "m", "messages": HI, "n": 3})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        result = await proxy.admin.close_session(handle.id)
        assert (result.rows, result.audit.is_clean, result.audit.num_generations) == ((), True, 2)


async def test_alternatives_are_shown_where_the_engine_tells_them() -> None:
    async with serving(abilities=frozenset({Ability.TOP_LOGPROBS}), streams=True) as proxy:
        handle = await proxy.open()
        for stream in (False, True):
            body = {"model": "m", "messages": HI, "logprobs": True, "top_logprobs": 2, "stream": stream}
            answer = await proxy.post(handle, body)
            assert answer.text.count('"top_logprobs":[{"token":') == len("ok")
            assert proxy.engine.requests[-1].sampling["logprobs"] == 2
        await proxy.post(handle, {"model": "m", "messages": HI, "logprobs": True})
        assert "logprobs" not in proxy.engine.requests[-1].sampling
