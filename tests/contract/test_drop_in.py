"""Override lists of verl's own example scripts compose to the same configuration plus ours, key by key."""

import os
from io import StringIO
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

import seamless_verl.main as ours
from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.machine import identity
from seamless_verl.main import main
from seamless_verl.run import compose
from seamless_verl.run.restarts import Exit

LISTS = sorted((Path(__file__).parent / "overrides").glob("*.txt"))
OURS = {"trainer.v1.trainer_mode"}
# What is refused holds on GPUs, too: nothing here looks at the devices. Stem of the list, what the message must say.
SGLANG = (
    "rollout.name=sglang: cannot be lent",
    "Fix: write vllm, or give rollout GPUs of its own (actor_rollout_ref.rollout.nnodes) and no policy, or keep verl's "
    "trainer (trainer.v1.trainer_mode=sync)",
)
ADAPTER = ("lora.merge=False: a replica that is started anew would put the adapter on random weights",)
UNSERVED = ("V1 trainer does not compute what it needs", "write grpo")
JUDGE = ("reward_model.enable_resource_pool=False: verl's asynchronous trainer, which ours extends, has no place",)
REFUSED = {
    "fapo_trainer-run_qwen_7b_rm_colocate": JUDGE,
    "gdpo_trainer-run_qwen3_8b_fsdp": UNSERVED,
    "grpo_trainer-run_mistral_nemo_12b_skyworkrm_fsdp": JUDGE,
    "lora-run_qwen2_5_vl_7b_fsdp": ADAPTER,
    "lora-run_qwen3_30b_a3b_megatron": ADAPTER,
    "remax_trainer-run_qwen3_8b_fsdp": UNSERVED,
    "sglang_multiturn-run_qwen2_5_3b_gsm8k_multiturn_fsdp": SGLANG,
    "sglang_multiturn-run_qwen3_4b_dapo_multiturn_fsdp": SGLANG,
}
APART = ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=4"]
WAYS_OUT = [["actor_rollout_ref.rollout.name=vllm"], ["trainer.v1.trainer_mode=sync"], APART]
JUDGES = [
    [f"reward.reward_model.{key}" for key in ("enable_resource_pool=true", "nnodes=1", "n_gpus_per_node=4")],
    ["trainer.v1.trainer_mode=sync"],
]
MENDED = {  # by what the message says; then they pass
    "fapo_trainer-run_qwen_7b_rm_colocate": JUDGES,
    "gdpo_trainer-run_qwen3_8b_fsdp": [["algorithm.adv_estimator=grpo"]],
    "grpo_trainer-run_mistral_nemo_12b_skyworkrm_fsdp": JUDGES,
    "lora-run_qwen2_5_vl_7b_fsdp": [["actor_rollout_ref.rollout.load_format=safetensors"]],
    "lora-run_qwen3_30b_a3b_megatron": [["actor_rollout_ref.model.lora.merge=true"]],
    "remax_trainer-run_qwen3_8b_fsdp": [["algorithm.adv_estimator=grpo"]],
    "sglang_multiturn-run_qwen2_5_3b_gsm8k_multiturn_fsdp": WAYS_OUT,
    "sglang_multiturn-run_qwen3_4b_dapo_multiturn_fsdp": WAYS_OUT,
}


def composed(overrides: list[str]) -> dict[str, object]:
    compose.register_ours()
    with initialize_config_dir(str(compose.verl_config_dir()), version_base=None):
        config = hydra_compose("ppo_trainer", overrides=overrides)
    return flatten(OmegaConf.to_container(config, resolve=False))


def through_us(overrides: list[str], platform: str = "gpu") -> list[str]:
    made = compose.hydra_arguments(overrides, platform=platform, runs=Path("/runs"), now=0.0, pid=1)
    return [argument for argument in made if not argument.startswith("hydra.")]


def flatten(section: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in section.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + str(key)] = value
    return flat


def overrides_of(path: Path) -> list[str]:
    return [line for line in path.read_text().split("\n") if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_they_pass_the_checks_before_the_start_as_they_are_or_are_refused_with_a_reason(path, on_machine, monkeypatch):
    """No key of ours is needed."""
    monkeypatch.setenv("WANDB_MODE", "offline")  # whoever runs them has logged in
    overrides = overrides_of(path)
    if path.stem not in REFUSED:
        passed = on_machine(*overrides, cards=32)
        assert passed.code == 0, passed.err
        assert OmegaConf.load(passed.folder / "config.yaml").seamless.scheduler.policy == "colocated"
        return
    refused = on_machine(*overrides, cards=32)
    assert refused.code == 2
    for said in REFUSED[path.stem]:
        assert said in refused.err
    for mended in MENDED[path.stem]:
        passed = on_machine(*overrides, *mended, cards=32)
        assert passed.code == 0, passed.err


def test_an_engine_must_be_named_as_under_verl(on_machine):
    refused = on_machine(cards=8)
    assert (refused.code, refused.err) == (
        2,
        "error: actor_rollout_ref.rollout.name=null: is not set. Fix: write vllm.\n",
    )


def test_a_folder_that_is_not_hydras_is_refused_with_the_key_that_chooses_it(on_machine):
    refused = on_machine("+recipe=arithmetic", "seamless.run_dir=/no/such/folder", cards=1)
    assert refused.code == 2
    assert refused.err.startswith("error: seamless.run_dir=/no/such/folder: is filled in")
    assert refused.err.endswith("write hydra.run.dir=/no/such/folder.\n")


def test_sections_with_nothing_below_them_are_empty(on_machine):
    started = on_machine("+recipe=arithmetic", "seamless.agent.kwargs=null", "ray_kwargs.ray_init=null", cards=1)
    assert started.code == 0, started.err


def test_keys_that_verls_trainer_does_not_read_are_told(on_machine):
    started = on_machine("+recipe=arithmetic", "trainer.v1.trainer_mode=sync", "seamless.weights.sync=rolling", cards=1)
    assert "it does not read seamless.weights\n" in started.out


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_the_same_plus_ours(path):
    overrides = overrides_of(path)
    theirs, with_us = composed(overrides), composed(through_us(overrides))
    added = with_us.keys() - theirs.keys()
    assert {key for key in added if not key.startswith("seamless.")} == set()
    changed = {key for key in theirs if with_us.get(key, "missing") != theirs[key]}
    assert changed == OURS


def test_there_are_lists_to_compare_and_the_page_says_how_many():
    stems = {path.stem for path in LISTS}
    assert stems >= REFUSED.keys() == MENDED.keys()
    page = (Path(__file__).parents[2] / "docs" / "running.md").read_text()
    assert f"{len(LISTS)} of verl's example scripts" in page
    assert f"{len(LISTS) - len(REFUSED)} pass the checks" in page
    left_out = [path for path in LISTS if path.read_text().startswith("# without ")]
    assert len(left_out) == 4


@pytest.mark.parametrize("model_engine", ["torchtitan", "veomni"])
def test_an_engine_whose_weights_verls_asynchronous_trainer_cannot_save_is_refused(model_engine, on_machine):
    overrides = [f"model_engine={model_engine}", "actor_rollout_ref.rollout.name=vllm", "critic.enable=false"]
    started = on_machine(*overrides, "algorithm.adv_estimator=grpo", "trainer.logger=console", cards=8)
    saves = model_engine == "veomni"
    assert (started.code, "actor.strategy=torchtitan: verl's" in started.err) == ((0, False) if saves else (2, True))


@pytest.mark.parametrize("model_engine", ["dp", "megatron"])
def test_other_model_engines_compose(model_engine):
    assert composed(through_us([f"model_engine={model_engine}"]))["trainer.v1.trainer_mode"] == "seamless"


def test_the_user_has_the_last_word_on_the_trainer_mode():
    assert composed(through_us(["trainer.v1.trainer_mode=sync"]))["trainer.v1.trainer_mode"] == "sync"


@pytest.mark.parametrize("recipe", compose.known("recipe"))
@pytest.mark.parametrize("platform", compose.known("platform"))
def test_every_recipe_composes_on_every_platform_and_its_section_is_valid(recipe, platform):
    compose.register_ours()
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


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs the command in this process, with run folders of its own; gives exit code, output and errors."""
    monkeypatch.setenv("SEAMLESS_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # the command sets it; so it is taken back afterwards

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.mark.parametrize("folder", [f"file://{compose.verl_config_dir()}", "pkg://verl.trainer.config"])
def test_a_yaml_on_top_of_verls_composes_as_it_does_there(folder, tmp_path, command):
    (tmp_path / "my.yaml").write_text(
        f"hydra: {{searchpath: ['{folder}']}}\ndefaults: [ppo_trainer, _self_]\ntrainer: {{total_epochs: 3}}\n"
    )
    code, out, err = command("--config-path", tmp_path, "--config-name=my", "+recipe=arithmetic", "--cfg", "job")
    assert code == 0, err
    config = OmegaConf.create(out)
    assert (config.trainer.v1.trainer_mode, config.seamless.recipe) == ("seamless", "arithmetic")
    code, out, err = command("--config-path", tmp_path, "--config-name=my", "--cfg", "job", "-p", "trainer")
    assert OmegaConf.create(out).total_epochs == 3


@pytest.mark.parametrize("defaults", ["[ppo_trainer, _self_]", "[ppo_trainer, seamless: default, _self_]"])
def test_such_a_yaml_changes_keys_of_ours_and_recipes_and_the_command_line_change_them_after_it(
    defaults, tmp_path, command
):
    (tmp_path / "my.yaml").write_text(
        f"hydra: {{searchpath: ['pkg://verl.trainer.config']}}\ndefaults: {defaults}\n"
        "seamless: {staleness: {eta: 3}, recipe: my, notes: [a, b], agent: {kwargs: {image: 'x:1'}}, run_dir: /old}\n"
    )
    words = ("--config-path", tmp_path, "--config-name=my", "--cfg", "job", "-p", "seamless")
    code, out, err = command(*words)
    assert code == 0, err
    found = OmegaConf.create(out)
    assert (found.staleness.eta, found.recipe, found.notes, found.agent.kwargs.image) == (
        3,
        "my",
        ["a", "b"],
        "x:1",
    )
    assert found.staleness.policy == "reserve", "what it does not say is ours"
    assert "run_dir: ${hydra:runtime.output_dir}\n" in out
    _, out, _ = command(*words, "+recipe=swe", "seamless.staleness.eta=2")
    assert (OmegaConf.create(out).staleness.eta, OmegaConf.create(out).recipe) == (2, "swe")


def test_the_configuration_of_a_run_composes_to_the_same_but_for_what_is_filled_in(on_machine, command):
    words = ("+recipe=swe", "seamless.staleness.eta=3", "trainer.total_epochs=5")
    started = on_machine(*words, cards=2)
    code, out, err = command("--config-path", started.folder, "--config-name=config", "+platform=gpu", "--cfg", "job")
    assert code == 0, err
    first, second = (OmegaConf.load(file) for file in (started.folder / "config.yaml", StringIO(out)))
    first.seamless.run_dir, first.seamless.assets.dir = "${hydra:runtime.output_dir}", None
    assert OmegaConf.to_container(first) == OmegaConf.to_container(second)


@pytest.mark.parametrize("names_it", ["--config-dir={}", "hydra.searchpath=['file://{}']"])
def test_a_recipe_of_the_users_is_found_beside_ours(names_it, tmp_path, command):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\nseamless: {recipe: mine}\n")
    found = command(names_it.format(tmp_path), "+recipe=mine", "--cfg", "job", "-p", "seamless.recipe")
    assert found == (0, "mine\n", "")
    _, _, err = command(names_it.format(tmp_path), "+recipe=mien", "--cfg", "job")
    assert err.endswith("Fix: write +recipe=mine.\n")


@pytest.mark.parametrize("names_it", ["--config-dir={}", "hydra.searchpath=['file://{}']", "pkg"])
def test_a_recipe_of_the_users_that_ours_hides_is_refused(names_it, tmp_path, command, monkeypatch):
    where = str(tmp_path)
    if names_it == "pkg":
        (tmp_path / "their_package").mkdir()
        monkeypatch.syspath_prepend(tmp_path)
        tmp_path, where, names_it = tmp_path / "their_package", "their_package", "hydra.searchpath=['pkg://{}']"
        (tmp_path / "__init__.py").touch()
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "swe.yaml").write_text("# @package _global_\nseamless: {recipe: mine}\n")
    code, _, err = command(names_it.format(where), "+recipe=swe", "trainer.nnodes=-3")
    assert code == 2
    assert f"hides that in {where}" in err
    _, _, err = command(names_it.format(where), "+recipe=arithmetic", "trainer.nnodes=-3")
    assert err.startswith("error: trainer.nnodes=-3")


def test_a_sweep_over_recipes_reaches_each_of_them(tmp_path, command):
    code, _, err = command("-m", "+recipe=arithmetic,srpo", "trainer.nnodes=-3")
    assert code == 2
    assert err.count("error: trainer.nnodes=-3") == 2, err
    (sweep,) = (tmp_path / "runs").iterdir()
    assert sweep.name.startswith("arithmetic-srpo-")


def test_a_folder_that_cannot_be_made_is_one_line(command):
    code, _, err = command("+recipe=arithmetic", "hydra.run.dir=/proc/foo")
    assert code == 2
    assert err.startswith("error: hydra.run.dir=/proc/foo: ")
    assert err.count("\n") == 1


def test_help_lists_every_recipe_and_the_keys_of_staleness_and_resources(command, capsys):
    with pytest.raises(SystemExit) as ended:
        command("--help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in [*compose.known("recipe"), *compose.known("platform")]:
        assert word in text.replace("=", " ").split()
    for key in ("seamless.staleness.in_flight=", "seamless.resources="):
        assert key in text


def test_checkpoints_of_another_place_than_the_runs_are_named_and_their_folder_is_absolute(
    on_machine, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    own = on_machine("+recipe=arithmetic", cards=1)
    assert own.out.endswith(f"run folder: {own.folder}\n"), own.err
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "latest_checkpointed_iteration.txt").write_text("5")
    started = on_machine("+recipe=arithmetic", "trainer.default_local_dir=kept", cards=1)
    assert started.out.endswith(f"continuing {started.folder} from {tmp_path / 'kept'}\n"), started.err
    assert OmegaConf.load(started.folder / "config.yaml").trainer.default_local_dir == str(tmp_path / "kept")


def test_a_folder_is_its_runs_from_the_checks_to_the_end_of_its_last_life(on_machine, monkeypatch):
    def again(config, seamless):
        with pytest.raises(ConfigError, match=r"hydra\.run\.dir=.*belongs to a run that is still going"):
            ours._Command(None, 0.0)._run_point(config)
        return []

    def life(run_dir, *_):
        owners.append((run_dir / "pid").read_text())
        return [Exit.DIED, 0][len(owners) - 1]

    owners = []
    monkeypatch.setattr(ours, "find_or_build", again)
    monkeypatch.setattr(ours, "run_trainer", life)
    started = on_machine("+recipe=arithmetic", "trainer.save_freq=1", cards=1)
    assert started.code == 0, started.err
    assert owners == [identity(os.getpid())] * 2
    assert not (started.folder / "pid").exists()


def test_a_launcher_that_runs_points_elsewhere_is_refused(on_machine, tmp_path):
    """Hydra's own one under another name; joblib's is not installed."""
    basic = {"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"}
    ConfigStore.instance().store(group="hydra/launcher", name="joblib", node=basic)
    words = ("+recipe=arithmetic", "-m", f"hydra.sweep.dir={tmp_path}", "trainer.save_freq=1,2")
    assert on_machine(*words, cards=1).code == 0
    refused = on_machine(*words, "hydra/launcher=joblib", cards=1)
    assert refused.code == 2
    assert "\nerror: hydra/launcher=joblib: would run points side by side" in refused.err


def test_a_life_that_follows_a_death_knows_when_the_command_began(on_machine, monkeypatch):
    lives, codes = [], iter([Exit.DIED, 0])
    monkeypatch.setattr(ours, "run_trainer", lambda folder, run, set_, *_: lives.append(dict(set_)) or next(codes))
    assert on_machine("+recipe=arithmetic", "trainer.save_freq=1", cards=0).code == 0
    first, second = lives
    assert first["SEAMLESS_COMMAND_AT"] == first["SEAMLESS_STARTED_AT"] == second["SEAMLESS_COMMAND_AT"]
    assert second["SEAMLESS_STARTED_AT"] > first["SEAMLESS_STARTED_AT"]
