"""Training rows of a session, one per leaf of its tree, and their audit against what the engine itself said.

::

    tokens   prompt | answer 1 | context | answer 2      ids exactly as the engine saw and produced them
    mask        0   |    1     |    0    |    1          1 on policy tokens that this row trains
    log-probs  0.0  |  l l l   |   0.0   |  l l l        behaviour policy; 0.0 where the mask is 0

Invariant: over all rows of a session, every generated token has mask 1 in exactly one row. A shared answer belongs to
the row with the most generated tokens among those that contain it in full; ties go to the lower token ids, then to the
lower log-probs and weight versions, at last to the lower name of the last answer. The rows, their order and what each
of them trains thus depend on what was generated only: whatever the order in which its turns were committed, a tree has
the same rows.

The audit checks rows against what the engine itself said. The ledger is written where the engine is called, before the
tree, parsers or templates see anything; the audit compares the two at the end and trusts neither. It holds a session
to: stored ids = engine ids; the prompt sent = the row before the answer; mask 1 exactly on the answers the row trains;
log-probs and weight versions unchanged; every generated token trained exactly once. It costs one pass over the tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

import msgspec

from seamless_verl.trajectory.generation import FinishReason, Generation, VersionSpan
from seamless_verl.trajectory.tokens import Segment, num_equal, pack_ids, path_to
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


def trained_order(rows: Iterable[Row]) -> list[Row]:
    """Rows that train something, as verl gets them and numbers them: it scores a session by its last one."""
    return [row for row in reversed(tuple(rows)) if row.num_trained]


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


class ViolationKind(Enum):
    UNKNOWN_GENERATION = "unknown_generation"
    PROMPT_DIFFERS = "prompt_differs"
    TOKENS_DIFFER = "tokens_differ"
    MASK_DIFFERS = "mask_differs"
    LOG_PROBS_DIFFER = "log_probs_differ"
    VERSIONS_DIFFER = "versions_differ"
    PROMPT_LEN_DIFFERS = "prompt_len_differs"
    TRAINED_TWICE = "trained_twice"
    NEVER_TRAINED = "never_trained"
    DISCARDED_BUT_TRAINED = "discarded_but_trained"
    SHAPE_DIFFERS = "shape_differs"


class Violation(msgspec.Struct, frozen=True, array_like=True):
    """One broken promise, with its story."""

    kind: ViolationKind
    story: str


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an audit; ``num_tokens`` are generated tokens that were checked."""

    num_rows: int
    num_generations: int
    num_tokens: int
    violations: tuple[Violation, ...]

    @property
    def is_clean(self) -> bool:
        return not self.violations


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One call of the engine, as the engine's boundary saw it.

    ``discarded`` says why the answer never reached the session ("" when it did): its client left, or it was aborted.
    """

    generation_id: str
    prompt_digest: bytes
    prompt_len: int
    token_ids: array[int]
    log_probs: array[float]
    version_spans: tuple[VersionSpan, ...]
    discarded: str = ""


def ledger_entry(*, generation_id: str, prompt_digest: bytes, prompt_len: int, generation: Generation) -> LedgerEntry:
    """Copy what crossed the engine's boundary.

    Args:
        prompt_digest: :meth:`TokenPath.digest <seamless_verl.trajectory.tokens.TokenPath.digest>` of what was sent,
            taken before it was.
    """
    return LedgerEntry(
        generation_id=generation_id,
        prompt_digest=prompt_digest,
        prompt_len=prompt_len,
        token_ids=array("i", generation.token_ids),
        log_probs=array("d", generation.log_probs),
        version_spans=generation.version_spans,
    )


def audit_rows(rows: Sequence[Row], ledger: Iterable[LedgerEntry]) -> AuditReport:
    """Check all rows of one session against all its calls of the engine."""
    entries = {entry.generation_id: entry for entry in ledger}
    violations: list[Violation] = []
    times_trained: dict[str, int] = {}
    for number, row in enumerate(rows):
        violations.extend(_check_row(f"row {number}", row, entries))
        for turn in row.turns:
            times_trained[turn.generation_id] = times_trained.get(turn.generation_id, 0) + int(turn.trained)
    for entry in entries.values():
        violations.extend(_check_trained(entry, times_trained.get(entry.generation_id)))
    return AuditReport(
        num_rows=len(rows),
        num_generations=len(entries),
        num_tokens=sum(len(entry.token_ids) for entry in entries.values() if not entry.discarded),
        violations=tuple(violations),
    )


def _check_trained(entry: LedgerEntry, times: int | None) -> list[Violation]:
    story = f"generation {entry.generation_id} ({len(entry.token_ids)} tokens)"
    if entry.discarded:
        if times is None:
            return []
        story = f"{story} was discarded ({entry.discarded}) but is in a row"
        return [Violation(ViolationKind.DISCARDED_BUT_TRAINED, story)]
    if not times:
        return [Violation(ViolationKind.NEVER_TRAINED, f"{story} has mask 1 in no row")]
    if times > 1:
        return [Violation(ViolationKind.TRAINED_TWICE, f"{story} has mask 1 in {times} rows")]
    return []


def _check_row(name: str, row: Row, entries: dict[str, LedgerEntry]) -> list[Violation]:
    num_tokens = len(row.token_ids)
    if len(row.mask) != num_tokens or len(row.log_probs) != num_tokens:
        shape = f"{num_tokens} tokens, {len(row.mask)} mask entries, {len(row.log_probs)} log-probs"
        return [Violation(ViolationKind.SHAPE_DIFFERS, f"{name}: {shape}")]
    violations: list[Violation] = []
    ids = pack_ids(row.token_ids)
    prefix, hashed = blake2b(digest_size=16), 0
    expected_mask = [0] * num_tokens
    expected_log_probs = [0.0] * num_tokens
    expected_spans: list[RowSpan] = []
    for turn in row.turns:
        story = f"{name}, tokens {turn.start}:{turn.stop}, generation {turn.generation_id}"
        entry = entries.get(turn.generation_id)
        if entry is None:
            violations.append(Violation(ViolationKind.UNKNOWN_GENERATION, f"{story}: the engine never made it"))
            continue
        if not hashed <= turn.start <= turn.stop <= num_tokens:
            violations.append(Violation(ViolationKind.SHAPE_DIFFERS, f"{story}: outside its row of {num_tokens}"))
            continue
        prefix.update(ids[hashed : turn.start])
        hashed = turn.start
        violations.extend(_check_turn(story, turn, entry, ids, prefix.digest()))
        if turn.trained:
            expected_mask[turn.start : turn.stop] = [1] * (turn.stop - turn.start)
            known = entry.log_probs[: turn.stop - turn.start].tolist()  # fewer, where the entry is another answer's
            expected_log_probs[turn.start : turn.start + len(known)] = known
        expected_spans.extend(_spans_of(turn, entry))
    violations.extend(_compare(name, row, expected_mask, expected_log_probs, expected_spans))
    return violations


def _check_turn(story: str, turn: RowTurn, entry: LedgerEntry, ids: array[int], prefix: bytes) -> list[Violation]:
    violations = []
    if turn.start != entry.prompt_len or prefix != entry.prompt_digest:
        sent = f"the engine was sent {entry.prompt_len} ids, digest {entry.prompt_digest.hex()}"
        held = f"the row holds {turn.start}, {prefix.hex()}"
        violations.append(Violation(ViolationKind.PROMPT_DIFFERS, f"{story}: {sent}; {held}"))
    stored = ids[turn.start : turn.stop]
    wanted = entry.token_ids[: len(entry.token_ids) - turn.num_cut]
    if stored != wanted:
        at = num_equal(stored, wanted)
        held = f"differs from the engine at token {at} of {len(wanted)}; the row holds {len(stored)}"
        violations.append(Violation(ViolationKind.TOKENS_DIFFER, f"{story}: {held}"))
    if turn.trained and turn.num_cut:
        violations.append(Violation(ViolationKind.MASK_DIFFERS, f"{story}: trained although {turn.num_cut} are cut"))
    return violations


def _spans_of(turn: RowTurn, entry: LedgerEntry) -> list[RowSpan]:
    spans, at = [], turn.start
    for span in entry.version_spans:
        stop = min(at + span.num_tokens, turn.stop)
        if stop > at:
            spans.append(RowSpan(start=at, stop=stop, version=span.version))
        at = stop
    return spans


def _compare(name: str, row: Row, mask: list[int], log_probs: list[float], spans: list[RowSpan]) -> list[Violation]:
    violations = []
    if list(row.mask) != mask:
        at = num_equal(row.mask, mask)
        violations.append(Violation(ViolationKind.MASK_DIFFERS, f"{name}: mask {row.mask[at]} at token {at}"))
    if list(row.log_probs) != log_probs:
        at = num_equal(row.log_probs, log_probs)
        story = f"{name}: log-prob {row.log_probs[at]} at token {at}, the engine said {log_probs[at]}"
        violations.append(Violation(ViolationKind.LOG_PROBS_DIFFER, story))
    if list(row.version_spans) != spans:
        story = f"{name}: weight versions {list(row.version_spans)}, the engine said {spans}"
        violations.append(Violation(ViolationKind.VERSIONS_DIFFER, story))
    first = row.turns[0].start if row.turns else len(row.token_ids)
    if row.prompt_len != first:
        story = f"{name}: prompt_len {row.prompt_len}, the first generated token is at {first}"
        violations.append(Violation(ViolationKind.PROMPT_LEN_DIFFERS, story))
    return violations
