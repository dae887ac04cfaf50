"""OpenAI chat completions, the way in: from the body of a request to a checked call and canonical messages.

What cannot be honoured is refused by name, never ignored. The pydantic models are the description of the dialect; the
kernel's messages are what the rest of the proxy works with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, with_config
from typing_extensions import TypedDict

from seamless_verl.proxy.errors import ApiError, bad_request
from seamless_verl.trajectory.messages import Message, Role, ToolCall, join_text_parts

_ROLES = {role.value: role for role in Role} | {"developer": Role.SYSTEM}


@with_config(ConfigDict(extra="forbid"))
class FunctionSpec(TypedDict, total=False):
    name: str
    arguments: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


@with_config(ConfigDict(extra="ignore"))
class RawCall(TypedDict, total=False):
    id: str
    type: str
    function: FunctionSpec


@with_config(ConfigDict(extra="forbid"))
class RawTool(TypedDict, total=False):
    type: str
    function: FunctionSpec


@with_config(ConfigDict(extra="ignore"))
class RawPart(TypedDict, total=False):
    type: str
    text: str


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
    provider_specific_fields: Any  # litellm's own notes, sent back with every answer; no part of the conversation


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class ChatRequest(BaseModel):
    """Body of ``POST /v1/chat/completions``."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str = Field(max_length=256)
    messages: list[RawMessage] = Field(min_length=1)
    tools: list[RawTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A checked request, before its messages became canonical."""

    model: str
    raw_messages: Sequence[Mapping[str, Any]]
    raw_tools: Sequence[Mapping[str, Any]]
    sampling: Mapping[str, Any]
    parse_tools: bool
    logprobs: bool
    stream: bool
    include_usage: bool


def parse_chat(body: bytes) -> ChatCall:
    """Check a body.

    Raises:
        ApiError: 400, naming the parameter at fault.
    """
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        raise invalid(error) from None
    _refuse_unsupported(request)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    if stop is not None and (len(stop) > 16 or not all(stop)):
        raise bad_request("stop takes 1 to 16 texts that are not empty.", param="stop")
    asked: dict[str, Any] = {
        "max_tokens": request.max_completion_tokens or request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed,
        "stop": stop or None,
    }
    return ChatCall(
        model=request.model,
        raw_messages=request.messages,
        raw_tools=request.tools or (),
        sampling={key: value for key, value in asked.items() if value is not None},
        parse_tools=bool(request.tools) and request.tool_choice != "none",
        logprobs=bool(request.logprobs),
        stream=bool(request.stream),
        include_usage=request.stream_options is not None and request.stream_options.include_usage,
    )


def invalid(error: ValidationError) -> ApiError:
    """A validation error in OpenAI's words: the first problem, by name."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:200]
    if first["type"] == "json_invalid":
        return bad_request(f"The body is not valid JSON: {first['msg']}.", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return bad_request(f"{where} is not supported here. Leave it out.", param=where, code="unsupported_parameter")
    return bad_request(f"{where}: {first['msg']}.", param=where)


def _refuse_unsupported(request: ChatRequest) -> None:
    """Parameters that exist in the dialect but would change what is generated in ways this proxy does not offer."""
    problems = (
        ("n", request.n not in (None, 1), "only one answer per request; send the request again for another sample"),
        ("top_logprobs", bool(request.top_logprobs), "only the log-prob of the chosen token is recorded"),
        ("frequency_penalty", bool(request.frequency_penalty), "penalties change the policy that is trained"),
        ("presence_penalty", bool(request.presence_penalty), "penalties change the policy that is trained"),
        ("parallel_tool_calls", request.parallel_tool_calls is False, "the model decides how many calls it makes"),
        (
            "tool_choice",
            request.tool_choice not in (None, "auto", "none"),
            "only auto and none; required and named choices need constrained decoding",
        ),
        (
            "response_format",
            request.response_format is not None and request.response_format.get("type") != "text",
            "only text; JSON formats need constrained decoding",
        ),
    )
    for param, is_wrong, why in problems:
        if is_wrong:
            raise bad_request(f"This value of {param} is not supported: {why}.", param=param, code="unsupported_value")


def canonical_message(raw: Mapping[str, Any], number: int) -> Message:
    """One message of a body in canonical form; ``number`` is its place, for error messages."""
    where = f"messages.{number}"
    role = _ROLES.get(raw.get("role", ""))
    if role is None:
        raise bad_request(f"{where}.role is {raw.get('role')!r:.40}; it must be one of {sorted(_ROLES)}.", param=where)
    content = raw.get("content")
    calls = raw.get("tool_calls") or ()
    if calls and role is not Role.ASSISTANT:
        raise bad_request(f"{where}: only assistant messages have tool_calls.", param=f"{where}.tool_calls")
    if content is None and role is not Role.ASSISTANT:
        raise bad_request(f"{where}.content is missing.", param=f"{where}.content")
    return Message(
        role=role,
        content=content if isinstance(content, str) else _text_of(content or (), where),
        tool_calls=tuple(_canonical_call(call, where) for call in calls),
        tool_call_id=raw.get("tool_call_id") or "",
        name=raw.get("name") or "",
        reasoning=raw.get("reasoning_content") or raw.get("reasoning") or "",
    )


def _text_of(parts: Sequence[Mapping[str, Any]], where: str) -> str:
    for number, part in enumerate(parts):
        if part.get("type") != "text" or "text" not in part:
            raise bad_request(
                f"{where}.content.{number} has type {part.get('type')!r:.40}; this model takes text only.",
                param=f"{where}.content.{number}",
                code="unsupported_content",
            )
    return join_text_parts(tuple(part["text"] for part in parts))


def _canonical_call(call: Mapping[str, Any], where: str) -> ToolCall:
    function = call.get("function", {})
    if call.get("type", "function") != "function" or "name" not in function:
        raise bad_request(f"{where}.tool_calls: each call needs type function and a name.", param=f"{where}.tool_calls")
    return ToolCall(id=call.get("id", ""), name=function["name"], arguments=function.get("arguments", ""))


def canonical_tools(raw: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Tools as JSON texts, key order as sent: templates write them into the prompt that way."""
    for number, tool in enumerate(raw):
        if tool.get("type") != "function" or not tool.get("function", {}).get("name"):
            where = f"tools.{number}"
            raise bad_request(f"{where}: only functions with a name are supported.", param=where)
    return tuple(json.dumps(tool, ensure_ascii=False) for tool in raw)
