"""OpenAI responses, the way out: one answer as a response or as its stream of items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seamless_verl.proxy.calls import Answer, ApiError, Call, Delta, StreamHead, Token, encoded
from seamless_verl.proxy.dialects.chat_answer import event
from seamless_verl.trajectory.messages import ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesExchange:
    """One response; see :class:`~.calls.Exchange`. ``echo`` is what it repeats of its request."""

    call: Call
    echo: Mapping[str, Any]

    def body(self, answers: Sequence[Answer]) -> bytes:
        return encoded(self.ended(answers[0]))

    def writer(self) -> ResponsesWriter:
        return ResponsesWriter(self)

    def ended(self, answer: Answer) -> dict[str, Any]:
        """The response object of a finished answer."""
        is_cut = answer.finish_reason == "length"
        return {
            **self.frame(answer.id, answer.created, "incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": items_of(answer),
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": answer.cached_tokens},
                "output_tokens": answer.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            },
        }

    def frame(self, answer_id: str, created: int, status: str) -> dict[str, Any]:
        """A response object without any output."""
        return {
            "id": f"resp_{answer_id}",
            "object": "response",
            "created_at": created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.call.model,
            "output": [],
            "usage": None,
            **self.echo,
        }


def items_of(answer: Answer) -> list[dict[str, Any]]:
    """Reasoning, message and function calls of an answer, in this order."""
    said, items = answer.message, []
    if said.reasoning:
        items.append(_reasoning(answer.id, said.reasoning))
    if said.content or not said.tool_calls:
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        items.append(_message(answer.id, status, [_text_part(said.content, answer.tokens)]))
    items.extend(_call_item(call, call.arguments, "completed") for call in said.tool_calls)
    return items


def _reasoning(answer_id: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": f"rs_{answer_id}", "type": "reasoning", "summary": [], "content": content}


def _message(answer_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": f"msg_{answer_id}", "type": "message", "status": status, "role": "assistant", "content": content}


def _text_part(text: str, tokens: Sequence[Token]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": _logprobs(tokens)}


def _logprobs(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    return [
        {**_chance(token.text, token.logprob), "top_logprobs": [_chance(*other) for other in token.alternatives]}
        for token in tokens
    ]


def _chance(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}


def _call_item(call: ToolCall, arguments: str, status: str) -> dict[str, Any]:
    return {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": arguments,
    }


class ResponsesWriter:
    """Events of one stream; one item is open at a time, and every event has its number."""

    def __init__(self, exchange: ResponsesExchange) -> None:
        self._exchange = exchange
        self._head: StreamHead | None = None
        self._number = 0
        self._open = ""  # "", "reasoning" or "message"
        self._text = ""
        self._tokens: list[Token] = []
        self._num_items = 0

    def start(self, head: StreamHead) -> bytes:
        self._head = head
        response = self._exchange.frame(head.id, head.created, "in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def delta(self, delta: Delta) -> bytes:
        data = b""
        if delta.reasoning:
            data += self._enter("reasoning") + self._more("response.reasoning_text.delta", delta.reasoning)
        if delta.content:
            self._tokens.extend(delta.tokens)
            data += self._enter("message")
            data += self._more("response.output_text.delta", delta.content, logprobs=_logprobs(delta.tokens))
        return data

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def end(self, answers: Sequence[Answer]) -> bytes:
        answer = answers[0]
        parts = []
        if not answer.message.content and not answer.message.tool_calls:
            parts.append(self._enter("message"))
        parts.append(self._leave(answer))
        parts.extend(self._call(call) for call in answer.message.tool_calls)
        name = "response.incomplete" if answer.finish_reason == "length" else "response.completed"
        return b"".join([*parts, self._event(name, response=self._exchange.ended(answer))])

    def fail(self, error: ApiError) -> bytes:
        assert self._head is not None
        response = self._exchange.frame(self._head.id, self._head.created, "failed")
        response["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=response)

    def _enter(self, kind: str) -> bytes:
        if self._open == kind:
            return b""
        left, self._open, self._text = self._leave(None), kind, ""
        if kind == "reasoning":
            item, part = _reasoning(self._id, ""), {"type": "reasoning_text", "text": ""}
        else:
            item, part = _message(self._id, "in_progress", []), _text_part("", ())
        added = self._event("response.output_item.added", output_index=self._num_items, item=item)
        return left + added + self._event("response.content_part.added", **self._place(), part=part)

    def _more(self, name: str, text: str, **extra: Any) -> bytes:
        self._text += text
        return self._event(name, **self._place(), delta=text, **extra)

    def _leave(self, answer: Answer | None) -> bytes:
        """Close the open item; ``answer`` is known when it is the last."""
        if not self._open:
            return b""
        if self._open == "reasoning":
            name, extra = "response.reasoning_text.done", {}
            part: dict[str, Any] = {"type": "reasoning_text", "text": self._text}
            item = _reasoning(self._id, self._text)
        else:
            tokens = answer.tokens if answer is not None else self._tokens
            name, extra = "response.output_text.done", {"logprobs": _logprobs(tokens)}
            part = _text_part(self._text, tokens)
            is_cut = answer is not None and answer.finish_reason == "length"
            item = _message(self._id, "incomplete" if is_cut else "completed", [part])
        events = [
            self._event(name, **self._place(), text=self._text, **extra),
            self._event("response.content_part.done", **self._place(), part=part),
            self._event("response.output_item.done", output_index=self._num_items, item=item),
        ]
        self._open = ""
        self._num_items += 1
        return b"".join(events)

    def _call(self, call: ToolCall) -> bytes:
        index = {"output_index": self._num_items}
        place = {**index, "item_id": f"fc_{call.id}"}
        self._num_items += 1
        started, done = _call_item(call, "", "in_progress"), _call_item(call, call.arguments, "completed")
        finished = {**place, "arguments": call.arguments, "name": call.name}
        return b"".join(
            [
                self._event("response.output_item.added", **index, item=started),
                self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
                self._event("response.function_call_arguments.done", **finished),
                self._event("response.output_item.done", **index, item=done),
            ]
        )

    @property
    def _id(self) -> str:
        assert self._head is not None
        return self._head.id

    def _place(self) -> dict[str, Any]:
        prefix = "rs" if self._open == "reasoning" else "msg"
        return {"item_id": f"{prefix}_{self._id}", "output_index": self._num_items, "content_index": 0}

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number - 1, **fields}, name)
