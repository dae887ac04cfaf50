"""Reward of the SRPO recipe: accuracy, and a little for the form; only accuracy decides what counts as solved."""

from __future__ import annotations

from typing import Any

_FORM = 0.1


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> dict[str, float]:
    """verl's reward function signature; ``solution_str`` is the decoded answer.

    Returns:
        ``score`` in [0, 1], ``acc`` (1 for the exact value) and ``form`` (1 for a whole number and nothing else).
    """
    answer = solution_str.strip()
    accuracy, form = float(answer == ground_truth), float(answer.isdecimal())
    return {"score": (1 - _FORM) * accuracy + _FORM * form, "acc": accuracy, "form": form}
