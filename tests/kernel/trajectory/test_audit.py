"""The audit must be able to fail: every promise is broken once, and found."""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace

from seamless_verl.trajectory.rows import AuditReport, LedgerEntry, Row, RowSpan, ViolationKind, audit_rows
from tests.fakes import ScriptedEdge, assistant, system, user


def _session() -> tuple[list[Row], list[LedgerEntry]]:
    edge = ScriptedEdge()
    start = [system("s"), user("a"), assistant("one two")]
    edge.ask(start[:2], "one two")
    edge.ask([*start, user("left")], "l l l")
    edge.ask([*start, user("right")], "r r")
    return list(edge.rows()), edge.ledger


def _swap(values: tuple, at: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:at], value, *values[at + 1 :])


def _row(change: Callable[[Row], Row]) -> Callable[[list[Row], list[LedgerEntry]], None]:
    def corrupt(rows: list[Row], ledger: list[LedgerEntry]) -> None:
        rows[0] = change(rows[0])

    return corrupt


def _entry(change: Callable[[LedgerEntry], LedgerEntry]) -> Callable[[list[Row], list[LedgerEntry]], None]:
    def corrupt(rows: list[Row], ledger: list[LedgerEntry]) -> None:
        ledger[0] = change(ledger[0])

    return corrupt


def _turn(number: int = 0, **changes: object) -> Callable[[list[Row], list[LedgerEntry]], None]:
    def change(row: Row) -> Row:
        turn = replace(row.turns[number], **changes)
        return replace(row, turns=_swap(row.turns, number, turn))

    return _row(change)


def _train_twice(rows: list[Row], ledger: list[LedgerEntry]) -> None:
    row, turn = rows[1], rows[1].turns[0]
    length = turn.stop - turn.start
    rows[1] = replace(
        row,
        turns=(replace(turn, trained=True), *row.turns[1:]),
        mask=(*row.mask[: turn.start], *[1] * length, *row.mask[turn.stop :]),
        log_probs=(*row.log_probs[: turn.start], *ledger[0].log_probs, *row.log_probs[turn.stop :]),
    )


def _nothing_left(entry: LedgerEntry) -> LedgerEntry:
    """What the proxy's ledger keeps of an answer that it discards."""
    return dataclasses.replace(entry, token_ids=array("i"), log_probs=array("d"), version_spans=(), discarded="left")


@pytest.mark.parametrize(
    ("corrupt", "kind"),
    [
        (_row(lambda row: replace(row, token_ids=_swap(row.token_ids, 0, 99))), ViolationKind.PROMPT_DIFFERS),
        (
            _row(lambda row: replace(row, token_ids=_swap(row.token_ids, row.turns[1].start - 1, 99))),
            ViolationKind.PROMPT_DIFFERS,
        ),
        (
            _row(lambda row: replace(row, token_ids=_swap(row.token_ids, row.turns[0].start, 99))),
            ViolationKind.TOKENS_DIFFER,
        ),
        (_row(lambda row: replace(row, token_ids=row.token_ids[:-1])), ViolationKind.SHAPE_DIFFERS),
        (_row(lambda row: replace(row, mask=_swap(row.mask, 0, 1))), ViolationKind.MASK_DIFFERS),
        (_row(lambda row: replace(row, mask=_swap(row.mask, row.turns[0].start, 0))), ViolationKind.MASK_DIFFERS),
        (
            _row(lambda row: replace(row, log_probs=_swap(row.log_probs, row.turns[0].start, -9.0))),
            ViolationKind.LOG_PROBS_DIFFER,
        ),
        (_row(lambda row: replace(row, log_probs=_swap(row.log_probs, 0, -0.5))), ViolationKind.LOG_PROBS_DIFFER),
        (
            _row(lambda row: replace(row, version_spans=(RowSpan(start=0, stop=1, version=9),))),
            ViolationKind.VERSIONS_DIFFER,
        ),
        (_row(lambda row: replace(row, prompt_len=row.prompt_len + 1)), ViolationKind.PROMPT_LEN_DIFFERS),
        (_turn(generation_id="stranger"), ViolationKind.UNKNOWN_GENERATION),
        (_turn(stop=10_000), ViolationKind.SHAPE_DIFFERS),
        (_turn(num_cut=1), ViolationKind.TOKENS_DIFFER),
        (_turn(trained=False), ViolationKind.NEVER_TRAINED),
        (lambda rows, ledger: rows.pop(), ViolationKind.NEVER_TRAINED),
        (_train_twice, ViolationKind.TRAINED_TWICE),
        (_entry(lambda entry: dataclasses.replace(entry, token_ids=array("i", [1]))), ViolationKind.TOKENS_DIFFER),
        (_entry(lambda entry: dataclasses.replace(entry, prompt_len=3)), ViolationKind.PROMPT_DIFFERS),
        (_entry(lambda entry: dataclasses.replace(entry, discarded="left")), ViolationKind.DISCARDED_BUT_TRAINED),
        (
            lambda rows, ledger: ledger.append(_nothing_left(ledger.pop())),
            ViolationKind.DISCARDED_BUT_TRAINED,
        ),
        (
            _entry(lambda entry: dataclasses.replace(entry, log_probs=entry.log_probs[:1])),
            ViolationKind.LOG_PROBS_DIFFER,
        ),
        (
            lambda rows, ledger: ledger.append(dataclasses.replace(ledger[0], generation_id="lost")),
            ViolationKind.NEVER_TRAINED,
        ),
    ],
)
def test_a_broken_promise_is_found(
    corrupt: Callable[[list[Row], list[LedgerEntry]], object], kind: ViolationKind
) -> None:
    rows, ledger = _session()
    assert audit_rows(rows, ledger).is_clean
    corrupt(rows, ledger)
    report = audit_rows(rows, ledger)
    assert kind in {violation.kind for violation in report.violations}
    assert all(violation.story for violation in report.violations)


def test_the_report_counts_what_it_checked() -> None:
    rows, ledger = _session()
    report = audit_rows(rows, ledger)
    assert (report.num_rows, report.num_generations) == (2, 3)
    assert report.num_tokens == sum(row.num_trained for row in rows) == sum(sum(row.mask) for row in rows)


def test_discarded_answers_need_no_row() -> None:
    rows, ledger = _session()
    ledger.append(dataclasses.replace(ledger[0], generation_id="lost", discarded="client left"))
    assert audit_rows(rows, ledger).is_clean
    assert audit_rows([], []).is_clean


def test_rows_and_reports_are_read_back_from_json_as_they_were() -> None:
    rows, ledger = _session()
    rows[0] = replace(rows[0], images=("a picture",))
    ledger.append(dataclasses.replace(ledger[0], generation_id="lost"))
    report = audit_rows(rows, ledger)
    assert not report.is_clean
    assert msgspec.convert(json.loads(msgspec.json.encode(report)), AuditReport) == report
    assert msgspec.convert(json.loads(msgspec.json.encode(rows)), list[Row]) == rows
