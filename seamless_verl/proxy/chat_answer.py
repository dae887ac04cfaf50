"""OpenAI chat completions, the way out: one answer as a body or as server-sent events."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from seamless_verl.proxy.chat import ChatCall
from seamless_verl.trajectory.messages import Message, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """One answer, ready to be written in any form of the dialect.

    Attributes:
        tokens: text and log-prob of each generated token, without the stop token; only where asked for.
    """

    id: str
    created: int
    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tokens: tuple[tuple[str, float], ...] = ()

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def logprobs(self) -> dict[str, Any]:
        return {
            "content": [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in self.tokens
            ],
            "refusal": None,
        }


def completion_body(answer: ChatAnswer, call: ChatCall) -> bytes:
    """The whole response of a request without streaming."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.message.content or None, "refusal": None}
    if not answer.message.tool_calls:
        message["content"] = answer.message.content
    else:
        message["tool_calls"] = [_wire_call(tool_call) for tool_call in answer.message.tool_calls]
    if answer.message.reasoning:
        message["reasoning_content"] = answer.message.reasoning
    body = {
        "id": answer.id,
        "object": "chat.completion",
        "created": answer.created,
        "model": call.model,
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": answer.logprobs() if call.logprobs else None,
                "finish_reason": answer.finish_reason,
            }
        ],
        "usage": answer.usage(),
    }
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _wire_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def completion_events(answer: ChatAnswer, call: ChatCall) -> list[bytes]:
    """The response as server-sent events: role, reasoning, content, tool calls, finish, usage, end."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if answer.message.reasoning:
        deltas.append({"reasoning_content": answer.message.reasoning})
    if answer.message.content:
        deltas.append({"content": answer.message.content})
    deltas += [
        {"tool_calls": [{"index": number, **_wire_call(tool_call)}]}
        for number, tool_call in enumerate(answer.message.tool_calls)
    ]
    choices: list[list[dict[str, Any]]] = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
    if call.logprobs:
        choices[0][0]["logprobs"] = answer.logprobs()
    choices.append([{"index": 0, "delta": {}, "finish_reason": answer.finish_reason}])
    usages: list[dict[str, Any] | None] = [None] * len(choices)
    if call.include_usage:
        choices.append([])
        usages.append(answer.usage())
    events = []
    for choice, usage in zip(choices, usages, strict=True):
        chunk: dict[str, Any] = {
            "id": answer.id,
            "object": "chat.completion.chunk",
            "created": answer.created,
            "model": call.model,
            "choices": choice,
        }
        if call.include_usage:
            chunk["usage"] = usage
        events.append(b"data: " + json.dumps(chunk, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n")
    return [*events, b"data: [DONE]\n\n"]
