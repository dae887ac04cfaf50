"""SRPO on real data through the installed verl: its rewards with the paper's, its data set with system prompts."""

import pandas as pd
import pytest
from omegaconf import OmegaConf

from seamless_verl.errors import ConfigError
from seamless_verl.recipes.srpo import assets
from seamless_verl.recipes.srpo.verl_reward import compute_score
from seamless_verl.recipes.swe.tiny import tokenizer as tokenizers
from tests.contract.test_recipes import composed

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    ("source", "answer", "truth", "expected"),
    [
        ("math_dapo", "so\nAnswer: 34", "34", {"score": 1.0, "acc": 1.0, "form": 0.0, "mixing": 0.0}),
        ("math_dapo", "Answer: 35", "34", {"score": -1.0, "acc": 0.0, "form": 0.0, "mixing": 0.0}),
        ("openai/gsm8k", "#### 7", "7", {"score": 1.0, "acc": 1.0, "form": 0.0, "mixing": 0.0}),
        ("openai/gsm8k", "#### 8", "7", {"score": 0.0, "acc": 0.0, "form": 0.0, "mixing": 0.0}),
        (
            "math_dapo",
            "<think>Answer: 35? No.</think>\n<answer>Answer: 34</answer>",
            "34",
            {"score": 1.1, "acc": 1.0, "form": 1.0, "mixing": 0.0},
        ),
        (
            "math_dapo",
            "<think>Answer: 34</think><answer>Answer: 35</answer>",
            "34",
            {"score": -0.9, "acc": 0.0, "form": 1.0, "mixing": 0.0},
        ),
        (
            "math_dapo",
            "<think>\u6240\u4ee5 it is</think><answer>Answer: 34</answer>",
            "34",
            {"score": 1.0, "acc": 1.0, "form": 1.0, "mixing": 1.0},
        ),
    ],
)
def test_verls_rewards_see_the_answer_and_get_form_and_language_beside_them(source, answer, truth, expected):
    assert compute_score(source, answer, truth) == pytest.approx(expected)


def test_weights_of_form_and_language_are_the_users():
    mixed = "<think>\u6240\u4ee5 it is</think><answer>Answer: 34</answer>"
    reward = compute_score("math_dapo", mixed, "34", form_weight=0.5, mixing_weight=0.25)
    assert reward["score"] == pytest.approx(1.25)


@pytest.fixture
def dataset(tmp_path):
    """Builds verl's data set as verl does, from prompts by source."""
    from verl.utils.dataset.rl_dataset import get_dataset_class

    def made(rows, **changes):
        file = tmp_path / "train.parquet"
        pd.DataFrame([{"data_source": source, "prompt": prompt} for source, prompt in rows]).to_parquet(file)
        config, _ = composed("srpo")
        data = OmegaConf.merge(OmegaConf.create(dict(config["data"])), changes)
        tokenizer = tokenizers.train([["1+2", "word"]])
        return get_dataset_class(data)(data_files=[str(file)], tokenizer=tokenizer, config=data)

    return made


ASKED = [{"role": "user", "content": "1+2"}]


def test_a_conversation_gets_the_system_prompt_of_its_source(dataset):
    own = [{"role": "system", "content": "mine"}, *ASKED]
    prompts = {"math": "Sums.", "default": "Think."}
    found = dataset([("math", ASKED), ("code", ASKED), ("code", own)], system_prompts=prompts)
    messages = [found[at]["raw_prompt"] for at in range(3)]
    assert [[m["content"] for m in each] for each in messages] == [["Sums.", "1+2"], ["Think.", "1+2"], ["mine", "1+2"]]
    assert [each[0]["role"] for each in messages] == ["system"] * 3


def test_a_system_prompt_counts_where_verl_leaves_long_prompts_out(dataset):
    long = {"system_prompts": {"default": "word " * 100}, "filter_overlong_prompts": True}
    assert len(dataset([("math", ASKED)], **long)) == 0
    assert len(dataset([("math", ASKED)], filter_overlong_prompts=True)) == 1


def test_a_data_set_without_any_system_prompt_says_which_key_to_set(dataset):
    with pytest.raises(ConfigError, match=r"data\.system_prompts=None: is empty"):
        dataset([("math", ASKED)], system_prompts=None)


def test_the_model_was_warmed_up_with_the_recipes_system_prompt():
    config, _ = composed("srpo")
    assert config["data"]["system_prompts"] == {"default": assets.SYSTEM_PROMPT}
