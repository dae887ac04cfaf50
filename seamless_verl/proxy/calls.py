"""One request and its answer, whatever dialect they are spoken in, and how a request is refused.

A dialect is a pure translation: a body becomes a :class:`Call`, :class:`Answer` objects become a body or events.

::

    bytes ──parse──▶ Call ──▶ attempt ──▶ answers ──Call.body──▶ bytes
                                 └──────▶ deltas ──Call.writer──▶ server-sent events
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any, ClassVar, NoReturn, Protocol

import msgspec

from seamless_verl.errors import SeamlessError
from seamless_verl.trajectory.messages import Message, Role, Transcript, transcript_of
from seamless_verl.trajectory.tokens import pack_ids

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    502: "engine_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_PROMPT_NAME = "\x00prompt"  # keeps prompts apart from messages; a client that uses this name confuses only itself
_ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
_ANTHROPIC_TYPES = {
    408: "timeout_error",
    409: "invalid_request_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_DIGITS = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else ord(" ") for byte in range(256))
_MANY_DIGITS = b"0" * 300  # integers shorter than that are finite as floats


class OnUnsupported(Enum):
    """What happens to a request with preferences that this proxy cannot honour."""

    ACCEPT = "accept"
    REFUSE = "refuse"


class Earlier(Protocol):
    """What a session has said and was asked before, by the ids of its answers."""

    @property
    def said(self) -> Mapping[str, Message]: ...

    def conversation(self, answer_id: str) -> Sequence[Mapping[str, Any]] | None:
        """The messages that were answered; None: they are not known."""
        ...


class ToolChoice(Enum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A checked request; each dialect has a kind of its own, which writes its answers.

    Attributes:
        raw_messages, raw_tools: in the shape of OpenAI's chat completions, before they became canonical.
        prompt: text or token ids to continue as they are; the messages are then empty and no template is used.
        sampling: what the engine is asked for.
        tool_name: the one tool to call, with ``REQUIRED``; "" for any.
        strict_tools: names of tools whose arguments must follow their schema.
        json_schema: what the answer's text must follow; None for free text.
        schema_field: where the dialect's body has that schema.
        thinking: whether the client asks the model to reason; None when it says nothing.
        thinking_budget: how many tokens the model may reason for.
        preferences: fields that this proxy cannot honour, and that do not change the form of an answer.
        n: answers wanted.
        logprobs: alternatives wanted per token, 0 for the chosen token only; None for no log-probs.
    """

    schema_field: ClassVar[str] = "response_format"
    model: str
    raw_messages: Sequence[Mapping[str, Any]] = ()
    raw_tools: Sequence[Mapping[str, Any]] = ()
    prompt: str | tuple[int, ...] | None = None
    sampling: Mapping[str, Any]
    tool_choice: ToolChoice = ToolChoice.AUTO
    tool_name: str = ""
    parallel_tool_calls: bool = True
    strict_tools: frozenset[str] = frozenset()
    json_schema: Mapping[str, Any] | None = None
    thinking: bool | None = None
    thinking_budget: int | None = None
    preferences: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    stream: bool = False

    @property
    def tools_to_parse(self) -> Sequence[Mapping[str, Any]]:
        """Tools whose calls are found in the answer's text; none where calls are just text."""
        return () if self.tool_choice is ToolChoice.NONE else self.raw_tools

    @property
    def conversation(self) -> Sequence[Mapping[str, Any]] | None:
        """The messages to be remembered for a request that goes on from the answer; None in most dialects."""
        return None

    def continued(self, earlier: Earlier) -> Call:
        """The call with all of its messages, where it refers to earlier ones instead of repeating them.

        Raises:
            ApiError: 400, they are not known.
        """
        return self

    def body(self, answers: Sequence[Answer]) -> bytes:
        """The whole response of a request without streaming."""
        raise NotImplementedError

    def writer(self) -> EventWriter:
        """Of a stream."""
        raise NotImplementedError

    def digest(self, said: bytes) -> bytes:
        """Names a request by everything that decides its answers; two with the same name may be a retry.

        Args:
            said: names its messages and tools.
        """
        schema = "" if self.json_schema is None else json.dumps(self.json_schema, sort_keys=True)
        wishes = (
            sorted(self.sampling.items()),
            self.logprobs,
            self.tool_choice.value,
            self.tool_name,
            self.parallel_tool_calls,
            sorted(self.strict_tools),
            schema,
        )
        return blake2b(said + repr(wishes).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def prompt_transcript(prompt: str | tuple[int, ...]) -> Transcript:
    """A text completion has no messages; its prompt stands for them, so that retries are recognised."""
    if isinstance(prompt, str):
        name, text = _PROMPT_NAME, prompt
    else:
        name, text = _PROMPT_NAME + "_ids", blake2b(pack_ids(prompt).tobytes(), digest_size=16).hexdigest()
    return transcript_of((Message(role=Role.USER, content=text, name=name),))


class Token(msgspec.Struct, frozen=True, omit_defaults=True):
    """One generated token as clients see it.

    Attributes:
        alternatives: texts with log-probs, best first.
        raws: bytes of the token and of its alternatives, where one of them is part of a character, of which its text
            says nothing; empty where the texts say all.
    """

    text: str
    logprob: float
    alternatives: tuple[tuple[str, float], ...] = ()
    raws: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer, in the words of no dialect.

    Attributes:
        id: the generation's id; dialects put their own prefix before it.
        finish_reason: ``stop``, ``length`` or ``tool_calls``.
        stop_text: the stop string that ended it, "" for none.
        cached_tokens: tokens of the prompt that the session already held.
        tokens: without the stop token; only where asked for.
        digest: names the request, and which of its answers this is.
        match: how the request fitted the tree (``clean``, ``realign`` or ``fork``), "" until it is committed.
        overrides: ``name=value`` of what the trainer decided against the agent's wish.

    One that is still generated has its head only: ``id``, ``created``, the tokens of the prompt, and ``overrides``.
    """

    id: str
    created: int
    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tokens: tuple[Token, ...] = ()
    stop_text: str = ""
    digest: bytes = b""
    match: str = ""
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A piece of one answer: more reasoning, or more content, with the tokens that came with it."""

    index: int
    reasoning: str = ""
    content: str = ""
    tokens: tuple[Token, ...] = ()


class EventWriter(Protocol):
    """Writes one stream in a dialect. ``start`` comes first, then deltas, then ``end`` or ``fail``, once."""

    def start(self, head: Answer) -> bytes:
        """``head`` is what is known of the first answer before its first token."""
        ...

    def delta(self, delta: Delta) -> bytes: ...

    def keep_alive(self) -> bytes: ...

    def end(self, answers: Sequence[Answer]) -> bytes:
        """Writes what deltas do not carry: tool calls, finish reasons, usage. All text has been written before."""
        ...

    def fail(self, error: ApiError) -> bytes: ...


def total_usage(answers: Sequence[Answer]) -> tuple[int, int, int]:
    """Prompt, generated and cached tokens of a request; its prompt counts once, however many answers it has."""
    first = answers[0]
    return first.prompt_tokens, sum(answer.completion_tokens for answer in answers), first.cached_tokens


class ApiError(SeamlessError):
    """A refusal with an HTTP status.

    Args:
        status: HTTP status code.
        code: short machine-readable name, e.g. ``session_closed``.
        message: what is wrong and what to do instead, for people.
        param: the request's field at fault, if one is.
        retry_after_s: when trying again may help; None means that it will not, and SDKs are told so.
    """

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self, path: str = "") -> dict[str, object]:
        """The error as the dialect spoken at ``path`` writes it."""
        if path.endswith(_ANTHROPIC_PATHS):
            message = f"{self.param}: {self.message}" if self.param else self.message
            kind = _ANTHROPIC_TYPES.get(self.status, _TYPES.get(self.status, "api_error"))
            return {"type": "error", "error": {"type": kind, "message": message, "code": self.code}}
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "api_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> Mapping[str, str]:
        # SDKs repeat 409, 429 and 5xx by themselves unless told otherwise.
        if self.retry_after_s is None:
            return {"x-should-retry": "false"}
        return {"retry-after": f"{max(1, round(self.retry_after_s))}", "x-should-retry": "true"}


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, code, message, param=param)


def refuse_infinite(body: bytes) -> None:
    """Numbers like ``NaN`` and ``1e999`` anywhere in a body: pydantic takes them where a schema says "anything".

    Raises:
        ApiError: 400.
    """
    try:
        msgspec.json.decode(body)  # takes no other number that is not finite; microseconds
        is_fine = _MANY_DIGITS not in body.translate(_DIGITS)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        is_fine = False
    if not is_fine:
        _refuse_infinite(body)


def _refuse_infinite(body: bytes) -> None:
    def refuse(number: str) -> NoReturn:
        raise bad_request(f"The body is not valid JSON: {number[:40]} is not a finite number.", code="invalid_json")

    def finite(number: str) -> float:
        value = float(number)
        if not math.isfinite(value):
            refuse(number)
        return value

    try:
        json.loads(body, parse_constant=refuse, parse_float=finite, parse_int=finite)
    except (ValueError, RecursionError):
        return  # the model's own parser says what is wrong


def encoded(content: Any) -> bytes:
    """A response body; what cannot be written as UTF-8 is replaced, never an error."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")
