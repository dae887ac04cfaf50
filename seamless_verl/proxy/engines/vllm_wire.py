"""The text of prompts on their way to a vLLM server, and what it answers: one choice, whole or as server-sent events.

``/v1/completions`` as vLLM 0.24 to 0.27 write it with log-probs and ``return_tokens_as_token_ids``: every token, chosen
or not, is named ``token_id:…``. Asked for ``return_token_ids`` they would send the prompt's ids back, too.
``/inference/v1/generate`` as vLLM 0.27 writes it: ids, and log-probs in the shape of chat completions.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
from cachetools import LRUCache

from seamless_verl.proxy.engine import TokenChunk
from seamless_verl.trajectory.tokens import EMPTY, TokenPath

_TOKEN_ID = "token_id:"
_ID_AT = len(_TOKEN_ID)
_tops = msgspec.json.Decoder(list[dict[str, float] | None] | None)


class LogProbs(msgspec.Struct):
    """``top_logprobs`` is read only where alternatives were asked for; servers send it anyway."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: msgspec.Raw = msgspec.Raw(b"null")


class Choice(msgspec.Struct):
    """What is read of a completion."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: LogProbs | None = None

    @property
    def has_tokens(self) -> bool:
        return bool(self.text or (self.logprobs is not None and self.logprobs.tokens))

    def read(self, num_alternatives: int) -> Read:
        """Token ids, their log-probs, and per token the alternatives, best first, where the server told any.

        Raises:
            BadAnswer: they do not fit together.
        """
        if self.logprobs is None:
            raise BadAnswer("it returns no log-probs")
        ids = _ids(self.logprobs.tokens)
        log_probs = [value for value in self.logprobs.token_logprobs if value is not None]
        if len(log_probs) != len(ids):
            raise BadAnswer(f"{len(ids)} tokens but {len(log_probs)} log-probs")
        tops = _tops.decode(self.logprobs.top_logprobs) if num_alternatives else None
        alternatives = [_ranked(top or {})[:num_alternatives] for top in tops or ()]
        return Read(ids, log_probs, alternatives, self.finish_reason)


class Completion(msgspec.Struct):
    """An answer, or one event of it. ``error`` stands in the place of choices when a stream breaks off."""

    choices: list[Choice] = []
    error: object = None


class NamedToken(msgspec.Struct):
    token: str
    logprob: float


class ChosenToken(NamedToken):
    top_logprobs: list[NamedToken] = []


class ChosenTokens(msgspec.Struct):
    content: list[ChosenToken]


class TokensChoice(msgspec.Struct):
    """What is read of an answer in tokens."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: ChosenTokens | None = None

    @property
    def has_tokens(self) -> bool:
        return bool(self.token_ids)

    def read(self, num_alternatives: int) -> Read:
        """See :meth:`Choice.read`."""
        if self.token_ids is None or self.logprobs is None:
            raise BadAnswer("it returns no token ids, or no log-probs")
        told = self.logprobs.content
        if _ids([token.token for token in told]) != self.token_ids:
            raise BadAnswer("its log-probs are not those of its tokens")
        tops = ({top.token: top.logprob for top in token.top_logprobs} for token in told) if num_alternatives else ()
        alternatives = [_ranked(top)[:num_alternatives] for top in tops]
        return Read(self.token_ids, [token.logprob for token in told], alternatives, self.finish_reason)


class TokensAnswer(msgspec.Struct):
    """See :class:`Completion`."""

    choices: list[TokensChoice] = []
    error: object = None


AnswerShape: TypeAlias = type[Completion] | type[TokensAnswer]


class BadAnswer(Exception):
    """The server did not answer with token ids and log-probs."""


_Ranked = tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Read:
    """An answer, or the part received so far; ``alternatives`` is aligned with the tokens, or empty."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    alternatives: list[_Ranked] = field(default_factory=list)
    finish_reason: str | None = None


class EventReader:
    """Joins the events of a stream into one answer and reports each event's tokens as they arrive.

    Args:
        on_tokens: an error that it raises is kept in ``failure``; nothing is told after it.
        num_alternatives: how many were asked for; the server adds the chosen token to them.
        shape: of one event.
    """

    def __init__(self, on_tokens: Callable[[TokenChunk], None], num_alternatives: int, shape: AnswerShape) -> None:
        self._on_tokens = on_tokens
        self._num_alternatives = num_alternatives
        self._decoder = msgspec.json.Decoder(shape)
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
            event: Completion | TokensAnswer = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise BadAnswer(f"an event is no completion: {error}") from error
        if event.error is not None:
            raise BadAnswer(f"the stream broke off: {event.error}")
        for choice in event.choices:
            whole = self.whole
            whole.finish_reason = choice.finish_reason or whole.finish_reason
            if not choice.has_tokens:
                continue  # the last one says only why it ended
            part = choice.read(self._num_alternatives)
            whole.token_ids += part.token_ids
            whole.log_probs += part.log_probs
            whole.alternatives += part.alternatives
            self._on_tokens(
                TokenChunk(token_ids=part.token_ids, log_probs=part.log_probs, alternatives=part.alternatives)
            )


def read_answer(body: bytes, num_alternatives: int, shape: AnswerShape) -> Read:
    """A whole answer.

    Raises:
        BadAnswer: it is none.
    """
    try:
        answer: Completion | TokensAnswer = msgspec.json.decode(body, type=shape)
        return answer.choices[0].read(num_alternatives)
    except (msgspec.MsgspecError, IndexError) as error:
        raise BadAnswer(str(error)) from error


def _ids(names: list[str]) -> list[int]:
    try:
        ids = [int(name[_ID_AT:]) for name in names if name.startswith(_TOKEN_ID)]
    except ValueError as error:
        raise BadAnswer(f"it returns token ids that are none: {error}") from error
    if len(ids) != len(names):
        raise BadAnswer("it returns no token ids; a vLLM of 0.24 or later does")
    return ids


def _ranked(top: Mapping[str, float]) -> _Ranked:
    named = ((name.removeprefix(_TOKEN_ID), value) for name, value in top.items() if name.startswith(_TOKEN_ID))
    return tuple(sorted(((int(number), value) for number, value in named), key=lambda pair: -pair[1]))


class PromptTexts:
    """JSON of growing prompts: a session's next prompt usually begins with its last one, whose text is kept.

    Writing 128,000 ids takes six milliseconds, writing the thousand that are new takes none. Holds the last prompt of
    each session, as long as all of them together stay below ``max_bytes``.
    """

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._known: LRUCache[str, tuple[TokenPath, bytearray]] = LRUCache(
            max_bytes, getsizeof=lambda known: known[0].num_bytes + len(known[1])
        )

    @property
    def num_bytes(self) -> int:
        return int(self._known.currsize)

    def encode(self, session_id: str, token_ids: Sequence[int]) -> tuple[bytes, bytearray, bytes]:
        """The ids as a JSON list, in pieces: to be joined at once, for the session's next prompt changes them."""
        path = TokenPath.of(token_ids)
        begun, text = self._known.pop(session_id, (EMPTY, bytearray()))
        added = path.since(begun) if begun else None
        if added is None:
            text = bytearray(_items(path.flat()))
        elif added:
            text += b",%b" % _items(added)
        with contextlib.suppress(ValueError):  # this one alone is larger than all may be
            self._known[session_id] = (path, text)
        return b"[", text, b"]"

    def forget(self, session_id: str) -> None:
        """The session has ended."""
        self._known.pop(session_id, None)


def _items(ids: array[int]) -> bytes:
    return msgspec.json.encode(ids.tolist())[1:-1]
