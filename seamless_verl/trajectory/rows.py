"""Training rows of a session: one per leaf of its tree.

::

    tokens   prompt | answer 1 | context | answer 2      ids exactly as the engine saw and produced them
    mask        0   |    1     |    0    |    1          1 on policy tokens that this row trains
    log-probs  0.0  |  l l l   |   0.0   |  l l l        behaviour policy; 0.0 where the mask is 0

Invariant: over all rows of a session, every generated token has mask 1 in exactly one row. A shared answer belongs to
the row with the most generated tokens among those that contain it in full; ties go to the lower token ids, then to the
lower log-probs and weight versions, at last to the lower name of the last answer. The rows, their order and what each
of them trains thus depend on what was generated only: whatever the order in which its turns were committed, a tree has
the same rows.
"""

from __future__ import annotations

import msgspec

from seamless_verl.trajectory.generation import FinishReason
from seamless_verl.trajectory.tokens import Segment, path_to
from seamless_verl.trajectory.tree import SessionTree


class RowTurn(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Where one answer lies in a row: ``token_ids[start:stop]``.

    Attributes:
        trained: whether this row, of all rows that contain the answer, is the one that trains it.
        finish_reason: how the generation ended.
        num_cut: trailing tokens of the generation that this row leaves out, because the conversation went on before
            them; such a turn is never trained here.
    """

    generation_id: str
    start: int
    stop: int
    trained: bool
    finish_reason: FinishReason
    num_cut: int = 0


class RowSpan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Tokens ``start:stop`` of a row were generated under weight version ``version``."""

    start: int
    stop: int
    version: int


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One token stream from the first prompt to the end of one leaf.

    As JSON it is an object of its fields, without ``images`` where there are none; turns and spans are lists of theirs.

    Attributes:
        token_ids, mask, log_probs: one entry per token.
        prompt_len: tokens before the first generated token of the row, shared or not.
        turns: the answers on the path, oldest first.
        version_spans: weight versions of all generated tokens on the path, in order.
        images: digests of the pictures in ``token_ids``, in order, once these are the model's own ids again.
    """

    token_ids: tuple[int, ...]
    mask: tuple[int, ...]
    log_probs: tuple[float, ...]
    prompt_len: int
    turns: tuple[RowTurn, ...]
    version_spans: tuple[RowSpan, ...]
    images: tuple[str, ...] = ()

    @property
    def num_trained(self) -> int:
        return sum(turn.stop - turn.start for turn in self.turns if turn.trained)

    @property
    def finish_reason(self) -> FinishReason:
        """How the row's last answer ended."""
        return self.turns[-1].finish_reason


def build_rows(tree: SessionTree) -> tuple[Row, ...]:
    """Rows of all leaves, the one with the most generated tokens first."""
    leaves = [(path_to(answer), answer) for answer in tree.answers if answer.is_leaf]
    leaves.sort(key=_by_rule)
    owned: set[int] = set()
    rows = []
    for path, _ in leaves:
        rows.append(_build_row(path, owned))
    return tuple(rows)


def _by_rule(
    leaf: tuple[list[tuple[Segment, int]], Segment],
) -> tuple[int, list[int], list[float], list[tuple[int, int]], str]:
    path, answer = leaf
    assert answer.turn is not None
    num_generated = sum(length for segment, length in path if segment.turn is not None)
    ids = [token for segment, length in path for token in segment.tokens[:length]]
    turns = [segment.turn for segment, _ in path if segment.turn is not None]
    log_probs = [value for turn in turns for value in turn.log_probs]
    versions = [(span.version, span.num_tokens) for turn in turns for span in turn.version_spans]
    return -num_generated, ids, log_probs, versions, answer.turn.generation_id


def _build_row(path: list[tuple[Segment, int]], owned: set[int]) -> Row:
    """One row; ``owned`` are ordinals of the answers that earlier rows train, and grows by this row's."""
    token_ids: list[int] = []
    mask: list[int] = []
    log_probs: list[float] = []
    turns: list[RowTurn] = []
    spans: list[RowSpan] = []
    for segment, length in path:
        start, stop = len(token_ids), len(token_ids) + length
        token_ids.extend(segment.tokens[:length])
        turn = segment.turn
        whole = length == len(segment.tokens)
        trained = turn is not None and whole and segment.ordinal not in owned
        mask.extend([int(trained)] * length)
        log_probs.extend(turn.log_probs if turn is not None and trained else [0.0] * length)
        if turn is None:
            continue
        if trained:
            owned.add(segment.ordinal)
        at = start
        for span in turn.version_spans:
            end = min(at + span.num_tokens, stop)
            if end > at:
                spans.append(RowSpan(start=at, stop=end, version=span.version))
            at = end
        turns.append(
            RowTurn(
                generation_id=turn.generation_id,
                start=start,
                stop=stop,
                trained=trained,
                finish_reason=turn.finish_reason,
                num_cut=len(segment.tokens) - length,
            )
        )
    return Row(
        token_ids=tuple(token_ids),
        mask=tuple(mask),
        log_probs=tuple(log_probs),
        prompt_len=turns[0].start,
        turns=tuple(turns),
        version_spans=tuple(spans),
    )
