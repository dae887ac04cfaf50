"""The token side of a session: packed ids, paths that grow, marks where pictures stand, segments of the tree.

A path is immutable, and each step of a conversation costs only what it adds. Segments are the nodes of the session tree
and hold only the tokens they add::

    root ── prompt 1 ── answer 1 ── context 2 ── answer 2          row A
                           └─────── context 3 ── answer 3          row B  (answer 1 stored once, shared)

A segment is either *given* (a prompt, tool results, template glue; ``turn is None``) or *generated* (exactly the ids of
one generation). ``num_cut`` is how many trailing tokens of the parent a path through this segment leaves out: a prefix
that ends inside a segment is a branch.

To a model a picture is a run of placeholder tokens, all of one id, so that two pictures of one size read alike. Here
the placeholders of each picture carry negative numbers of its own: trees and audits tell pictures apart by comparing
tokens. Engines and rows get the model's ids::

    picture 1     <start>  -3  -4  -4  -4  <end>        -3 where it begins, -4 in the rest of it

Invariants: a path reads like the flat list of its ids, and its digest is that list's, however it came to be;
``plain(mark(ids, placeholder, number), placeholder) == ids``, and ``numbers_in`` names the pictures of a prompt in
their order, also where one stands there twice; a token is stored in one segment only, and segments never change once
they hang in the tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from itertools import chain
from typing import overload

from seamless_verl.trajectory.generation import FinishReason, VersionSpan
from seamless_verl.trajectory.messages import MessageKey

_NODE_BYTES = 450  # a node, its array's head, and the digest's state that every second one keeps


def pack_ids(ids: Sequence[int]) -> array[int]:
    """Token ids in four bytes each; an array that is one already is taken as it is, since none is ever changed."""
    return ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)


class TokenPath(Sequence[int]):
    """A sequence of token ids that knows what it continues. Two are equal only if they are the same object.

    Reading near the end is cheap, however long the path; :meth:`flat` and iteration take all of it.
    """

    __slots__ = ("_before", "_ids", "_length", "_num_nodes", "_state")

    def __init__(self, before: TokenPath | None, ids: array[int]) -> None:
        """Made by :meth:`of` and :meth:`then` only; ``before`` is None for the empty path."""
        self._before = before
        self._ids = ids
        self._length: int = len(ids) + (0 if before is None else before._length)
        self._num_nodes: int = 0 if before is None else before._num_nodes + 1
        self._state: blake2b | None = None

    @classmethod
    def of(cls, ids: Sequence[int]) -> TokenPath:
        """Any ids as a path; one that is a path already stays what it is."""
        return ids if isinstance(ids, TokenPath) else EMPTY.then(pack_ids(ids))

    def then(self, ids: array[int]) -> TokenPath:
        """This path and ``ids``, which nobody may change any more."""
        return TokenPath(self, ids) if ids else self

    def without(self, num: int) -> TokenPath:
        """This path less its last ``num`` ids."""
        node = self
        while node._before is not None and num >= len(node._ids):
            num -= len(node._ids)
            node = node._before
        return TokenPath(node._before, node._ids[: len(node._ids) - num]) if num else node

    def chunks(self) -> list[array[int]]:
        """All ids, in the pieces in which they came."""
        return self._chunks_from(0)[0]

    def flat(self) -> array[int]:
        """All ids in one array."""
        return _joined(self.chunks())

    def since(self, earlier: TokenPath) -> array[int] | None:
        """The ids that follow ``earlier``, if this path continues it; None if it does not, or cuts it elsewhere.

        Takes the time of what is new, not of what both begin with, where the one grew out of the other.
        """
        added: list[array[int]] = []
        node: TokenPath | None = self
        while node is not None and node._length > earlier._length:
            added.append(node._ids)
            node = node._before
        known: TokenPath | None = earlier
        while node is not known:
            if node is None or known is None or node._ids != known._ids:
                return None
            node, known = node._before, known._before
        added.reverse()
        return _joined(added)

    def digest(self) -> bytes:
        """16 bytes that name the ids: BLAKE2b of all of them, four bytes each in the machine's order.

        The state before the last piece is kept, since the next prompt of a conversation begins with that.
        """
        unhashed = [self]
        node = self._before
        while node is not None and node._state is None:
            unhashed.append(node)
            node = node._before
        state = blake2b(digest_size=16) if node is None or node._state is None else node._state.copy()
        while len(unhashed) > 1:
            state.update(unhashed.pop()._ids)
        if self._before is not None:
            self._before._state = state.copy()
        state.update(self._ids)
        return state.digest()

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes, also what it shares with others."""
        return self._ids.itemsize * self._length + _NODE_BYTES * self._num_nodes

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.chunks())

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> array[int]: ...
    def __getitem__(self, at: int | slice) -> int | array[int]:
        if isinstance(at, slice):
            start, stop, step = at.indices(self._length)
            if step != 1:
                return self.flat()[at]
            chunks, skipped = self._chunks_from(min(start, stop))
            return _joined(chunks)[start - skipped : stop - skipped]
        place = at + self._length if at < 0 else at
        if not 0 <= place < self._length:
            raise IndexError(f"token {at} of a path of {self._length}")
        chunks, skipped = self._chunks_from(place)
        return chunks[0][place - skipped]

    def _chunks_from(self, start: int) -> tuple[list[array[int]], int]:
        """The last pieces, as many as reach back to ``start``, and how many ids stand before them."""
        chunks: list[array[int]] = []
        node = self
        while node._before is not None and node._length > start:
            chunks.append(node._ids)
            node = node._before
        chunks.reverse()
        return chunks, node._length


def _joined(chunks: Sequence[array[int]]) -> array[int]:
    if len(chunks) == 1:
        return chunks[0]
    ids = array("i")
    for chunk in chunks:
        ids.extend(chunk)
    return ids


EMPTY = TokenPath(None, array("i"))


def mark(token_ids: Sequence[int], placeholder: int, number: int) -> tuple[int, ...]:
    """The ids of one picture, its placeholders marked with its ``number`` (from 0)."""
    first, rest = -2 * number - 1, -2 * number - 2
    marked = [rest if token == placeholder else token for token in token_ids]
    if rest in marked:
        marked[marked.index(rest)] = first
    return tuple(marked)


def plain(token_ids: Sequence[int], placeholder: int) -> array[int]:
    """The model's own ids."""
    return array("i", [placeholder if token < 0 else token for token in token_ids])


def numbers_in(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Pictures in the order in which they begin."""
    return tuple((-token - 1) // 2 for token in token_ids if token < 0 and token % 2)


class MatchKind(Enum):
    CLEAN = "clean"
    REALIGN = "realign"
    FORK = "fork"


class DriftReason(Enum):
    """Why a turn did not simply extend a leaf of the tree."""

    # REALIGN: the same history, spelled differently; the recorded tokens stay.
    ARGUMENTS_RESPELLED = "arguments_respelled"
    CALL_IDS_CHANGED = "call_ids_changed"
    CONTENT_WHITESPACE = "content_whitespace"
    REASONING_DROPPED = "reasoning_dropped"
    # FORK: another history, or a known one that continues a second time.
    BRANCHED = "branched"
    RESAMPLED = "resampled"
    HISTORY_REWRITTEN = "history_rewritten"
    ROOT_CHANGED = "root_changed"
    SYSTEM_CHANGED = "system_changed"
    TOOLS_CHANGED = "tools_changed"
    TEMPLATE_MISMATCH = "template_mismatch"
    BOUNDARY_TRIMMED = "boundary_trimmed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One answer and its request: what the journal keeps, and all that a tree needs to add it, live or after a restart.

    Attributes:
        generation_id: the engine's name for this answer; unique in the session.
        request_digest: of the request; nobody reads it since answers are given again by their own, and it goes with the
            journal's next form (`turn_bytes.VERSION`).
        anchor: generation id of the answer that the tokens hang under, ``""`` for the root.
        anchor_is_given: the anchor is the given segment directly before that answer instead.
        num_cut: trailing tokens of the anchor left out.
        context_ids: given tokens between anchor and answer.
        token_ids, log_probs: the generated tokens.
        chain, spelled: history up to and including the answer, by identity and by spelling.
        spelled_before: the part of the history that ``keys`` does not cover, as this request spelled it.
        keys: the messages this turn added, the answer last.
        system: names the leading system message (:func:`seamless_verl.trajectory.matching.system_of`).
        forked, realigned: why the match is not clean, as far as it was known before the answer.
        detail: a renderer's own words where it refused to extend; otherwise what the request respelled, as it wrote it.
    """

    generation_id: str
    request_digest: bytes
    anchor: str
    anchor_is_given: bool
    num_cut: int
    context_ids: array[int]
    token_ids: array[int]
    log_probs: array[float]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    tools_digest: bytes
    chain: bytes
    spelled: bytes
    spelled_before: bytes
    keys: tuple[MessageKey, ...]
    system: bytes
    forked: DriftReason | None
    realigned: tuple[DriftReason, ...]
    detail: str


class Segment:
    """A run of tokens in the tree; see the module's picture.

    Attributes:
        turn: the record of a generated segment, None for a given one.
        ordinal: place of an answer in the order of commits, from 0; -1 for a given segment.
        kind, reasons: how an answer's request fitted in; ``reasons`` are empty exactly for ``CLEAN``.
        path: all ids from the root to the segment's end.
    """

    __slots__ = ("children", "kind", "num_cut", "ordinal", "parent", "path", "reasons", "tokens", "turn")

    def __init__(
        self,
        *,
        parent: Segment | None,
        tokens: array[int],
        num_cut: int = 0,
        turn: TurnRecord | None = None,
        ordinal: int = -1,
        kind: MatchKind = MatchKind.CLEAN,
        reasons: tuple[DriftReason, ...] = (),
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.num_cut = num_cut
        self.turn = turn
        self.ordinal = ordinal
        self.kind = kind
        self.reasons = reasons
        self.children: list[Segment] = []
        self.path: TokenPath = (EMPTY if parent is None else parent.path.without(num_cut)).then(tokens)

    @property
    def end(self) -> int:
        """Length of the path."""
        return len(self.path)

    @property
    def is_leaf(self) -> bool:
        """Whether a row ends here: an answer that nothing continues in full."""
        return self.turn is not None and all(child.num_cut for child in self.children)

    @property
    def parent_ordinal(self) -> int | None:
        """The answer that this one continues, None at the root."""
        above = self.answer_above()
        return None if above is None else above.ordinal

    def answer_above(self) -> Segment | None:
        """The nearest generated segment that this one continues, itself excluded."""
        segment = self.parent
        while segment is not None and segment.turn is None:
            segment = segment.parent
        return segment


def path_to(segment: Segment) -> list[tuple[Segment, int]]:
    """Segments from the root to ``segment``, each with how many of its tokens the path uses."""
    path: list[tuple[Segment, int]] = []
    num_cut = 0
    walk: Segment | None = segment
    while walk is not None:
        path.append((walk, len(walk.tokens) - num_cut))
        num_cut = walk.num_cut
        walk = walk.parent
    path.reverse()
    return path


def deepest_token_match(root: Segment, ids: Sequence[int]) -> Segment:
    """The leaf farthest from the root whose path is a prefix of ``ids``; where there is none, the farthest segment.

    A leaf goes before whatever lies deeper in another branch, since continuing it adds no row. Only whole segments
    count, so the answer does not depend on how siblings happen to be cut. Of several equally far it is the one with the
    most generated tokens, then the one that was there first.
    """
    best: list[Segment] = []
    best_rank = (False, -1)
    for segment in _prefixes(root, pack_ids(ids)):
        rank = (segment.is_leaf, segment.end)
        if rank > best_rank:
            best.clear()
            best_rank = rank
        if rank == best_rank:
            best.append(segment)
    return best[0] if len(best) == 1 else min(best, key=_by_rule)


def _prefixes(root: Segment, wanted: array[int]) -> Iterator[Segment]:
    """All segments whose path is a prefix of ``wanted``, also those that leave out the end of one that is none."""
    stack = [(root, 0)]  # each with how much of its path is a prefix
    while stack:
        segment, agreed = stack.pop()
        if agreed == segment.end:
            yield segment
        for child in reversed(segment.children):
            start = segment.end - child.num_cut
            if start > agreed:
                continue
            found = wanted[start : start + len(child.tokens)]
            if found == child.tokens:
                stack.append((child, child.end))
            elif any(below.num_cut for below in child.children):
                stack.append((child, start + num_equal(found, child.tokens)))


def num_equal(ours: Sequence[float], theirs: Sequence[float]) -> int:
    """How many values both begin with."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(ours), len(theirs)))


def _by_rule(segment: Segment) -> tuple[int, int]:
    num_generated = sum(length for part, length in path_to(segment) if part.turn is not None)
    answers = [answer for answer in (segment, *segment.children) if answer.turn is not None]
    return -num_generated, min(answer.ordinal for answer in answers)  # a given segment came with an answer
