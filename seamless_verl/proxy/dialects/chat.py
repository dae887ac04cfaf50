"""OpenAI chat completions, the way in: from the body of a request to a checked call and canonical messages.

What cannot be honoured is refused by name, never ignored. The pydantic models are the description of the dialect; the
kernel's messages are what the rest of the proxy works with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, with_config
from typing_extensions import TypedDict

from seamless_verl.proxy.calls import ApiError, Call, ToolChoice, bad_request, refuse_infinite
from seamless_verl.proxy.dialects.chat_answer import ChatExchange
from seamless_verl.trajectory.messages import Image, Message, Role, ToolCall, join_text_parts

_Model = TypeVar("_Model", bound=BaseModel)
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
    n: int | None = Field(default=None, ge=1, lt=2**31)
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
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    # Hints about caches and abuse; they change no answer, and the proxy keeps every prefix anyway.
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


def parse_chat(body: bytes) -> ChatExchange:
    """Check a body.

    Raises:
        ApiError: 400, naming the parameter at fault.
    """
    request = validated(ChatRequest, body)
    _refuse_unsupported(request)
    tool_choice, tool_name = _tool_choice(request)
    asked: dict[str, Any] = {
        "max_tokens": request.max_completion_tokens or request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed,
        "stop": checked_stop(request.stop, "stop"),
    }
    call = Call(
        model=request.model,
        raw_messages=request.messages,
        raw_tools=request.tools or (),
        sampling={key: value for key, value in asked.items() if value is not None},
        tool_choice=tool_choice,
        tool_name=tool_name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        strict_tools=_strict_tools(request.tools or ()),
        json_schema=_json_schema(request.response_format),
        n=request.n or 1,
        logprobs=request.top_logprobs or 0 if request.logprobs else None,
        stream=bool(request.stream),
    )
    options = request.stream_options
    return ChatExchange(call=call, include_usage=options is not None and options.include_usage)


def validated(model: type[_Model], body: bytes) -> _Model:
    """A body as its dialect's model.

    Raises:
        ApiError: 400, naming the parameter at fault.
    """
    try:
        valid = model.model_validate_json(body)
    except ValidationError as error:
        raise invalid(error) from None
    refuse_infinite(body)
    return valid


def checked_stop(stop: str | list[str] | None, param: str) -> list[str] | None:
    """Stop strings as a list; None for none."""
    stops = [stop] if isinstance(stop, str) else stop
    if stops is not None and (len(stops) > 16 or not all(stops)):
        raise bad_request(f"{param} takes 1 to 16 texts that are not empty.", param=param)
    return stops or None


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


def _tool_choice(request: ChatRequest) -> tuple[ToolChoice, str]:
    choice = request.tool_choice
    if choice is None:
        return ToolChoice.AUTO, ""
    names = {tool.get("function", {}).get("name", "") for tool in request.tools or ()}
    if isinstance(choice, str):
        return checked_choice(choice, "", names, "tool_choice")
    name = choice.get("function", {}).get("name") if isinstance(choice.get("function"), dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise bad_request("tool_choice takes auto, none, required or one function by name.", param="tool_choice")
    return checked_choice("required", name, names, "tool_choice")


def checked_choice(choice: str, name: str, names: set[str], param: str) -> tuple[ToolChoice, str]:
    """A tool choice that the tools of the request allow."""
    if choice not in {known.value for known in ToolChoice}:
        raise bad_request(f"{param} is {choice[:40]!r}; it must be auto, none or required.", param=param)
    if choice == "required" and not names:
        raise bad_request(f"{param} asks for a tool, but there are no tools.", param=param)
    if name and name not in names:
        raise bad_request(f"{param} names {name[:64]!r}, which is not among the tools.", param=param)
    return ToolChoice(choice), name


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
        ("n", (request.n or 1) > 128, "at most 128 answers"),
        ("top_logprobs", bool(request.top_logprobs) and not request.logprobs, "it needs logprobs"),
        ("frequency_penalty", bool(request.frequency_penalty), "penalties change the policy that is trained"),
        ("presence_penalty", bool(request.presence_penalty), "penalties change the policy that is trained"),
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
