"""Keys that name a file, a class or a source that is not there are refused; nothing is run or built for it."""

import json
import socket

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from seamless_verl.errors import ConfigError, MachineError
from tests.kernel.run.test_preflight import check, config

NO_CLASS = 7


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
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{cluster.getsockname()[1]}")
        check(config(ray_kwargs__ray_init__address=None), agent=named("blue"))
    with pytest.raises(MachineError, match="none for blue"):
        check(config(), agent=named("blue"))


def test_a_task_without_a_test_command_is_refused_before_anything_starts(tmp_path):
    from seamless_verl.recipes.swe.tiny.tasks import generate

    task = json.loads(next(generate("train", 0)).to_json())
    del task["test_command"]
    rows = [{"extra_info": {"index": 0, "split": "train", "task": json.dumps(task)}}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    with pytest.raises(ConfigError) as refused:
        check(
            config(data__train_files=str(tmp_path / "train.parquet")),
            agent={"runner": "seamless_verl.recipes.swe.tiny.runner.TinySweRunner"},
        )
    assert "test_command" in refused.value.key


def test_a_stage_over_a_source_that_the_data_does_not_have_is_refused_before_anything_starts(tmp_path):
    file = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist([{"data_source": "math"}, {"data_source": "code"}]), file)
    stages = [{"name": "first", "sources": ["maths"]}]
    with pytest.raises(ConfigError, match=r"stages\[0\]\.sources=maths.*did you mean math\?"):
        check(config(data__train_files=str(file)), curriculum={"accuracy_key": "acc", "stages": stages})
    resampling = {"accuracy_key": "acc", "history_resampling": True, "pool_floor": 3}
    with pytest.raises(ConfigError, match=r"pool_floor=3.*only 2 prompts"):
        check(config(data__train_files=str(file)), curriculum=resampling)
    parquet.write_table(pa.Table.from_pylist([{"prompt": "x"}]), file)
    with pytest.raises(ConfigError, match="no column data_source"):
        check(config(data__train_files=str(file)), curriculum={"accuracy_key": "acc", "stages": stages})
