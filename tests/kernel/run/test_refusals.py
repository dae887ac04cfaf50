"""Settings of verl that start and then train on the wrong thing, and packages that a GPU run would miss."""

import copy
import re
import sys
from contextlib import nullcontext

import pytest

from seamless_verl import cli
from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import ConfigError, MachineError
from seamless_verl.machine import Machine
from seamless_verl.run import check_machine, preflight

GIB = 1 << 30
MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
CONFIG = {
    "trainer": {"device": "cuda", "nnodes": 1, "n_gpus_per_node": 4, "v1": {"trainer_mode": "seamless"}},
    "data": {"train_batch_size": 16, "max_prompt_length": 256, "max_response_length": 768},
    "actor_rollout_ref": {
        "model": {"path": "Qwen/Qwen3-8B", "lora_rank": 0, "lora": {"rank": 0, "merge": False}, "override_config": {}},
        "actor": {"ppo_mini_batch_size": 8, "strategy": "fsdp2"},
        "rollout": {
            "name": "vllm",
            "n": 8,
            "nnodes": 1,
            "n_gpus_per_node": 4,
            "tensor_model_parallel_size": 1,
            "load_format": "dummy",
            "checkpoint_engine": {"backend": "naive", "custom_backend_module": None},
        },
    },
    "ray_kwargs": {"ray_init": {"address": "local"}},
}


def machine(accelerators=8):
    return Machine(
        accelerators=accelerators,
        cores=2,
        memory_available=16 * GIB,
        memory_total=24 * GIB,
        disk_free=50 * GIB,
        shared_memory_free=GIB,
    )


def config(changes):
    changed = copy.deepcopy(CONFIG)
    for path, value in changes.items():
        *parents, last = path.split(".")
        section = changed
        for parent in parents:
            section = section[parent]
        section[last] = value
    return changed


def check(changes, *, here=None, **seamless):
    preflight.check_settings(config(changes), SeamlessConfig.from_mapping(seamless), here or machine())


@pytest.fixture
def installed(monkeypatch):
    """The modules that can be found; a test adds what its machine has."""
    found = {"cupy", "flash_attn", "wandb"}
    monkeypatch.setattr(check_machine, "is_installed", found.__contains__)
    return found


@pytest.mark.parametrize("rank", ["lora_rank", "lora.rank"])
def test_an_unmerged_adapter_is_refused_where_replicas_have_gpus_of_their_own(installed, rank):
    with pytest.raises(ConfigError, match=r"would sample the base model.*lora\.merge=true") as refused:
        check({f"{MODEL}.{rank}": 16})
    assert (refused.value.key, refused.value.value) == (f"{MODEL}.lora.merge", False)
    check({f"{MODEL}.{rank}": 16, f"{MODEL}.lora.merge": True})
    check({f"{MODEL}.{rank}": 16, "trainer.v1.trainer_mode": "separate_async"})  # verl's own; not ours to refuse


def test_an_adapter_is_refused_where_no_rank_says_that_there_is_one(installed):
    named = {f"{MODEL}.lora_adapter_path": "/adapter", f"{MODEL}.lora.merge": True}
    with pytest.raises(ConfigError, match=r"Fix: write actor_rollout_ref\.model\.lora_rank=") as refused:
        check(named)
    assert (refused.value.key, refused.value.value) == (f"{MODEL}.lora_adapter_path", "/adapter")
    check({**named, f"{MODEL}.lora_rank": 16})


def test_the_trainers_own_replicas_get_adapters_and_one_that_is_started_anew_needs_the_model_below(installed):
    alone = {f"{MODEL}.lora_rank": 16, f"{ROLLOUT}.nnodes": 0, f"{ROLLOUT}.n_gpus_per_node": 0}
    check({**alone, f"{ROLLOUT}.load_format": "safetensors"}, scheduler={"policy": "colocated"})
    with pytest.raises(ConfigError, match=r"random weights.*load_format=safetensors"):
        check(alone, scheduler={"policy": "colocated"})


@pytest.mark.parametrize(
    ("backend", "missing"),
    [("naive", "cupy"), ("nccl", "cupy"), ("nixl", "nixl"), ("delta_sharded", "cupy"), ("mooncake", "mooncake")],
)
def test_a_checkpoint_engine_that_cannot_be_imported_is_refused(installed, backend, missing):
    installed.discard(missing)
    with pytest.raises(ConfigError, match=f"needs {missing}, which is not installed") as refused:
        check({f"{ROLLOUT}.checkpoint_engine.backend": backend})
    assert refused.value.key == f"{ROLLOUT}.checkpoint_engine.backend"
    assert str(refused.value.value).startswith("nccl" if backend == "naive" else backend)
    assert "install" in refused.value.fix
    installed.add(missing)
    name = "sglang" if backend == "delta_sharded" else "vllm"
    check({f"{ROLLOUT}.checkpoint_engine.backend": backend, f"{ROLLOUT}.name": name})


def test_only_changes_of_weights_are_refused_with_a_vllm_that_cannot_apply_them(installed, tmp_path, monkeypatch):
    asked = {f"{ROLLOUT}.checkpoint_engine.backend": "delta_sharded"}
    loader = tmp_path / "vllm" / "model_executor" / "model_loader"
    loader.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with pytest.raises(ConfigError, match=r"backend=delta_sharded: needs a vLLM with checkpoint_weight_patch.*nccl"):
        check(asked)
    (loader / "checkpoint_weight_patch.py").touch()
    check(asked)


def test_what_needs_no_such_package_is_not_refused(installed):
    installed.clear()
    installed.add("flash_attn")
    check({f"{ROLLOUT}.checkpoint_engine.backend": "mine", f"{ROLLOUT}.checkpoint_engine.custom_backend_module": "m"})
    check({"trainer.v1.trainer_mode": "sync"})  # weights stay within the workers
    installed.clear()
    check({"trainer.device": "cpu"})


def test_where_replicas_pull_published_weights_no_package_of_verls_engines_is_missed(installed):
    installed.discard("cupy")
    ours = {f"{ROLLOUT}.name": "vllm"}
    check(ours, weights={"sync": "rolling"})
    with pytest.raises(ConfigError, match="needs cupy"):
        check(ours, weights={"sync": "together"})
    verls = {"trainer.v1.trainer_mode": "separate_async", f"{ROLLOUT}.checkpoint_engine.backend": "nccl"}
    with pytest.raises(ConfigError, match="needs cupy"):  # it publishes nothing
        check(verls, weights={"sync": "rolling"})


def test_flash_attention_is_missed_where_the_workers_are(installed, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    installed.discard("flash_attn")
    with pytest.raises(ConfigError, match=r"flash_attention_2: needs flash_attn.*attn_implementation=sdpa"):
        check({})
    with pytest.raises(ConfigError, match=r"use_remove_padding=false actor_.*ulysses_sequence_parallel_size=1"):
        check({"actor_rollout_ref.actor.ulysses_sequence_parallel_size": 4})
    check({f"{MODEL}.override_config.attn_implementation": "sdpa"})
    joins = {"ray_kwargs.ray_init.address": "10.0.0.1:6379"}
    monkeypatch.setattr(check_machine, "check_cluster", lambda settings: None)  # whoever answers there, or nobody
    check(joins, here=machine(0))  # the workers are elsewhere
    with pytest.raises(ConfigError, match="flash_attn"):
        check(joins)
    installed.add("kernels")  # transformers fetches the kernel instead
    check({})


@pytest.fixture
def nobody_logged_in(monkeypatch, tmp_path):
    for name in ("API_KEY", "IDENTITY_TOKEN_FILE", "MODE", "DISABLED", "BASE_URL"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["console", "wandbb"], "trainer.logger=wandbb: is none of verl's trackers. Fix: write wandb; known: "),
        (["swanlab"], "trainer.logger=swanlab: needs swanlab, which is not installed. Fix: install it (pip install"),
        ("vemlp_wandb", "trainer.logger=vemlp_wandb: needs volcengine_ml_platform, which is not installed"),
    ],
)
def test_a_tracker_that_verl_could_not_load_is_refused_before_anything_is(installed, asked, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_machine.check_tracker({"trainer": {"logger": asked}})


@pytest.mark.parametrize("way", ["key", "key for workers", "offline", "netrc", "settings", "own server", "no wandb"])
def test_wandb_without_a_key_is_refused_before_anything_is_loaded(installed, nobody_logged_in, monkeypatch, way):
    asked = {"trainer.logger": ["console", "wandb"]}
    with pytest.raises(ConfigError, match=r"no API key for api\.wandb\.ai.*wandb login.*trainer\.logger=\[console\]"):
        check(asked)
    netrc = nobody_logged_in / ".netrc"
    if way == "key":
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    elif way == "key for workers":  # the trainer's process takes their variables over (`job._start_ray`)
        asked["ray_kwargs.ray_init.runtime_env"] = {"env_vars": {"WANDB_API_KEY": "k" * 40}}
    elif way == "offline":
        monkeypatch.setenv("WANDB_MODE", "offline")
    elif way == "netrc":
        netrc.write_text("machine github.com\n  login me\n  password p\n")
        with pytest.raises(ConfigError, match="no API key"):
            check(asked)
        netrc.write_text("machine api.wandb.ai\n  login user\n  password p\n")
    elif way == "settings":
        (nobody_logged_in / "wandb").mkdir()
        (nobody_logged_in / "wandb" / "settings").write_text("[default]\nmode = offline\n")
    elif way == "own server":
        monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8443")
        with pytest.raises(ConfigError, match=r"no API key for wandb\.example\.org"):
            check(asked)
        netrc.write_text("machine wandb.example.org\n  login user\n  password p\n")
    else:
        asked = {"trainer.logger": "console"}
    check(asked)


def test_megatron_is_missed(installed):
    with pytest.raises(ConfigError, match=r"strategy=megatron: needs megatron.*verl\[megatron\]"):
        check({"actor_rollout_ref.actor.strategy": "megatron"})


def test_modules_are_looked_for_without_importing_them():
    assert check_machine.is_installed("colorsys")
    assert not check_machine.is_installed("no_module_of_this_name")


@pytest.mark.parametrize(
    ("policy", "loads"),
    [
        *((policy, True) for policy in (None, "auto", " AUTO ", "a, seamless_verl", "Seamless_Verl")),
        *((policy, False) for policy in ("", "none", "my_plugin", "auto,none")),
    ],
)
def test_where_verl_would_not_load_our_plug_in_what_needs_it_is_refused(installed, monkeypatch, policy, loads):
    monkeypatch.delenv(check_machine.PLUGINS, raising=False)
    own, shared, verls = {}, {"shared_prefix": "auto"}, {"trainer.v1.trainer_mode": "separate_async"}
    if policy is not None:
        monkeypatch.setenv(check_machine.PLUGINS, policy)
    finding = cli._plugin()
    assert (finding.fatal, bool(finding.fix)) == (not loads, not loads)
    check(verls)
    for changes, keys in ((own, own), (verls, shared)):
        with nullcontext() if loads else pytest.raises(MachineError, match="verl plug-in: off: VERL_USE_EXTERNAL"):
            check(changes, **keys)
    in_workers = {"runtime_env": {"env_vars": {check_machine.PLUGINS: "auto"}}, "address": "local"}
    check({"ray_kwargs.ray_init": in_workers})
