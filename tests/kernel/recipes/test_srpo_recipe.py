"""The SRPO recipe's problems and reward; the run itself is an end-to-end matter."""

import pytest

from seamless_verl.recipes.srpo import assets
from seamless_verl.recipes.srpo.reward import compute_score


@pytest.mark.parametrize("source", ["math", "code"])
def test_answers_are_right_and_validation_problems_are_none_of_the_training_ones(source):
    found = assets.problems(source, seed=0)
    for problem in found:
        assert eval(problem.question) == problem.answer
    questions = [problem.question for problem in found]
    assert len(set(questions)) == len(questions) > assets._TRAIN + assets._VAL


@pytest.mark.parametrize(
    ("answer", "score", "acc"), [("17", 1.0, 1.0), (" 17\n", 1.0, 1.0), ("18", 0.1, 0.0), ("it is 17", 0.0, 0.0)]
)
def test_only_the_exact_value_is_accurate(answer, score, acc):
    reward = compute_score("math", answer, "17")
    assert (reward["score"], reward["acc"]) == (pytest.approx(score), acc)
