"""Words and numbers of the page, as people read them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from seamless_verl.observe.time_ledger import Category
from seamless_verl.trajectory.tokens import DriftReason

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
FORKS = frozenset(reason.value for reason in DriftReason) - {reason.value for reason in REALIGNED}
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


def spent(seconds: Mapping[Category, float]) -> list[tuple[str, str, float]]:
    """What time went into, with its style and seconds; what took none is left out."""
    return [(LABELS[category], style_of(category), value) for category, value in seconds.items() if value > 0]


def ended(outcome: str | None) -> tuple[str, str]:
    """How a run ended, in words, and the style of that; ``None``: nobody recorded an end."""
    if outcome is None:
        return "no end recorded", "bad"
    if outcome == "KeyboardInterrupt":
        return "interrupted", "open"
    return (outcome, "good") if outcome == "finished" else (f"ended by {outcome}", "bad")


def share(value: float | None) -> str:
    """``42%``; a question mark where nobody knows, ``<1%`` for what is small but there."""
    if value is None:
        return "?"
    return "<1%" if 0 < value < 0.005 else f"{value:.0%}"


def si(value: float) -> str:
    """``950``, ``1.5k``, ``2.3M``."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """``12 ms``, ``4.2 s``, ``38 s``, ``5 min 14 s``, ``3 h 05 min``."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if 0 < seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least a share ``q`` of the values does not exceed.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values, no quantile")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]
