"""Rows and audits as JSON-compatible data, for the way between proxy and trainer.

Invariant: ``row_from_wire(row_to_wire(row)) == row``, also through JSON text.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from seamless_verl.proxy.session.sessions import Session
from seamless_verl.trajectory.audit import AuditReport, Violation, ViolationKind
from seamless_verl.trajectory.generation import FinishReason
from seamless_verl.trajectory.rows import Row, RowSpan, RowTurn

# Of every row; one that shows pictures has "images", too.
ROW_FIELDS = ("token_ids", "mask", "log_probs", "prompt_len", "turns", "version_spans")


def row_to_wire(row: Row) -> dict[str, Any]:
    return {
        "token_ids": row.token_ids,
        "mask": row.mask,
        "log_probs": row.log_probs,
        "prompt_len": row.prompt_len,
        "turns": [
            [turn.generation_id, turn.start, turn.stop, turn.trained, turn.finish_reason.value, turn.num_cut]
            for turn in row.turns
        ],
        "version_spans": [[span.start, span.stop, span.version] for span in row.version_spans],
        **({"images": row.images} if row.images else {}),
    }


def row_from_wire(data: Mapping[str, Any]) -> Row:
    return Row(
        token_ids=tuple(data["token_ids"]),
        mask=tuple(data["mask"]),
        log_probs=tuple(data["log_probs"]),
        prompt_len=data["prompt_len"],
        turns=tuple(
            RowTurn(
                generation_id=generation_id,
                start=start,
                stop=stop,
                trained=trained,
                finish_reason=FinishReason(finish),
                num_cut=num_cut,
            )
            for generation_id, start, stop, trained, finish, num_cut in data["turns"]
        ),
        version_spans=tuple(
            RowSpan(start=start, stop=stop, version=version) for start, stop, version in data["version_spans"]
        ),
        images=tuple(data.get("images", ())),
    )


def audit_to_wire(report: AuditReport) -> dict[str, Any]:
    return {
        "num_rows": report.num_rows,
        "num_generations": report.num_generations,
        "num_tokens": report.num_tokens,
        "violations": [[violation.kind.value, violation.story] for violation in report.violations],
    }


def audit_from_wire(data: Mapping[str, Any]) -> AuditReport:
    return AuditReport(
        num_rows=data["num_rows"],
        num_generations=data["num_generations"],
        num_tokens=data["num_tokens"],
        violations=tuple(Violation(kind=ViolationKind(kind), story=story) for kind, story in data["violations"]),
    )


def result_to_wire(session: Session, rows: tuple[Row, ...], report: AuditReport) -> dict[str, Any]:
    """What closing a session answers; read back by :class:`seamless_verl.proxy.client.SessionResult`."""
    result = {**summary_to_wire(session, report), "rows": [row_to_wire(row) for row in rows]}
    return {**result, **images_to_wire(session.images.files(rows))}


def images_to_wire(files: Mapping[str, bytes]) -> dict[str, Any]:
    """What a result says of the pictures of its rows; without any, nothing."""
    return {"images": {digest: b64encode(data).decode() for digest, data in files.items()}} if files else {}


def summary_to_wire(session: Session, report: AuditReport) -> dict[str, Any]:
    """The result of a session but for its rows."""
    return {
        "id": session.id,
        "group": session.spec.group,
        "index": session.spec.index,
        "metadata": dict(session.spec.metadata),
        "reward": session.reward,
        "rewards": session.rewards,
        "audit": audit_to_wire(report),
        "kinds": {kind.value: count for kind, count in session.tree.kinds.items()},
        "drift": {reason.value: count for reason, count in session.tree.drift.items()},
    }


def view_of(session: Session) -> dict[str, Any]:
    """A session as people want to see it: no keys, no token lists."""
    tree = session.tree
    return {
        "id": session.id,
        "group": session.spec.group,
        "index": session.spec.index,
        "state": session.state.value,
        "opened_at": session.opened_at,
        "deadline": session.deadline,
        "metadata": dict(session.spec.metadata),
        "reward": session.reward,
        "rewards": session.rewards,
        "in_flight": session.num_in_flight,
        "generated_tokens": session.num_generated,
        "stored_tokens": tree.num_stored_tokens,
        "kinds": {kind.value: count for kind, count in tree.kinds.items()},
        "drift": {reason.value: count for reason, count in tree.drift.items()},
        "turns": [
            {
                "ordinal": segment.ordinal,
                "generation_id": turn.generation_id,
                "parent": segment.parent_ordinal,
                "kind": segment.kind.value,
                "reasons": [reason.value for reason in segment.reasons],
                "detail": turn.detail,
                "prompt_tokens": segment.end - len(segment.tokens),
                "generated_tokens": len(segment.tokens),
                "versions": [[span.version, span.num_tokens] for span in turn.version_spans],
                "finish_reason": turn.finish_reason.value,
                "is_leaf": segment.is_leaf,
            }
            for segment in tree.answers
            if (turn := segment.turn) is not None
        ],
    }
