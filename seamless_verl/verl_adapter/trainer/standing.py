"""Replicas on GPUs of their own, and the router that all replicas of a run share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig
from verl.single_controller.ray.base import RayResourcePool, ResourcePoolManager
from verl.workers.rollout.llm_server import LLMServerManager

from seamless_verl.config import RouterConfig
from seamless_verl.run.check_combinations import replica_size
from seamless_verl.verl_adapter.rollout.load_balancer import balancer_class
from seamless_verl.verl_adapter.slices.placing import PlacedServers, standing_pools
from seamless_verl.verl_adapter.slices.resource_pools import TagAwareResourcePoolManager
from seamless_verl.verl_adapter.trainer.adoption import standalone_config


class StandingServers:
    """Args:
    hybrid: the trainer's GPUs carry replicas, too; verl counts those first.
    """

    def __init__(self, config: DictConfig, router: RouterConfig, *, hybrid: bool) -> None:
        self._config = config
        self._router = router
        self._first_rank = 0
        if hybrid:
            trainer = config.trainer
            self._first_rank = int(trainer.nnodes * trainer.n_gpus_per_node // replica_size(config))

    @property
    def exist(self) -> bool:
        """Otherwise the trainer's own replicas are all there are."""
        return bool(self._config.actor_rollout_ref.rollout.nnodes)

    @property
    def own_router(self) -> bool:
        """The user names a router, which verl makes."""
        return self._config.actor_rollout_ref.rollout.get("router_config_path") is not None

    def pools(self) -> dict[int, RayResourcePool]:
        """By rank; none is placed yet."""
        return standing_pools(self._config, self._first_rank)

    @contextmanager
    def starting(self, pools: Mapping[int, RayResourcePool]) -> Iterator[Future[LLMServerManager]]:
        """They start beside what happens within, and are there when it has ended."""
        with ThreadPoolExecutor(1, thread_name_prefix="replicas") as pool:
            servers = pool.submit(self.start, pools)
            try:
                yield servers
            finally:
                servers.result()

    def start(self, pools: Mapping[int, RayResourcePool]) -> LLMServerManager:
        """All of them on ``pools``, which are placed, with the router."""
        config = standalone_config(self._config)
        servers: LLMServerManager = PlacedServers.create(
            config=config, pools=pools, start_rank=self._first_rank, load_balancer_cls=self._balancer_class()
        )
        return servers

    def pool_manager(self, of_verl: ResourcePoolManager, accelerator: str | None) -> TagAwareResourcePoolManager:
        """Of the same pools as verl's; it knows that there are GPUs beside them."""
        rollout = self._config.actor_rollout_ref.rollout
        return TagAwareResourcePoolManager(
            resource_pool_spec=of_verl.resource_pool_spec,
            mapping=of_verl.mapping,
            standing_gpus=(rollout.nnodes or 0) * (rollout.n_gpus_per_node or 0),
            accelerator=accelerator,
        )

    def router_alone(self, worker_group: Any) -> LLMServerManager:
        """A manager of no replicas; those of the trainer join its router when they are lent."""
        servers: LLMServerManager = LLMServerManager.create_empty(
            config=self._config, worker_group=worker_group, load_balancer_cls=self._balancer_class()
        )
        return servers

    def _balancer_class(self) -> Any:
        return (
            None
            if self.own_router
            else balancer_class(self._router, self._config.actor_rollout_ref.rollout.max_num_seqs)
        )
