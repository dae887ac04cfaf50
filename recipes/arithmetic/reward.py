"""Reward of the arithmetic recipe: 1 for the exact sum, 0 otherwise."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """verl's reward function signature; ``solution_str`` is the decoded answer."""
    return float(solution_str.strip() == ground_truth)
