"""What a vLLM server's ``/v1/completions`` answers: one choice, whole or as server-sent events.

Shapes as vLLM 0.24 to 0.27 write them with log-probs and ``return_tokens_as_token_ids``: every token, chosen or not, is
named ``token_id:…``. Asked for ``return_token_ids`` they would send the prompt's ids back as well, every turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from seamless_verl.proxy.engine import TokenChunk

_TOKEN_ID = "token_id:"
_ID_AT = len(_TOKEN_ID)
_tops = msgspec.json.Decoder(list[dict[str, float] | None] | None)


class LogProbs(msgspec.Struct):
    """``top_logprobs`` is read only where alternatives were asked for; servers send it anyway."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: msgspec.Raw = msgspec.Raw(b"null")


class Choice(msgspec.Struct):
    """What is read of an answer."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: LogProbs | None = None


class Completion(msgspec.Struct):
    """An answer, or one event of it. ``error`` stands in the place of choices when a stream breaks off."""

    choices: list[Choice] = []
    error: object = None


class BadAnswer(Exception):
    """The server says something else than a completion with token ids and log-probs."""


_Ranked = tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Read:
    """What was read of an answer, or of the part that came; ``alternatives`` is aligned with the tokens, or empty."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    alternatives: list[_Ranked] = field(default_factory=list)
    finish_reason: str | None = None


class EventReader:
    """Joins the events of a stream into one answer, and tells the tokens of each as they come.

    Args:
        num_alternatives: how many were asked for; the server adds the chosen token to them.
        on_tokens: an error that it raises is kept in ``failure``; nothing is told after it.
    """

    def __init__(self, on_tokens: Callable[[TokenChunk], None], num_alternatives: int) -> None:
        self._on_tokens = on_tokens
        self._num_alternatives = num_alternatives
        self._decoder = msgspec.json.Decoder(Completion)
        self._rest = b""
        self.whole = Read()
        self.failure: Exception | None = None

    def feed(self, data: bytes) -> None:
        """Take bytes as they come from the network."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if self.failure is None and line.startswith(b"data:"):
                try:
                    self._take(line[5:].strip())
                except Exception as error:  # noqa: BLE001 - this runs inside the HTTP parser; generate() raises it
                    self.failure = error

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        try:
            event = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise BadAnswer(f"an event is no completion: {error}") from error
        if event.error is not None:
            raise BadAnswer(f"the stream broke off: {event.error}")
        for choice in event.choices:
            whole = self.whole
            whole.finish_reason = choice.finish_reason or whole.finish_reason
            if not choice.text and (choice.logprobs is None or not choice.logprobs.tokens):
                continue  # the last one says only why it ended
            part = read_choice(choice, self._num_alternatives)
            whole.token_ids += part.token_ids
            whole.log_probs += part.log_probs
            whole.alternatives += part.alternatives
            self._on_tokens(
                TokenChunk(token_ids=part.token_ids, log_probs=part.log_probs, alternatives=part.alternatives)
            )


def read_choice(choice: Choice, num_alternatives: int) -> Read:
    """Token ids, their log-probs, and per token the alternatives, best first, where the server told any.

    Raises:
        BadAnswer: they do not fit together.
    """
    told = choice.logprobs
    if told is None:
        raise BadAnswer("it returns no log-probs")
    try:
        ids = [int(name[_ID_AT:]) for name in told.tokens if name.startswith(_TOKEN_ID)]
    except ValueError as error:
        raise BadAnswer(f"it returns token ids that are none: {error}") from error
    if len(ids) != len(told.tokens):
        raise BadAnswer("it returns no token ids; a vLLM of 0.24 or later does")
    log_probs = [value for value in told.token_logprobs if value is not None]
    if len(log_probs) != len(ids):
        raise BadAnswer(f"{len(ids)} tokens but {len(log_probs)} log-probs")
    tops = _tops.decode(told.top_logprobs) if num_alternatives else None
    alternatives = [_ranked(top or {})[:num_alternatives] for top in tops or ()]
    return Read(ids, log_probs, alternatives, choice.finish_reason)


def _ranked(top: Mapping[str, float]) -> _Ranked:
    named = ((name.removeprefix(_TOKEN_ID), value) for name, value in top.items() if name.startswith(_TOKEN_ID))
    return tuple(sorted(((int(number), value) for number, value in named), key=lambda pair: -pair[1]))
