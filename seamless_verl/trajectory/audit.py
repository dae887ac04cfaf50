"""An independent check of rows against what the engine itself said.

The ledger is written where the engine is called, before tree, parsers or templates see anything; the audit compares
the two at the end and trusts neither. Cost: one pass over the rows' tokens.

It holds a session to: stored ids = engine ids; the prompt sent = the row before the answer; mask 1 exactly on the
answers the row trains; log-probs and weight versions unchanged; every generated token trained exactly once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

import msgspec

from seamless_verl.trajectory.generation import Generation, VersionSpan
from seamless_verl.trajectory.rows import Row, RowSpan, RowTurn
from seamless_verl.trajectory.tokens import num_equal, pack_ids


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
