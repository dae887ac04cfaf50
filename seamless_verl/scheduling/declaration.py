"""From ``seamless.resources`` to slices; what cannot work is refused with key, value and fix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from seamless_verl.config import ResourceConfig, SchedulerConfig, SeamlessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.scheduling.policies import Colocated, Disaggregated, Greedy, Policy
from seamless_verl.scheduling.prediction.predictive import Predictive
from seamless_verl.scheduling.slices import Gpu, Hardware, Slice, SliceId, Tag
from seamless_verl.scheduling.verl_gate import VerlGate


def slices_of(resources: Sequence[ResourceConfig], *, replica_gpus: int) -> tuple[Slice, ...]:
    """Cut every pool into slices of one rollout replica each.

    Args:
        replica_gpus: tensor x data x pipeline parallel size of a replica.

    Raises:
        ConfigError: the same GPUs declared twice, a replica that would straddle nodes or slices, nothing that can
            train, nothing that can generate.
    """
    names = [resource.name for resource in resources]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"seamless.resources[{name}]", name, "is declared twice: its GPUs would have two owners", "rename one"
            )
    for tag in Tag:
        if not any(tag.value in resource.capabilities for resource in resources):
            raise ConfigError(
                "seamless.resources",
                ", ".join(names) or "[]",
                f"no entry can {tag.value}",
                f"add {tag.value} to the capabilities of one of them",
            )
    return tuple(slice_ for resource in resources for slice_ in _cut(resource, replica_gpus))


def with_policy(seamless: SeamlessConfig, config: Mapping[str, Any]) -> SeamlessConfig:
    """``colocated`` where verl's own keys leave rollout nothing but the trainer's GPUs, as verl's ``sync`` mode does.

    So a command for `verl.trainer.main_ppo` runs as it is. Nothing is added where GPUs or a policy are declared, where
    verl's switch decides, or where the trainer's GPUs may not generate.

    Args:
        config: verl's, plain or an OmegaConf node.
    """
    rollout, modes = config["actor_rollout_ref"]["rollout"], config["trainer"]["v1"]
    switch = ((modes.get("separate_async") or {}).get("hybrid_rollout") or {}).get("enable_switch")
    declared = seamless.resources or seamless.scheduler.policy is not None or switch
    if declared or rollout.get("nnodes") or not config["actor_rollout_ref"].get("hybrid_engine", True):
        return seamless
    return replace(seamless, scheduler=replace(seamless.scheduler, policy="colocated"))


def verl_keys(resources: Sequence[ResourceConfig]) -> dict[str, int | bool]:
    """What a declaration that `slices_of` accepts says in verl's own keys; empty without one.

    verl knows two places for GPUs: the trainer's pool, whose replicas are *hybrid*, and the standalone replicas.
    Entries that can train become the first, entries that only roll out the second; without any of those all GPUs
    generate, then all train.

    Raises:
        ConfigError: what verl's two pools cannot express.
    """
    if not resources:
        return {}
    trainers = [r for r in resources if Tag.TRAIN.value in r.capabilities]
    rollouts = [r for r in resources if Tag.TRAIN.value not in r.capabilities]
    for pool in filter(None, (trainers, rollouts)):
        sizes = sorted({r.gpus_per_node for r in pool})
        if len(sizes) > 1:
            raise ConfigError(
                f"seamless.resources[{pool[-1].name}].gpus_per_node",
                pool[-1].gpus_per_node,
                f"verl has one number of GPUs per node for all of {', '.join(r.name for r in pool)}",
                f"write {sizes[0]} for each of them",
            )
    return {
        "trainer.nnodes": sum(r.nodes for r in trainers),
        "trainer.n_gpus_per_node": trainers[0].gpus_per_node,
        "actor_rollout_ref.hybrid_engine": any(Tag.ROLLOUT.value in r.capabilities for r in trainers),
        "actor_rollout_ref.rollout.nnodes": sum(r.nodes for r in rollouts),
        "actor_rollout_ref.rollout.n_gpus_per_node": (rollouts or trainers)[0].gpus_per_node,
    }


def _cut(resource: ResourceConfig, replica_gpus: int) -> Iterable[Slice]:
    gpus = [
        Gpu(node=f"{resource.name}/{node}", index=index)
        for node in range(resource.nodes)
        for index in range(resource.gpus_per_node)
    ]
    fits = len(gpus) % replica_gpus == 0 and (
        resource.gpus_per_node % replica_gpus == 0 or replica_gpus % resource.gpus_per_node == 0
    )
    if not fits:
        raise ConfigError(
            f"seamless.resources[{resource.name}].gpus_per_node",
            resource.gpus_per_node,
            f"a rollout replica takes {replica_gpus} GPUs and would straddle slices ({len(gpus)} GPUs on "
            f"{resource.nodes} node(s))",
            f"make it a multiple of {replica_gpus}, or change tensor_model_parallel_size",
        )
    hardware = None
    if resource.tflops is not None and resource.bandwidth_gbs is not None and resource.memory_gb is not None:
        hardware = Hardware(
            flops=resource.tflops * 1e12, bandwidth=resource.bandwidth_gbs * 1e9, memory=resource.memory_gb * 1e9
        )
    for number in range(len(gpus) // replica_gpus):
        yield Slice(
            id=SliceId(f"{resource.name}/{number}"),
            pool=resource.name,
            gpus=tuple(gpus[number * replica_gpus : (number + 1) * replica_gpus]),
            capabilities=frozenset(Tag(tag) for tag in resource.capabilities),
            hardware=hardware,
        )


def policy_of(config: SchedulerConfig, *, batch: int, mini_batch: int) -> Policy:
    """The policy that ``seamless.scheduler`` names, for live runs and for the simulator's.

    Args:
        batch: groups per training step.
        mini_batch: groups per local update.
    """
    if config.policy == "predictive":
        return Predictive(margin=config.margin, max_loans_per_step=config.max_loans_per_step)
    if config.policy == "verl_gate":
        return VerlGate(batch=batch, mini_batch=mini_batch)
    plain: dict[str, type[Policy]] = {"greedy": Greedy, "colocated": Colocated, "disaggregated": Disaggregated}
    return plain[str(config.policy)]()
