"""verl's rollout replicas as slices: the router, the weights and the memory of chosen ones, in the trainer's process.

    lend     on the router (requests queue there), weights in, awake                  hybrid replicas, chosen ones
    sync     weights published: interrupts and resumes every standing replica         verl's checkpoint engine
    drain    off the router; interrupt with tokens kept; memory back to the trainer   hybrid replicas, chosen ones

verl's transfer into hybrid replicas is collective over the trainer's workers, so lending a part of them loads the
weights into all and puts the others to sleep again. Except for restarts, calls return when they are done: the trainer
has nothing else to do meanwhile, its gang is released, or it waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import ray
from ray.exceptions import RayError
from verl.checkpoint_engine import CheckpointEngineManager
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutReplica

from seamless_verl.scheduling.slices import SliceId

_PROBE_S = 10.0


class ReplicaSlices:
    """verl's replicas by slice.

    Args:
        hybrid: slices that live on the trainer's GPUs, in the order of their replicas.
        standing: slices of the standalone replicas, in order.
        published_weights: within it the trainer's workers hold the weights that were published last.
    """

    def __init__(
        self,
        hybrid: Sequence[SliceId],
        standing: Sequence[SliceId],
        hybrid_servers: LLMServerManager,
        standing_servers: LLMServerManager,
        hybrid_weights: CheckpointEngineManager,
        standing_weights: CheckpointEngineManager,
        published_weights: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._hybrid = dict(zip(hybrid, hybrid_servers.get_replicas(), strict=True))
        self._standing = dict(zip(standing, standing_servers.get_replicas(), strict=True))
        self._replicas: dict[SliceId, RolloutReplica] = {**self._hybrid, **self._standing}
        self.addresses = {slice_id: replica.server_address for slice_id, replica in self._replicas.items()}
        self._router = standing_servers.global_load_balancer
        self._hybrid_weights = hybrid_weights
        self._standing_weights = standing_weights
        self._published_weights = published_weights
        self._restarts = ThreadPoolExecutor(1, thread_name_prefix="restart")
        self.sync_metrics: dict[str, Any] = {}

    def is_hybrid(self, slice_id: SliceId) -> bool:
        return slice_id in self._hybrid

    def register(self, slices: Sequence[SliceId]) -> None:
        """On the router; sticky conversations are spread anew."""
        ray.get(
            self._router.add_servers.remote({self.addresses[s]: self._replicas[s].server_handle for s in slices}),
        )
        ray.get(self._router.clear_sticky_cache.remote())

    def set_horizon(self, slices: Sequence[SliceId], outlasting: frozenset[str]) -> None:
        """Advice for requests that come from now on; a router of the user's own takes none."""
        advise = getattr(self._router, "set_horizon", None)
        if advise is not None:
            advise.remote([self.addresses[s] for s in slices], outlasting)

    def unregister(self, slices: Sequence[SliceId]) -> None:
        ray.get(self._router.remove_servers.remote([self.addresses[s] for s in slices]))

    def hold(self, slices: Sequence[SliceId]) -> None:
        """Requests that come before `wake` has ended wait for it, instead of being sent away."""
        _together([self._replicas[s].abort_all_requests() for s in slices])

    def wake(self, slices: Sequence[SliceId], version: int, serving: Iterable[SliceId]) -> None:
        """Weights of ``version`` into all hybrid replicas; ``slices`` generate, those not ``serving`` sleep again."""
        with self._published_weights():
            self._hybrid_weights.update_weights(version)
        busy = {*slices, *serving}
        asleep = [replica.sleep() for s, replica in self._hybrid.items() if s not in busy]
        _together([self._replicas[s].resume_generation() for s in slices] + asleep)

    def interrupt(self, slices: Sequence[SliceId]) -> dict[SliceId, RayError]:
        """Requests end with the tokens they have and continue elsewhere; then the memory is the trainer's.

        Returns:
            The slices whose replica could not do so, most likely since it died; the others have.
        """

        async def all_of_them() -> list[BaseException | None]:
            return await asyncio.gather(*(_hand_back(self._replicas[s]) for s in slices), return_exceptions=True)

        failed: dict[SliceId, RayError] = {}
        for slice_id, error in zip(slices, asyncio.run(all_of_them()), strict=True):
            if isinstance(error, RayError):
                failed[slice_id] = error
            elif error is not None:
                raise error
        return failed

    def sync(self, version: int) -> None:
        """New weights into all standing replicas; their requests are interrupted, and go on."""
        if self._standing_weights.replicas:
            with self._published_weights():
                self.sync_metrics = dict(self._standing_weights.update_weights(version) or {})

    # ---------------------------------------------------------------- replicas that die

    def dead(self, slices: Iterable[SliceId]) -> dict[SliceId, str]:
        """Those whose server, or the engine behind it, does not live; why."""
        asked = {s: [server.__ray_call__.remote(_engine_died) for server in self._replicas[s].servers] for s in slices}
        calls = [call for calls in asked.values() for call in calls]
        ray.wait(calls, num_returns=len(calls), timeout=_PROBE_S)
        found: dict[SliceId, str] = {}
        for slice_id, answers in asked.items():
            try:
                if any(ray.get(answers, timeout=0)):
                    found[slice_id] = "its engine process died"
            except RayError as error:
                found[slice_id] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        return found

    def leave_out(self, slice_id: SliceId) -> None:
        """Off the router, and no weights for it any more."""
        self.unregister([slice_id])
        if not self.is_hybrid(slice_id):
            self._standing_weights.remove_replicas([self._standing[slice_id]])

    def take_in(self, slices: Sequence[SliceId]) -> None:
        """Standing replicas that came back get weights at the next `sync`."""
        new = [self._standing[s] for s in slices if self._standing[s] not in self._standing_weights.replicas]
        self._standing_weights.add_replicas(new)

    def restart(self, slice_id: SliceId) -> Future[None]:
        """Start the servers of a replica anew, beside whatever the trainer does."""
        return self._restarts.submit(self._restart, slice_id)

    def _restart(self, slice_id: SliceId) -> None:
        """verl 0.9.1 starts a replica's servers once; this starts them again under the same names. Remove when a
        replica can restart itself.
        """
        replica = self._replicas[slice_id]
        for server in replica.servers:
            ray.kill(server)
        gone = [server.__ray_ready__.remote() for server in replica.servers]
        ray.wait(gone, num_returns=len(gone), timeout=_PROBE_S)  # their names are free when these calls have failed
        replica.servers = []
        _together([replica.launch_servers()])
        if self.is_hybrid(slice_id):
            _together([replica.sleep()])
        ray.get([worker.__ray_call__.remote(_forget_server) for worker in replica.workers])
        self.addresses[slice_id] = replica.server_address


def _engine_died(server: Any) -> bool:
    """Runs in the server's process; engines that do not say are taken to live."""
    return bool(getattr(getattr(server, "engine", None), "errored", False))


def _forget_server(worker: Any) -> None:
    """Runs in a worker's process: verl's `ServerAdapter` looks its server up once, by name."""
    for part in (worker, *getattr(worker, "worker_dict", {}).values()):
        for name in ("rollout", "server_adapter"):
            adapter = getattr(part, name, None)
            if hasattr(adapter, "server_handle"):
                adapter.server_handle = None


async def _hand_back(replica: RolloutReplica) -> None:
    await replica.abort_all_requests(reject_request=True)
    await replica.sleep()


def _together(calls: Sequence[Any]) -> None:
    async def gather() -> None:
        await asyncio.gather(*calls)

    asyncio.run(gather())
