"""OpenAI responses: from a body to a call in the shape of chat completions, from an answer to a response or a stream.

``instructions``             a system message
``message``                  a message; its text parts joined, its pictures between them
``reasoning``                reasoning of the assistant message that follows
``function_call``            a tool call of the assistant message before it
``function_call_output``     a tool message
anything else                refused by name

Items of one answer come back in a row, and are one assistant message again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seamless_verl.proxy.calls import Answer, ApiError, Call, Delta, Token, bad_request, encoded
from seamless_verl.proxy.dialects.responses_body import Function, ResponsesRequest, TextOptions
from seamless_verl.proxy.dialects.shared import (
    KEEP_ALIVE,
    chances,
    chat_content,
    chat_tool,
    event,
    openai_choice,
    preferences,
    sampling_of,
    validated,
)
from seamless_verl.trajectory.messages import ToolCall

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_LOGPROBS = "message.output_text.logprobs"
_ORDER = ("reasoning", "message", "function_call")  # of the items of one assistant message
_TEXT_EVENTS = {"reasoning": "reasoning_text", "message": "output_text"}


def parse_responses(body: bytes) -> ResponsesCall:
    """Check a body.

    Raises:
        ApiError: 400, naming the parameter at fault.
    """
    request = validated(ResponsesRequest, body)
    if request.previous_response_id is not None:
        story = "Responses are not kept; send the whole conversation as input."
        raise bad_request(story, param="previous_response_id", code="unsupported_parameter")
    tools = [tool for tool in request.tools or () if isinstance(tool, Function)]
    choice = request.tool_choice or "auto"
    wished = choice.get("name") or None if isinstance(choice, dict) else None
    reasoning = request.reasoning
    effort = reasoning.effort if reasoning is not None else None
    tool_choice, tool_name = openai_choice(choice, wished, {tool.name for tool in tools})
    return ResponsesCall(
        model=request.model,
        raw_messages=_messages(request),
        raw_tools=[chat_tool(tool.name, tool.description, tool.parameters) for tool in tools],
        sampling=sampling_of(request, request.max_output_tokens),
        tool_choice=tool_choice,
        tool_name=tool_name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        strict_tools=frozenset(tool.name for tool in tools if tool.strict),
        json_schema=_json_schema(request.text),
        thinking=False if effort == "none" else None,
        preferences=preferences(
            ("reasoning.effort", effort not in (None, "none")),
            ("reasoning.summary", reasoning is not None and bool(reasoning.summary or reasoning.generate_summary)),
            ("text.verbosity", request.text is not None and request.text.verbosity not in (None, "medium")),
            ("truncation", request.truncation == "auto"),
            tools=request.tools or (),
        ),
        logprobs=_num_alternatives(request),
        stream=bool(request.stream),
        echo=_echo(request),
    )


def _echo(request: ResponsesRequest) -> dict[str, Any]:
    """What a response repeats of its request."""
    return {
        **request.model_dump(include={"instructions", "max_output_tokens", "temperature", "top_p", "user"}),
        "tools": [tool.model_dump() for tool in request.tools or () if isinstance(tool, Function)],
        "tool_choice": request.tool_choice or "auto",
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "text": request.text.model_dump(by_alias=True) if request.text else {"format": {"type": "text"}},
        "metadata": request.metadata or {},
        "previous_response_id": None,
        "truncation": "disabled",
        "store": False,
    }


def _num_alternatives(request: ResponsesRequest) -> int | None:
    include = request.include or []
    for name in include:
        # Reasoning is given in plain text anyway; clients ask for its encrypted form by habit.
        if name not in (_LOGPROBS, "reasoning.encrypted_content"):
            raise bad_request(f"include knows {_LOGPROBS}, not {name[:64]!r}.", param="include")
    if request.top_logprobs and _LOGPROBS not in include:
        raise bad_request(f"top_logprobs needs {_LOGPROBS} in include.", param="top_logprobs")
    return request.top_logprobs or 0 if _LOGPROBS in include else None


def _json_schema(text: TextOptions | None) -> Mapping[str, Any] | None:
    form = text.format if text is not None else None
    if form is None:
        return None
    if form.type == "json_schema":
        if form.json_schema is None:
            raise bad_request("text.format.schema is missing.", param="text")
        return form.json_schema
    given = [name for name in form.model_fields_set if name != "type" and getattr(form, name) is not None]
    if given:
        story = f"text.format has {given[0].removeprefix('json_')}, which goes with json_schema, not with {form.type}."
        raise bad_request(story, param="text", code="unsupported_parameter")
    return {"type": "object"} if form.type == "json_object" else None


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": request.instructions}] if request.instructions else []
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    if not request.input:
        raise bad_request("input is empty.", param="input")
    last = ""  # kind of the item before, where it became part of an assistant message
    for number, item in enumerate(request.input):
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
        function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
        call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


def _other(kind: Any, item: Mapping[str, Any], where: str) -> dict[str, Any]:
    if kind == "function_call_output":
        content = _content(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": content}
    if kind != "message":
        raise _unsupported(kind, where)
    role = _string(item, "role", where)
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
    return {"type": "text", "text": _string(part, "text", where)}


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name} is missing or no text.", param=f"{where}.{name}")
    return value


def _unsupported(kind: Any, where: str) -> ApiError:
    story = f"{where} has type {str(kind)[:40]!r}; this model takes text, pictures, function calls and their outputs."
    return bad_request(story, param=where, code="unsupported_content")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesCall(Call):
    """One response; ``echo`` is what it repeats of its request."""

    echo: Mapping[str, Any]

    def body(self, answers: Sequence[Answer]) -> bytes:
        return encoded(self.ended(answers[0]))

    def writer(self) -> ResponsesWriter:
        return ResponsesWriter(self)

    def ended(self, answer: Answer) -> dict[str, Any]:
        """The response object of a finished answer."""
        status, prompt, generated = _status(answer), answer.prompt_tokens, answer.completion_tokens
        usage = {"input_tokens": prompt, "output_tokens": generated, "total_tokens": prompt + generated}
        return {
            **self.frame(answer, status),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": _items_of(answer),
            "usage": {
                **usage,
                "input_tokens_details": {"cached_tokens": answer.cached_tokens},
                "output_tokens_details": {"reasoning_tokens": 0},
            },
        }

    def frame(self, seen: Answer, status: str) -> dict[str, Any]:
        """A response object without any output."""
        known = {"id": f"resp_{seen.id}", "object": "response", "created_at": seen.created, "status": status}
        nothing: dict[str, Any] = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        return {**known, "model": self.model, **nothing, **self.echo}


def _items_of(answer: Answer) -> list[dict[str, Any]]:
    """Reasoning, message and function calls of an answer, in this order."""
    said, items = answer.message, []
    if said.reasoning:
        items.append(_text_item("reasoning", answer.id, said.reasoning)[0])
    if said.content or not said.tool_calls:
        items.append(_text_item("message", answer.id, said.content, answer.tokens, _status(answer))[0])
    return items + [_call_item(call, call.arguments, "completed") for call in said.tool_calls]


def _status(answer: Answer | None) -> str:
    return "incomplete" if answer is not None and answer.finish_reason == "length" else "completed"


def _text_item(
    kind: str, answer_id: str, text: str, tokens: Sequence[Token] = (), status: str = "completed"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """An item of reasoning, or a message, and the one part that it has once it has text."""
    if kind == "reasoning":
        part: dict[str, Any] = {"type": "reasoning_text", "text": text}
        return {"id": f"rs_{answer_id}", "type": kind, "summary": [], "content": [part] if text else []}, part
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": chances(tokens)}
    content = [] if status == "in_progress" else [part]
    return {"id": f"msg_{answer_id}", "type": kind, "status": status, "role": "assistant", "content": content}, part


def _call_item(call: ToolCall, arguments: str, status: str) -> dict[str, Any]:
    item = {"id": f"fc_{call.id}", "type": "function_call", "status": status}
    return {**item, "call_id": call.id, "name": call.name, "arguments": arguments}


class ResponsesWriter:
    """Events of one stream; one item is open at a time, and every event has its number."""

    def __init__(self, request: ResponsesCall) -> None:
        self._request = request
        self._id = ""
        self._response: dict[str, Any] = {}  # before there is an answer
        self._num_events = self._num_items = 0
        self._open = ""  # "", "reasoning" or "message"
        self._text = ""
        self._tokens: list[Token] = []

    def start(self, head: Answer) -> bytes:
        self._id, self._response = head.id, self._request.frame(head, "in_progress")
        created = self._event("created", response=self._response)
        return created + self._event("in_progress", response=self._response)

    def delta(self, delta: Delta) -> bytes:
        data = b""
        if delta.reasoning:
            data += self._more("reasoning", delta.reasoning)
        if delta.content:
            self._tokens.extend(delta.tokens)
            data += self._more("message", delta.content, logprobs=chances(delta.tokens))
        return data

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def end(self, answers: Sequence[Answer]) -> bytes:
        answer = answers[0]
        says_nothing = not answer.message.content and not answer.message.tool_calls
        parts = [self._enter("message") if says_nothing else b"", self._leave(answer)]
        parts.extend(self._call(call) for call in answer.message.tool_calls)
        return b"".join([*parts, self._event(f"{_status(answer)}", response=self._request.ended(answer))])

    def fail(self, error: ApiError) -> bytes:
        told = {"code": "server_error", "message": error.message}
        return self._event("failed", response={**self._response, "status": "failed", "error": told})

    def _more(self, kind: str, text: str, **extra: Any) -> bytes:
        entered = self._enter(kind)
        self._text += text
        return entered + self._event(f"{_TEXT_EVENTS[kind]}.delta", **self._place(), delta=text, **extra)

    def _enter(self, kind: str) -> bytes:
        if self._open == kind:
            return b""
        left, self._open, self._text = self._leave(), kind, ""
        item, part = _text_item(kind, self._id, "", status="in_progress")
        added = self._event("output_item.added", output_index=self._num_items, item=item)
        return left + added + self._event("content_part.added", **self._place(), part=part)

    def _leave(self, answer: Answer | None = None) -> bytes:
        """Close the open item; ``answer`` is known when it is the last."""
        if not self._open:
            return b""
        tokens = answer.tokens if answer is not None else self._tokens
        item, part = _text_item(self._open, self._id, self._text, tokens, _status(answer))
        extra = {"logprobs": part["logprobs"]} if self._open == "message" else {}
        events = [
            self._event(f"{_TEXT_EVENTS[self._open]}.done", **self._place(), text=self._text, **extra),
            self._event("content_part.done", **self._place(), part=part),
            self._event("output_item.done", output_index=self._num_items, item=item),
        ]
        self._open = ""
        self._num_items += 1
        return b"".join(events)

    def _call(self, call: ToolCall) -> bytes:
        index = {"output_index": self._num_items}
        place = {**index, "item_id": f"fc_{call.id}"}
        self._num_items += 1
        events = [
            self._event("output_item.added", **index, item=_call_item(call, "", "in_progress")),
            self._event("function_call_arguments.delta", **place, delta=call.arguments),
            self._event("function_call_arguments.done", **place, arguments=call.arguments, name=call.name),
            self._event("output_item.done", **index, item=_call_item(call, call.arguments, "completed")),
        ]
        return b"".join(events)

    def _place(self) -> dict[str, Any]:
        prefix = "rs" if self._open == "reasoning" else "msg"
        return {"item_id": f"{prefix}_{self._id}", "output_index": self._num_items, "content_index": 0}

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._num_events += 1
        data = {"type": f"response.{name}", "sequence_number": self._num_events - 1, **fields}
        return event(data, f"response.{name}")
