"""What it is worth to compute once what rows share: multiply-adds of both ways, and what each pays for one.

Counted are the passes through the decoder and its head; forward and backward stand in the same ratio. What a
multiply-add costs on a trie, over what it costs row by row, is measured on rows that were computed both ways.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from seamless_verl.token_trie import Rows, in_order

_UNMEASURED = 1.02  # rows that share nothing take 1 to 2 % longer as a trie
_KEPT = 5  # comparisons


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Multiply-adds of a forward pass: of a token, of a query with a key, of a position that the head sees."""

    token: float
    pair: float
    position: float

    @classmethod
    def of(cls, text: Any, *, values: bool = False) -> Shape:
        """Args:
        text: the Hugging Face configuration of a decoder; of a mixture of experts those count that a token meets.
        values: its head gives one number.
        """
        hidden, heads = text.hidden_size, text.num_attention_heads
        keys = getattr(text, "num_key_value_heads", None) or heads
        size = getattr(text, "head_dim", None) or hidden // heads
        wide, experts = text.intermediate_size, getattr(text, "num_experts_per_tok", None)
        if experts:
            wide = experts * (getattr(text, "moe_intermediate_size", None) or wide)
        return cls(
            token=text.num_hidden_layers * (2 * hidden * size * (heads + keys) + 3 * hidden * wide),
            pair=text.num_hidden_layers * 2 * size * heads,
            position=hidden * (1 if values else text.vocab_size),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Multiply-adds of some rows: row by row, and of what is distinct; tokens of both."""

    rows: float
    trie: float
    tokens: int
    computed: int


def work(
    rows: Rows, prompts: Sequence[int], parts: Sequence[Sequence[int]], shape: Shape, *, padded: bool = False
) -> Work:
    """Args:
    prompts: of each row, its first tokens that no loss reads.
    parts: rows that are computed together.
    padded: row by row, verl pads to the longest.
    """
    longest = max(map(len, rows))
    flat = trie = 0.0
    computed = 0
    for length in map(len, rows):
        flat += _of_row(longest if padded else length, 0, 0, shape)  # verl's head sees prompts, too
    for part in parts:
        for at, shared in in_order([rows[row] for row in part]):
            row = part[at]
            trie += _of_row(len(rows[row]), shared, prompts[row], shape)
            computed += len(rows[row]) - shared
    return Work(rows=flat, trie=trie, tokens=sum(map(len, rows)), computed=computed)


def _of_row(length: int, shared: int, prompt: int, shape: Shape) -> float:
    """Of the tokens from ``shared`` on; one at depth d sees d + 1 keys."""
    pairs = (length * (length + 1) - shared * (shared + 1)) / 2
    return (length - shared) * shape.token + pairs * shape.pair + (length - max(shared, prompt)) * shape.position


class Price:
    """What a multiply-add costs on a trie, over what it costs row by row: the median of the last comparisons."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=_KEPT)

    @property
    def now(self) -> float:
        return median(self._seen) if self._seen else _UNMEASURED

    def compared(self, of: Work, trie_s: float, rows_s: float) -> None:
        """The same rows were computed both ways, in so many seconds."""
        if min(trie_s, rows_s) > 0:
            self._seen.append(trie_s / of.trie * of.rows / rows_s)

    def saved(self, of: Work, trie_s: float) -> float:
        """Seconds that it would have taken longer row by row, as far as both ways have their price."""
        return trie_s * (of.rows / (of.trie * self.now) - 1)
