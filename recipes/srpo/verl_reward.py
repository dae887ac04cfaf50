"""verl's own rewards for real data, with SRPO's for the form and against mixed languages, and the accuracy that the
curriculum asks for."""

from __future__ import annotations

from typing import Any

from seamless_verl.recipes.srpo.reward import answer_of, mixes_languages


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
    *,
    form_weight: float = 0.1,
    mixing_weight: float = 0.1,
    **kwargs: Any,
) -> dict[str, float]:
    """As ``verl.utils.reward_score.default_compute_score``, which is given what stands in the answer's tags, or all of
    a text that is not in that form.

    Args:
        form_weight: what is added for the form.
        mixing_weight: what mixed languages cost; both in ``reward.custom_reward_function.reward_kwargs``.

    Returns:
        ``score`` as verl has it, with both; ``acc``: verl's where it has one, else 1 for a full score (every test
        passed); ``form`` and ``mixing``: 1 or 0.
    """
    from verl.utils.reward_score import default_compute_score

    answer = answer_of(solution_str)
    given = solution_str if answer is None else answer
    result = default_compute_score(data_source, given, ground_truth, extra_info, **kwargs)
    told = result if isinstance(result, dict) else {"score": result}
    score, form, mixing = float(told["score"]), float(answer is not None), float(mixes_languages(solution_str))
    return {
        "score": score + form_weight * form - mixing_weight * mixing,
        "acc": float(told.get("acc", score >= 1)),
        "form": form,
        "mixing": mixing,
    }
