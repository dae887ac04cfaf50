"""Answers of a session that nobody got: what the journal knows of them, for whoever asks the same again.

::

    engine ─news─▶ kept here and in the journal ─▶ recorded as a whole: forgotten
                     └ its attempt failed, or the process died ─▶ claimed by the next attempt at the request
    answers of a dead rollout worker's agents (`left_sessions`) ──┘

Invariant: what is claimed has the prompt that it was generated for, token for token; nobody else has it meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from seamless_verl.trajectory.generation import FinishReason, Generation, PartialGeneration

_MOST = 64  # answers of one session; those that were given up long ago leave


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedPart:
    """Tokens that an answer got; all of them, where they end with a finish reason.

    Attributes:
        answer: the generation's id, which whoever goes on with it keeps.
        digest: names the answer by its request (`answer_digest`).
        prompt: digest of the prompt's tokens.
        start: how many tokens it had before.
    """

    answer: str
    digest: bytes
    prompt: bytes
    start: int
    tokens: Generation


class UnfinishedAnswers:
    """Those of one session."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[UnfinishedPart, PartialGeneration]] = OrderedDict()
        self._whole: set[str] = set()
        self._claimed: set[str] = set()

    @property
    def num_tokens(self) -> int:
        return sum(len(partial.token_ids) for _, partial in self._known.values())

    def add(self, part: UnfinishedPart) -> None:
        """An answer got more tokens; a part that does not follow what is known is of no use, like all behind it."""
        first, partial = self._known.get(part.answer) or (part, PartialGeneration({}, None))
        if part.start != len(partial.token_ids):
            return
        partial.begin(part.tokens)
        self._known[part.answer] = first, partial
        if part.tokens.finish_reason is not FinishReason.ABORTED:
            self._whole.add(part.answer)
        if len(self._known) - len(self._whole) > _MOST:
            needed = self._claimed | self._whole
            del self._known[next((answer for answer in self._known if answer not in needed), part.answer)]

    def more(self, answer: str, digest: bytes, prompt: bytes, tokens: Generation) -> UnfinishedPart:
        """The engine has more of an answer: as a part, to be written down."""
        known = self._known.get(answer)
        start = len(known[1].token_ids) if known else 0
        part = UnfinishedPart(answer=answer, digest=digest, prompt=prompt, start=start, tokens=tokens)
        self.add(part)
        return part

    def claim(self, digest: bytes, prompt: bytes, *, new: str, is_whole: bool = False) -> tuple[str, Generation | None]:
        """The name of an answer to be generated, and what there is of it; nobody else gets it until `release`.

        Args:
            new: the name of one that nobody has begun.
            is_whole: what others have begun is of no use.
        """
        for answer, (first, partial) in self._known.items():
            if (first.digest, first.prompt) == (digest, prompt) and answer not in self._claimed and not is_whole:
                self._claimed.add(answer)
                return answer, partial.generation().after(0)  # a copy: what is known grows
        self._claimed.add(new)
        return new, None

    def release(self, answer: str, *, is_over: bool) -> None:
        """Its attempt has ended; ``is_over``: the answer was finished, whether or not anybody got it."""
        self._claimed.discard(answer)
        if is_over:
            self._known.pop(answer, None)
            self._whole.discard(answer)
