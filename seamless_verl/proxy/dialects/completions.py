"""OpenAI text completions: a prompt as text or as token ids is continued as it is, without a chat template.

Token ids that begin with a recorded answer extend it; a text is encoded whole, and extends what it then begins with.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from seamless_verl.proxy.calls import Answer, Call, Delta, Token, bad_request, encoded
from seamless_verl.proxy.dialects.shared import (
    ChunkWriter,
    SampledRequest,
    checked_stop,
    frame,
    preferences,
    refuse_values,
    sampling_of,
    usage_of,
    validated,
)


class CompletionRequest(SampledRequest):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)


def parse_completion(body: bytes) -> CompletionCall:
    """Check a body.

    Raises:
        ApiError: 400, naming the parameter at fault.
    """
    request = validated(CompletionRequest, body)
    refuse_values(
        ("n", (request.n or 1) > 128, "at most 128 answers"),
        ("best_of", request.best_of not in (None, 1, request.n), "every answer is recorded, so every answer is given"),
        ("echo", bool(request.echo), "the prompt is not repeated"),
        ("suffix", bool(request.suffix), "text is continued at its end only"),
    )
    options = request.stream_options
    return CompletionCall(
        model=request.model,
        prompt=_prompt(request.prompt),
        sampling=sampling_of(request, request.max_tokens or 16, checked_stop(request.stop)),  # the API's own default
        preferences=preferences(
            ("frequency_penalty", bool(request.frequency_penalty)),
            ("presence_penalty", bool(request.presence_penalty)),
            ("logit_bias", bool(request.logit_bias)),
        ),
        n=request.n or 1,
        logprobs=request.logprobs,
        stream=bool(request.stream),
        include_usage=options is not None and options.include_usage,
    )


def _prompt(prompt: str | list[int] | list[str] | list[list[int]]) -> str | tuple[int, ...]:
    if prompt and isinstance(prompt, list) and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise bad_request("prompt takes one text or one list of token ids per request.", param="prompt")
        prompt = prompt[0]
    if not prompt:
        raise bad_request("prompt is empty.", param="prompt")
    if isinstance(prompt, str):
        return prompt
    ids = tuple(token for token in prompt if isinstance(token, int))
    if min(ids) < 0 or max(ids) >= 2**31:
        raise bad_request("prompt holds a number that is no token id.", param="prompt")
    return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall(Call):
    """One text completion."""

    include_usage: bool

    def body(self, answers: Sequence[Answer]) -> bytes:
        shows = self.logprobs is not None
        choices = [
            _choice(number, answer.message.content, answer.tokens if shows else None, _Offsets(), answer.finish_reason)
            for number, answer in enumerate(answers)
        ]
        head = frame(answers[0], self, "cmpl", "text_completion")
        return encoded({**head, "choices": choices, "usage": usage_of(answers)})

    def writer(self) -> CompletionWriter:
        return CompletionWriter(self, include_usage=self.include_usage)


class _Offsets:
    """Where tokens begin in the text of an answer; parts of a character begin where it does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def of(self, token: Token) -> int:
        """Of the token that comes next."""
        at, raw = self._at, token.raws[0] if token.raws else token.text.encode("utf-8", "replace")
        self._at += len(self._decoder.decode(raw))
        return at


def _choice(
    index: int, text: str, tokens: Sequence[Token] | None, offsets: _Offsets, finish_reason: str | None
) -> dict[str, Any]:
    """One choice, or the next piece of one."""
    choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
    if tokens is not None:
        choice["logprobs"] = {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [dict(token.alternatives) or {token.text: token.logprob} for token in tokens],
            "text_offset": [offsets.of(token) for token in tokens],
        }
    return choice


class CompletionWriter(ChunkWriter):
    """Per answer: text, finish."""

    def __init__(self, call: Call, *, include_usage: bool) -> None:
        super().__init__(call, "cmpl", "text_completion", include_usage=include_usage)
        self._offsets = [_Offsets() for _ in range(call.n)]

    def start(self, head: Answer) -> bytes:
        self._head = head
        return b""

    def delta(self, delta: Delta) -> bytes:
        tokens = delta.tokens if self._call.logprobs is not None else None
        return self._chunk([_choice(delta.index, delta.content, tokens, self._offsets[delta.index], None)])

    def end(self, answers: Sequence[Answer]) -> bytes:
        finishes = (_choice(at, "", None, _Offsets(), answer.finish_reason) for at, answer in enumerate(answers))
        return b"".join([*(self._chunk([finish]) for finish in finishes), self._last(answers)])
