"""The token side of a session: segments that hold only the tokens they add.

::

    root ── prompt 1 ── answer 1 ── context 2 ── answer 2          row A
                           └─────── context 3 ── answer 3          row B  (answer 1 stored once, shared)

A segment is either *given* (a prompt, tool results, template glue; ``turn is None``) or *generated* (exactly the ids of
one generation). ``num_cut`` is how many trailing tokens of the parent a path through this segment leaves out: a prefix
that ends inside a segment is a branch.

Invariant: a token is stored in one segment only, and segments never change once they hang in the tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from seamless_verl.trajectory.generation import FinishReason, VersionSpan
from seamless_verl.trajectory.messages import MessageKey
from seamless_verl.trajectory.tokens import EMPTY, TokenPath, pack_ids


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
        detail: a renderer's own words where it refused to extend.
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
    """The segment farthest from the root whose path is a prefix of ``ids``.

    Only whole segments count, so the answer does not depend on how siblings happen to be cut. Of several equally far
    it is the one with the most generated tokens, then the one that was there first.
    """
    wanted = pack_ids(ids)
    best: list[Segment] = []
    stack = [root]
    while stack:
        segment = stack.pop()
        if best and segment.end > best[0].end:
            best.clear()
        if not best or segment.end == best[0].end:
            best.append(segment)
        stack.extend(
            child
            for child in reversed(segment.children)
            if child.end <= len(wanted) and not child.num_cut and wanted[segment.end : child.end] == child.tokens
        )
    return best[0] if len(best) == 1 else min(best, key=_by_rule)


def _by_rule(segment: Segment) -> tuple[int, int]:
    num_generated = sum(length for part, length in path_to(segment) if part.turn is not None)
    answers = [answer for answer in (segment, *segment.children) if answer.turn is not None]
    return -num_generated, min(answer.ordinal for answer in answers)  # a given segment came with an answer
