"""The SRPO recipe's problems and rewards; the run itself is an end-to-end matter."""

import pytest

from seamless_verl.recipes.srpo import assets
from seamless_verl.recipes.srpo.reward import answer_of, compute_score, mixes_languages


@pytest.mark.parametrize("source", ["math", "code"])
def test_answers_are_right_and_validation_problems_are_none_of_the_training_ones(source):
    found = assets.problems(source, seed=0)
    for problem in found:
        assert eval(problem.question) == problem.answer
    questions = [problem.question for problem in found]
    assert len(set(questions)) == len(questions) > assets._TRAIN + assets._VAL


def test_what_is_thought_is_true():
    for problem in assets.problems("math", seed=0):
        for claim in problem.thought.split():
            left, right = claim.split("=")
            assert eval(left) == int(right)
        assert problem.thought.endswith(f"={problem.answer}")


@pytest.mark.parametrize("thinks", [True, False])
def test_demonstrations_have_the_form_that_the_reward_asks_for(thinks):
    problem = assets.problems("math", seed=0)[0]
    written = problem.written(problem.answer, thinks=thinks)
    assert compute_score("math", written, str(problem.answer)) == {"score": 1.0, "acc": 1.0, "form": 1.0}
    assert (problem.thought in written) == thinks


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>1+1=2</think><answer>2</answer>", "2"),
        ("\n<think></think>\n<answer> x\ny</answer> ", " x\ny"),
        ("2", None),
        ("<think>1+1=2</think>2", None),
        ("<answer>2</answer>", None),
        ("<think>a</think><answer>2</answer> so it is", None),
        ("well <think>a</think><answer>2</answer>", None),
        ("<think>a</think><think>b</think><answer>2</answer>", None),
        ("<think>a</think><answer>1</answer><answer>2</answer>", None),
        ("<answer>2</answer><think>a</think>", None),
        ("<think>a</think><answer>2", None),
    ],
)
def test_a_form_is_one_thought_and_one_answer_and_nothing_else(text, answer):
    assert answer_of(text) == answer


@pytest.mark.parametrize(
    ("answer", "score", "acc"),
    [
        ("<think></think><answer>17</answer>", 1.0, 1.0),
        ("<think></think><answer> 17\n</answer>", 1.0, 1.0),
        ("<think></think><answer>18</answer>", 0.1, 0.0),
        ("17", 0.0, 0.0),
    ],
)
def test_only_the_exact_value_in_its_form_is_accurate(answer, score, acc):
    reward = compute_score("math", answer, "17")
    assert (reward["score"], reward["acc"]) == (pytest.approx(score), acc)


@pytest.mark.parametrize(
    ("text", "mixed"),
    [
        ("the sum of the angles is 180", False),
        ("", False),
        ("1 + 1 = 2", False),
        ("so \u03b1 + \u03b2 = \u03c0 and \U0001d465 is real", False),  # Greek, and mathematical alphabets
        ("the name \u674e is a word in a long sentence about the sum of all the angles of a triangle", False),
        ("the sum is \u56e0\u6b64\u7b54\u6848\u662f 5", True),
        ("\u56e0\u6b64\u7b54\u6848\u662f\u4e94", False),
        ("\u7b54\u3048\u306f\u30bc\u30ed\u3067\u3059", False),  # Japanese has three scripts
        ("\u0441\u0443\u043c\u043c\u0430 is five", True),
    ],
)
def test_two_scripts_are_two_languages(text, mixed):
    assert mixes_languages(text) == mixed
