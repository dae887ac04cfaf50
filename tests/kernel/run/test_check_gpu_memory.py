"""A share of a GPU that cannot hold what is asked of it is refused, with the sum and what would fit."""

import copy
import json
import subprocess

import pytest

from seamless_verl import machine as machines
from seamless_verl.errors import ConfigError
from seamless_verl.machine import Machine
from seamless_verl.run.check_gpu_memory import check_memory, model_shape
from tests.kernel.memory.test_gpu_memory import H100, QWEN3_8B, QWEN3_32B

GIB = 1 << 30
CONFIG = {
    "trainer": {"device": "cuda", "nnodes": 1, "n_gpus_per_node": 8, "v1": {"trainer_mode": "seamless"}},
    "data": {"max_prompt_length": 8192, "max_response_length": 24576},
    "algorithm": {"adv_estimator": "grpo"},
    "actor_rollout_ref": {
        "hybrid_engine": True,
        "model": {"path": None, "lora_rank": 0},
        "actor": {
            "strategy": "fsdp2",
            "optim": {"optimizer": "AdamW", "optimizer_impl": "torch.optim"},
            "fsdp_config": {
                "fsdp_size": -1,
                "model_dtype": "fp32",
                "param_offload": False,
                "optimizer_offload": False,
                "offload_policy": False,
            },
        },
        "rollout": {
            "name": "vllm",
            "nnodes": 0,
            "n_gpus_per_node": 8,
            "tensor_model_parallel_size": 1,
            "gpu_memory_utilization": 0.85,
            "max_model_len": None,
            "dtype": "bfloat16",
            "engine_kwargs": {"vllm": {}},
        },
    },
    "critic": {"model": {"path": None}, "strategy": "fsdp2", "fsdp": {}},
    "ray_kwargs": {"ray_init": {"address": "local"}},
}
ACTOR, ROLLOUT = "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.rollout"
SHARE, ALONE = f"{ROLLOUT}.gpu_memory_utilization", f"{ROLLOUT}.standalone_gpu_memory_utilization"
ROLLING = {"seamless": {"weights": {"sync": "rolling"}}}


def machine(card=H100, shared=GIB):
    return Machine(
        accelerators=8,
        accelerator_memory=card,
        cores=2,
        memory_available=16 * GIB,
        memory_total=24 * GIB,
        disk_free=50 * GIB,
        shared_memory_free=shared,
    )


@pytest.fixture
def check(tmp_path):
    """Check the 8B on one node of eight 80 GB cards, with changes."""

    def check(changes, *, shape=QWEN3_8B, card=H100, shared=GIB):
        (tmp_path / "config.json").write_text(json.dumps(shape))
        changed = copy.deepcopy(CONFIG)
        folder = str(tmp_path)
        for path, value in {"actor_rollout_ref.model.path": folder, "critic.model.path": folder, **changes}.items():
            *parents, last = path.split(".")
            section = changed
            for parent in parents:
                section = section[parent]
            section[last] = value
        return check_memory(changed, machine(card, shared))

    return check


def test_a_share_for_engines_alone_is_refused_beside_a_trainer_with_the_sum(check):
    with pytest.raises(ConfigError) as refused:
        check({})
    assert (refused.value.key, refused.value.value) == (SHARE, 0.85)
    for part in ("67.7 GiB for the engine", "11.4 GiB", "8.2e9 parameters over 8 GPUs", "> 79.6 GiB of a card"):
        assert part in refused.value.problem
    assert "write 0.80" in refused.value.fix
    assert check({SHARE: 0.80}) == []


def test_replicas_with_gpus_of_their_own_keep_their_share(check):
    with pytest.raises(ConfigError, match=rf"\+{ALONE}=0.85"):
        check({f"{ROLLOUT}.nnodes": 1})
    apart = {f"{ROLLOUT}.nnodes": 1, SHARE: 0.72, ALONE: 0.85}
    assert check(apart) == []
    assert check({f"{ROLLOUT}.nnodes": 1, "actor_rollout_ref.hybrid_engine": False}) == []


@pytest.mark.parametrize(
    "changes",
    [
        {f"{ACTOR}.optimizer_offload": True},
        {f"{ACTOR}.offload_policy": True},
        {"actor_rollout_ref.model.lora_rank": 32},  # only the adapter has moments
        {f"{ACTOR}.model_dtype": "bf16"},
        {"trainer.nnodes": 4},
    ],
)
def test_what_leaves_the_gpu_or_is_spread_makes_room(check, changes):
    with pytest.raises(ConfigError):
        check({SHARE: 0.84})
    assert check({SHARE: 0.84, **changes}) == []


def test_a_critic_on_the_same_gpus_counts(check):
    fits = {SHARE: 0.75}
    assert check(fits) == []
    with pytest.raises(ConfigError, match=r"8\.2e9 parameters over 8 GPUs\) \+ .*7\.6e9 parameters over 8 GPUs"):
        check({**fits, "algorithm.adv_estimator": "gae"})


def test_what_is_tight_is_a_warning(check):
    (warning,) = check({SHARE: 0.82})
    assert f"{SHARE}=0.82 is tight" in warning
    assert "0.80 would leave 4.0 GiB free" in warning


def test_buckets_for_a_replica_that_comes_back_count_where_slices_are_lent_beside_replicas_of_their_own(check):
    ours = {f"{ROLLOUT}.nnodes": 1, SHARE: 0.75, ALONE: 0.85, "trainer.v1": {"trainer_mode": "seamless"}}
    (warning,) = check(ours)
    assert "a replica that comes back takes 6.3 GiB for its weights" in warning  # 2 x 2,048 MiB, 151,936 x 4,096 fp32
    assert "0.72 would leave 10.3 GiB free" in warning
    assert check({**ours, SHARE: 0.72}) == []
    bucket = f"{ROLLOUT}.checkpoint_engine"
    assert check({**ours, bucket: {"update_weights_bucket_megabytes": 512}}) == []
    assert check({**ours, **ROLLING}, shared=64 * GIB) == [], "no buckets; the matrix still counts"


def test_two_published_versions_must_fit_into_shared_memory(check):
    cpu = {**ROLLING, "trainer.device": "cpu"}
    with pytest.raises(
        ConfigError, match=r"/dev/shm, which has 30\.0 GiB free; two versions .* take 30\.8 GiB"
    ) as refused:
        check(cpu, shared=30 * GIB)
    assert "--shm-size=31g" in refused.value.fix
    assert check(cpu, shared=31 * GIB) == []
    fp32 = {**cpu, f"{ROLLOUT}.dtype": "float32"}
    with pytest.raises(ConfigError, match=r"take 61\.3 GiB"):
        check(fp32, shared=31 * GIB)
    uncast = {**cpu, f"{ROLLOUT}.dtype": "auto"}
    with pytest.raises(ConfigError, match=r"take 61\.3 GiB"):
        check(uncast, shared=31 * GIB)
    assert check({**uncast, f"{ACTOR}.model_dtype": "bf16"}, shared=31 * GIB) == []
    assert check({**uncast, ACTOR: {}}, shared=31 * GIB) == [], "Megatron's are two bytes each"
    (warning,) = check({**cpu, "ray_kwargs.ray_init.address": "10.0.0.1:6379"})
    assert warning.startswith("if the cluster's machines are as this one:")
    assert check({"trainer.device": "cpu"}, shared=0) == []


def test_engines_that_keep_their_memory_while_the_trainer_trains_are_a_warning(check):
    fits = {SHARE: 0.5, f"{ROLLOUT}.free_cache_engine": False}
    (warning,) = check(fits)
    assert "free_cache_engine=false: engines on the trainer's GPUs keep 39.8 GiB" in warning
    assert check({**fits, "actor_rollout_ref.hybrid_engine": False, f"{ROLLOUT}.nnodes": 1}) == []


def test_weights_and_one_row_must_fit_into_an_engine(check):
    alone = {"actor_rollout_ref.hybrid_engine": False, f"{ROLLOUT}.nnodes": 4}
    with pytest.raises(ConfigError, match=r"61\.0 GiB of weights and 8\.0 GiB.*32768 tokens") as refused:
        check(alone, shape=QWEN3_32B)
    assert f"{ROLLOUT}.tensor_model_parallel_size=2" in refused.value.fix
    assert check({**alone, f"{ROLLOUT}.tensor_model_parallel_size": 2}, shape=QWEN3_32B) == []
    assert check({**alone, f"{ROLLOUT}.max_model_len": 16384}, shape=QWEN3_32B) == []
    assert check({**alone, f"{ROLLOUT}.engine_kwargs.vllm": {"kv_cache_dtype": "fp8"}}, shape=QWEN3_32B) == []


def test_where_the_cards_may_be_others_it_is_a_warning(check):
    (warning,) = check({"ray_kwargs.ray_init.address": "10.0.0.1:6379"})
    assert warning.startswith("if the cluster's machines are as this one:")
    assert "does not fit beside the trainer" in warning


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer.device": "cpu"},
        {f"{ROLLOUT}.name": "sglang"},
        {"actor_rollout_ref.actor.strategy": "megatron", SHARE: 0.9},
    ],
)
def test_what_is_not_known_is_not_refused(check, changes, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    assert check(changes) == []
    assert check({}, card=0) == []


def test_a_model_that_is_not_here_yet_is_said_to_be_unchecked(check, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (warning,) = check({"actor_rollout_ref.model.path": "Qwen/never-downloaded"})
    assert "Qwen/never-downloaded is not on this machine yet" in warning
    assert "hf download Qwen/never-downloaded" in warning


def test_a_model_that_was_downloaded_is_found_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert model_shape("Qwen/Qwen3-8B") is None
    folder = tmp_path / "hub" / "models--Qwen--Qwen3-8B" / "snapshots" / "b968826d"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    assert model_shape("Qwen/Qwen3-8B").parameters == 8_190_735_360


@pytest.mark.parametrize(
    ("told", "bytes_"),
    [("81559\n81559\n40960\n", 40960 << 20), ("[N/A]\n", 0), ("", 0)],
    ids=["two kinds", "n/a", "none"],
)
def test_the_smallest_card_counts(monkeypatch, told, bytes_):
    done = subprocess.CompletedProcess([], 0, stdout=told)
    monkeypatch.setattr(machines.subprocess, "run", lambda *_, **__: done)
    assert machines.card_memory() == bytes_


def test_without_the_vendors_tool_nothing_is_known(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert machines.card_memory() == 0
