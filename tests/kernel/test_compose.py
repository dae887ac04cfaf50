"""From the user's command line to Hydra's arguments, and Hydra's refusals in our words."""

import os
from pathlib import Path

import pytest

from seamless_verl import compose
from seamless_verl.errors import ConfigError
from seamless_verl.supervisor import identity

RUNS = Path("/somewhere/runs")


def arguments(*user: str, runs: Path = RUNS) -> list[str]:
    return compose.hydra_arguments(user, platform="cpu", runs=runs, now=0.0, pid=7)


def test_ours_come_before_the_users_so_that_the_user_has_the_last_word():
    made = arguments("trainer.total_epochs=3", "+recipe=swe")
    assert made.index("+seamless=default") < made.index("+platform=cpu") < made.index("trainer.total_epochs=3")
    assert made[-2:] == ["trainer.total_epochs=3", "+recipe=swe"]


def test_a_platform_or_run_folder_of_the_users_is_kept():
    made = arguments("+platform=gpu", "hydra.run.dir=/here")
    assert "+platform=cpu" not in made
    assert not any(argument.startswith("hydra.run.dir=/somewhere") for argument in made)


def test_runs_started_in_the_same_second_get_folders_of_their_own():
    one = compose.hydra_arguments(["+recipe=swe"], platform="cpu", runs=RUNS, now=0.0, pid=1)
    two = compose.hydra_arguments(["+recipe=swe"], platform="cpu", runs=RUNS, now=0.0, pid=2)
    folder = [argument for argument in one if argument.startswith("hydra.run.dir=")]
    assert folder != [argument for argument in two if argument.startswith("hydra.run.dir=")]


def test_an_unknown_recipe_names_the_known_ones():
    with pytest.raises(ConfigError) as refused:
        arguments("+recipe=sve")
    assert "arithmetic" in refused.value.problem
    assert refused.value.fix == "write +recipe=swe"


def test_flags_stay_in_front_and_verls_relative_config_path_is_found():
    made = arguments("data.train_batch_size=8", "--config-path=config", "--config-name=ppo_megatron_trainer", "-m")
    assert made[1:3] == ["--config-name=ppo_megatron_trainer", "-m"]
    assert made[0] == f"--config-path={compose.verl_config_dir()}"


def test_flags_keep_their_values():
    assert arguments("--cfg", "job", "a=1")[:2] == ["--cfg", "job"]


def test_recipes_can_be_swept_over_and_come_from_the_users_own_folder():
    assert "+recipe=swe,arithmetic" in arguments("-m", "+recipe=swe,arithmetic")
    assert "+recipe=mine" in arguments("--config-dir=/my/configs", "+recipe=mine")


def test_resume_mode_without_a_recipe_is_verls_own_and_adopts_no_folder(tmp_path):
    (tmp_path / "run-old").mkdir()
    (tmp_path / "run-old" / "config.yaml").write_text("{}")
    assert f"hydra.run.dir={tmp_path / 'run-old'}" not in arguments("trainer.resume_mode=auto", runs=tmp_path)


def test_resuming_picks_the_newest_unfinished_run_of_the_recipe_that_nobody_runs(tmp_path):
    for number, name in enumerate(["swe-old", "swe-new", "swe-done", "swe-alive", "arithmetic-new"]):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text("{}")
        os.utime(folder, (number, number))
    (tmp_path / "swe-done" / "summary.json").write_text("{}")
    (tmp_path / "swe-alive" / "pid").write_text(identity(os.getpid()))
    (tmp_path / "swe-new" / "pid").write_text(f"{os.getpid()} 1.0 another-host")  # the number came again
    for number, name in enumerate(["swe-old", "swe-new", "swe-done", "swe-alive", "arithmetic-new"]):
        os.utime(tmp_path / name, (number, number))
    made = arguments("+recipe=swe", "trainer.resume_mode=auto", runs=tmp_path)
    assert f"hydra.run.dir={tmp_path / 'swe-new'}" in made


def test_without_resume_mode_on_the_command_line_a_run_starts_afresh(tmp_path):
    (tmp_path / "swe-old").mkdir()
    (tmp_path / "swe-old" / "config.yaml").write_text("{}")
    assert f"hydra.run.dir={tmp_path / 'swe-old'}" not in arguments("+recipe=swe", runs=tmp_path)


def test_a_typo_is_explained_with_the_nearest_key():
    error = ValueError("Could not override 'actor_rollout_ref.actr.optim.lr'.\nKey 'actr' is not in struct")
    text = compose.explain(error, ["actor_rollout_ref.actor.optim.lr", "data.train_files"])
    assert text == "actor_rollout_ref.actr.optim.lr: no such key. Fix: did you mean actor_rollout_ref.actor.optim.lr?"


def test_other_refusals_keep_their_own_words():
    assert compose.explain(ValueError("no viable alternative at input"), []) == "no viable alternative at input"
