"""OpenAI chat completions, the way out: answers as a body or as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from seamless_verl.proxy.calls import Answer, ApiError, Call, Delta, StreamHead, Token, encoded, total_usage
from seamless_verl.trajectory.messages import ToolCall

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatExchange:
    """One chat completion; see :class:`~.calls.Exchange`."""

    call: Call
    include_usage: bool

    def body(self, answers: Sequence[Answer]) -> bytes:
        first = answers[0]
        choices = [
            {
                "index": number,
                "message": _message(answer),
                "logprobs": _logprobs(answer.tokens) if self.call.logprobs is not None else None,
                "finish_reason": answer.finish_reason,
            }
            for number, answer in enumerate(answers)
        ]
        return encoded(
            {
                "id": f"chatcmpl-{first.id}",
                "object": "chat.completion",
                "created": first.created,
                "model": self.call.model,
                "choices": choices,
                "usage": usage_of(answers),
            }
        )

    def writer(self) -> ChatWriter:
        return ChatWriter(self)


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


def _logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    content = [
        {**_chance(token.text, token.logprob), "top_logprobs": [_chance(*other) for other in token.alternatives]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _chance(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}


def usage_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """``usage`` of chat and text completions."""
    prompt, generated, cached = total_usage(answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class ChatWriter:
    """Chunks of one stream: per answer role, text, tool calls, finish; then usage and the end."""

    def __init__(self, exchange: ChatExchange) -> None:
        self._exchange = exchange
        self._head: StreamHead | None = None

    def start(self, head: StreamHead) -> bytes:
        self._head = head
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk([_choice(number, role)]) for number in range(self._exchange.call.n))

    def delta(self, delta: Delta) -> bytes:
        texts = {"reasoning_content": delta.reasoning, "content": delta.content}
        choice = _choice(delta.index, {key: text for key, text in texts.items() if text})
        if delta.tokens:
            choice["logprobs"] = _logprobs(delta.tokens)
        return self._chunk([choice])

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def end(self, answers: Sequence[Answer]) -> bytes:
        chunks: list[bytes] = []
        for number, answer in enumerate(answers):
            calls = [{"index": at, **_wire_call(call)} for at, call in enumerate(answer.message.tool_calls)]
            chunks.extend(self._chunk([_choice(number, {"tool_calls": [call]})]) for call in calls)
            chunks.append(self._chunk([_choice(number, {}, answer.finish_reason)]))
        if self._exchange.include_usage:
            chunks.append(self._chunk([], usage_of(answers)))
        return b"".join([*chunks, DONE])

    def fail(self, error: ApiError) -> bytes:
        return event(error.body()) + DONE

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        assert self._head is not None
        chunk: dict[str, Any] = {
            "id": f"chatcmpl-{self._head.id}",
            "object": "chat.completion.chunk",
            "created": self._head.created,
            "model": self._exchange.call.model,
            "choices": choices,
        }
        if self._exchange.include_usage:
            chunk["usage"] = usage
        return event(chunk)


def _choice(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish_reason}


def event(data: dict[str, Any], name: str = "") -> bytes:
    """One server-sent event; OpenAI's completions give theirs no name."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + encoded(data) + b"\n\n"
