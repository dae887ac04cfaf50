"""What an engine returned for one prompt, and the tree's memory of token ids.

Invariant: one log-prob and one weight version per token, in the order in which the engine produced them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from seamless_verl.errors import SeamlessError


class TrajectoryError(SeamlessError):
    """A move that the session's state does not allow; the message tells the story."""


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """``num_tokens`` tokens in a row that were generated under weight version ``version``."""

    version: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Answer of the engine, token by token.

    Attributes:
        token_ids: generated ids, including the stop token where one was generated.
        log_probs: behaviour log-probability of each, in nats.
        version_spans: weight versions in order; the lengths add up to ``len(token_ids)``.
        finish_reason: ``ABORTED`` means that nobody will continue it.
        alternatives: per token the most likely ``(id, log-prob)`` pairs, best first, for the client's eyes only: they
            are not recorded. Empty where not asked for.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    alternatives: Sequence[Sequence[tuple[int, float]]] = ()

    def check(self, story: str) -> None:
        """Refuse a generation that contradicts itself; ``story`` names whose it is."""
        num_tokens = len(self.token_ids)
        if len(self.log_probs) != num_tokens:
            raise TrajectoryError(f"{story}: {num_tokens} tokens but {len(self.log_probs)} log-probs")
        covered = sum(span.num_tokens for span in self.version_spans)
        if covered != num_tokens or any(span.num_tokens <= 0 for span in self.version_spans):
            raise TrajectoryError(f"{story}: {num_tokens} tokens but weight versions for {covered}")
        if num_tokens and min(self.token_ids) < 0:
            raise TrajectoryError(f"{story}: negative token id {min(self.token_ids)}")
        if not math.isfinite(sum(self.log_probs)):
            raise TrajectoryError(f"{story}: a log-prob is not finite")


def pack_ids(ids: Sequence[int]) -> array[int]:
    """Token ids in four bytes each; an array that is one already is taken as it is, since none is ever changed."""
    return ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)
