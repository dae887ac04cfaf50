"""Override lists of verl's own example scripts compose to the same configuration plus ours, key by key."""

from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from seamless_verl import compose
from seamless_verl.config import SeamlessConfig

LISTS = sorted((Path(__file__).parent / "overrides").glob("*.txt"))
OURS = {"trainer.v1.trainer_mode"}


def composed(overrides: list[str]) -> dict[str, object]:
    with initialize_config_dir(str(compose.verl_config_dir()), version_base=None):
        config = hydra_compose("ppo_trainer", overrides=overrides)
    return flatten(OmegaConf.to_container(config, resolve=False))


def through_us(overrides: list[str], platform: str = "gpu") -> list[str]:
    made = compose.hydra_arguments(overrides, platform=platform, runs=Path("/runs"), now=0.0, pid=1)
    return [argument for argument in made if not argument.startswith("hydra.") or "searchpath" in argument]


def flatten(section: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in section.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + str(key)] = value
    return flat


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_the_same_plus_ours(path):
    overrides = path.read_text().split("\n")
    overrides = [line for line in overrides if line.strip() and not line.startswith("#")]
    theirs, with_us = composed(overrides), composed(through_us(overrides))
    added = with_us.keys() - theirs.keys()
    assert {key for key in added if not key.startswith("seamless.")} == set()
    changed = {key for key in theirs if with_us.get(key, "missing") != theirs[key]}
    assert changed == OURS


def test_there_are_lists_to_compare():
    assert len(LISTS) >= 3


@pytest.mark.parametrize("model_engine", ["dp", "megatron"])
def test_other_model_engines_compose(model_engine):
    assert composed(through_us([f"model_engine={model_engine}"]))["trainer.v1.trainer_mode"] == "seamless"


def test_the_user_has_the_last_word_on_the_trainer_mode():
    assert composed(through_us(["trainer.v1.trainer_mode=sync"]))["trainer.v1.trainer_mode"] == "sync"


@pytest.mark.parametrize("recipe", compose.known("recipe"))
@pytest.mark.parametrize("platform", compose.known("platform"))
def test_every_recipe_composes_on_every_platform_and_its_section_is_valid(recipe, platform):
    with initialize_config_dir(str(compose.verl_config_dir()), version_base=None):
        config = hydra_compose(
            "ppo_trainer", overrides=through_us([f"+recipe={recipe}", "seamless.run_dir=/runs/x"], platform)
        )
    section = OmegaConf.to_container(config.seamless, resolve=True)
    seamless = SeamlessConfig.from_mapping(section)
    assert seamless.recipe == recipe


def test_the_note_beside_the_results_states_the_measured_score_of_clean_imitation():
    from seamless_verl.recipes.swe.tiny.imitation import CLEAN_IMITATION

    text = " ".join(OmegaConf.load(compose.our_config_dir() / "recipe" / "swe.yaml").seamless.notes)
    for rate in CLEAN_IMITATION.values():
        assert f"{rate:.3f}" in text
