"""verl's own rewards, and the accuracy that the curriculum asks for beside them."""

import pytest

from seamless_verl.recipes.srpo.verl_reward import compute_score

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    ("source", "answer", "truth", "expected"),
    [
        ("math_dapo", "so\nAnswer: 34", "34", {"score": 1.0, "acc": 1.0}),
        ("math_dapo", "Answer: 35", "34", {"score": -1.0, "acc": 0.0}),
        ("openai/gsm8k", "#### 7", "7", {"score": 1.0, "acc": 1.0}),
        ("openai/gsm8k", "#### 8", "7", {"score": 0.0, "acc": 0.0}),
    ],
)
def test_verls_rewards_come_with_an_accuracy(source, answer, truth, expected):
    assert compute_score(source, answer, truth) == expected
