"""verl's rollout replicas as slices: the router, the weights and the memory of chosen ones, in the trainer's process.

    lend     on the router (requests queue there), weights in, awake                  hybrid replicas, chosen ones
    sync     weights published: interrupts and resumes every standing replica         verl's checkpoint engine
             the same, while each goes on until it pulls in its turn                  `RollingWeights`
    drain    off the router; interrupt with tokens kept; memory back to the trainer   hybrid replicas, chosen ones

verl's transfer into hybrid replicas is collective over the trainer's workers, so lending a part of them loads the
weights into all and puts the others to sleep again; where weights are published to be pulled (`RollingWeights`),
each lent replica takes them by itself. Except for restarts, calls return when they are done: the trainer has nothing
else to do meanwhile, its gang is released, or it waits for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from verl.checkpoint_engine import CheckpointEngineManager
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutReplica

from seamless_verl.scheduling.slices import SliceId
from seamless_verl.verl_adapter.slices.deaths import ReplicaHealth, end_replicas, restart_replica, story_of
from seamless_verl.verl_adapter.slices.standing import tell_cache_sizes
from seamless_verl.verl_adapter.weights.rolling_weights import RollingWeights
from seamless_verl.verl_adapter.weights.weight_checks import WeightChecks
from seamless_verl.verl_adapter.weights.weight_transfer import TransferBroken

_PROBE_S = 10.0
_ANSWER_S = 100.0  # for an engine to end its requests, to sleep, or to go on; the scheduler waits for 120


class ReplicaSlices:
    """verl's replicas by slice.

    Args:
        hybrid: slices that live on the trainer's GPUs, in the order of their replicas.
        standing: slices of the standalone replicas, in order.
        standing_weights: `RollingWeights` hold the published weights in a store; lent replicas take them from there,
            whatever the trainer's workers hold.
        published_weights: within it the trainer's workers hold the weights that were published last; without a store.
        checks: compare the weights of slices that wake with those that were published; None: no comparison.
    """

    def __init__(
        self,
        *,
        hybrid: Sequence[SliceId],
        standing: Sequence[SliceId],
        hybrid_servers: LLMServerManager,
        standing_servers: LLMServerManager,
        hybrid_weights: CheckpointEngineManager,
        standing_weights: CheckpointEngineManager | RollingWeights,
        published_weights: Callable[[], AbstractContextManager[None]],
        checks: WeightChecks | None = None,
    ) -> None:
        self._hybrid = dict(zip(hybrid, hybrid_servers.get_replicas(), strict=True))
        self._standing = dict(zip(standing, standing_servers.get_replicas(), strict=True))
        self._replicas: dict[SliceId, RolloutReplica] = {**self._hybrid, **self._standing}
        self.addresses = {slice_id: replica.server_address for slice_id, replica in self._replicas.items()}
        self._router = standing_servers.global_load_balancer
        self._hybrid_weights = hybrid_weights
        self._standing_weights = standing_weights
        self._store = standing_weights if isinstance(standing_weights, RollingWeights) else None
        self._published_weights = published_weights if self._store is None else nullcontext
        self._checks = checks
        self._given_up: dict[SliceId, str] = {}  # until they are back: why, as it was known first
        self.sync_metrics: dict[str, Any] = {}

    def is_hybrid(self, slice_id: SliceId) -> bool:
        return slice_id in self._hybrid

    def register(self, slices: Sequence[SliceId]) -> None:
        """Put slices on the router. Ours keeps conversations where their prefix is cached, as far as that pays; one of
        the user's own is told to spread them anew, as verl does it."""
        ray.get(self._router.add_servers.remote({self.addresses[s]: self._replicas[s].server_handle for s in slices}))
        if not hasattr(self._router, "even_out"):
            self.forget_routes()

    def forget_routes(self) -> None:
        """Have the router spread conversations anew."""
        ray.get(self._router.clear_sticky_cache.remote())

    def forget_caches(self) -> None:
        """New weights are about to empty every cache; those of replicas that pull are valid until their turn has come,
        and conversations stay with them."""
        if self._store is None:
            self.forget_routes()

    def even_out(self) -> None:
        """Slices that are on the router and have no requests are awake: let them have some that run elsewhere."""
        if hasattr(self._router, "even_out"):
            ray.get(self._router.even_out.remote())

    def set_horizon(self, slices: Sequence[SliceId], outlasting: frozenset[str]) -> None:
        """Tell our router which sessions will outlast the loan of these slices; one of the user's own is left alone."""
        advise = getattr(self._router, "set_horizon", None)
        if advise is not None:
            advise.remote([self.addresses[s] for s in slices], outlasting)

    def unregister(self, slices: Sequence[SliceId]) -> None:
        ray.get(self._router.remove_servers.remote([self.addresses[s] for s in slices]))

    def hold(self, slices: Sequence[SliceId]) -> None:
        """Requests that come before `wake` has ended wait for it, instead of being sent away."""
        _together([self._replicas[s].abort_all_requests() for s in slices])

    def wake(self, slices: Sequence[SliceId], version: int, serving: Collection[SliceId]) -> dict[SliceId, RayError]:
        """Weights of ``version`` into ``slices``, which generate then; those neither among them nor ``serving`` sleep.

        Returns:
            The slices that could not take them by themselves; the others generate.

        Raises:
            RayError, TransferBroken: all that were woken sleep, but for those that are `dead` and those that serve.
        """
        try:
            if self._store is not None:
                named = {self._replicas[s]: s for s in slices}
                failed = {named[replica]: error for replica, error in self._store.wake(list(named), version).items()}
                awake, asleep = [s for s in slices if s not in failed], []
            else:
                with self._published_weights(), self._noting_deaths():
                    self._hybrid_weights.update_weights(version)
                failed, awake, busy = {}, list(slices), {*slices, *serving}
                asleep = [replica.sleep() for s, replica in self._hybrid.items() if s not in busy]
            self.check(awake, version)
            _together([self._replicas[s].resume_generation() for s in awake] + asleep)
            return failed
        except (RayError, TransferBroken):  # verl wakes all, and the trainer may get its GPUs next
            woken = set(self._hybrid) if self._store is None else set(slices)
            self._given_up |= (dead := self.dead(woken))
            self.interrupt(list(woken - dead.keys() - set(serving)))
            raise

    def publish(self, version: int) -> None:
        """Called when the trainer's workers hold this version, of which all following loans are."""
        self.sync_metrics = {}
        if self._store is not None:
            self._store.publish(version)
        if self._checks is not None:
            self._checks.publish(version)

    def check(self, slices: Sequence[SliceId], version: int) -> None:
        """Compare the weights of awake slices with the published ones.

        Raises:
            WeightsDiffer: they are not those of ``version``.
        """
        if self._checks is not None:
            self._checks.compare(version, {s: self._replicas[s] for s in slices})

    def interrupt(self, slices: Sequence[SliceId]) -> dict[SliceId, RayError]:
        """Requests end with the tokens they have and continue elsewhere; then the memory is the trainer's.

        Returns:
            The slices whose replica could not do so, most likely since it died. It is ended then: the trainer may get
            its GPUs next.
        """

        async def all_of_them() -> list[BaseException | None]:
            handing_back = (_answered(_hand_back(self._replicas[s])) for s in slices)
            return await asyncio.gather(*handing_back, return_exceptions=True)

        failed: dict[SliceId, RayError] = {}
        for slice_id, error in zip(slices, asyncio.run(all_of_them()), strict=True):
            if isinstance(error, RayError):
                failed[slice_id] = error
            elif error is not None:
                raise error
        if failed:
            self._given_up |= {s: story_of(error) for s, error in failed.items()} | self.dead(failed)
            end_replicas([self._replicas[s] for s in failed])
        return failed

    def sync(self, version: int) -> None:
        """New weights for all standing replicas. verl's engine loads them together: requests are interrupted, and go
        on. `RollingWeights` publishes them, to be pulled in turn, and waits only for replicas that have none."""
        if self._standing_weights.replicas:
            with self._published_weights(), self._noting_deaths():
                self.sync_metrics = dict(self._standing_weights.update_weights(version) or {})

    # ---------------------------------------------------------------- replicas that die

    @contextmanager
    def _noting_deaths(self) -> Iterator[None]:
        try:
            yield
        except TransferBroken as broken:
            named = {replica: slice_id for slice_id, replica in self._replicas.items()}
            self._given_up |= {named[replica]: reason for replica, reason in broken.dead.items()}
            raise

    def dead(self, slices: Iterable[SliceId]) -> dict[SliceId, str]:
        """Slices whose server, engine or worker died or has not answered for ten seconds, and why."""
        asked = {self._replicas[s]: s for s in slices}
        health = ReplicaHealth(list(asked))
        found = health.deaths(_PROBE_S) | health.silent(_PROBE_S)
        known = {s: reason for s, reason in self._given_up.items() if s in asked.values()}
        return {asked[replica]: reason for replica, reason in found.items()} | known

    def leave_out(self, slices: Collection[SliceId]) -> None:
        """Take slices off the router, and those that stand alone out of weight transfers. The others are ended: the
        trainer may get their GPUs next, and requests that wait at their gates go elsewhere."""
        self.unregister(list(slices))
        self._given_up |= dict.fromkeys(set(slices) - self._given_up.keys(), "it is out")
        end_replicas([replica for s, replica in self._hybrid.items() if s in slices])
        self._standing_weights.remove_replicas([replica for s, replica in self._standing.items() if s in slices])

    def take_in(self, slices: Sequence[SliceId]) -> None:
        """Standing replicas that came back take part in the next `sync`."""
        new = [self._standing[s] for s in slices if self._standing[s] not in self._standing_weights.replicas]
        self._standing_weights.add_replicas(new)

    def restart(self, slice_id: SliceId) -> Future[None]:
        """Start the servers of a replica anew; those on the trainer's GPUs need them to be free until it is done.

        All restarts go on side by side: the scheduler's patience begins when it orders one.
        """
        restarted: Future[None] = Future()
        # No pool: the interpreter joins the threads of one, and a run that has ended is not to wait for a replica.
        threading.Thread(target=self._restart, args=(slice_id, restarted), name="restart", daemon=True).start()
        return restarted

    def _restart(self, slice_id: SliceId, restarted: Future[None]) -> None:
        replica = self._replicas[slice_id]
        try:
            restart_replica(replica)
            self._given_up.pop(slice_id, None)
            self.addresses[slice_id] = replica.server_address
            tell_cache_sizes(self._router, {replica.server_address: replica.server_handle})
            restarted.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised where the restart was asked for
            restarted.set_exception(error)


async def _hand_back(replica: RolloutReplica) -> None:
    await replica.abort_all_requests(reject_request=True)
    await replica.sleep()


async def _answered(call: Awaitable[None]) -> None:
    """An engine that hangs without dying would keep the trainer's thread for ever, and every deadline with it."""
    try:
        await asyncio.wait_for(call, _ANSWER_S)
    except asyncio.TimeoutError:
        raise GetTimeoutError(f"its engine has not answered for {_ANSWER_S:.0f} s") from None


def _together(calls: Sequence[Any]) -> None:
    async def gather() -> None:
        await asyncio.gather(*map(_answered, calls))

    asyncio.run(gather())
