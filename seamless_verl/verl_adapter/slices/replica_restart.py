"""A replica that died comes back: its servers, and where they died too, the workers beside it.

verl 0.9.1 starts a replica's parts once; this starts them again under the same names. Remove when a replica can restart
itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import ray
from verl.single_controller.ray import RayWorkerGroup
from verl.utils.device import get_device_name
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

_log = logging.getLogger(__name__)

_GONE_S = 10.0
_AGAIN_S = 10.0  # the memory of a killed engine may come back a little after its process is gone


def restart_replica(replica: RolloutReplica) -> None:
    """Blocks until it answers; one that lives in the trainer's workers sleeps then."""
    if replica.rollout_mode is RolloutMode.STANDALONE:
        _replace_dead_workers(replica)
    try:
        _launch(replica)
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises for lack of memory; the second time it goes through
        _log.warning("replica %s did not start (%s), once more in %.0f s", replica.replica_rank, error, _AGAIN_S)
        time.sleep(_AGAIN_S)
        _launch(replica)
    if replica.rollout_mode is RolloutMode.HYBRID:
        asyncio.run(replica.sleep())
    ray.get([worker.__ray_call__.remote(_forget_server) for worker in replica.workers])


def _launch(replica: RolloutReplica) -> None:
    for server in replica.servers:
        ray.kill(server)
    _until_gone(replica.servers)  # then their names are free
    replica.servers = []
    asyncio.run(_launched(replica))


async def _launched(replica: RolloutReplica) -> None:
    await replica.launch_servers()


def _replace_dead_workers(replica: RolloutReplica) -> None:
    """All of them, if one does not answer: as `RolloutReplica.init_standalone` makes them, in the same place."""
    answers = [worker.__ray_ready__.remote() for worker in replica.workers]
    answered, _ = ray.wait(answers, num_returns=len(answers), timeout=_GONE_S)
    if len(answered) == len(answers) and not any(map(_failed, answers)):
        return
    for worker in replica.workers:
        ray.kill(worker)
    _until_gone(replica.workers)
    replica.workers = RayWorkerGroup(
        resource_pool=replica.resource_pool,
        ray_cls_with_init=replica.get_ray_class_with_init_args(),
        bin_pack=False,
        name_prefix=f"rollout_standalone_{replica.replica_rank}{replica.name_suffix}_{time.time_ns()}",
        use_gpu=True,
        device_name=get_device_name(),
    ).workers


def _until_gone(actors: list[Any]) -> None:
    calls = [actor.__ray_ready__.remote() for actor in actors]
    ray.wait(calls, num_returns=len(calls), timeout=_GONE_S)


def _failed(answer: Any) -> bool:
    try:
        ray.get(answer)
    except ray.exceptions.RayError:
        return True
    return False


def _forget_server(worker: Any) -> None:
    """Runs in a worker's process: verl's `ServerAdapter` looks its server up once, by name."""
    for part in (worker, *getattr(worker, "worker_dict", {}).values()):
        for name in ("rollout", "server_adapter"):
            adapter = getattr(part, name, None)
            if hasattr(adapter, "server_handle"):
                adapter.server_handle = None
