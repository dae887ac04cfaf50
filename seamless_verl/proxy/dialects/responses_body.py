"""Bodies of OpenAI's responses, as they are checked, and their items in the shape of chat completions.

``instructions``             a system message
``message``                  a message; its text parts joined, its pictures between them
``reasoning``                reasoning of the assistant message that follows
``function_call``            a tool call of the assistant message before it
``function_call_output``     a tool message
``item_reference``           the item of that name of an answer of this session
anything else                refused by name

Items of one answer come back in a row, and are one assistant message again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WrapValidator

from seamless_verl.proxy.calls import ApiError, bad_request
from seamless_verl.proxy.dialects.shared import ConversationRequest, Strict, chat_content, tool_or_server_tool

_ORDER = ("reasoning", "message", "function_call")  # of the items of one assistant message
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class Function(Strict):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Strict):
    model_config = ConfigDict(populate_by_name=True)
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: str | None = Field(default=None, max_length=32)


class Reasoning(Strict):
    effort: str | None = Field(default=None, max_length=32)
    summary: str | None = Field(default=None, max_length=32)
    generate_summary: str | None = Field(default=None, max_length=32)


class ResponsesRequest(ConversationRequest):
    """Body of ``POST /v1/responses``."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[Annotated[Function, WrapValidator(tool_or_server_tool)]] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None
    truncation: Literal["disabled", "auto"] | None = None
    background: Literal[False] | None = None
    client_metadata: dict[str, Any] | None = None  # a hint


def instructions_of(request: ResponsesRequest) -> list[dict[str, Any]]:
    return [{"role": "system", "content": request.instructions}] if request.instructions else []


def items_of(request: ResponsesRequest) -> list[dict[str, Any]]:
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    if not request.input:
        raise bad_request("input is empty.", param="input")
    return request.input


def refers_back(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "item_reference"


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    last = ""  # kind of the item before, where it became part of an assistant message
    for number, item in enumerate(items):
        where = f"input.{number}"
        kind = item.get("type", "message")
        is_said = kind == "message" and item.get("role") == "assistant"
        if not is_said and kind not in ("reasoning", "function_call"):
            messages.append(_other(kind, item, where))
            last = ""
            continue
        goes_on = last and (kind == last == "function_call" or _ORDER.index(kind) > _ORDER.index(last))
        if not goes_on:
            messages.append({"role": "assistant", "content": ""})
        _add(messages[-1], kind, item, where)
        last = kind
    return messages


def _add(message: dict[str, Any], kind: str, item: Mapping[str, Any], where: str) -> None:
    """One item of the assistant message that it is part of."""
    if kind == "message":
        message["content"] = _content(item.get("content"), f"{where}.content", pictures=False)
    elif kind == "reasoning":
        message["reasoning_content"] = _content(item.get("content") or item.get("summary") or "", where, pictures=False)
    else:
        function = {"name": string_of(item, "name", where), "arguments": string_of(item, "arguments", where)}
        call = {"id": string_of(item, "call_id", where), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


def _other(kind: Any, item: Mapping[str, Any], where: str) -> dict[str, Any]:
    if kind == "function_call_output":
        content = _content(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": string_of(item, "call_id", where), "content": content}
    if kind != "message":
        raise _unsupported(kind, where)
    role = string_of(item, "role", where)
    if role not in ("user", "system", "developer"):
        raise bad_request(f"{where}.role is {role[:40]!r}.", param=f"{where}.role")
    return {"role": role, "content": _content(item.get("content"), f"{where}.content")}


def _content(content: Any, where: str, *, pictures: bool = True) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} is missing.", param=where)
    return chat_content(_part(part, f"{where}.{number}", pictures) for number, part in enumerate(content))


def _part(part: Any, where: str, pictures: bool) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind == "input_image" and pictures:
        if part.get("file_id") is not None:
            raise _unsupported("input_image with file_id", where)
        url = {"url": part.get("image_url") or "", "detail": part.get("detail")}
        return {"type": "image_url", "image_url": url, "place": where}
    if kind not in _TEXT_PARTS:
        raise _unsupported(kind, where)
    return {"type": "text", "text": string_of(part, "text", where)}


def string_of(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name} is missing or no text.", param=f"{where}.{name}")
    return value


def _unsupported(kind: Any, where: str) -> ApiError:
    story = f"{where} has type {str(kind)[:40]!r}; this model takes text, pictures, function calls and their outputs."
    return bad_request(story, param=where, code="unsupported_content")
