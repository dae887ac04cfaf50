"""What several sections of the page share: names of categories and drift reasons, small pieces of HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from seamless_verl.observe.digest import RunDigest
from seamless_verl.observe.time_ledger import Category
from seamless_verl.trajectory.segments import DriftReason

LABELS: Mapping[Category, str] = {
    Category.TRAIN: "training",
    Category.GENERATE: "generating",
    Category.PREFILL_AGAIN: "prefilling again",
    Category.SYNC: "weight sync",
    Category.SWITCH: "switching",
    Category.WAIT_DATA: "waiting for data or work",
    Category.WAIT_STRAGGLER: "waiting for stragglers",
    Category.FAILED: "failed",
    Category.VALIDATION: "waiting for validation",
    Category.CHECKPOINT: "checkpoint",
    Category.OTHER: "other",
}

# The first four keep the session in one row, with the tokens that were generated; each of the others starts a branch.
REALIGNED = frozenset(
    [
        DriftReason.ARGUMENTS_RESPELLED,
        DriftReason.CALL_IDS_CHANGED,
        DriftReason.CONTENT_WHITESPACE,
        DriftReason.REASONING_DROPPED,
    ]
)
DRIFT: Mapping[DriftReason, str] = {
    DriftReason.ARGUMENTS_RESPELLED: "the arguments of a tool call came back as other JSON of the same value",
    DriftReason.CALL_IDS_CHANGED: "the ids of tool calls came back changed",
    DriftReason.CONTENT_WHITESPACE: "the text of an answer came back with other white space",
    DriftReason.REASONING_DROPPED: "the reasoning of an answer did not come back",
    DriftReason.BRANCHED: "a history that had gone on already went on once more: parallel calls, sub-agents",
    DriftReason.RESAMPLED: "the same request was sent again for another answer",
    DriftReason.HISTORY_REWRITTEN: "an earlier message was changed, as when an agent compacts its history",
    DriftReason.ROOT_CHANGED: "a history that shares nothing with the session's",
    DriftReason.SYSTEM_CHANGED: "another system prompt",
    DriftReason.TOOLS_CHANGED: "another list of tools",
    DriftReason.TEMPLATE_MISMATCH: "the chat template renders the history otherwise than it was generated",
    DriftReason.BOUNDARY_TRIMMED: "tokens at the end of an answer do not fit what follows in the chat template",
}


def style_of(category: Category) -> str:
    return f"c-{category.value.replace('_', '-')}"


def facts(facts: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts) + "</dl>"


def figure(title: str, chart: str, caption: str) -> str:
    if not chart:
        return ""
    return f"<figure><h3>{escape(title)}</h3>{chart}<figcaption>{escape(caption)}</figcaption></figure>"


def absent(text: str) -> str:
    return f'<p class="absent">{escape(text)}</p>'


def validation_sets(run: RunDigest) -> dict[str, list[Mapping[str, Any]]]:
    sets: dict[str, list[Mapping[str, Any]]] = {}
    for record in sorted(run.validations, key=lambda record: record["step"]):
        sets.setdefault(record["name"], []).append(record)
    return sets
