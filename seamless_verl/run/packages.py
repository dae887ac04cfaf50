"""Packages that a configuration needs on GPUs and that verl alone does not bring: looked for, never imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from seamless_verl.errors import ConfigError
from seamless_verl.machine import Machine
from seamless_verl.run.devices import value_of
from seamless_verl.run.joining import ADDRESS, cluster_address

_BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend"
_ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
_STRATEGY = "actor_rollout_ref.actor.strategy"
_MODULES = {
    "nccl": ("cupy",),
    "nixl": ("cupy", "nixl"),
    "delta_sharded": ("cupy",),
    "kimi_ckpt_engine": ("checkpoint_engine",),
    "mooncake": ("mooncake",),
}
"""What verl 0.9.1's checkpoint engines import, by backend. Without it verl leaves the backend unregistered and says so
when the trainer's workers have loaded the model (``CheckpointEngineRegistry.get``)."""

HOW_TO_INSTALL = {
    "cupy": "pip install cupy-cuda13x==14.0.1 (cupy-cuda12x beside a torch built for CUDA 12); the extra [gpu] has it",
    "flash_attn": "pip install --no-build-isolation flash-attn==2.8.3 once torch is there (it compiles; verl offers a "
    "built wheel for Python 3.12)",
}


def is_installed(module: str) -> bool:
    """Whether a top-level module can be found; it is not imported."""
    return importlib.util.find_spec(module) is not None


def check_packages(config: Mapping[str, Any], machine: Machine) -> None:
    """Raise on a package that a GPU run would miss minutes after its start.

    The trainer's own process looks its checkpoint engine up, so that one's packages are needed here; flash-attn is
    needed where the workers are, which is here too unless this machine has no accelerator and joins a cluster.

    Raises:
        ConfigError: a checkpoint engine or an attention that cannot be imported.
    """
    if value_of(config, "trainer.device") != "cuda":
        return
    _check_backend(config)
    if machine.accelerators or cluster_address(value_of(config, ADDRESS, None)) is None:
        _check_attention(config)


def _check_backend(config: Mapping[str, Any]) -> None:
    if value_of(config, "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module", None):
        return  # it registers engines of its own
    given = backend = value_of(config, _BACKEND, None) or "naive"
    if given == "naive" and value_of(config, "trainer.v1.trainer_mode") == "seamless":
        backend = "nccl"  # `adopt_config` writes it
    for module in _MODULES.get(backend, ()):
        if not is_installed(module):
            default = "" if backend == given else f" (what {given} becomes under trainer mode seamless)"
            fix = HOW_TO_INSTALL.get(module, f"install the package that brings {module}")
            raise ConfigError(_BACKEND, f"{backend}{default}", f"needs {module}, which is not installed", fix)


def _check_attention(config: Mapping[str, Any]) -> None:
    strategy = str(value_of(config, _STRATEGY, "fsdp"))
    if strategy == "megatron" and not is_installed("megatron"):
        raise ConfigError(_STRATEGY, strategy, "needs megatron, which is not installed", "install verl[megatron]")
    attention = value_of(config, _ATTENTION, "flash_attention_2")  # verl's default
    if not strategy.startswith("fsdp") or attention != "flash_attention_2":
        return
    # transformers takes the hub's kernels instead, where the package `kernels` is installed.
    if not is_installed("flash_attn") and not is_installed("kernels"):
        raise ConfigError(
            _ATTENTION,
            attention,
            "needs flash_attn, which is not installed",
            f"{HOW_TO_INSTALL['flash_attn']}, or write ++{_ATTENTION}=sdpa with "
            "actor_rollout_ref.model.use_remove_padding=false",
        )
