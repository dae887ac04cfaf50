"""Tags on verl: from ``seamless.resources`` (or verl's own keys) to resource pools and slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.single_controller.ray.base import RayResourcePool, ResourcePoolManager

from seamless_verl.config import ResourceConfig, SeamlessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.run.check_combinations import check_generators, check_resources, replica_size
from seamless_verl.scheduling.declaration import slices_of, verl_keys
from seamless_verl.scheduling.slices import Slice, Tag
from seamless_verl.verl_adapter.slices.placing import Reservation, place

TRAINER_POOL = "global_pool"
REWARD_POOL = "reward_pool"  # verl names it where a reward model might have GPUs of its own, wanted or not


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
    rollout = config.actor_rollout_ref.rollout
    seats = int(rollout.max_num_seqs * rollout.data_parallel_size) if rollout.max_num_seqs else None
    return tuple(replace(slice_, seats=seats) for slice_ in slices)


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
    """verl's manager that knows which GPUs its pools do not hold; its pools are made once, and placed by `placing`.

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
                accelerator_type=f"accelerator_type:{wanted}" if wanted else None,
            )
        self._check_resource_available()

    def place(self, config: DictConfig, standing: Mapping[int, RayResourcePool], say: Callable[[str], object]) -> None:
        """Reserve the GPUs of all pools, the trainer's first, and of the ``standing`` replicas.

        Raises:
            ConfigError: the Ray cluster has fewer GPUs.
            MachineError: they cannot be placed; see `placing.place`.
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
        """By what the nodes have; who holds it now is for `placing.place` to wait for."""
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
