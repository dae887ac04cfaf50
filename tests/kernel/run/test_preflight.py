"""What cannot work is refused before anything heavy starts, naming key, value and fix."""

import copy
import json
import socket

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import ConfigError, MachineError
from seamless_verl.machine import Machine, count_accelerators, port_is_free
from seamless_verl.run import check_machine, check_references, preflight

GIB = 1 << 30
ELSEWHERE = "203.0.113.7"  # kept for documentation: no machine has it
MACHINE = Machine(
    accelerators=0,
    cores=2,
    memory_available=16 * GIB,
    memory_total=24 * GIB,
    disk_free=50 * GIB,
    shared_memory_free=GIB,
)
CONFIG = {
    "trainer": {"device": "cpu", "nnodes": 1, "n_gpus_per_node": 1, "v1": {"trainer_mode": "seamless"}},
    "data": {
        "train_batch_size": 16,
        "max_prompt_length": 256,
        "max_response_length": 768,
        "train_files": [],
        "val_files": [],
    },
    "actor_rollout_ref": {
        "model": {"path": "Qwen/Qwen3-8B"},
        "actor": {"ppo_mini_batch_size": 8},
        "rollout": {
            "n": 8,
            "nnodes": 1,
            "n_gpus_per_node": 1,
            "tensor_model_parallel_size": 1,
            "max_model_len": 1024,
        },
    },
    "critic": {"model": {"path": "Qwen/Qwen3-8B"}},
    "algorithm": {"adv_estimator": "grpo"},
    "ray_kwargs": {"ray_init": {"address": "local"}},
}


def config(**changes):
    changed = copy.deepcopy(CONFIG)
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = changed
        for parent in parents:
            section = section[parent]
        section[last] = value
    return changed


def check(changed, machine=MACHINE, **seamless):
    settings = SeamlessConfig.from_mapping(seamless)
    preflight.check_settings(changed, settings, machine)
    check_references.check_files(changed, settings)


def test_a_sound_configuration_passes():
    check(config())


@pytest.mark.parametrize(
    ("changes", "key", "fix"),
    [
        (dict(data__train_batch_size=10), "actor_rollout_ref.actor.ppo_mini_batch_size", "write 5"),
        (dict(trainer__n_gpus_per_node=3), "actor_rollout_ref.actor.ppo_mini_batch_size", "multiple of 3"),
        (
            dict(actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=24),
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            "write 16",
        ),
        (
            dict(actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu=48),
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
            "log_prob_use_dynamic_bsz=true",
        ),
        (
            dict(actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu="some"),
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            "write 1 or more",
        ),
        (dict(actor_rollout_ref__rollout__nnodes=0), "actor_rollout_ref.rollout.nnodes", "trainer_mode=sync"),
        (
            dict(actor_rollout_ref__rollout__tensor_model_parallel_size=2),
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            "divides 1",
        ),
        (dict(actor_rollout_ref__rollout__max_model_len=512), "actor_rollout_ref.rollout.max_model_len", "write 1024"),
        (dict(actor_rollout_ref__model__path="/no/such/model"), "actor_rollout_ref.model.path", "hub name"),
        (dict(data__train_files="/no/such/file.parquet"), "data.train_files", "parquet"),
    ],
)
def test_a_setting_that_cannot_work_names_its_key_and_the_fix(changes, key, fix):
    with pytest.raises(ConfigError) as refused:
        check(config(**changes))
    assert refused.value.key == key
    assert fix in refused.value.fix


@pytest.mark.parametrize(
    "changes",
    [
        dict(actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=32),
        dict(
            actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=24,
            actor_rollout_ref__actor__use_dynamic_bsz=True,
        ),
        # Two ranks of 32 rows each, where four devices would have 16.
        dict(
            trainer__n_gpus_per_node=4,
            actor_rollout_ref__actor__ulysses_sequence_parallel_size=2,
            actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=32,
        ),
        # Whole batches of 128 rows, mini-batches of 64.
        dict(actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu=128),
    ],
)
def test_micro_batches_that_work_in_verl_are_not_refused(changes):
    check(config(**changes))


def test_with_a_policy_nobody_need_only_roll_out():
    check(config(actor_rollout_ref__rollout__nnodes=0), scheduler={"policy": "colocated"})


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


def test_a_gpu_recipe_needs_a_gpu_or_a_cluster(monkeypatch):
    monkeypatch.setattr(check_machine, "is_installed", lambda module: True)
    with pytest.raises(MachineError, match="this machine has none"):
        check(config(trainer__device="cuda"))
    check(config(trainer__device="cuda", ray_kwargs__ray_init__address="auto"))


@pytest.mark.parametrize("short", ["memory_available", "disk_free"])
def test_a_machine_that_is_too_small_is_told_so(short):
    fields = {name: getattr(MACHINE, name) for name in Machine.__slots__}
    with pytest.raises(MachineError, match="1.0 GiB"):
        check(config(), machine=Machine(**{**fields, short: GIB}))


def test_a_port_in_use_is_refused_and_a_free_one_is_not():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not port_is_free("127.0.0.1", port)
        with pytest.raises(ConfigError, match="in use"):
            check(config(), proxy={"port": port})
    assert port_is_free("127.0.0.1", 0)


@pytest.mark.parametrize("port", [0, 8123])
@pytest.mark.parametrize("host", [ELSEWHERE, "no-such-host.invalid", "a..b"])
def test_a_host_that_cannot_be_bound_is_refused_as_a_host(host, port):
    agent = {"runner": f"{__name__}.Runner", "kwargs": {"address": "a"}}
    with pytest.raises(ConfigError, match=f"{host}: is no address that .* can listen on: .") as refused:
        check(config(), agent=agent, proxy={"host": host, "port": port})
    assert refused.value.key == "seamless.proxy.host"
    # Nobody binds it where no agent talks to a proxy, and another machine's may be the right one there.
    check(config(), proxy={"host": host, "port": port})
    check(config(ray_kwargs__ray_init__address="auto"), agent=agent, proxy={"host": host, "port": port})


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_hosts_that_can_be_bound_are_accepted(host):
    check(config(), agent={"runner": f"{__name__}.Runner", "kwargs": {"address": "a"}}, proxy={"host": host})


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
        check(config(), agent={"runner": f"{__name__}.GIB"})


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


def test_accelerators_are_counted_by_their_device_files(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "davinci_manager"):
        (tmp_path / name).touch()
    assert count_accelerators(tmp_path) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert count_accelerators(tmp_path) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_accelerators(tmp_path) == 0


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
