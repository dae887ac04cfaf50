"""OpenAI responses: from a body to a call in the shape of chat completions, from an answer to a response or events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from seamless_verl.proxy.calls import Answer, ApiError, Call, Delta, Earlier, Token, bad_request, encoded
from seamless_verl.proxy.dialects.responses_body import (
    Function,
    ResponsesRequest,
    TextOptions,
    instructions_of,
    items_of,
    messages_of,
    refers_back,
    string_of,
)
from seamless_verl.proxy.dialects.shared import (
    KEEP_ALIVE,
    chances,
    chat_tool,
    event,
    openai_choice,
    preferences,
    sampling_of,
    validated,
)
from seamless_verl.trajectory.messages import Message, ToolCall

_LOGPROBS = "message.output_text.logprobs"
_TEXT_EVENTS = {"reasoning": "reasoning_text", "message": "output_text"}


def parse_responses(body: bytes) -> ResponsesCall:
    """Check a body.

    Raises:
        ApiError: 400, naming the parameter at fault.
    """
    request = validated(ResponsesRequest, body)
    tools = [tool for tool in request.tools or () if isinstance(tool, Function)]
    choice = request.tool_choice or "auto"
    wished = choice.get("name") or None if isinstance(choice, dict) else None
    reasoning = request.reasoning
    effort = reasoning.effort if reasoning is not None else None
    tool_choice, tool_name = openai_choice(choice, wished, {tool.name for tool in tools})
    refers = request.previous_response_id is not None or any(refers_back(item) for item in items_of(request))
    return ResponsesCall(
        model=request.model,
        raw_messages=() if refers else [*instructions_of(request), *messages_of(items_of(request))],
        refers=request if refers else None,
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
        "previous_response_id": request.previous_response_id,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesCall(Call):
    """One response.

    ``echo`` is what it repeats of its request. ``refers``: the request, if it refers to what was said before; its
    messages are those of `continued` then.
    """

    schema_field: ClassVar[str] = "text.format"
    echo: Mapping[str, Any]
    refers: ResponsesRequest | None = None

    @property
    def conversation(self) -> Sequence[Mapping[str, Any]]:
        """Without the instructions, which a response that goes on from this one has of its own."""
        return self.raw_messages[1:] if self.echo["instructions"] else self.raw_messages

    def continued(self, earlier: Earlier) -> Call:
        request = self.refers
        if request is None:
            return self
        items = list(items_of(request))
        if any(refers_back(item) for item in items):
            known = {item["id"]: item for answer, said in earlier.said.items() for item in _items_said(answer, said)}
            items = [
                _referred(item, known, f"input.{at}") if refers_back(item) else item for at, item in enumerate(items)
            ]
        before: Sequence[Mapping[str, Any]] = ()
        if request.previous_response_id is not None:
            before, said = _before(request.previous_response_id, earlier)
            items = [*said, *items]
        return replace(self, raw_messages=[*instructions_of(request), *before, *messages_of(items)], refers=None)

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


def _before(response_id: str, earlier: Earlier) -> tuple[Sequence[Mapping[str, Any]], list[dict[str, Any]]]:
    """What a response was given to, and its items."""
    answer_id = response_id.removeprefix("resp_")
    said, conversation = earlier.said.get(answer_id), earlier.conversation(answer_id)
    if said is None or conversation is None:
        story = "This session does not know that response, or no longer. Send the whole conversation as input."
        raise bad_request(story, param="previous_response_id", code="previous_response_not_found")
    return conversation, _items_said(answer_id, said)


def _referred(item: Mapping[str, Any], known: Mapping[str, dict[str, Any]], where: str) -> dict[str, Any]:
    name = string_of(item, "id", where)
    if name not in known:
        story = f"{where} refers to {name[:80]!r}, which is no item of an answer of this session."
        raise bad_request(story, param=where, code="item_not_found")
    return known[name]


def _items_of(answer: Answer) -> list[dict[str, Any]]:
    return _items_said(answer.id, answer.message, answer.tokens, _status(answer))


def _items_said(
    answer_id: str, said: Message, tokens: Sequence[Token] = (), status: str = "completed"
) -> list[dict[str, Any]]:
    """Reasoning, message and function calls of an answer, in this order."""
    items = []
    if said.reasoning:
        items.append(_text_item("reasoning", answer_id, said.reasoning)[0])
    if said.content or not said.tool_calls:
        items.append(_text_item("message", answer_id, said.content, tokens, status)[0])
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
