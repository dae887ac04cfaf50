"""Rows of tokens as a trie: tokens that rows share stand in it once, and every row finds its own again.

Rows are laid out depth first, so what hangs below a stretch of tokens is one contiguous range behind it::

    row 0: A B C        laid out   A    B    C    D    E         stretch A: below it B C D E
    row 1: A B D                   |----|----|----|----|         stretch B: below it C D
    row 2: A E                                                   stretches C, D, E: nothing

A query sees the keys of its own stretch up to itself, and all keys of the stretches that it hangs below. Only equal
tokens from the start of a row are shared, so it does not matter which rows come from one prompt or one session.

What that is worth stands below it: multiply-adds of both ways, and what each pays for one. Counted are the passes
through the decoder and its head; forward and backward stand in the same ratio. What a multiply-add costs on a trie,
over what it costs row by row, is measured on rows that were computed both ways.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Rows = Sequence[Ids]
_TOKEN_WORK = 24_576
"""What a token takes, where ``n`` take ``n**2`` for attention, in a model of 7B (verl's ``calculate_workload``)."""
_UNMEASURED_PRICE = 1.02  # where rows share nothing, a trie takes 1 to 2 % longer
_PRICE_WINDOW = 5


class Stretch(NamedTuple):
    """Nodes ``[start, stop)`` without a branch, and ``[stop, end)`` all that hangs below them."""

    start: int
    stop: int
    end: int


@dataclass(frozen=True, slots=True)
class Predictions:
    """Pairs of a node and the token that is to be predicted from it, each once however many rows have it.

    Attributes:
        node, label: [predictions] where the hidden state stands, and the token id asked for.
        row: [predictions] one of the rows that have it.
        of_token: [tokens of all rows] the prediction at each position; the number of predictions where none is asked.
    """

    node: Ids
    label: Ids
    row: Ids
    of_token: Ids


class Trie:
    """A plain class: FSDP1 rebuilds every dataclass that it finds among a module's arguments.

    Attributes:
        tokens, depth, parent: [nodes] token id, position in its rows, node before it (-1 for the first of a row).
        nodes_of_row: per row, in the caller's order, the nodes of its tokens.
        stretches: in the order of the layout.
        calls: of the attention function; a layer that does not use it would see other rows' tokens.
    """

    def __init__(self, rows: Rows) -> None:
        """Lay out ``rows``, each of one token at least."""
        tokens, depth, parent = [], [], []
        end = np.empty(sum(map(len, rows)), np.int64)
        self.nodes_of_row: list[Ids] = [np.empty(0, np.int64)] * len(rows)
        total, path = 0, np.empty(0, np.int64)
        for index, shared in in_order(rows):
            row = rows[index]
            path = np.concatenate([path[:shared], np.arange(total, total + len(row) - shared)])
            self.nodes_of_row[index] = path
            tokens.append(row[shared:])
            depth.append(np.arange(shared, len(row)))
            parent.append(np.concatenate([[-1], path[:-1]])[shared:])
            total += len(row) - shared
            end[path] = total  # the last row through a node leaves its mark
        self.tokens, self.depth, self.parent = map(np.concatenate, (tokens, depth, parent))
        cuts = [0, *(np.flatnonzero(np.diff(end[:total])) + 1).tolist(), total]
        self.calls = 0
        self.stretches = [Stretch(a, b, int(end[a])) for a, b in itertools.pairwise(cuts)]

    def __len__(self) -> int:
        """Nodes: tokens that are computed."""
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Of all rows."""
        return sum(map(len, self.nodes_of_row))

    def predictions(self, wanted: Rows, kinds: Sequence[float] | None = None) -> Predictions:
        """What the rows' losses need.

        Args:
            wanted: per row, the positions whose next token is to be predicted, each below its length - 1.
            kinds: per row, what else tells two predictions of one token apart (its temperature); None: nothing.
        """
        counts = [len(positions) for positions in wanted]
        begin = np.cumsum([0, *map(len, self.nodes_of_row)])
        places = np.concatenate([first + positions for first, positions in zip(begin, wanted, strict=False)])
        children = np.concatenate([nodes[at + 1] for nodes, at in zip(self.nodes_of_row, wanted, strict=True)])
        keys = children
        if kinds is not None:
            _, kind = np.unique(np.asarray(kinds), return_inverse=True)
            keys = children + len(self) * np.repeat(kind, counts)
        _, first_at, which = np.unique(keys, return_index=True, return_inverse=True)
        children = children[first_at]
        of_token = np.full(begin[-1], len(children))
        of_token[places] = which
        row = np.repeat(np.arange(len(wanted)), counts)[first_at]
        return Predictions(self.parent[children], self.tokens[children], row, of_token)


def in_order(rows: Rows) -> list[tuple[int, int]]:
    """Rows in lexicographic order, and how many of its first tokens each shares with the one before it.

    Neighbours in this order share the most that any two rows do.
    """
    order = sorted(range(len(rows)), key=lambda index: rows[index].astype(">i8").tobytes())
    shared = [0, *(_common(rows[a], rows[b]) for a, b in itertools.pairwise(order))]
    return list(zip(order, shared, strict=False))


def micro_batches(
    rows: Rows, budget: int, agree: Callable[[int, int], tuple[int, int]] = lambda groups, rows: (groups, rows)
) -> list[list[int]]:
    """Rows in groups of at most ``budget`` distinct tokens, as even as they come.

    Rows that share stay together, since the lexicographic order is cut into runs.

    Args:
        budget: tokens that one forward and backward pass may hold.
        agree: among ranks, whose passes are collective: from the groups that this one needs and its rows to the most
            groups that any needs and the fewest rows that any has.

    Raises:
        ValueError: a row alone exceeds the budget; a rank has fewer rows than groups are needed (on all ranks alike).
    """
    longest = max(map(len, rows))
    if longest > budget:
        raise ValueError(f"a row of {longest} tokens exceeds the {budget} of a micro-batch")
    ordered = in_order(rows)
    count, fewest = agree(len(_cut(rows, ordered, budget)), len(rows))
    if count > fewest:
        raise ValueError(f"{count} micro-batches are needed on one rank, and another has {fewest} rows")
    low, high = longest, budget
    while low < high:  # the smallest limit that needs no more groups
        middle = (low + high) // 2
        if len(_cut(rows, ordered, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    parts = _cut(rows, ordered, low)
    while len(parts) < count:
        largest = max(parts, key=lambda part: (len(part) > 1, sum(len(rows[row]) for row in part)))
        parts.remove(largest)
        parts += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return parts


def deal(groups: Sequence[str], shared: Sequence[int], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Rows to ranks, equally many to each: groups whole where there is room, ranks even in what they compute.

    That is distinct tokens and their attention, as verl weighs them. The largest group goes first, to the rank with the
    least so far among those that have room for all of it.

    Args:
        groups: of each row; their number is a multiple of ``ranks``.
        shared: how many tokens each row begins with as all of its group do (its prompt).
        lengths: tokens of each row.

    Returns:
        Rows of each rank; those of a group follow each other, the shorter before the longer.
    """
    room = len(groups) // ranks
    members: dict[str, list[int]] = {}
    for row in sorted(range(len(groups)), key=lambda row: lengths[row]):
        members.setdefault(groups[row], []).append(row)

    def below(end: int, begin: int) -> int:
        return _TOKEN_WORK * (end - begin) + end**2 - begin**2

    def cost(rows: Sequence[int]) -> int:
        return below(max(shared[row] for row in rows), 0) + sum(below(lengths[row], shared[row]) for row in rows)

    dealt: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    left = sorted(members.values(), key=cost)
    while left:
        rows = left.pop()
        rank = min(range(ranks), key=lambda rank: (len(dealt[rank]) + len(rows) > room, load[rank]))
        if len(dealt[rank]) + len(rows) > room:  # nobody has: a part of it fills the rank with the most room
            rank = min(range(ranks), key=lambda rank: len(dealt[rank]))
            space = room - len(dealt[rank])
            left.append(rows[space:])
            rows = rows[:space]
        dealt[rank] += rows
        load[rank] += cost(rows)
    return dealt


def _cut(rows: Rows, ordered: Sequence[tuple[int, int]], limit: int) -> list[list[int]]:
    parts: list[list[int]] = []
    used = limit + 1
    for row, shared in ordered:
        used += len(rows[row]) - shared
        if used > limit:
            parts.append([])
            used = len(rows[row])
        parts[-1].append(row)
    return parts


def _common(a: Ids, b: Ids) -> int:
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size


# ---------------------------------------------------------------- what it is worth


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Multiply-adds of a forward pass: of a token, of a query with a key, of a position that the head sees."""

    token: float
    pair: float
    position: float

    @classmethod
    def of(cls, text: Any, *, values: bool = False) -> Shape:
        """The shape of a decoder.

        Args:
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
    """Count the multiply-adds of some rows, computed both ways.

    Args:
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
        self._seen: deque[float] = deque(maxlen=_PRICE_WINDOW)

    @property
    def now(self) -> float:
        return median(self._seen) if self._seen else _UNMEASURED_PRICE

    def compared(self, of: Work, trie_s: float, rows_s: float) -> None:
        """The same rows were computed both ways, in so many seconds."""
        if min(trie_s, rows_s) > 0:
            self._seen.append(trie_s / of.trie * of.rows / rows_s)

    def saved(self, of: Work, trie_s: float) -> float:
        """Seconds that it would have taken longer row by row, as far as both ways have their price."""
        return trie_s * (of.rows / (of.trie * self.now) - 1)
