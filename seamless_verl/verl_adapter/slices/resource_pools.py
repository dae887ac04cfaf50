"""From ``seamless.resources`` (or verl's own keys) to slices and resource pools, reserved before anything is loaded.

    pools, replicas ─► plan (`scheduling.placement`) ─► groups of the trainer ─► groups of the replicas
                         ▲ not yet: others hold GPUs               └─ ready, or a time-out that names nodes

verl 0.9.1 creates the placement groups of a pool with its first workers, lets Ray choose the nodes group by group, and
waits for them without a limit. A standalone replica that starts while the trainer still loads its data then takes GPUs
of a node that the trainer needs whole, and both wait for ever. Remove `place` when verl places all pools at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from ray.util.placement_group import PlacementGroup, placement_group
from verl.plugin.platform import get_platform
from verl.single_controller.ray.base import RayResourcePool, ResourcePoolManager, sort_placement_group_by_node_ip

from seamless_verl.config import ResourceConfig, SeamlessConfig
from seamless_verl.errors import ConfigError, MachineError
from seamless_verl.run.check_combinations import check_generators, check_resources, replica_size
from seamless_verl.scheduling.declaration import slices_of, verl_keys
from seamless_verl.scheduling.placement import GroupedGpus, NodeRoom, plan, story
from seamless_verl.scheduling.slices import Slice, Tag

TRAINER_POOL = "global_pool"
REWARD_POOL = "reward_pool"  # verl names it where a reward model might have GPUs of its own, wanted or not
PLACING_S = 120.0
_LOOK_S = 1.0
_KIND = "accelerator_type:"
_FIX = (
    "ask for fewer GPUs, end what holds them, start more nodes, or give the nodes more CPUs "
    "(ray start --num-cpus; verl asks for several per GPU)"
)


def adopt_resources(config: DictConfig, seamless: SeamlessConfig) -> tuple[Slice, ...]:
    """Write declared resources into verl's keys; the slices that result.

    Nothing is changed, and no slice returned, when neither ``seamless.resources`` nor ``seamless.scheduler.policy`` is
    set: then verl's keys mean exactly what they mean without us.

    Raises:
        ConfigError: see `check_resources` and `verl_keys`.
    """
    check_resources(config, seamless)
    if seamless.resources:
        slices = slices_of(seamless.resources, replica_gpus=replica_size(config))
        with open_dict(config):
            for key, value in verl_keys(seamless.resources).items():
                OmegaConf.update(config, key, value)
    elif seamless.scheduler.policy is not None:
        slices = _slices_of_verl_keys(config)
    else:
        return ()
    if not any(Tag.TRAIN not in s.capabilities for s in slices):
        check_generators(seamless.scheduler.policy)
    return tuple(replace(slice_, seats=seats_of(config.actor_rollout_ref.rollout)) for slice_ in slices)


def seats_of(rollout: DictConfig) -> int | None:
    """Requests that a replica decodes at a time, in all its engine cores; None: the number is not configured."""
    return int(rollout.max_num_seqs * rollout.data_parallel_size) if rollout.max_num_seqs else None


def _slices_of_verl_keys(config: DictConfig) -> tuple[Slice, ...]:
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    hybrid = bool(config.actor_rollout_ref.get("hybrid_engine", True))
    entries = (
        ("trainer", trainer, ("train", "rollout") if hybrid else ("train",), "trainer.n_gpus_per_node"),
        ("rollout", rollout, ("rollout",), "actor_rollout_ref.rollout.n_gpus_per_node"),
    )
    declared = tuple(
        ResourceConfig(name=name, nodes=keys.nnodes, gpus_per_node=keys.n_gpus_per_node, capabilities=tags)
        for name, keys, tags, _ in entries
        if keys.nnodes
    )
    try:
        return slices_of(declared, replica_gpus=replica_size(config))
    except ConfigError as error:
        for name, _, _, key in entries:
            if name in error.key:
                raise ConfigError(key, error.value, error.problem, error.fix) from None
        raise


@dataclass
class TagAwareResourcePoolManager(ResourcePoolManager):
    """verl's manager that knows which GPUs its pools do not hold; its pools are made once, and placed by `place`.

    Attributes:
        standing_gpus: of the replicas that only roll out, whose pools are their own.
        accelerator: Ray accelerator type of the trainer's nodes; None: any.
    """

    standing_gpus: int = 0
    accelerator: str | None = None

    def create_resource_pool(self) -> None:
        """As verl's, once; the trainer's pool on nodes with its accelerator.

        Raises:
            ConfigError: the Ray cluster has fewer GPUs than the trainer and the standalone replicas together.
        """
        if self.resource_pool_dict:
            return  # made and placed before verl's own initialization comes here
        for name, process_on_nodes in self.resource_pool_spec.items():
            wanted = self.accelerator if name == TRAINER_POOL else None
            self.resource_pool_dict[name] = RayResourcePool(
                process_on_nodes=process_on_nodes,
                use_gpu=True,
                max_colocate_count=self.max_colocate_count,
                name_prefix=name,
                accelerator_type=f"{_KIND}{wanted}" if wanted else None,
            )
        self._check_resource_available()

    def place(self, config: DictConfig, standing: Mapping[int, RayResourcePool], say: Callable[[str], object]) -> None:
        """Reserve the GPUs of all pools, the trainer's first, and of the ``standing`` replicas.

        Raises:
            ConfigError: the Ray cluster has fewer GPUs.
            MachineError: they cannot be placed; see `place`.
        """
        self.create_resource_pool()
        unused = () if config.reward.reward_model.enable else (REWARD_POOL,)
        named = [(name, pool) for name, pool in self.resource_pool_dict.items() if name not in unused]
        named.sort(key=lambda item: item[0] != TRAINER_POOL)
        wanted = [Reservation(name=name, pools=[pool], per_node=max(pool.store)) for name, pool in named]
        if standing:
            per_node = config.actor_rollout_ref.rollout.n_gpus_per_node
            wanted.append(Reservation(name="rollout", pools=list(standing.values()), per_node=per_node))
        place(wanted, say=say)

    def _check_resource_available(self) -> None:
        """Compare with what the nodes have in all; `place` waits for what others hold now."""
        needed = self.get_n_gpus() + self.standing_gpus
        found = int(sum(node.get("Resources", {}).get("GPU", 0) for node in ray.nodes() if node.get("Alive")))
        found = found or int(ray.cluster_resources().get("NPU", 0))
        if found < needed:
            raise ConfigError(
                "actor_rollout_ref.rollout.n_gpus_per_node",
                f"{self.standing_gpus} GPUs for rollout alone beside {self.get_n_gpus()} for the trainer",
                f"is more than the Ray cluster has: {found}",
                "ask for fewer (seamless.resources where that is set), or start more nodes",
            )


# ---------------------------------------------------------------- placing


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Pools that are placed together.

    Attributes:
        name: for people.
        pools: in order; the groups of consecutive ones fill a node up to ``per_node``.
        per_node: GPUs wanted on each node.
    """

    name: str
    pools: Sequence[RayResourcePool]
    per_node: int

    def asked(self) -> GroupedGpus:
        first = self.pools[0]
        return GroupedGpus(
            name=self.name,
            groups=tuple(size for pool in self.pools for size in pool.store),
            per_node=self.per_node,
            cpus_per_gpu=first.max_colocate_count,
            kind=first.accelerator_type.removeprefix(_KIND) if first.accelerator_type else None,
        )


def place(
    reservations: Sequence[Reservation], *, limit_s: float = PLACING_S, say: Callable[[str], object] = print
) -> None:
    """Give every pool its placement groups, ready; the first reservation's before those of the next are asked for.

    Args:
        limit_s: seconds to wait for GPUs that others hold, and then for each reservation.
        say: tells people that it waits.

    Raises:
        MachineError: it cannot be done, or not within ``limit_s``: what was asked for and what every node has free.
    """
    asked = [reservation.asked() for reservation in reservations]
    nodes = _planned(asked, limit_s, say)
    for reservation, chosen in zip(reservations, nodes, strict=True):
        where = iter(chosen)
        groups = [_groups_of(pool, where) for pool in reservation.pools]
        deadline = time.monotonic() + limit_s
        if not all(group.wait(max(0.0, deadline - time.monotonic())) for of_pool in groups for group in of_pool):
            raise _refused(f"{reservation.name} was not placed within {limit_s:.0f} s", asked)
        for pool, of_pool in zip(reservation.pools, groups, strict=True):
            placed: Any = pool  # to mypy its groups are None for ever, as verl initializes them
            placed.pgs = sort_placement_group_by_node_ip(of_pool)


def _planned(asked: Sequence[GroupedGpus], limit_s: float, say: Callable[[str], object]) -> tuple[tuple[str, ...], ...]:
    if plan(rooms(free=False), asked) is None:
        raise _refused("no way was found to place it, even on empty nodes", asked, free=False)
    deadline = time.monotonic() + limit_s
    was_said = False
    while (nodes := plan(rooms(), asked)) is None:
        if time.monotonic() >= deadline:
            raise _refused(f"others held the GPUs for {limit_s:.0f} s", asked)
        if not was_said:
            was_said = True
            say(f"waiting up to {limit_s:.0f} s for GPUs: {story(rooms(), asked)}")
        time.sleep(_LOOK_S)
    return nodes


def _refused(problem: str, asked: Sequence[GroupedGpus], *, free: bool = True) -> MachineError:
    has = "free" if free else "in all"
    return MachineError("GPUs of the Ray cluster", f"{problem}; {story(rooms(free=free), asked, has)}", _FIX)


def rooms(*, free: bool = True) -> list[NodeRoom]:
    """Living nodes: what is free on them, or all that they have."""
    available = ray._private.state.available_resources_per_node() if free else {}
    device = get_platform().ray_resource_name()
    found = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        has: Mapping[str, float] = available.get(node["NodeID"], {}) if free else node["Resources"]
        kinds = frozenset(name.removeprefix(_KIND) for name in node["Resources"] if name.startswith(_KIND))
        found.append(
            NodeRoom(
                id=node["NodeID"],
                address=node["NodeManagerAddress"],
                gpus=has.get(device, 0.0),
                cpus=has.get("CPU", 0.0),
                kinds=kinds,
            )
        )
    return found


def _groups_of(pool: RayResourcePool, nodes: Iterator[str]) -> list[PlacementGroup]:
    """As `RayResourcePool.get_placement_groups` makes them, each on the next of ``nodes``."""
    bundle: dict[str, float] = {"CPU": pool.max_colocate_count, get_platform().ray_resource_name(): 1}
    if pool.accelerator_type is not None:
        bundle[pool.accelerator_type] = 1e-4
    return [
        placement_group(
            [dict(bundle) for _ in range(size)],
            strategy="STRICT_PACK",
            name=f"{pool.name_prefix}_{number}",
            _soft_target_node_id=next(nodes),
        )
        for number, size in enumerate(pool.store)
    ]
