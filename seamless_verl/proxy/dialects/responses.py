"""OpenAI responses, the way in: from a body to a call in the shape of chat completions.

===========================  =======================================================
item                         becomes
===========================  =======================================================
``instructions``             a system message
``message``                  a message; its text parts joined, its pictures between them
``reasoning``                reasoning of the assistant message that follows
``function_call``            a tool call of the assistant message before it
``function_call_output``     a tool message
anything else                refused by name
===========================  =======================================================

One answer comes back as several items; those in a row are one assistant message again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from seamless_verl.proxy.calls import ApiError, Call, ToolChoice, bad_request
from seamless_verl.proxy.dialects.chat import checked_choice, validated
from seamless_verl.proxy.dialects.responses_answer import ResponsesExchange

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_LOGPROBS = "message.output_text.logprobs"


class Function(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(BaseModel):
    model_config = ConfigDict(extra="forbid")
    effort: None = None
    summary: None = None
    generate_summary: None = None


class ResponsesRequest(BaseModel):
    """Body of ``POST /v1/responses``."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str = Field(max_length=256)
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[Function] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


def parse_responses(body: bytes) -> ResponsesExchange:
    """Check a body.

    Raises:
        ApiError: 400, naming the parameter at fault.
    """
    request = validated(ResponsesRequest, body)
    if request.previous_response_id is not None:
        story = "Responses are not kept; send the whole conversation as input."
        raise bad_request(story, param="previous_response_id", code="unsupported_parameter")
    tool_choice, tool_name = _tool_choice(request)
    asked = {
        "max_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
    }
    call = Call(
        model=request.model,
        raw_messages=_messages(request),
        raw_tools=[_tool(tool) for tool in request.tools or ()],
        sampling={key: value for key, value in asked.items() if value is not None},
        tool_choice=tool_choice,
        tool_name=tool_name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        strict_tools=frozenset(tool.name for tool in request.tools or () if tool.strict),
        json_schema=_json_schema(request.text),
        logprobs=_logprobs(request),
        stream=bool(request.stream),
    )
    return ResponsesExchange(call=call, echo=_echo(request))


def _echo(request: ResponsesRequest) -> dict[str, Any]:
    """What a response repeats of its request."""
    return {
        "instructions": request.instructions,
        "tools": [tool.model_dump() for tool in request.tools or ()],
        "tool_choice": request.tool_choice or "auto",
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "max_output_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "text": request.text.model_dump(by_alias=True) if request.text else {"format": {"type": "text"}},
        "metadata": request.metadata or {},
        "previous_response_id": None,
        "truncation": "disabled",
        "store": False,
        "user": request.user,
    }


def _logprobs(request: ResponsesRequest) -> int | None:
    include = request.include or []
    for name in include:
        # Reasoning is given in plain text anyway; clients ask for its encrypted form by habit.
        if name not in (_LOGPROBS, "reasoning.encrypted_content"):
            raise bad_request(f"include knows {_LOGPROBS}, not {name[:64]!r}.", param="include")
    if request.top_logprobs and _LOGPROBS not in include:
        raise bad_request(f"top_logprobs needs {_LOGPROBS} in include.", param="top_logprobs")
    return request.top_logprobs or 0 if _LOGPROBS in include else None


def _tool(tool: Function) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters or {}}
    return {"type": "function", "function": function}


def _tool_choice(request: ResponsesRequest) -> tuple[ToolChoice, str]:
    choice, names = request.tool_choice or "auto", {tool.name for tool in request.tools or ()}
    if isinstance(choice, str):
        return checked_choice(choice, "", names, "tool_choice")
    name = choice.get("name")
    if choice.get("type") != "function" or not isinstance(name, str) or not name:
        raise bad_request("tool_choice takes auto, none, required or one function by name.", param="tool_choice")
    return checked_choice("required", name, names, "tool_choice")


def _json_schema(text: TextOptions | None) -> Mapping[str, Any] | None:
    form = text.format if text is not None else None
    if form is None:
        return None
    given = [name for name in form.model_fields_set if name != "type" and getattr(form, name) is not None]
    if form.type != "json_schema" and given:
        story = f"text.format has {given[0].removeprefix('json_')}, which goes with json_schema, not with {form.type}."
        raise bad_request(story, param="text", code="unsupported_parameter")
    if form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.json_schema is None:
        raise bad_request("text.format.schema is missing.", param="text")
    return form.json_schema


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": request.instructions}] if request.instructions else []
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    if not request.input:
        raise bad_request("input is empty.", param="input")
    answer: _Answer | None = None
    for number, item in enumerate(request.input):
        where = f"input.{number}"
        kind = item.get("type", "message")
        is_said = kind == "message" and item.get("role") == "assistant"
        if is_said or kind in ("reasoning", "function_call"):
            if answer is None or not answer.takes(kind):
                answer = _Answer()
                messages.append(answer.message)
            answer.add(kind, item, where)
            continue
        answer = None
        messages.append(_other(kind, item, where))
    return messages


class _Answer:
    """Items of one assistant message, in the order reasoning, message, calls."""

    _ORDER = ("reasoning", "message", "function_call")

    def __init__(self) -> None:
        self.message: dict[str, Any] = {"role": "assistant", "content": ""}
        self._last = ""

    def takes(self, kind: str) -> bool:
        if not self._last or kind == self._last == "function_call":
            return True
        return self._ORDER.index(kind) > self._ORDER.index(self._last)

    def add(self, kind: str, item: Mapping[str, Any], where: str) -> None:
        self._last = kind
        if kind == "message":
            self.message["content"] = _text(item.get("content"), f"{where}.content")
        elif kind == "reasoning":
            self.message["reasoning_content"] = _text(item.get("content") or item.get("summary") or "", where)
        else:
            function = {
                "name": _string(item, "name", where),
                "arguments": _string(item, "arguments", where),
            }
            call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
            self.message.setdefault("tool_calls", []).append(call)


def _other(kind: Any, item: Mapping[str, Any], where: str) -> dict[str, Any]:
    if kind == "message":
        role = _string(item, "role", where)
        if role not in ("user", "system", "developer"):
            raise bad_request(f"{where}.role is {role[:40]!r}.", param=f"{where}.role")
        return {"role": role, "content": _content(item.get("content"), f"{where}.content")}
    if kind == "function_call_output":
        return {
            "role": "tool",
            "tool_call_id": _string(item, "call_id", where),
            "content": _content(item.get("output"), f"{where}.output"),
        }
    raise _unsupported(kind, where)


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Text, or parts where there are pictures among them."""
    pictured = isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") == "input_image" for part in content
    )
    if not pictured:
        return _text(content, where)
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "input_image":
            parts.append({"type": "text", "text": _part_text(part, f"{where}.{number}")})
            continue
        url = {"url": part.get("image_url") or "", "detail": part.get("detail")}
        if part.get("file_id") is not None:
            raise _unsupported("input_image with file_id", f"{where}.{number}")
        parts.append({"type": "image_url", "image_url": url, "place": f"{where}.{number}"})
    return parts


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise bad_request(f"{where} is missing.", param=where)
    return "\n".join(_part_text(part, f"{where}.{number}") for number, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
        raise _unsupported(part.get("type") if isinstance(part, dict) else type(part).__name__, where)
    return _string(part, "text", where)


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name} is missing or no text.", param=f"{where}.{name}")
    return value


def _unsupported(kind: Any, where: str) -> ApiError:
    story = f"{where} has type {str(kind)[:40]!r}; this model takes text, pictures, function calls and their outputs."
    return bad_request(story, param=where, code="unsupported_content")
