"""Keys that name a file, a class or a source that is not there are refused; nothing is run or built for it."""

import json
import re
import socket
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from omegaconf import OmegaConf

from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import ConfigError, MachineError
from seamless_verl.run import compose
from seamless_verl.run.check_batches import check_estimator
from seamless_verl.run.check_references import task_at
from tests.kernel.run.test_preflight import check, config

NO_CLASS = 7
AGENT = {"runner": f"{__name__}.Runner", "kwargs": {"address": "a"}}
ROW = {"prompt": "p", "agent_name": "seamless_agent", "extra_info": {"index": 5, "split": "train", "task": '{"n": 1}'}}


def test_a_reward_function_that_its_file_does_not_define_is_refused_without_running_the_file(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("raise SystemExit('must not run')\ndef compute_score(*_): return 1.0\n")

    def with_reward(path, name):
        return config(reward={"custom_reward_function": {"path": path, "name": name}})

    check(with_reward(str(file), "compute_score"))
    check(with_reward("pkg://seamless_verl.recipes.arithmetic.reward", "compute_score"))
    with pytest.raises(ConfigError, match="did you mean compute_score"):
        check(with_reward(str(file), "compute_scores"))
    with pytest.raises(ConfigError, match="does not exist"):
        check(with_reward(str(tmp_path / "nowhere.py"), "compute_score"))


def test_an_agent_runner_that_cannot_be_imported_is_refused():
    with pytest.raises(ConfigError) as refused:
        check(config(), agent={"runner": "seamless_verl.agents.nowhere.Runner"})
    assert refused.value.key == "seamless.agent.runner"


class Runner:
    """An agent runner of somebody's own; building it would be too early."""

    def __init__(self, address, *, retries=3):
        raise AssertionError("was built")


class CheckedRunner(Runner):
    def __init__(self, **options):
        raise AssertionError("was built")

    @staticmethod
    def check_options(options):
        if options.get("colour") == "green":
            raise ConfigError("seamless.agent.kwargs.colour", "green", "is no colour for agents", "write blue")

    @staticmethod
    def check_machine(options):
        raise MachineError("brushes", f"none for {options['colour']}", "buy some")


@pytest.mark.parametrize(
    ("kwargs", "key", "fix"),
    [
        ({"address": "a", "retrys": 4}, "seamless.agent.kwargs.retrys", "write retries"),
        ({"retries": 4}, "seamless.agent.kwargs.address", "set it"),
    ],
)
def test_arguments_that_a_runner_does_not_take_are_refused_without_building_it(kwargs, key, fix):
    with pytest.raises(ConfigError) as refused:
        check(config(), agent={"runner": f"{__name__}.Runner", "kwargs": kwargs})
    assert refused.value.key == key
    assert fix in refused.value.fix
    check(config(), agent={"runner": f"{__name__}.Runner", "kwargs": {"address": "a"}})


def test_a_runner_that_is_no_class_is_refused():
    with pytest.raises(ConfigError, match=r"seamless\.agent\.runner=.*cannot be called"):
        check(config(), agent={"runner": f"{__name__}.NO_CLASS"})


def test_a_runner_checks_its_options_and_the_machine_that_will_run_its_attempts(monkeypatch):
    def named(colour):
        return {"runner": f"{__name__}.CheckedRunner", "kwargs": {"colour": colour}}

    elsewhere = config(ray_kwargs__ray_init__address="auto")
    with pytest.raises(ConfigError, match="colour=green.*write blue"):
        check(elsewhere, agent=named("green"))
    check(elsewhere, agent=named("blue"))
    with pytest.raises(MachineError, match="none for blue"):
        check(config(), agent=named("blue"))
    # Ray joins the cluster that the environment names, unless the configuration says `local`.
    monkeypatch.setattr("seamless_verl.run.check_machine._is_node", lambda port: True)
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{cluster.getsockname()[1]}")
        check(config(ray_kwargs__ray_init__address=None), agent=named("blue"))
    with pytest.raises(MachineError, match="none for blue"):
        check(config(), agent=named("blue"))


def test_a_parser_that_the_installed_vllm_does_not_have_is_refused_without_importing_it(monkeypatch, tmp_path):
    for package, name in {"tool_parsers": "hermes", "reasoning": "qwen3"}.items():
        (tmp_path / "vllm" / package).mkdir(parents=True)
        register = f'_TO_REGISTER = {{\n    "{name}": (\n        "file",\n        "Class",\n    ),\n}}\n'
        (tmp_path / "vllm" / package / "__init__.py").write_text(register)
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('must not be imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    check(config(), proxy={"tool_parser": "hermes", "reasoning_parser": "qwen3"})
    with pytest.raises(ConfigError, match=r"proxy\.tool_parser=hermse: vLLM has no such parser. Fix: write hermes;"):
        check(config(), proxy={"tool_parser": "hermse"})
    with pytest.raises(ConfigError, match=r"proxy\.reasoning_parser=foo: .*write one of qwen3"):
        check(config(), proxy={"reasoning_parser": "foo"})
    (tmp_path / "vllm" / "tool_parsers" / "__init__.py").write_text("")  # a version that keeps them elsewhere
    check(config(), proxy={"tool_parser": "foo"})


def test_a_task_without_a_test_command_is_refused_before_anything_starts(tmp_path):
    from seamless_verl.recipes.swe.tiny.tasks import generate

    task = json.loads(next(generate("train", 0)).to_json())
    del task["test_command"]
    rows = [{**ROW, "extra_info": {"index": 0, "split": "train", "task": json.dumps(task)}}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    with pytest.raises(ConfigError) as refused:
        check(
            config(data__train_files=str(tmp_path / "train.parquet")),
            agent={"runner": "seamless_verl.recipes.swe.tiny.runner.TinySweRunner"},
        )
    assert "test_command" in refused.value.key


def test_a_stage_over_a_source_that_the_data_does_not_have_is_refused_before_anything_starts(tmp_path):
    file = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist([{**ROW, "data_source": source} for source in ("math", "code")]), file)
    stages = [{"name": "first", "sources": ["maths"]}]
    with pytest.raises(ConfigError, match=r"stages\[0\]\.sources=maths.*did you mean math\?"):
        check(config(data__train_files=str(file)), curriculum={"accuracy_key": "acc", "stages": stages})
    resampling = {"accuracy_key": "acc", "history_resampling": True, "pool_floor": 3}
    with pytest.raises(ConfigError, match=r"pool_floor=3.*only 2 prompts"):
        check(config(data__train_files=str(file)), curriculum=resampling)
    parquet.write_table(pa.Table.from_pylist([{"prompt": "x"}]), file)
    with pytest.raises(ConfigError, match="no column data_source"):
        check(config(data__train_files=str(file)), curriculum={"accuracy_key": "acc", "stages": stages})


def data(folder, *rows, times=16):
    file = folder / "train.parquet"
    parquet.write_table(pa.Table.from_pylist([*rows] * times), file)
    return config(data__train_files=str(file))


@pytest.mark.parametrize(
    ("wrong", "right", "key"),
    [("promt", "prompt", "data.prompt_key"), ("extra_inof", "extra_info", "data.*_files")],
)
def test_a_misspelt_column_is_refused_with_the_right_one(tmp_path, wrong, right, key):
    check(data(tmp_path, ROW), agent=AGENT)
    misspelt = {wrong if column == right else column: value for column, value in ROW.items()}
    with pytest.raises(ConfigError, match=f"{right}: .*no such column. Fix: write {wrong}") as refused:
        check(data(tmp_path, misspelt), agent=AGENT)
    assert refused.value.key == key


def test_a_runner_that_no_row_asks_for_is_refused(tmp_path):
    other = {**ROW, "agent_name": "single_turn_agent"}
    check(data(tmp_path, ROW, other), agent=AGENT)
    unnamed = {column: value for column, value in ROW.items() if column != "agent_name"}
    for row in (other, unnamed):
        with pytest.raises(ConfigError, match="never called: no row of .*agent_name=seamless_agent"):
            check(data(tmp_path, row), agent=AGENT)
    default = data(tmp_path, unnamed)
    default["actor_rollout_ref"]["rollout"]["agent"] = {"default_agent_loop": "seamless_agent"}
    check(default, agent=AGENT)


def graded(tmp_path, reward, *rows):
    return data(tmp_path, *rows) | {"reward": reward}


@pytest.mark.parametrize(
    ("reward", "key"),
    [
        ({"custom_reward_function": {"path": "pkg://seamless_verl.recipes.arithmetic.reward"}}, "function.path=pkg:"),
        ({"reward_manager": {"name": "dapo"}}, "manager.name=dapo"),
        ({"reward_manager": {"module": {"path": "mine.py"}}}, "manager.module.path=mine.py"),
        ({"reward_kwargs": {"overlong_buffer_cfg": {"enable": True}}}, "reward.reward_kwargs={'overlong"),
        ({"sandbox_fusion": {"url": "http://sandbox"}}, "sandbox_fusion.url=http:"),
    ],
)
def test_a_reward_that_nobody_computes_is_told(tmp_path, reward, key):
    function = reward.get("custom_reward_function")
    if function:
        function["name"] = "compute_score"
    (told,) = check(graded(tmp_path, reward, ROW), agent=AGENT)
    assert key in told
    assert f"graded by seamless.agent.runner={AGENT['runner']}" in told
    assert check(graded(tmp_path, reward, ROW, {**ROW, "agent_name": "single_turn_agent"}), agent=AGENT) == []
    assert check(graded(tmp_path, reward, ROW)) == []


def test_a_reward_model_that_nobody_asks_is_refused(tmp_path):
    judge = {"reward_model": {"enable": True, "enable_resource_pool": True}, "reward_manager": {"name": "naive"}}
    with pytest.raises(ConfigError, match=r"reward_model\.enable=True: would keep GPUs for nothing.*Fix: write false"):
        check(graded(tmp_path, judge, ROW), agent=AGENT)
    check(graded(tmp_path, judge, ROW, {**ROW, "agent_name": "single_turn_agent"}), agent=AGENT)
    assert check(graded(tmp_path, {"reward_manager": {"name": "naive"}}, ROW), agent=AGENT) == []


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    (tmp_path / "train.parquet").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match=r"train\.parquet: cannot be read as parquet"):
        check(config(data__train_files=str(tmp_path / "train.parquet")))


def test_a_task_is_found_by_its_number(tmp_path):
    other = {**ROW, "agent_name": "single_turn_agent"}
    bad = {**ROW, "extra_info": {**ROW["extra_info"], "task": "[1]"}}
    found = data(tmp_path, ROW, other, bad, times=1)
    assert task_at(found, 0, validation=False) == ("train/5", {"n": 1})
    for number, words in (
        (1, "agent_name is single_turn_agent"),
        (2, "no mapping"),
        (3, "write 0 to 2"),
        (-1, "0 to 2"),
    ):
        with pytest.raises(ConfigError, match=words):
            task_at(found, number, validation=False)


def test_a_task_is_found_in_json_too_which_verl_trains_on(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    lines, whole, other = (str(tmp_path / name) for name in ("a.jsonl", "b.json", "c.csv"))
    plain = [ROW | {"prompt": "p" * 2_000_000}, ROW | {"extra_info": {"index": 7, "split": "val", "task": {"n": 2}}}]
    Path(lines).write_text("\n".join(map(json.dumps, [ROW, plain[0]])))
    Path(whole).write_text(json.dumps(plain[1:]))
    Path(other).write_text("prompt\np\n")
    found = config(data={"train_files": [lines, whole], "val_files": other})
    assert task_at(found, 1, validation=False) == ("train/5", {"n": 1})
    assert task_at(found, 2, validation=False) == ("val/7", {"n": 2})
    with pytest.raises(ConfigError, match=r"c\.csv: cannot be read .*Fix: give parquet, JSON or JSONL files"):
        task_at(found, 0, validation=True)


def test_data_that_fills_no_batch_are_refused(tmp_path):
    check(data(tmp_path, ROW))
    for few in (data(tmp_path, ROW, times=15), data(tmp_path, ROW)):
        few["data"]["train_max_samples"] = 15
        with pytest.raises(ConfigError, match=r"train_batch_size=16: .*15 rows, fewer than one batch.*write 15"):
            check(few)
        few["trainer"]["val_only"] = True
        check(few)


def test_data_in_a_form_that_verl_does_not_read_are_refused(tmp_path):
    table = tmp_path / "rows.csv"
    table.write_text("prompt\np\n")
    with pytest.raises(ConfigError, match=r"data\.val_files=.*rows\.csv: is nothing that verl reads"):
        check(config(data__val_files=str(table)))


@pytest.mark.parametrize("where", ["own columns", "hub", "null", "few"])
def test_what_a_dataset_class_of_ones_own_makes_of_its_files_is_left_to_it(tmp_path, where):
    seamless = {}
    if where == "own columns":
        changed = data(tmp_path, {"question": "q"})
        seamless = {"agent": AGENT, "curriculum": {"accuracy_key": "acc", "history_resampling": True}}
    elif where == "few":
        changed = data(tmp_path, ROW, times=2)
    else:
        changed = config(data__train_files="openai/gsm8k" if where == "hub" else None)
    ours = "pkg://seamless_verl.recipes.srpo.system_prompts"  # reads as verl's class does
    for path in (None, ours):
        changed["data"]["custom_cls"] = {"path": path, "name": "Mine"}
        with pytest.raises(ConfigError, match="data.train|data.prompt_key"):
            check(changed, **seamless)
    changed["data"]["custom_cls"]["path"] = "/mine.py"
    check(changed, **seamless)


def test_a_folder_that_holds_no_model_is_refused(tmp_path):
    changed = config()
    changed["actor_rollout_ref"]["model"]["path"] = str(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path=.*holds no config\.json"):
        check(changed)
    (tmp_path / "config.json").write_text("{}")
    check(changed)


@pytest.mark.parametrize("nested", [False, True])
def test_an_engine_for_more_tokens_than_the_model_has_positions_is_refused(tmp_path, nested):
    positions = {"max_position_embeddings": 1023}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": positions} if nested else positions))
    changed = config(actor_rollout_ref__rollout__max_model_len=1024)
    changed["actor_rollout_ref"]["model"]["path"] = str(tmp_path)
    with pytest.raises(ConfigError, match=r"1023 positions.*write 1023") as refused:
        check(changed)
    assert refused.value.key == "actor_rollout_ref.rollout.max_model_len"
    changed["actor_rollout_ref"]["model"]["override_config"] = {"max_position_embeddings": 1024}
    check(changed)


def test_an_estimator_that_is_nearly_one_of_verls_is_refused():
    check(config(algorithm__adv_estimator="my_own"))
    with pytest.raises(ConfigError, match=r"adv_estimator=grop: .*did you mean grpo\?"):
        check(config(algorithm__adv_estimator="grop"))


@pytest.mark.parametrize("estimator", ["remax", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"])
def test_an_estimator_that_verls_trainer_falls_over_is_refused(estimator):
    with pytest.raises(ConfigError, match=f"adv_estimator={estimator}: .*does not compute.* Fix: write grpo"):
        check(config(algorithm__adv_estimator=estimator))


def test_resampled_rows_are_refused_where_verls_trainer_would_mix_them_up():
    with pytest.raises(ConfigError, match=r"algorithm\.use_pf_ppo=True: .* Fix: write false"):
        check(config(algorithm={"adv_estimator": "gae", "use_pf_ppo": True}))
    check(config(algorithm={"adv_estimator": "grpo", "use_pf_ppo": True}))  # verl reads it for gae only


@pytest.mark.parametrize(
    ("section", "fix"),
    [
        ({"custom_reward_function": {"path": "mine.py", "name": None}}, "reward.custom_reward_function.path=mine.py"),
        ({"reward_model": {"enable": None, "model": {"path": "rm"}}}, "reward.reward_model.model_path=rm"),
        ({"reward_model": {"enable": True, "model": {"path": "rm"}}}, "reward.reward_model.enable=True"),
    ],
)
def test_a_reward_under_the_key_of_an_older_verl_is_refused_with_the_newer_one(section, fix):
    with pytest.raises(ConfigError, match=rf"do not read it.* Fix: write {re.escape(fix)}\.$"):
        check_estimator({**config(), **section}, SeamlessConfig())
    check_estimator({**config(), "reward_model": {"enable": False}}, SeamlessConfig())
    (told,) = check_estimator({**config(), "reward_model": {"reward_manager": "dapo"}}, SeamlessConfig())
    assert "Fix: write reward.reward_manager.name=dapo" in told


def test_the_key_of_an_older_verl_beside_the_newer_one_is_nothing_to_tell(tmp_path, monkeypatch):
    """A launch script that serves both; the trainer asks again when paths are absolute."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    function = {"path": "mine.py", "name": "compute_score"}
    both = {"custom_reward_function": function, "reward": {"custom_reward_function": function}}
    assert not check_estimator({**config(), **both}, SeamlessConfig())
    absolute = OmegaConf.create({**config(), **both})
    compose.make_absolute(absolute)
    assert absolute.reward.custom_reward_function.path == str(tmp_path / "mine.py")
    assert not check_estimator(OmegaConf.to_container(absolute), SeamlessConfig())
    both["reward"] = {"custom_reward_function": {**function, "path": "other.py"}}
    with pytest.raises(ConfigError, match=r"path=mine\.py: "):
        check_estimator({**config(), **both}, SeamlessConfig())


@pytest.mark.parametrize("estimator", ["rloo_vectorized", "grpo_passk"])
def test_an_estimator_that_compares_rollouts_is_refused_with_one_per_prompt(estimator):
    changed = config(algorithm__adv_estimator=estimator, actor_rollout_ref__rollout__n=1)
    with pytest.raises(ConfigError, match=r"rollout\.n=1: .*Fix: write 2 or more, or .*=rloo"):
        check(changed)
    del changed["actor_rollout_ref"]["rollout"]["n"]  # verl's default
    with pytest.raises(ConfigError, match=r"rollout\.n=1: "):
        check_estimator(changed, SeamlessConfig())
    check(config(algorithm__adv_estimator="rloo", actor_rollout_ref__rollout__n=1))


@pytest.mark.parametrize("estimator", ["rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline"])
def test_where_agents_may_fork_an_estimator_that_counts_rows_is_told(estimator):
    forking, plain = SeamlessConfig.from_mapping({"agent": AGENT}), SeamlessConfig.from_mapping({})
    (told,) = check_estimator(config(algorithm__adv_estimator=estimator), forking)
    assert f"adv_estimator={estimator} compares rows" in told
    assert "write grpo" in told
    assert ("ties with itself" in told) == (estimator == "grpo_passk")
    assert check_estimator(config(algorithm__adv_estimator=estimator), plain) == []
    for other in ("grpo", "gae", "reinforce_plus_plus", "my_own"):
        assert check_estimator(config(algorithm__adv_estimator=other), forking) == []
    assert told in check(config(algorithm__adv_estimator=estimator), agent=AGENT)
