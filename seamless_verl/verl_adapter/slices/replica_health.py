"""Which replicas died, and how one comes back.

Replicas are asked again and again without waiting, since whoever lives may be too busy to answer. One that died gets
new servers, and where they died too, new workers beside it, under the same names: verl 0.9.1 starts a replica's parts
once. Remove the restart when a replica can restart itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from verl.single_controller.ray import RayWorkerGroup
from verl.utils.device import get_device_name
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from seamless_verl.verl_adapter.vllm.vllm_plugin import engine_died

_log = logging.getLogger(__name__)

_GONE_S = 10.0
_AGAIN_S = 10.0  # the memory of a killed engine may come back a little after its process is gone


class ReplicaHealth:
    """Of replicas that take part in something.

    A replica consists of servers, the engine processes behind them, and, unless it lives in the trainer's workers, of
    workers of its own that hand weights to it. Any of them may die alone.
    """

    def __init__(self, replicas: Sequence[RolloutReplica]) -> None:
        self._replicas = list(replicas)
        self._asked: dict[tuple[RolloutReplica, str, Any], tuple[Any, float]] = {}
        for replica in self._replicas:
            for server in replica.servers:
                self._ask(replica, "server", server)
            if replica.rollout_mode is RolloutMode.STANDALONE:
                for worker in replica.workers:
                    self._ask(replica, "worker", worker)

    def deaths(self, wait_s: float = 0.0) -> dict[RolloutReplica, str]:
        """Those found dead, and why; the others answered, or have not answered yet."""
        calls = [call for call, _ in self._asked.values()]
        if wait_s and calls:
            ray.wait(calls, num_returns=len(calls), timeout=wait_s)
        found: dict[RolloutReplica, str] = {}
        for (replica, part, actor), (call, _) in list(self._asked.items()):
            if not ray.wait([call], timeout=0)[0]:
                continue
            try:
                if ray.get(call):
                    found.setdefault(replica, "its engine process died")
            except RayError as error:
                found.setdefault(replica, f"its {part}: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
            else:
                self._ask(replica, part, actor)
        return found

    def silent(self, for_s: float) -> dict[RolloutReplica, str]:
        """Those one of whose servers has not answered for so long; a worker is silent whenever it works."""
        now = time.monotonic()
        return {
            replica: f"its server has not answered for {now - since:.0f} s"
            for (replica, part, _), (_, since) in self._asked.items()
            if part == "server" and now - since >= for_s
        }

    def _ask(self, replica: RolloutReplica, part: str, actor: Any) -> None:
        question = engine_died if part == "server" else _nothing
        self._asked[replica, part, actor] = (actor.__ray_call__.remote(question), time.monotonic())


def _nothing(_: Any) -> bool:
    """Runs in a worker's process: whether it lives shows in whether this answers."""
    return False


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
    except RayError:
        return True
    return False


def _forget_server(worker: Any) -> None:
    """Runs in a worker's process: verl's `ServerAdapter` looks its server up once, by name."""
    for part in (worker, *getattr(worker, "worker_dict", {}).values()):
        for name in ("rollout", "server_adapter"):
            adapter = getattr(part, name, None)
            if adapter is not None and hasattr(adapter, "server_handle"):
                adapter.server_handle = None
