"""Replicas on GPUs of their own, and the router that all replicas of a run share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import ray
from omegaconf import DictConfig
from verl.single_controller.ray.base import RayResourcePool, ResourcePoolManager
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, get_rollout_replica_class

from seamless_verl.config import RouterConfig
from seamless_verl.run.check_combinations import replica_size
from seamless_verl.verl_adapter.rollout.holding_balancer import balancer_class
from seamless_verl.verl_adapter.rollout.load_balancer import UNBOUNDED
from seamless_verl.verl_adapter.slices.deaths import start_workers
from seamless_verl.verl_adapter.slices.resource_pools import TagAwareResourcePoolManager, seats_of

_COLOCATED = 2  # workers per GPU that verl's `init_standalone` makes room for


def replica_loader(sync: str) -> Callable[[], type[RolloutReplica]]:
    """Gives verl our class of vLLM's replicas; ``sync`` is ``seamless.weights.sync``."""

    def load() -> type[RolloutReplica]:  # brings vLLM in
        if sync == "rolling":
            from seamless_verl.verl_adapter.vllm.pulling_server import PullingReplica

            return PullingReplica
        from seamless_verl.verl_adapter.vllm.vllm_server import InterruptibleReplica

        return InterruptibleReplica

    return load


class StandingServers:
    """Starts standalone replicas and the router.

    Args:
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
        """Whether there are any; else only the trainer's own replicas generate."""
        return bool(self._config.actor_rollout_ref.rollout.nnodes)

    @property
    def own_router(self) -> bool:
        """Whether the user named a router, which verl then makes."""
        return self._config.actor_rollout_ref.rollout.get("router_config_path") is not None

    def pools(self) -> dict[int, RayResourcePool]:
        """The pool of every replica, by rank, as verl's `init_standalone` would make it; none is placed yet.

        Empty where replicas are parted into prefill and decode servers, whose pools are left to verl.
        """
        rollout = self._config.actor_rollout_ref.rollout
        if not rollout.nnodes or rollout.disaggregation.enabled:
            return {}
        size = replica_size(self._config)
        on_a_node = min(rollout.n_gpus_per_node, size)
        ranks = range(self._first_rank, self._first_rank + rollout.nnodes * rollout.n_gpus_per_node // size)
        return {
            rank: RayResourcePool(
                process_on_nodes=[on_a_node] * (size // on_a_node),
                max_colocate_count=_COLOCATED,
                name_prefix=f"rollout_pool_{rank}",
            )
            for rank in ranks
        }

    @contextmanager
    def starting(self, pools: Mapping[int, RayResourcePool]) -> Iterator[Future[LLMServerManager]]:
        """Start the replicas in a thread while the body runs; they are there when it has ended."""
        with ThreadPoolExecutor(1, thread_name_prefix="replicas") as pool:
            servers = pool.submit(self.start, pools)
            try:
                yield servers
            finally:
                servers.result()

    def start(self, pools: Mapping[int, RayResourcePool]) -> LLMServerManager:
        """Start all replicas on ``pools``, which are placed by now, and the router."""
        config = standalone_config(self._config)
        servers: LLMServerManager = PlacedServers.create(
            config=config, pools=pools, start_rank=self._first_rank, load_balancer_cls=self._balancer_class()
        )
        return servers

    def pool_manager(self, of_verl: ResourcePoolManager, accelerator: str | None) -> TagAwareResourcePoolManager:
        """Our manager of verl's pools, which counts the GPUs of standalone replicas, too."""
        rollout = self._config.actor_rollout_ref.rollout
        return TagAwareResourcePoolManager(
            resource_pool_spec=of_verl.resource_pool_spec,
            mapping=of_verl.mapping,
            standing_gpus=(rollout.nnodes or 0) * (rollout.n_gpus_per_node or 0),
            accelerator=accelerator,
        )

    def router_alone(self, worker_group: Any) -> LLMServerManager:
        """A manager without replicas, whose router takes the trainer's replicas when they are lent."""
        servers: LLMServerManager = LLMServerManager.create_empty(
            config=self._config, worker_group=worker_group, load_balancer_cls=self._balancer_class()
        )
        return servers

    @staticmethod
    def tell_cache_sizes(*managers: LLMServerManager) -> None:
        """Tell the router of the first manager how many tokens the caches of all their servers hold."""
        servers = [(m.server_addresses, m.server_handles) for m in managers]
        known = {address: handle for each in servers for address, handle in zip(*each, strict=True)}
        tell_cache_sizes(managers[0].global_load_balancer, known)

    def _balancer_class(self) -> Any:
        if self.own_router:
            return None
        rollout = self._config.actor_rollout_ref.rollout
        return balancer_class(
            self._router, seats_of(rollout) or UNBOUNDED, full_determinism=bool(rollout.get("full_determinism"))
        )


def tell_cache_sizes(router: Any, servers: Mapping[str, Any]) -> None:
    """Tell the router how many tokens the caches of these servers hold; a router of the user's own, and servers of
    other engines, are left alone.

    Args:
        servers: handles by address.
    """
    ours = {address: handle for address, handle in servers.items() if hasattr(handle, "cache_tokens")}
    if ours and hasattr(router, "set_cache_tokens"):
        sizes = ray.get([handle.cache_tokens.remote() for handle in ours.values()])
        ray.get(router.set_cache_tokens.remote(dict(zip(ours, sizes, strict=True))))


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
            self.workers = start_workers(self)
            await self.launch_servers()

    Placed.__name__ = Placed.__qualname__ = f"Placed{replica.__name__}"
    return Placed


def standalone_config(config: DictConfig) -> DictConfig:
    """What replicas on GPUs of their own are made from: with their share of a card, not that beside a trainer.

    verl 0.9.1 declares ``rollout.standalone_gpu_memory_utilization``, but its V1 trainers do not read it (verl #7795).
    Remove with the verl that has #7926. A copy: the trainer's own replicas are made from ``config`` at the same time.
    """
    share = config.actor_rollout_ref.rollout.get("standalone_gpu_memory_utilization")
    if share is None:
        return config
    apart = copy.deepcopy(config)
    apart.actor_rollout_ref.rollout.gpu_memory_utilization = share
    return apart


def with_standing(config: DictConfig) -> DictConfig:
    """What verl's separate_async trainer is constructed from; without standalone replicas, a copy that has some.

    verl 0.9.1 asserts that there are some, although only its ``_setup``, which is ours, and its own switch, which is
    off then, have a use for them. Remove when it does not.
    """
    if config.actor_rollout_ref.rollout.nnodes:
        return config
    some = copy.deepcopy(config)
    some.actor_rollout_ref.rollout.nnodes = 1
    return some
