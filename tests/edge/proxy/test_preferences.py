"""Preferences that nobody here can honour, hints that change no answer, and what a client is told of both."""

from __future__ import annotations

from typing import Any

import pytest

from seamless_verl.proxy.calls import OnUnsupported
from tests.fakes import serving

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
RESPONSE = {"model": "m", "input": "hi"}
MESSAGE = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}
CHAT_PATH, RESPONSE_PATH, MESSAGE_PATH = "/v1/chat/completions", "/v1/responses", "/v1/messages"

WISHES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT_PATH, {**CHAT, "presence_penalty": 0.5}, "presence_penalty"),
    (CHAT_PATH, {**CHAT, "frequency_penalty": 0.5}, "frequency_penalty"),
    (CHAT_PATH, {**CHAT, "logit_bias": {"1": 1}}, "logit_bias"),
    (CHAT_PATH, {**CHAT, "reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT_PATH, {**CHAT, "verbosity": "low"}, "verbosity"),
    ("/v1/completions", {"model": "m", "prompt": "hi", "logit_bias": {"1": 1}}, "logit_bias"),
    (RESPONSE_PATH, {**RESPONSE, "reasoning": {"effort": "high"}}, "reasoning.effort"),
    (RESPONSE_PATH, {**RESPONSE, "reasoning": {"summary": "auto"}}, "reasoning.summary"),
    (RESPONSE_PATH, {**RESPONSE, "text": {"verbosity": "low"}}, "text.verbosity"),
    (RESPONSE_PATH, {**RESPONSE, "truncation": "auto"}, "truncation"),
    (RESPONSE_PATH, {**RESPONSE, "tools": [FUNCTION, {"type": "web_search"}]}, "tools.web_search"),
    (RESPONSE_PATH, {**RESPONSE, "tools": [{"type": "namespace", "name": "x", "tools": []}]}, "tools.namespace"),
    (MESSAGE_PATH, {**MESSAGE, "output_config": {"effort": "high"}}, "output_config.effort"),
    (MESSAGE_PATH, {**MESSAGE, "thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    (MESSAGE_PATH, {**MESSAGE, "tools": [SEARCH]}, "tools.web_search"),
    (
        MESSAGE_PATH,
        {**MESSAGE, "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management",
    ),
]


@pytest.mark.parametrize(("path", "body", "name"), WISHES, ids=lambda value: value if isinstance(value, str) else "")
async def test_a_preference_is_ignored_and_told_or_refused_by_name(path: str, body: dict[str, Any], name: str) -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        response = await proxy.post(handle, body, path)
        assert response.status_code == 200, response.text
        assert f"{name}=ignored" in response.headers["x-seamless-overrides"].split(", ")
        assert proxy.deps.counters.ignored == {name: 1}
        assert proxy.deps.sessions.by_id(handle.id).view()["ignored"] == {name: 1}
    async with serving(on_unsupported=OnUnsupported.REFUSE) as proxy:
        handle = await proxy.open()
        response = await proxy.post(handle, body, path)
        assert response.status_code == 400
        assert name in response.text
        assert "--on-unsupported accept" in response.text
        assert proxy.engine.requests == []


HINTS: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT_PATH,
        {**CHAT, "prompt_cache_retention": "24h", "store": True, "verbosity": "medium"},
    ),
    (CHAT_PATH, {**CHAT, "reasoning_effort": "none", "modalities": ["text"], "logit_bias": {}}),
    (CHAT_PATH, {**CHAT, "stream": True, "stream_options": {"include_obfuscation": False}}),
    (RESPONSE_PATH, {**RESPONSE, "prompt_cache_retention": "24h", "client_metadata": {"a": "b"}, "store": True}),
    (RESPONSE_PATH, {**RESPONSE, "stream": True, "stream_options": {"include_obfuscation": True}}),
    (RESPONSE_PATH, {**RESPONSE, "reasoning": {"effort": None}, "text": {"verbosity": "medium"}}),
    (
        MESSAGE_PATH,
        {
            **MESSAGE,
            "tools": [{"name": "look", "input_schema": {"type": "object"}, "eager_input_streaming": True}],
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), HINTS)
async def test_hints_are_taken_without_a_word(path: str, body: dict[str, Any]) -> None:
    async with serving(on_unsupported=OnUnsupported.REFUSE) as proxy:
        response = await proxy.post(await proxy.open(), body, path)
        assert response.status_code == 200, response.text
        assert "x-seamless-overrides" not in response.headers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSE_PATH, {**RESPONSE, "tools": [{"type": "web_search"}]}),
        (MESSAGE_PATH, {**MESSAGE, "tools": [SEARCH]}),
    ],
)
async def test_the_refusal_of_a_search_names_the_clients_setting_that_leaves_it_out(
    path: str, body: dict[str, Any]
) -> None:
    async with serving(on_unsupported=OnUnsupported.REFUSE) as proxy:
        told = (await proxy.post(await proxy.open(), body, path)).json()["error"]["message"]
    for setting in ('web_search = "disabled"', "--disallowedTools WebSearch", "WebSearchTool", "--on-unsupported"):
        assert setting in told


async def test_tools_that_nobody_here_runs_are_left_out_of_the_prompt() -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        both = await proxy.post(handle, {**RESPONSE, "tools": [{"type": "web_search"}, FUNCTION]}, RESPONSE_PATH)
        alone = await proxy.post(await proxy.open(), {**RESPONSE, "tools": [FUNCTION]}, RESPONSE_PATH)
        assert both.json()["usage"]["input_tokens"] == alone.json()["usage"]["input_tokens"]
        assert [tool["name"] for tool in both.json()["tools"]] == ["look"]


async def test_a_base_url_answers_a_head_without_its_key() -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        for path in ("/", "/v1", f"/sessions/{handle.id}", f"/sessions/{handle.id}/v1"):
            response = await proxy.http.head(path)
            assert (response.status_code, response.content) == (200, b"")


async def test_a_path_that_does_not_exist_tells_those_that_do() -> None:
    async with serving() as proxy:
        response = await proxy.http.post("/v1/embeddings", json={})
        assert response.status_code == 404
        told = response.json()["error"]
        assert told["code"] == "unknown_path"
        assert "There is no POST /v1/embeddings." in told["message"]
        assert "/v1/chat/completions" in told["message"]
        assert (await proxy.http.get("/v1/chat/completions")).status_code == 405
