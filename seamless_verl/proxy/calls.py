"""One request and its answer, whatever dialect they are spoken in.

A dialect is a pure translation: a body becomes a :class:`Call`, :class:`Answer` objects become a body or events.

::

    bytes ──parse──▶ Exchange.call ──▶ turns ──▶ answers ──Exchange.body──▶ bytes
                                         └─────▶ deltas ──Exchange.writer──▶ server-sent events
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from seamless_verl.proxy.call_errors import ApiError
from seamless_verl.trajectory.messages import Message


class ToolChoice(Enum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A checked request.

    Attributes:
        raw_messages, raw_tools: in the shape of OpenAI's chat completions, before they became canonical.
        prompt: text or token ids to continue as they are; the messages are then empty and no template is used.
        sampling: what the engine is asked for.
        tool_name: the one tool to call, with ``REQUIRED``; "" for any.
        strict_tools: names of tools whose arguments must follow their schema.
        json_schema: what the answer's text must follow; None for free text.
        thinking: whether the client asks the model to reason; None when it says nothing.
        thinking_budget: how many tokens it would have it reason for.
        n: answers wanted.
        logprobs: alternatives wanted per token, 0 for the chosen token only; None for no log-probs.
    """

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
    n: int = 1
    logprobs: int | None = None
    stream: bool = False

    @property
    def parse_tools(self) -> bool:
        """Whether tool calls in the answer's text are calls."""
        return bool(self.raw_tools) and self.tool_choice is not ToolChoice.NONE


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token as clients see it; ``alternatives`` are texts with log-probs, best first."""

    text: str
    logprob: float
    alternatives: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer, ready to be written in any dialect.

    Attributes:
        id: the generation's id; dialects put their own prefix before it.
        finish_reason: ``stop``, ``length`` or ``tool_calls``.
        stop_text: the stop string that ended it, "" for none.
        cached_tokens: tokens of the prompt that the session already held.
        tokens: without the stop token; only where asked for.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamHead:
    """What is known of an answer before its first token."""

    id: str
    created: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A piece of one answer: more reasoning, or more content, with the tokens that came with it."""

    index: int
    reasoning: str = ""
    content: str = ""
    tokens: tuple[Token, ...] = ()


class EventWriter(Protocol):
    """Writes one stream in a dialect. ``start`` comes first, then deltas, then ``end`` or ``fail``, once."""

    def start(self, head: StreamHead) -> bytes: ...

    def delta(self, delta: Delta) -> bytes: ...

    def keep_alive(self) -> bytes: ...

    def end(self, answers: Sequence[Answer]) -> bytes:
        """Whatever deltas do not carry: tool calls, finish reasons, usage. All text has been written before."""
        ...

    def fail(self, error: ApiError) -> bytes: ...


class Exchange(Protocol):
    """One request in its dialect."""

    @property
    def call(self) -> Call: ...

    def body(self, answers: Sequence[Answer]) -> bytes:
        """The whole response of a request without streaming."""
        ...

    def writer(self) -> EventWriter: ...


def total_usage(answers: Sequence[Answer]) -> tuple[int, int, int]:
    """Prompt, generated and cached tokens of a request; its prompt counts once, however many answers it has."""
    first = answers[0]
    return first.prompt_tokens, sum(answer.completion_tokens for answer in answers), first.cached_tokens
