"""What several dialects check in a body, and what several write into an answer.

What cannot be honoured is refused by name, but for preferences, which the proxy may be told to ignore, by name as well
(`Call.preferences`). Hints that change no answer are taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from seamless_verl.proxy.calls import (
    Answer,
    ApiError,
    Call,
    Token,
    ToolChoice,
    bad_request,
    encoded,
    refuse_infinite,
    total_usage,
)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
# Run by other vendors' servers, wherever the model is; with a date behind in Anthropic's dialect.
_SERVER_TOOLS = re.compile(
    r"(web_search|web_fetch|file_search|code_interpreter|code_execution|image_generation|tool_search|mcp|namespace)"
)


# What leaves such a tool out of requests, in the clients that send it by themselves.
_LEFT_OUT_BY = {
    "web_search": (
        'Codex: web_search = "disabled" in config.toml',
        "Claude Code: --disallowedTools WebSearch, or permissions.deny in settings.json",
        "OpenAI Agents SDK: no WebSearchTool among an agent's tools",
    ),
    "file_search": ("OpenAI Agents SDK: no FileSearchTool among an agent's tools",),
    "code_interpreter": ("OpenAI Agents SDK: no CodeInterpreterTool among an agent's tools",),
    "image_generation": ("OpenAI Agents SDK: no ImageGenerationTool among an agent's tools",),
    "mcp": ("OpenAI Agents SDK: no HostedMCPTool among an agent's tools",),
}


class Strict(BaseModel):
    """Part of a body that has the fields of its dialect and no others."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


_Model = TypeVar("_Model", bound=BaseModel)


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool | None = None  # a hint; nothing is padded here


class OpenAIRequest(Strict):
    """What all of OpenAI's dialects have in a body."""

    model: str = Field(max_length=256)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


class SampledRequest(OpenAIRequest):
    """Chat and text completions."""

    n: int | None = Field(default=None, ge=1, lt=2**31)
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


class ConversationRequest(OpenAIRequest):
    """Chat and responses."""

    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    # Hints about caches and abuse; they change no answer, and the proxy keeps every prefix anyway.
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None


class ServerTool(BaseModel):
    """A tool that nobody here runs; ``type`` without a date."""

    type: str


def tool_or_server_tool(value: Any, read: Callable[[Any], Any]) -> Any:
    """For pydantic's ``WrapValidator`` of a dialect's tool."""
    kind = value.get("type") if isinstance(value, dict) else None
    found = _SERVER_TOOLS.match(kind) if isinstance(kind, str) else None
    return ServerTool(type=found[1]) if found is not None else read(value)


def preferences(*wishes: tuple[str, bool], tools: Iterable[object] = ()) -> tuple[str, ...]:
    """`Call.preferences`: fields, each with whether it is asked for, and the tools that nobody here runs."""
    dropped = [f"tools.{tool.type}" for tool in tools if isinstance(tool, ServerTool)]
    return (*(name for name, is_asked in wishes if is_asked), *dropped)


def refused_preference(name: str) -> ApiError:
    """The refusal of a preference; of a tool that nobody here runs, with what its client leaves it out by."""
    told = _LEFT_OUT_BY.get(name.removeprefix("tools."), ())
    how = f" ({'; '.join(told)})" if told else ""
    story = f"{name} cannot be honoured here. Leave it out{how}, or have it ignored (--on-unsupported accept)."
    return bad_request(story, param=name, code="unsupported_value")


def validated(model: type[_Model], body: bytes) -> _Model:
    """A body as its dialect's model.

    Raises:
        ApiError: 400, naming the parameter at fault.
    """
    try:
        valid = model.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error) from None
    refuse_infinite(body)
    return valid


def _invalid(error: ValidationError) -> ApiError:
    """A validation error in OpenAI's words: the first problem, by name."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:200]
    if first["type"] == "json_invalid":
        return bad_request(f"The body is not valid JSON: {first['msg']}.", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return bad_request(f"{where} is not supported here. Leave it out.", param=where, code="unsupported_parameter")
    return bad_request(f"{where}: {first['msg']}.", param=where)


def refuse_values(*problems: tuple[str, bool, str]) -> None:
    """Refuse values that exist in a dialect but ask for what this proxy does not offer: field, whether it is so, why.

    Raises:
        ApiError: 400, for the first of them.
    """
    for param, is_wrong, why in problems:
        if is_wrong:
            raise bad_request(f"This value of {param} is not supported: {why}.", param=param, code="unsupported_value")


def checked_stop(stop: str | list[str] | None, param: str = "stop") -> list[str] | None:
    """Stop strings as a list; None for none."""
    stops = [stop] if isinstance(stop, str) else stop
    if stops is not None and (len(stops) > 16 or not all(stops)):
        raise bad_request(f"{param} takes 1 to 16 texts that are not empty.", param=param)
    return stops or None


def checked_choice(choice: str, name: str, names: Collection[str]) -> tuple[ToolChoice, str]:
    """A tool choice that the tools of the request allow."""
    if choice not in {known.value for known in ToolChoice}:
        story = f"tool_choice is {choice[:40]!r}; it must be auto, none or required."
        raise bad_request(story, param="tool_choice")
    if choice == "required" and not names:
        raise bad_request("tool_choice asks for a tool, but there are no tools.", param="tool_choice")
    if name and name not in names:
        story = f"tool_choice names {name[:64]!r}, which is not among the tools."
        raise bad_request(story, param="tool_choice")
    return ToolChoice(choice), name


def openai_choice(choice: str | dict[str, Any] | None, name: object, names: Collection[str]) -> tuple[ToolChoice, str]:
    """``tool_choice`` of an OpenAI dialect; ``name`` is that of its function, wherever the dialect has it."""
    if choice is None or isinstance(choice, str):
        return checked_choice("auto" if choice is None else choice, "", names)
    if choice.get("type") != "function" or not isinstance(name, str):
        raise bad_request("tool_choice takes auto, none, required or one function by name.", param="tool_choice")
    return checked_choice("required", name, names)


def chat_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool of another dialect in the shape of chat completions."""
    function = {"name": name, "description": description or "", "parameters": parameters or {}}
    return {"type": "function", "function": function}


def chat_content(given: Iterable[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Parts in the shape of chat completions as the content of a message: text, where there are no pictures."""
    parts = list(given)
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def sampling_of(request: Strict, max_tokens: int | None, stop: list[str] | None = None) -> dict[str, Any]:
    """What the engine is asked for; it decides where the request says nothing."""
    said = {name: getattr(request, name, None) for name in ("temperature", "top_p", "top_k", "seed")}
    asked = {"max_tokens": max_tokens, **said, "stop": stop}
    return {name: value for name, value in asked.items() if value is not None}


def chances(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Log-probs of tokens as chat completions and responses write them."""
    found = []
    for token in tokens:
        texts = ((token.text, token.logprob), *token.alternatives)
        raws = token.raws or tuple(text.encode("utf-8", "replace") for text, _ in texts)
        own, *others = (
            {"token": text, "logprob": logprob, "bytes": list(raw)}
            for (text, logprob), raw in zip(texts, raws, strict=True)
        )
        found.append({**own, "top_logprobs": others})
    return found


def usage_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """``usage`` of chat and text completions."""
    prompt, generated, cached = total_usage(answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def event(data: dict[str, Any], name: str = "") -> bytes:
    """One server-sent event; OpenAI's completions give theirs no name."""
    head = f"event: {name}\n".encode() if name else b""
    body = encoded(data)
    for character in "\x85\u2028\u2029":  # where httpx's `iter_lines`, with which litellm reads, ends a line
        body = body.replace(character.encode(), b"\\u%04x" % ord(character))
    return head + b"data: " + body + b"\n\n"


class ChunkWriter:
    """What the streams of chat and text completions have in common: chunks without a name, then ``[DONE]``.

    Args:
        prefix, kind: of the id of every chunk, and its ``object``.
        include_usage: whether the client asked for a last chunk with the usage.
    """

    def __init__(self, call: Call, prefix: str, kind: str, *, include_usage: bool) -> None:
        self._call = call
        self._prefix = prefix
        self._kind = kind
        self._include_usage = include_usage
        self._head: Answer | None = None

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def fail(self, error: ApiError) -> bytes:
        return event(error.body()) + DONE

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        assert self._head is not None
        chunk = {**frame(self._head, self._call, self._prefix, self._kind), "choices": choices}
        if self._include_usage:
            chunk["usage"] = usage
        return event(chunk)

    def _last(self, answers: Sequence[Answer]) -> bytes:
        return (self._chunk([], usage_of(answers)) if self._include_usage else b"") + DONE


def frame(seen: Answer, call: Call, prefix: str, kind: str) -> dict[str, Any]:
    """What chat and text completions, and their chunks, begin with."""
    return {"id": f"{prefix}-{seen.id}", "object": kind, "created": seen.created, "model": call.model}
