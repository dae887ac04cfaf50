"""Anthropic messages: from a body to a call in the shape of chat completions, from an answer to a message or a stream.

``system``                    a system message
``text``, ``thinking``        text and reasoning of its message
``tool_use``                  a tool call; ``input`` as JSON text
``tool_result``               a tool message, before the rest of its user message; with ``is_error``, one that says so
``image`` (base64)            a picture of its user message, or of its tool message
``document``, …               refused: the model takes text and pictures
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from seamless_verl.proxy.calls import Answer, ApiError, Call, Delta, ToolChoice, bad_request, encoded
from seamless_verl.proxy.dialects.anthropic_body import Block, Choice, CountRequest, MessagesRequest, Tool, Turn
from seamless_verl.proxy.dialects.shared import (
    chat_content,
    chat_tool,
    checked_choice,
    checked_stop,
    event,
    preferences,
    sampling_of,
    validated,
)
from seamless_verl.trajectory.messages import ToolCall

_SAYS_ERROR = re.compile(r"\W*error\b", re.IGNORECASE)
_MAX_DEPTH = 100  # of a tool's arguments; JSON readers begin to refuse somewhere above
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def parse_messages(body: bytes) -> MessagesCall:
    """Check a body.

    Raises:
        ApiError: 400, naming the parameter at fault.
    """
    request = validated(MessagesRequest, body)
    sampling = sampling_of(request, request.max_tokens, checked_stop(request.stop_sequences, "stop_sequences"))
    shows_thinking = request.thinking is None or request.thinking.display != "omitted"
    return _call(request, sampling, stream=bool(request.stream), shows_thinking=shows_thinking)


def parse_count(body: bytes) -> Call:
    """The call whose prompt is to be counted.

    Raises:
        ApiError: 400, naming the parameter at fault.
    """
    return _call(validated(CountRequest, body), {})


def _call(
    request: CountRequest, sampling: Mapping[str, Any], *, stream: bool = False, shows_thinking: bool = True
) -> MessagesCall:
    tools = [tool for tool in request.tools or () if isinstance(tool, Tool)]
    choice = request.tool_choice or Choice(type="auto")
    wished = {"any": "required", "tool": "required"}.get(choice.type, choice.type)
    if (choice.type == "tool") != bool(choice.name):
        raise bad_request("tool_choice.name goes with type tool, and only with it.", param="tool_choice")
    tool_choice, tool_name = checked_choice(wished, choice.name, {tool.name for tool in tools})
    if request.messages[-1].role == "assistant":
        story = "The last message is the assistant's. Its beginning cannot be prescribed here."
        raise bad_request(story, param=f"messages.{len(request.messages) - 1}", code="unsupported_value")
    output, edits = request.output_config, request.context_management.edits if request.context_management else []
    messages = _system(request.system)
    for number, turn in enumerate(request.messages):
        messages += _turn(turn, f"messages.{number}")
    return MessagesCall(
        model=request.model,
        raw_messages=messages,
        raw_tools=[chat_tool(tool.name, tool.description, tool.input_schema) for tool in tools],
        sampling=sampling,
        tool_choice=tool_choice,
        tool_name=tool_name,
        parallel_tool_calls=not choice.disable_parallel_tool_use or tool_choice is ToolChoice.NONE,
        strict_tools=frozenset(tool.name for tool in tools if tool.strict),
        thinking=None if request.thinking is None else request.thinking.type != "disabled",
        thinking_budget=request.thinking.budget_tokens if request.thinking is not None else None,
        json_schema=output.format.json_schema if output is not None and output.format is not None else None,
        preferences=preferences(
            ("output_config.effort", output is not None and output.effort is not None),
            ("context_management", any(not edit.is_done_anyway for edit in edits)),
            tools=request.tools or (),
        ),
        stream=stream,
        shows_thinking=shows_thinking,
    )


def _system(system: str | list[Block] | None) -> list[dict[str, Any]]:
    text = _content(system, "system", pictures=False) if isinstance(system, list) else system
    return [{"role": "system", "content": text}] if text else []


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
    return [*results, {"role": turn.role, "content": _content(rest, f"{where}.content")}]


def _assistant(blocks: Sequence[Block], where: str) -> dict[str, Any]:
    said: dict[str, list[str]] = {"text": [], "thinking": []}
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        place, fields = f"{where}.content.{number}", block.model_extra or {}
        if block.type in said:
            said[block.type].append(_field(fields, block.type, str, place))
        elif block.type == "tool_use":
            arguments = json.dumps(_field(fields, "input", dict, place), ensure_ascii=False)
            function = {"name": _field(fields, "name", str, place), "arguments": arguments}
            calls.append({"id": _field(fields, "id", str, place), "type": "function", "function": function})
        else:
            raise _unsupported(block, place)
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(said["text"])}
    if calls:
        message["tool_calls"] = calls
    if said["thinking"]:
        message["reasoning_content"] = "\n".join(said["thinking"])
    return message


def _result(block: Block, where: str) -> dict[str, Any]:
    fields = block.model_extra or {}
    content = fields.get("content") or ""
    if isinstance(content, list):
        for number, part in enumerate(content):
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                raise _unsupported(Block(type=str(part)), f"{where}.content.{number}")
        content = _content([Block.model_validate(part) for part in content], f"{where}.content")
    elif not isinstance(content, str):
        raise bad_request(f"{where}.content is neither text nor blocks.", param=where)
    is_error = fields.get("is_error")
    if is_error is not None and not isinstance(is_error, bool):
        raise bad_request(f"{where}.is_error is neither true nor false.", param=f"{where}.is_error")
    content = _marked(content) if is_error else content
    return {"role": "tool", "tool_call_id": _field(fields, "tool_use_id", str, where), "content": content}


def _marked(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The result of a failed tool. Templates have no field for failure, so the text says so, unless it does already."""
    text = content if isinstance(content, str) else next((part["text"] for part in content if "text" in part), "")
    if _SAYS_ERROR.match(text):
        return content
    if isinstance(content, str):
        return f"Error: {content}" if content else "Error"
    return [{"type": "text", "text": "Error:"}, *content]


def _content(blocks: Sequence[Block], where: str, *, pictures: bool = True) -> str | list[dict[str, Any]]:
    return chat_content(_part(block, f"{where}.{number}", pictures) for number, block in enumerate(blocks))


def _part(block: Block, where: str, pictures: bool) -> dict[str, Any]:
    fields = block.model_extra or {}
    if block.type == "image" and pictures:
        return {"type": "image_url", "image_url": {"url": _image_url(fields.get("source"), where)}, "place": where}
    if block.type != "text":
        raise _unsupported(block, where)
    return {"type": "text", "text": _field(fields, "text", str, where)}


def _image_url(source: Any, where: str) -> str:
    if not isinstance(source, dict):
        return ""
    if source.get("type") == "base64":
        media = _field(source, "media_type", str, f"{where}.source")
        return f"data:{media};base64,{_field(source, 'data', str, f'{where}.source')}"
    return str(source.get("url") or "")  # refused where all pictures that would have to be fetched are


def _field(fields: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    value = fields.get(name)
    if not isinstance(value, kind):
        raise bad_request(f"{where}.{name} is missing or no {kind.__name__}.", param=f"{where}.{name}")
    return value


def _unsupported(block: Block, where: str) -> ApiError:
    story = f"{where} has type {block.type[:40]!r}; this model takes text, pictures, tool calls and their results."
    return bad_request(story, param=where, code="unsupported_content")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesCall(Call):
    """One message.

    ``shows_thinking``: whether thinking blocks have their text. Sent back empty, they are recognised all the same.
    """

    schema_field: ClassVar[str] = "output_config.format"
    shows_thinking: bool

    def body(self, answers: Sequence[Answer]) -> bytes:
        (answer,) = answers
        said = answer.message
        content: list[dict[str, Any]] = []
        if said.reasoning:
            thinking = said.reasoning if self.shows_thinking else ""
            content.append({"type": "thinking", "thinking": thinking, "signature": answer.id})
        if said.content or not said.tool_calls:
            content.append({"type": "text", "text": said.content})
        content.extend({**_tool_use(call), "input": _input(call)} for call in said.tool_calls)
        usage = _usage(answer, answer.completion_tokens)
        return encoded({**_message(answer.id, self), "content": content, **_ending(answer), "usage": usage})

    def writer(self) -> MessagesWriter:
        return MessagesWriter(self, shows_thinking=self.shows_thinking)


def _message(answer_id: str, call: Call) -> dict[str, Any]:
    return {"id": f"msg_{answer_id}", "type": "message", "role": "assistant", "model": call.model}


def _usage(seen: Answer, num_generated: int) -> dict[str, int]:
    return {
        "input_tokens": seen.prompt_tokens - seen.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": seen.cached_tokens,
        "output_tokens": num_generated,
    }


def _ending(answer: Answer) -> dict[str, Any]:
    reason = _STOP_REASONS[answer.finish_reason]
    if reason == "end_turn" and answer.stop_text:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_text}
    return {"stop_reason": reason, "stop_sequence": None}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _input(call: ToolCall) -> dict[str, Any]:
    """Arguments as the object that SDKs expect; anything else that the model wrote is wrapped in one.

    What no JSON can say (``NaN``), or some readers cannot take (deep nesting), stays the text that it is.
    """
    try:
        value = msgspec.json.decode(call.arguments)
    except (ValueError, RecursionError):
        value = call.arguments
    value = call.arguments if _is_deep(value, call.arguments) else value
    return value if isinstance(value, dict) else {"arguments": value}


def _is_deep(value: Any, text: str) -> bool:
    if text.count("{") + text.count("[") <= _MAX_DEPTH:
        return False
    level = [value]
    for _ in range(_MAX_DEPTH):
        holders = [list(held.values()) if isinstance(held, dict) else held for held in level]
        level = [inner for holder in holders if isinstance(holder, list) for inner in holder]
    return bool(level)


class MessagesWriter:
    """Events of one stream; one content block is open at a time."""

    def __init__(self, call: Call, *, shows_thinking: bool) -> None:
        self._call = call
        self._shows_thinking = shows_thinking
        self._answer_id = ""
        self._open = ""
        self._num_blocks = 0

    def start(self, head: Answer) -> bytes:
        self._answer_id = head.id
        message = {
            **_message(head.id, self._call),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(head, 0),
        }
        return _event({"type": "message_start", "message": message}) + self.keep_alive()

    def delta(self, delta: Delta) -> bytes:
        parts = []
        if delta.reasoning:
            parts.append(self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""}))
            if self._shows_thinking:
                parts.append(self._more({"type": "thinking_delta", "thinking": delta.reasoning}))
        if delta.content:
            parts.append(self._enter("text", {"type": "text", "text": ""}))
            parts.append(self._more({"type": "text_delta", "text": delta.content}))
        return b"".join(parts)

    def keep_alive(self) -> bytes:
        return _event({"type": "ping"})

    def end(self, answers: Sequence[Answer]) -> bytes:
        (answer,) = answers
        parts = []
        if not answer.message.content and not answer.message.tool_calls:
            parts.append(self._enter("text", {"type": "text", "text": ""}))
        for number, call in enumerate(answer.message.tool_calls):
            parts.append(self._enter(f"tool {number}", {**_tool_use(call), "input": {}}))
            arguments = json.dumps(_input(call), ensure_ascii=False)
            parts.append(self._more({"type": "input_json_delta", "partial_json": arguments}))
        parts.append(self._leave())
        usage = _usage(answer, answer.completion_tokens)
        parts.append(_event({"type": "message_delta", "delta": _ending(answer), "usage": usage}))
        return b"".join([*parts, _event({"type": "message_stop"})])

    def fail(self, error: ApiError) -> bytes:
        return event(error.body("/v1/messages"), "error")

    def _enter(self, name: str, block: dict[str, Any]) -> bytes:
        if self._open == name:
            return b""
        left = self._leave()
        self._open = name
        return left + _event({"type": "content_block_start", "index": self._num_blocks, "content_block": block})

    def _more(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._num_blocks, "delta": delta})

    def _leave(self) -> bytes:
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._more({"type": "signature_delta", "signature": self._answer_id})
        self._open = ""
        self._num_blocks += 1
        return signed + _event({"type": "content_block_stop", "index": self._num_blocks - 1})


def _event(data: dict[str, Any]) -> bytes:
    return event(data, str(data["type"]))
