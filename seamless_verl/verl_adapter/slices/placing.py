"""Reserves the GPUs of the trainer and of the standalone replicas before anything is loaded.

    pools, replicas ─► plan (`scheduling.placement`) ─► groups of the trainer ─► groups of the replicas
                         ▲ not yet: somebody else holds GPUs       └─ ready, or a time-out that names nodes

verl 0.9.1 creates the placement groups of a pool with its first workers, lets Ray choose the nodes group by group, and
waits for them without a limit. A standalone replica that starts while the trainer still loads its data then takes GPUs
of a node that the trainer needs whole, and both wait for ever. Remove when verl places all pools at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from omegaconf import DictConfig
from ray.util.placement_group import PlacementGroup, placement_group
from verl.plugin.platform import get_platform
from verl.single_controller.ray.base import RayResourcePool, RayWorkerGroup, sort_placement_group_by_node_ip
from verl.utils.device import get_device_name
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, get_rollout_replica_class

from seamless_verl.errors import MachineError
from seamless_verl.run.check_combinations import replica_size
from seamless_verl.scheduling.placement import GroupedGpus, NodeRoom, plan, story

PLACING_S = 120.0
_LOOK_S = 1.0
_COLOCATED = 2  # workers per GPU that verl's `init_standalone` makes room for
_KIND = "accelerator_type:"
_FIX = (
    "ask for fewer GPUs, end what holds them, start more nodes, or give the nodes more CPUs "
    "(ray start --num-cpus; verl asks for several per GPU)"
)


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
    told = False
    while (nodes := plan(rooms(), asked)) is None:
        if time.monotonic() >= deadline:
            raise _refused(f"others held the GPUs for {limit_s:.0f} s", asked)
        if not told:
            told = True
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


def standing_pools(config: DictConfig, first_rank: int) -> dict[int, RayResourcePool]:
    """The pool of every standalone replica, by rank, as verl's `init_standalone` would make it; none yet has groups.

    Empty where replicas are parted into prefill and decode servers, whose pools are left to verl.
    """
    rollout = config.actor_rollout_ref.rollout
    if not rollout.nnodes or rollout.disaggregation.enabled:
        return {}
    size = replica_size(config)
    on_a_node = min(rollout.n_gpus_per_node, size)
    return {
        first_rank + number: RayResourcePool(
            process_on_nodes=[on_a_node] * (size // on_a_node),
            max_colocate_count=_COLOCATED,
            name_prefix=f"rollout_pool_{first_rank + number}",
        )
        for number in range(rollout.nnodes * rollout.n_gpus_per_node // size)
    }


class PlacedServers(LLMServerManager):
    """Standalone replicas on pools that are placed already.

    Args:
        pools: of the replicas, by rank; a replica that is not among them is placed by verl.
    """

    def __init__(self, config: DictConfig, *args: Any, pools: Mapping[int, RayResourcePool], **kwargs: Any) -> None:
        rollout = config.actor_rollout_ref.rollout
        replica = get_rollout_replica_class(rollout.name, disaggregation_enabled=rollout.disaggregation.enabled)
        self.rollout_replica_class = on_pools(replica, pools)
        super().__init__(config, *args, **kwargs)


def on_pools(replica: type[RolloutReplica], pools: Mapping[int, RayResourcePool]) -> type[RolloutReplica]:
    """The same replica, whose `init_standalone` takes its pool from ``pools``; it repeats the rest of verl's."""

    class Placed(replica):  # type: ignore[valid-type, misc]
        async def init_standalone(self) -> None:
            if self.replica_rank not in pools:
                await super().init_standalone()
                return
            self.rollout_mode = RolloutMode.STANDALONE
            self.resource_pool = pools[self.replica_rank]
            self.workers = RayWorkerGroup(
                resource_pool=self.resource_pool,
                ray_cls_with_init=self.get_ray_class_with_init_args(),
                bin_pack=False,
                name_prefix=f"rollout_standalone_{self.replica_rank}{self.name_suffix}",
                use_gpu=True,
                device_name=get_device_name(),
            ).workers
            await self.launch_servers()

    Placed.__name__ = Placed.__qualname__ = f"Placed{replica.__name__}"
    return Placed
