"""OpenAI chat completions: from a body to a checked call, from answers to a body or to server-sent events.

The pydantic models are the description of the dialect. Every other dialect becomes a call in the shape of this one,
whose messages then become the kernel's (:func:`canonical_message`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from seamless_verl.proxy.calls import Answer, Call, Delta, bad_request, encoded
from seamless_verl.proxy.dialects.shared import (
    ChunkWriter,
    ConversationRequest,
    SampledRequest,
    chances,
    checked_stop,
    frame,
    openai_choice,
    preferences,
    refuse_values,
    sampling_of,
    usage_of,
    validated,
)
from seamless_verl.trajectory.messages import Image, Message, Role, ToolCall, join_text_parts

_ROLES = {role.value: role for role in Role} | {"developer": Role.SYSTEM}


@with_config(ConfigDict(extra="forbid"))
class FunctionSpec(TypedDict, total=False):
    name: str
    arguments: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None
    parsed_arguments: Any  # a note of OpenAI's SDKs, as below


@with_config(ConfigDict(extra="ignore"))
class RawCall(TypedDict, total=False):
    id: str
    type: str
    function: FunctionSpec


@with_config(ConfigDict(extra="forbid"))
class RawTool(TypedDict, total=False):
    type: str
    function: FunctionSpec


@with_config(ConfigDict(extra="forbid"))
class RawImage(TypedDict, total=False):
    url: str
    detail: Literal["auto", "low", "high"] | None


@with_config(ConfigDict(extra="ignore"))
class RawPart(TypedDict, total=False):
    type: str
    text: str
    image_url: RawImage


@with_config(ConfigDict(extra="forbid"))
class RawMessage(TypedDict, total=False):
    role: str
    content: str | list[RawPart] | None
    name: str | None
    tool_calls: list[RawCall] | None
    tool_call_id: str | None
    reasoning_content: str | None
    reasoning: str | None
    refusal: None
    audio: None
    function_call: None
    annotations: list[Any] | None
    # Notes that SDKs make on answers and send back with them; no part of the conversation.
    provider_specific_fields: Any
    parsed: Any


class ChatRequest(SampledRequest, ConversationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[RawMessage] = Field(min_length=1)
    tools: list[RawTool] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    reasoning_effort: str | None = Field(default=None, max_length=32)
    verbosity: str | None = Field(default=None, max_length=32)
    logprobs: bool | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None  # a hint


def parse_chat(body: bytes) -> ChatCall:
    """Check a body.

    Raises:
        ApiError: 400, naming the parameter at fault.
    """
    request = validated(ChatRequest, body)
    refuse_values(
        ("n", (request.n or 1) > 128, "at most 128 answers"),
        ("top_logprobs", bool(request.top_logprobs) and not request.logprobs, "it needs logprobs"),
    )
    tools, choice = request.tools or [], request.tool_choice
    function = choice.get("function") if isinstance(choice, dict) else None
    wished = function.get("name") if isinstance(function, dict) else None
    names = {tool.get("function", {}).get("name", "") for tool in tools}
    tool_choice, tool_name = openai_choice(choice, wished, names)
    max_tokens = request.max_completion_tokens or request.max_tokens
    options = request.stream_options
    return ChatCall(
        model=request.model,
        raw_messages=request.messages,
        raw_tools=tools,
        sampling=sampling_of(request, max_tokens, checked_stop(request.stop)),
        tool_choice=tool_choice,
        tool_name=tool_name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        strict_tools=_strict_tools(tools),
        json_schema=_json_schema(request.response_format),
        thinking=False if request.reasoning_effort == "none" else None,
        preferences=preferences(
            ("frequency_penalty", bool(request.frequency_penalty)),
            ("presence_penalty", bool(request.presence_penalty)),
            ("logit_bias", bool(request.logit_bias)),
            ("reasoning_effort", request.reasoning_effort not in (None, "none")),
            ("verbosity", request.verbosity not in (None, "medium")),
        ),
        n=request.n or 1,
        logprobs=request.top_logprobs or 0 if request.logprobs else None,
        stream=bool(request.stream),
        include_usage=options is not None and options.include_usage,
    )


def _strict_tools(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Names of the tools whose arguments must follow their schema.

    Raises:
        ApiError: 400, one of the tools is no function with a name; whatever reads tools later relies on that.
    """
    for number, tool in enumerate(tools):
        if tool.get("type") != "function" or not tool.get("function", {}).get("name"):
            where = f"tools.{number}"
            raise bad_request(f"{where}: only functions with a name are supported.", param=where)
    return frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict"))


def _json_schema(form: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if form is None:
        return None
    kind, described = form.get("type"), form.get("json_schema")
    if kind in ("text", "json_object"):
        _refuse_others(form, ("type",), "response_format")
        return {"type": "object"} if kind == "json_object" else None
    if kind != "json_schema" or not isinstance(described, dict):
        raise bad_request("response_format takes text, json_object or json_schema.", param="response_format")
    _refuse_others(form, ("type", "json_schema"), "response_format")
    _refuse_others(described, ("name", "description", "schema", "strict"), "response_format.json_schema")
    schema = described.get("schema")
    if not isinstance(schema, dict):
        raise bad_request("response_format.json_schema.schema is missing.", param="response_format")
    return schema


def _refuse_others(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    other = next((key for key, value in given.items() if key not in known and value is not None), None)
    if other is not None:
        story = f"{where}.{other[:40]} is not supported here. Leave it out."
        raise bad_request(story, param="response_format", code="unsupported_parameter")


def canonical_message(raw: Mapping[str, Any], number: int) -> Message:
    """One message of a body in canonical form; ``number`` is its place, for error messages."""
    where = f"messages.{number}"
    role = _ROLES.get(raw.get("role", ""))
    if role is None:
        raise bad_request(f"{where}.role is {raw.get('role')!r:.40}; it must be one of {sorted(_ROLES)}.", param=where)
    content = raw.get("content")
    parts = () if content is None or isinstance(content, str) else _parts_of(content, where)
    calls = raw.get("tool_calls") or ()
    if calls and role is not Role.ASSISTANT:
        raise bad_request(f"{where}: only assistant messages have tool_calls.", param=f"{where}.tool_calls")
    if content is None and role is not Role.ASSISTANT:
        raise bad_request(f"{where}.content is missing.", param=f"{where}.content")
    return Message(
        role=role,
        content=content if isinstance(content, str) else join_text_parts(tuple(p for p in parts if isinstance(p, str))),
        parts=parts if any(isinstance(part, Image) for part in parts) else (),
        tool_calls=tuple(_canonical_call(call, where) for call in calls),
        tool_call_id=raw.get("tool_call_id") or "",
        name=raw.get("name") or "",
        reasoning=raw.get("reasoning_content") or raw.get("reasoning") or "",
    )


def _parts_of(parts: Sequence[Mapping[str, Any]], where: str) -> tuple[str | Image, ...]:
    """Texts, and the pictures that :mod:`~seamless_verl.proxy.text.pictures` has put in place of their URLs."""
    found: list[str | Image] = []
    for number, part in enumerate(parts):
        if part.get("type") == "text" and "text" in part:
            found.append(part["text"])
        elif part.get("type") == "image_url" and isinstance(part.get("image_url"), Image):
            found.append(part["image_url"])
        else:
            raise bad_request(
                f"{where}.content.{number} has type {part.get('type')!r:.40}; this model takes text and pictures only.",
                param=f"{where}.content.{number}",
                code="unsupported_content",
            )
    return tuple(found)


def _canonical_call(call: Mapping[str, Any], where: str) -> ToolCall:
    function = call.get("function", {})
    if call.get("type", "function") != "function" or "name" not in function:
        raise bad_request(f"{where}.tool_calls: each call needs type function and a name.", param=f"{where}.tool_calls")
    return ToolCall(id=call.get("id", ""), name=function["name"], arguments=function.get("arguments", ""))


def canonical_tools(raw: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Tools as JSON texts, key order as sent: templates write them into the prompt that way."""
    return tuple(json.dumps(tool, ensure_ascii=False) for tool in raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall(Call):
    """One chat completion."""

    include_usage: bool

    def body(self, answers: Sequence[Answer]) -> bytes:
        choices = [
            {
                "index": number,
                "message": _message(answer),
                "logprobs": _logprobs(answer) if self.logprobs is not None else None,
                "finish_reason": answer.finish_reason,
            }
            for number, answer in enumerate(answers)
        ]
        head = frame(answers[0], self, "chatcmpl", "chat.completion")
        return encoded({**head, "choices": choices, "usage": usage_of(answers)})

    def writer(self) -> ChatWriter:
        return ChatWriter(self, "chatcmpl", "chat.completion.chunk", include_usage=self.include_usage)


def _message(answer: Answer) -> dict[str, Any]:
    said = answer.message
    message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
    if said.tool_calls:
        message["content"] = said.content or None
        message["tool_calls"] = [_wire_call(tool_call) for tool_call in said.tool_calls]
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    return message


def _wire_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(said: Answer | Delta) -> dict[str, Any]:
    return {"content": chances(said.tokens), "refusal": None}


class ChatWriter(ChunkWriter):
    """Per answer: role, text, tool calls, finish."""

    def start(self, head: Answer) -> bytes:
        self._head = head
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk([_choice(number, role)]) for number in range(self._call.n))

    def delta(self, delta: Delta) -> bytes:
        texts = {"reasoning_content": delta.reasoning, "content": delta.content}
        choice = _choice(delta.index, {key: text for key, text in texts.items() if text})
        if delta.tokens:
            choice["logprobs"] = _logprobs(delta)
        return self._chunk([choice])

    def end(self, answers: Sequence[Answer]) -> bytes:
        chunks: list[bytes] = []
        for number, answer in enumerate(answers):
            calls = [{"index": at, **_wire_call(call)} for at, call in enumerate(answer.message.tool_calls)]
            chunks.extend(self._chunk([_choice(number, {"tool_calls": [call]})]) for call in calls)
            chunks.append(self._chunk([_choice(number, {}, answer.finish_reason)]))
        return b"".join([*chunks, self._last(answers)])


def _choice(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish_reason}
