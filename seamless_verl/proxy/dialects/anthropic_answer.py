"""Anthropic messages, the way out: one answer as a message or as its stream of content blocks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from seamless_verl.proxy.calls import Answer, ApiError, Call, Delta, StreamHead, encoded
from seamless_verl.proxy.dialects.chat_answer import event
from seamless_verl.trajectory.messages import ToolCall

_MAX_DEPTH = 100  # of a tool's arguments; JSON readers begin to refuse somewhere above
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesExchange:
    """One message; see :class:`~.calls.Exchange`.

    ``shows_thinking``: whether thinking blocks have their text. Sent back empty, they are recognised all the same.
    """

    call: Call
    shows_thinking: bool = True

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
        usage = {**_prompt_usage(answer), "output_tokens": answer.completion_tokens}
        return encoded({**_message(answer.id, self.call), "content": content, **_ending(answer), "usage": usage})

    def writer(self) -> MessagesWriter:
        return MessagesWriter(self.call, shows_thinking=self.shows_thinking)


def _message(answer_id: str, call: Call) -> dict[str, Any]:
    return {"id": f"msg_{answer_id}", "type": "message", "role": "assistant", "model": call.model}


def _prompt_usage(seen: Answer | StreamHead) -> dict[str, int]:
    return {
        "input_tokens": seen.prompt_tokens - seen.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": seen.cached_tokens,
    }


def _ending(answer: Answer) -> dict[str, Any]:
    reason = _STOP_REASONS[answer.finish_reason]
    if reason == "end_turn" and answer.stop_text:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_text}
    return {"stop_reason": reason, "stop_sequence": None}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _input(call: ToolCall) -> dict[str, Any]:
    """Arguments as the object that SDKs expect; what the model wrote instead of one is put into one.

    What no JSON can say (``NaN``), or some readers cannot take (deep nesting), stays the text that it is.
    """
    try:
        value = json.loads(call.arguments, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        value = call.arguments
    if _is_deep(value, call.arguments):
        value = call.arguments
    return value if isinstance(value, dict) else {"arguments": value}


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not JSON")
    return value


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

    def start(self, head: StreamHead) -> bytes:
        self._answer_id = head.id
        message = {
            **_message(head.id, self._call),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**_prompt_usage(head), "output_tokens": 0},
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
        usage = {**_prompt_usage(answer), "output_tokens": answer.completion_tokens}
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
