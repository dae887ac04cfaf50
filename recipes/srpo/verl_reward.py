"""verl's own rewards for real data, with the accuracy that the curriculum asks for beside every score."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """As ``verl.utils.reward_score.default_compute_score``, which for some sources returns a bare number.

    Returns:
        ``score`` as verl has it, and ``acc``: verl's where it has one, else 1 for a full score (every test passed).
    """
    from verl.utils.reward_score import default_compute_score

    result = default_compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
    if not isinstance(result, dict):
        return {"score": float(result), "acc": float(result >= 1)}
    return {"score": float(result["score"]), "acc": float(result.get("acc", result["score"] >= 1))}
