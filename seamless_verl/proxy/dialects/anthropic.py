"""Anthropic messages, the way in: from a body to a call in the shape of chat completions.

============================  ==================================================
block                         becomes
============================  ==================================================
``system``                    a system message
``text``                      text of its message
``thinking``                  reasoning of its assistant message
``tool_use``                  a tool call; ``input`` as JSON text
``tool_result``               a tool message, before the rest of its user message; with ``is_error``, one that says so
``image`` (base64)            a picture of its user message, or of its tool message
``document``, …               refused: the model takes text and pictures
============================  ==================================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from seamless_verl.proxy.calls import ApiError, Call, ToolChoice, bad_request
from seamless_verl.proxy.dialects.anthropic_answer import MessagesExchange
from seamless_verl.proxy.dialects.chat import checked_choice, checked_stop, validated

_SAYS_ERROR = re.compile(r"\W*error\b", re.IGNORECASE)


class _Open(BaseModel):
    """Blocks carry notes of newer SDKs; what matters of them is checked block by block."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class Block(_Open):
    type: str


class Turn(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None  # a hint about prices; the proxy keeps every prefix anyway


class Choice(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    display: Literal["summarized", "omitted"] | None = None


class CountRequest(BaseModel):
    """Body of ``POST /v1/messages/count_tokens``."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str = Field(max_length=256)
    messages: list[Turn] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    cache_control: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    """Body of ``POST /v1/messages``."""

    max_tokens: int = Field(ge=1, lt=2**31)
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


def parse_messages(body: bytes) -> MessagesExchange:
    """Check a body.

    Raises:
        ApiError: 400, naming the parameter at fault.
    """
    request = validated(MessagesRequest, body)
    asked: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": checked_stop(request.stop_sequences, "stop_sequences"),
    }
    sampling = {key: value for key, value in asked.items() if value is not None}
    shows_thinking = request.thinking is None or request.thinking.display != "omitted"
    return MessagesExchange(call=_call(request, sampling, stream=bool(request.stream)), shows_thinking=shows_thinking)


def parse_count(body: bytes) -> Call:
    """The call whose prompt is to be counted.

    Raises:
        ApiError: 400, naming the parameter at fault.
    """
    return _call(validated(CountRequest, body), {}, stream=False)


def _call(request: CountRequest, sampling: Mapping[str, Any], *, stream: bool) -> Call:
    tools = request.tools or []
    choice = request.tool_choice or Choice(type="auto")
    wished = {"any": "required", "tool": "required"}.get(choice.type, choice.type)
    if (choice.type == "tool") != bool(choice.name):
        raise bad_request("tool_choice.name goes with type tool, and only with it.", param="tool_choice")
    tool_choice, tool_name = checked_choice(wished, choice.name, {tool.name for tool in tools}, "tool_choice")
    messages = [*_system(request.system), *(_message for turn in _numbered(request) for _message in turn)]
    return Call(
        model=request.model,
        raw_messages=messages,
        raw_tools=[_tool(tool) for tool in tools],
        sampling=sampling,
        tool_choice=tool_choice,
        tool_name=tool_name,
        parallel_tool_calls=not choice.disable_parallel_tool_use or tool_choice is ToolChoice.NONE,
        strict_tools=frozenset(tool.name for tool in tools if tool.strict),
        thinking=None if request.thinking is None else request.thinking.type != "disabled",
        thinking_budget=request.thinking.budget_tokens if request.thinking is not None else None,
        stream=stream,
    )


def _tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _system(system: str | list[Block] | None) -> list[dict[str, Any]]:
    text = system if isinstance(system, str) or system is None else _texts(system, "system")
    return [{"role": "system", "content": text}] if text else []


def _numbered(request: CountRequest) -> list[list[dict[str, Any]]]:
    if request.messages[-1].role == "assistant":
        story = "The last message is the assistant's. Its beginning cannot be prescribed here."
        raise bad_request(story, param=f"messages.{len(request.messages) - 1}", code="unsupported_value")
    return [_turn(turn, f"messages.{number}") for number, turn in enumerate(request.messages)]


def _turn(turn: Turn, where: str) -> list[dict[str, Any]]:
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if turn.role == "assistant":
        return [_assistant(turn.content, where)]
    results = [
        _result(block, f"{where}.content.{number}")
        for number, block in enumerate(turn.content)
        if block.type == "tool_result"
    ]
    rest = [block for block in turn.content if block.type != "tool_result"]
    if not rest and results:
        return results
    return [*results, {"role": turn.role, "content": _content(rest, where)}]


def _assistant(blocks: Sequence[Block], where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for number, block in enumerate(blocks):
        place, fields = f"{where}.content.{number}", block.model_extra or {}
        if block.type == "text":
            texts.append(_field(fields, "text", str, place))
        elif block.type == "thinking":
            thoughts.append(_field(fields, "thinking", str, place))
        elif block.type == "tool_use":
            arguments = json.dumps(_field(fields, "input", dict, place), ensure_ascii=False)
            function = {"name": _field(fields, "name", str, place), "arguments": arguments}
            calls.append({"id": _field(fields, "id", str, place), "type": "function", "function": function})
        else:
            raise _unsupported(block, place)
    message["content"] = "\n".join(texts)
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _result(block: Block, where: str) -> dict[str, Any]:
    fields = block.model_extra or {}
    content = fields.get("content") or ""
    if isinstance(content, list):
        for number, part in enumerate(content):
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                raise _unsupported(Block(type=str(part)), f"{where}.content.{number}")
        content = _content([Block.model_validate(part) for part in content], where)
    elif not isinstance(content, str):
        raise bad_request(f"{where}.content is neither text nor blocks.", param=where)
    is_error = fields.get("is_error")
    if is_error is not None and not isinstance(is_error, bool):
        raise bad_request(f"{where}.is_error is neither true nor false.", param=f"{where}.is_error")
    content = _marked(content) if is_error else content
    return {"role": "tool", "tool_call_id": _field(fields, "tool_use_id", str, where), "content": content}


def _marked(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The result of a tool that failed; templates know no field for that, so the text says it, unless it does so."""
    text = content if isinstance(content, str) else next((part["text"] for part in content if "text" in part), "")
    if _SAYS_ERROR.match(text):
        return content
    if isinstance(content, str):
        return f"Error: {content}" if content else "Error"
    return [{"type": "text", "text": "Error:"}, *content]


def _content(blocks: Sequence[Block], where: str) -> str | list[dict[str, Any]]:
    """Text, or parts where there are pictures among the blocks."""
    if all(block.type != "image" for block in blocks):
        return _texts(blocks, where)
    parts: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        place, fields = f"{where}.content.{number}", block.model_extra or {}
        if block.type == "text":
            parts.append({"type": "text", "text": _field(fields, "text", str, place)})
        elif block.type == "image":
            parts.append(
                {"type": "image_url", "image_url": {"url": _image_url(fields.get("source"), place)}, "place": place}
            )
        else:
            raise _unsupported(block, place)
    return parts


def _image_url(source: Any, where: str) -> str:
    if not isinstance(source, dict):
        return ""
    if source.get("type") == "base64":
        media = _field(source, "media_type", str, f"{where}.source")
        return f"data:{media};base64,{_field(source, 'data', str, f'{where}.source')}"
    return str(source.get("url") or "")  # refused where all pictures that would have to be fetched are


def _texts(blocks: Sequence[Block], where: str) -> str:
    texts = []
    for number, block in enumerate(blocks):
        place = f"{where}.content.{number}" if where != "system" else f"system.{number}"
        if block.type != "text":
            raise _unsupported(block, place)
        texts.append(_field(block.model_extra or {}, "text", str, place))
    return "\n".join(texts)


def _field(fields: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    value = fields.get(name)
    if not isinstance(value, kind):
        raise bad_request(f"{where}.{name} is missing or no {kind.__name__}.", param=f"{where}.{name}")
    return value


def _unsupported(block: Block, where: str) -> ApiError:
    story = f"{where} has type {block.type[:40]!r}; this model takes text, pictures, tool calls and their results."
    return bad_request(story, param=where, code="unsupported_content")
