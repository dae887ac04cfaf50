"""From the user's command line to Hydra's arguments, and Hydra's refusals in our words."""

import os
import re
import resource
import time
from pathlib import Path

import hydra
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from seamless_verl.errors import ConfigError
from seamless_verl.machine import identity, is_alive
from seamless_verl.run import compose

RUNS = Path("/somewhere/runs")


def arguments(*user: str, runs: Path = RUNS) -> list[str]:
    return compose.hydra_arguments(user, platform="cpu", runs=runs, now=0.0, pid=7)


def test_ours_come_before_the_users_so_that_the_user_has_the_last_word():
    made = arguments("trainer.total_epochs=3", "+recipe=swe")
    assert made.index("+trainer_mode=seamless") < made.index("+platform=cpu") < made.index("trainer.total_epochs=3")
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


def test_flags_stay_in_front_and_verls_relative_config_path_is_found():
    made = arguments("data.train_batch_size=8", "--config-path=config", "--config-name=ppo_megatron_trainer", "-m")
    assert made[1:3] == ["--config-name=ppo_megatron_trainer", "-m"]
    assert made[0] == f"--config-path={compose.verl_config_dir()}"


def test_flags_keep_their_values():
    assert arguments("--cfg", "job", "a=1")[:2] == ["--cfg", "job"]


def test_the_search_path_is_the_users():
    assert not any("searchpath" in argument for argument in arguments("+recipe=swe"))


@pytest.mark.parametrize("choice", ["swe,arithmetic", "'swe','arithmetic'", "choice(swe, arithmetic)", "glob(*)"])
def test_a_sweep_over_recipes_gets_one_folder(choice):
    made = arguments("-m", f"+recipe={choice}")
    folders = [argument for argument in made if argument.startswith(("hydra.run.dir=", "hydra.sweep.dir="))]
    assert len(folders) == 2
    for folder in folders:
        name = folder.removeprefix(folder.partition("=")[0] + f"={RUNS}/")
        assert re.fullmatch(r"[a-z][\w-]+-\d{8}-\d{6}-7", name), name


@pytest.mark.parametrize("flags", [["--cfg", "job", "-m"], ["--cfg=job", "--multirun"], ["-m", "-c", "job"]])
def test_flags_that_exclude_each_other_are_refused_before_hydra_raises(flags):
    with pytest.raises(ConfigError, match="exclude each other"):
        arguments(*flags)


def test_resolve_needs_something_to_print():
    with pytest.raises(ConfigError, match="--cfg job"):
        arguments("--resolve")
    assert "--resolve" in arguments("--cfg", "job", "--resolve")


_RUNS = [f"swe-2026010{day}-000000-1" for day in range(1, 5)]
_RUNS.append("swe-mine-20260105-000000-1")  # of another recipe


def test_resume_mode_without_a_recipe_is_verls_own_and_adopts_no_folder(tmp_path):
    (tmp_path / "run-old").mkdir()
    (tmp_path / "run-old" / "config.yaml").write_text("{}")
    assert f"hydra.run.dir={tmp_path / 'run-old'}" not in arguments("trainer.resume_mode=auto", runs=tmp_path)


def test_resuming_picks_the_newest_unfinished_run_of_the_recipe_that_nobody_runs(tmp_path):
    for number, name in enumerate(_RUNS):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text("{}")
        os.utime(folder, (number, number))
    (tmp_path / _RUNS[2] / "summary.json").write_text("{}")
    (tmp_path / _RUNS[3] / "pid").write_text(identity(os.getpid()))
    (tmp_path / _RUNS[1] / "pid").write_text(f"{os.getpid()} 1.0 another-host")  # the number came again
    os.utime(tmp_path / _RUNS[1] / "pid", (1, 1))
    for number, name in enumerate(_RUNS):
        os.utime(tmp_path / name, (number, number))
    made = arguments("+recipe=swe", "trainer.resume_mode=auto", runs=tmp_path)
    assert f"hydra.run.dir={tmp_path / _RUNS[1]}" in made


def test_resuming_passes_over_no_run_that_may_still_go_on_elsewhere(tmp_path):
    for number, name in enumerate(_RUNS[:2]):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text("{}")
        (folder / "pid").write_text("7 123 a-boot another-host")
        os.utime(folder, (number, number))
    made = arguments("+recipe=swe", "trainer.resume_mode=auto", runs=tmp_path)
    assert f"hydra.run.dir={tmp_path / _RUNS[1]}" in made


def test_a_run_of_another_machine_is_waited_for_and_taken_over_without_a_sign_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(compose, "_LOOK_S", 0.01)
    owner, said = tmp_path / "pid", []
    owner.write_text("7 123 a-boot another-host")

    def quiet(line):
        said.append(line)
        os.utime(owner, (1, 1))

    with compose.claimed(tmp_path, quiet):
        assert owner.read_text() == identity(os.getpid())
    assert not owner.exists()
    assert "of a run on another-host" in said[0]


def test_a_run_of_another_machine_that_gives_a_sign_of_life_keeps_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(compose, "_LOOK_S", 0.01)
    owner = tmp_path / "pid"
    owner.write_text("7 123 a-boot another-host")
    later = time.time() + 30
    with (
        pytest.raises(ConfigError, match="belongs to a run that is still going"),
        compose.claimed(tmp_path, lambda _: os.utime(owner, (later, later))),
    ):
        pass
    assert owner.read_text() == "7 123 a-boot another-host"


def test_a_run_on_another_machine_is_alive_while_its_supervisor_touches_its_file(tmp_path):
    (tmp_path / "pid").write_text("7 123 a-boot another-host")
    assert compose.run_is_alive(tmp_path)
    os.utime(tmp_path / "pid", (1, 1))
    assert not compose.run_is_alive(tmp_path)


def test_a_run_is_alive_whatever_happens_to_the_clock(tmp_path, monkeypatch):
    (tmp_path / "pid").write_text(identity(os.getpid()))
    monkeypatch.setattr("psutil.boot_time", lambda: 0.0)
    assert compose.run_is_alive(tmp_path)


@pytest.mark.parametrize("part", [2, 3])
def test_an_owner_of_another_boot_or_container_is_another_machines_under_the_same_name(tmp_path, monkeypatch, part):
    monkeypatch.setattr(compose, "_LOOK_S", 0.01)
    words, said = identity(os.getpid()).split(), []
    words[part] = "pid:[7]"
    owner = tmp_path / "pid"
    owner.write_text(" ".join(words))
    assert is_alive(owner.read_text()) is None

    def quiet(line):
        said.append(line)
        os.utime(owner, (1, 1))

    with compose.claimed(tmp_path, quiet):
        assert "waiting for 300 s of silence" in said[0]
        owner.write_text("7 123 a-boot pid:[7] another-host")  # took it over, since we gave no sign of life
    assert owner.exists()


def test_a_claim_that_could_not_be_written_is_none(tmp_path):
    """A full disk, say: an empty claim would be another machine's, and make the next command wait."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"), compose.claimed(tmp_path, str):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "pid").exists()


@pytest.mark.parametrize(
    "path", ["/runs/one", "/home/j\u00fcrgen/my runs", "/x/R&D (mine), [a]{b}", "/it's/#1", "file:///a b/c"]
)
def test_any_path_is_a_value_of_hydras(path):
    parsed = OverridesParser.create().parse_override(f"hydra.run.dir={compose.quoted(path)}").value()
    assert str(parsed) == path


def test_without_resume_mode_on_the_command_line_a_run_starts_afresh(tmp_path):
    (tmp_path / _RUNS[0]).mkdir()
    (tmp_path / _RUNS[0] / "config.yaml").write_text("{}")
    assert f"hydra.run.dir={tmp_path / _RUNS[0]}" not in arguments("+recipe=swe", runs=tmp_path)


def test_a_typo_is_explained_with_the_nearest_key():
    error = ValueError("Could not override 'actor_rollout_ref.actr.optim.lr'.\nKey 'actr' is not in struct")
    text = compose.explain(error, ["actor_rollout_ref.actor.optim.lr", "data.train_files"])
    assert text.startswith(
        "actor_rollout_ref.actr.optim.lr: no such key. Fix: did you mean actor_rollout_ref.actor.optim.lr? "
    )


def test_a_key_near_no_other_is_told_how_keys_are_added():
    said = "Could not override 'seamless.agent.kwargs'.\nTo append to your config use +seamless.agent.kwargs={a: b}"
    text = compose.explain(ValueError(said), ["seamless.agent.kwargs"])
    assert text.startswith("seamless.agent.kwargs={a: b}: has keys that")
    assert text.endswith("Fix: write ++seamless.agent.kwargs={a: b} to add them.")
    text = compose.explain(ValueError("Could not override 'trainer.foo'."), ["trainer.nnodes", "data.train_files"])
    assert text == "trainer.foo: no such key. Fix: +trainer.foo=VALUE adds a key that the configuration does not have."


@pytest.mark.parametrize(("group", "wrong", "right"), [("recipe", "sve", "swe"), ("platform", "gpus", "gpu")])
def test_an_unknown_choice_of_ours_is_one_line_with_the_known_ones(group, wrong, right):
    missing = MissingConfigException("a\nb\nConfig search path:\n\tc", f"{group}/{wrong}", compose.known(group))
    text = compose.explain(missing, [])
    assert text.startswith(f"+{group}={wrong}: ")
    assert ", ".join(compose.known(group)) in text
    assert text.endswith(f"Fix: write +{group}={right}.")


def test_a_recipe_in_a_folder_beside_the_command_is_pointed_to(tmp_path, monkeypatch):
    (tmp_path / "my_task" / "recipe").mkdir(parents=True)
    (tmp_path / "my_task" / "recipe" / "my_task.yaml").touch()
    monkeypatch.chdir(tmp_path)
    for name, fix in (("my_task", "write --config-dir my_task."), ("swee", "write +recipe=swe.")):
        missing = MissingConfigException("", f"recipe/{name}", compose.known("recipe"))
        assert compose.explain(missing, []).endswith(fix)


@pytest.mark.parametrize(
    ("group", "section"), [("recipe", "recipe"), ("platform", "platform"), ("seamless", "seamless.seamless")]
)
def test_a_configuration_without_its_first_line_is_refused(tmp_path, group, section):
    (tmp_path / group).mkdir()
    header, keys = "# @package _global_\n", "seamless: {staleness: {eta: 3}}\n"
    (tmp_path / group / "bare.yaml").write_text(keys)
    (tmp_path / group / "mine.yaml").write_text(header + keys)
    (tmp_path / "main.yaml").write_text("trainer: {}\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        bare, mine = (hydra.compose("main", overrides=[f"+{group}={name}"]) for name in ("bare", "mine"))
    compose.check_packages(mine, {group: "mine"})
    compose.check_packages(bare, {group: None})  # verl has a section of that name, perhaps
    with pytest.raises(ConfigError, match=rf"\+{group}=bare: its keys stand under {re.escape(section)}\.\*"):
        compose.check_packages(bare, {group: "bare"})


def test_another_missing_configuration_is_one_line_with_the_folders():
    said = "In 'my': Could not load 'x'.\n\nConfig search path:\n\tprovider=main, path=file:///a\n"
    text = compose.explain(MissingConfigException(said, "x", None), [])
    assert text == "In 'my': Could not load 'x'. Looked in: file:///a"


@pytest.mark.parametrize(("flags", "key"), [([], "hydra.run.dir"), (["-m"], "hydra.sweep.dir")])
def test_a_folder_that_cannot_be_made_is_named_with_its_key_and_the_systems_answer(flags, key):
    made = arguments(*flags, f"{key}=/proc/foo")
    refused = compose.folder_refused(made, FileNotFoundError(2, "No such file or directory", "/proc/foo"))
    assert (refused.key, refused.value) == (key, "/proc/foo")
    assert "No such file or directory" in refused.problem


def test_other_refusals_keep_their_own_words():
    assert compose.explain(ValueError("no viable alternative at input"), []) == "no viable alternative at input"


def test_paths_are_those_of_the_commands_folder_wherever_actors_open_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "mine.py").touch()
    mine = "rollout.multi_turn.tool_config_path", "rollout.multi_turn.function_tool_path", "model.lora_adapter_path"
    mine = [f"actor_rollout_ref.{name}" for name in (*mine, "rollout.agent.agent_loop_config_path")]
    mine += ["reward.reward_manager.module.path", "reward.custom_reward_function.path"]
    written = {"default_local_dir": "checkpoints/${.name}", "name": "x", "rollout_data_dir": "hdfs://a/b"}
    config = OmegaConf.create(
        {
            "trainer": {**written, "validation_data_dir": None, "resume_from_path": "/here/global_step_5"},
            "actor_rollout_ref": {"model": {"path": "model"}},
            "critic": {"model": {"path": "Qwen/Qwen3-8B"}},
            "reward": {"reward_model": {"model_path": "Skywork/Skywork-Reward"}},
        }
    )
    for key in mine:
        OmegaConf.update(config, key, "mine.py", force_add=True)
    before = OmegaConf.to_container(config, resolve=True)
    OmegaConf.set_struct(config, True)
    compose.make_absolute(config)
    assert [OmegaConf.select(config, key) for key in mine] == [str(tmp_path / "mine.py")] * len(mine)
    for key in mine:
        OmegaConf.update(config, key, "mine.py")
    before["trainer"]["default_local_dir"] = str(tmp_path / "checkpoints" / "x")
    before["actor_rollout_ref"]["model"]["path"] = str(tmp_path / "model")
    assert OmegaConf.to_container(config, resolve=True) == before
