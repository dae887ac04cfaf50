"""Transfers of weights that always end: the weights are there, or an error names the replicas that did not get them.

verl 0.9.1 waits for every part of a transfer without a limit. Here each part is watched while it lasts:

    a replica died            its own workers stop waiting for it, the others get their weights      (`_LOOK_S`)
    a peer died, or too slow  the communicator is aborted in every member                            (`_WALK_S` later)
    a member does not return  a worker beside a replica: that replica is lost; one of the trainer's: the run ends

A part is over when all members have returned from it, so none is still in a transfer when the next begins. After a
death, or when a replica comes back, the next transfer makes its group anew (`transfer_members.renew_group`).
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from verl.checkpoint_engine import CheckpointEngineManager
from verl.checkpoint_engine.base import _worker_cls
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.workers.rollout.replica import RolloutReplica

from seamless_verl.run.restarts import RunBroken
from seamless_verl.verl_adapter.slices.deaths import ReplicaHealth
from seamless_verl.verl_adapter.weights import transfer_members as members

_LOOK_S = 2.0
_GREET_S = 0.05
_WALK_S = 10.0  # for the members of a dead replica to walk through the rest of the weights
_SETTLE_S = 15.0  # for members to return from what was given up
_SILENT_S = 30.0  # a server that has not answered for so long will not
_LIMIT_S = float(os.environ.get("SEAMLESS_TRANSFER_LIMIT_S", "600"))  # for a part of a transfer without deaths

Calls = Mapping[Any, Any]  # reference -> the worker that was called


class TransferBroken(RunBroken):
    """Weights did not reach all replicas.

    Args:
        dead: replicas that did not get them, and why; empty if none is known to have died.
        story: what is known where no replica died.
    """

    def __init__(self, version: int | None, dead: Mapping[RolloutReplica, str], story: str) -> None:
        named = "; ".join(f"{name_of(replica)}: {reason}" for replica, reason in dead.items())
        super().__init__(f"weights of version {version} did not reach everybody ({named or story})")
        self.dead = dict(dead)


class TransferStuck(RunBroken):
    """Workers of the trainer did not come back from a transfer that was given up: nothing can be trained any more."""


def name_of(replica: RolloutReplica) -> str:
    return f"rollout replica {replica.replica_rank}"


class GuardedCheckpointManager(CheckpointEngineManager):
    """verl's manager, whose `update_weights` raises instead of waiting for the dead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: list[Any] | None = None  # members of the engine's group, in order of rank
        self._groups = 0  # that were made

    @classmethod
    def in_place_of(cls, manager: CheckpointEngineManager) -> GuardedCheckpointManager:
        return cls(config=manager.config, actor_wg=manager.actor_wg, replicas=manager.replicas)

    def close(self) -> None:
        """Between transfers there is nothing to end."""

    def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """As verl's, step by step; it is written out because verl's waits for each step itself.

        Without replicas nothing happens.

        Raises:
            TransferBroken: a replica died, or nothing moved for too long; the others may be sent to again.
            TransferStuck: a worker of the trainer does not return.
        """
        if not self.replicas:
            return {}
        health = ReplicaHealth(self.replicas)
        in_group = self.backend != "naive"
        with _Transfer(self.actor_wg.workers, self.replicas, health, global_steps) as transfer:
            begun = transfer.begin(in_group)
            dead = health.deaths(_LOOK_S)  # answered beside it: a slice that wakes waits for one round of calls
            if dead:
                raise TransferBroken(global_steps, dead, "")
            transfer.finish(begun)
            if in_group:
                try:
                    return self._send_through_group(transfer, global_steps)
                except TransferBroken:
                    transfer.drop_buckets()
                    raise
            transfer.finish(transfer.calls_of(_send(self.actor_wg, global_steps=global_steps, mode="naive")))
            return {}

    def _send_through_group(self, transfer: _Transfer, version: int | None) -> dict[str, Any]:
        transfer.control(self._pause())
        workers = [worker for replica in self.replicas for worker in replica.workers]
        rollout = RayWorkerGroup(worker_handles=workers, ray_cls_with_init=RayClassWithInitArgs(cls=_worker_cls))
        before, self._group = self._group, None
        if before != transfer.workers:  # somebody came or went, or the last transfer broke
            if self._groups:
                transfer.all(members.renew_group, self._groups)
            self._groups += 1
        everybody = (self.actor_wg, rollout)
        metadata = transfer.finish(transfer.each(everybody, "prepare"))
        trainers = self.actor_wg.world_size
        topology = self.backend_cls.build_topology(trainers, rollout.world_size, metadata)
        transfer.finish(transfer.each(everybody, "init_process_group", topology))
        transfer.meet()
        sending = _send(self.actor_wg, global_steps=version, mode=self.backend)
        results = transfer.finish(transfer.calls_of(sending + _send(rollout, global_steps=version)))
        transfer.finish(transfer.each(everybody, "finalize"))
        transfer.control(self._resume())
        transfer.all(members.give_back)  # while replicas generate again
        self._group = transfer.workers
        return {key: value for each in results[:trainers] if isinstance(each, dict) for key, value in each.items()}

    async def _pause(self) -> None:
        await self.abort_replicas()
        await self.release_kv_cache_replicas()

    async def _resume(self) -> None:
        await self.resume_kv_cache_replicas()
        await self.resume_generation_replicas()


def _send(group: Any, **arguments: Any) -> list[Any]:
    """References of the calls; verl binds the workers' methods to a `RayWorkerGroup` when it is made."""
    calls: list[Any] = group.update_weights(**arguments)
    return calls


class _Transfer:
    """One transfer: calls to all members, and waits that end when a member dies.

    Args:
        trainers: the trainer's workers.
        replicas: those that get the weights.
    """

    def __init__(
        self, trainers: Sequence[Any], replicas: Sequence[RolloutReplica], health: ReplicaHealth, version: int | None
    ) -> None:
        self.id = uuid.uuid4().hex
        self._trainers = list(trainers)
        self._replicas = list(replicas)
        self._health = health
        self._version = version
        self._dead: dict[RolloutReplica, str] = {}
        self._aborted = False
        self._owners: dict[Any, int] = dict.fromkeys(self._trainers, -1)
        for number, replica in enumerate(self._replicas):
            self._owners.update(dict.fromkeys(replica.workers, number))

    def __enter__(self) -> _Transfer:
        self._say()
        return self

    def __exit__(self, *_: object) -> None:
        members.forget(self.id)  # the members' listening threads end then

    @property
    def workers(self) -> list[Any]:
        """All members, in the order of their ranks."""
        return list(self._owners)

    def calls_of(self, references: Sequence[Any]) -> Calls:
        """The calls behind references that went to all members, in order."""
        return dict(zip(references, self.workers, strict=True))

    def each(self, groups: tuple[Any, Any], method: str, arguments: tuple[Any, Any] = ({}, {})) -> Calls:
        """A method of every checkpoint engine."""
        references: list[Any] = []
        for group, own in zip(groups, arguments, strict=True):
            references += group.execute_checkpoint_engine([method] * group.world_size, **own)
        return self.calls_of(references)

    def all(self, function: Any, *arguments: Any) -> None:
        """Run a function in every member's process."""
        self.finish(self._sent(function, *arguments))

    def _sent(self, function: Any, *arguments: Any) -> Calls:
        return {w.__ray_call__.remote(function, *arguments): w for w in self.workers}

    def begin(self, in_group: bool) -> Calls:
        """Have every member listen to what is said of this transfer, and of the replica whose engine it sends to."""
        owners = self._owners.items()
        return {w.__ray_call__.remote(members.begin, self.id, in_group, owner): w for w, owner in owners}

    def meet(self) -> None:
        """Wait until all members hear the trainer's announcements of buckets: ZeroMQ drops those before a subscription.

        verl 0.9.1 does not wait for that (`_connect_zmq_client`, in every transfer), and a member that missed the first
        bucket waits for it for ever. Remove when it does.
        """
        master = self._trainers[0]
        self.finish(self._sent(members.hear), meanwhile=lambda: master.__ray_call__.remote(members.greet, False))
        master.__ray_call__.remote(members.greet, True)
        self.all(members.skip_greetings)

    def control(self, work: Coroutine[Any, Any, None]) -> None:
        """Calls to servers, which answer at once if they live."""
        try:
            asyncio.run(self._control(work))
        except RayError as error:
            dead = self._health.deaths(_LOOK_S)
            raise TransferBroken(self._version, dead, f"{type(error).__name__}: {error}") from error

    async def _control(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        while not (await asyncio.wait([task], timeout=_LOOK_S))[0]:
            dead = self._health.deaths() | self._health.silent(_SILENT_S)
            if dead:
                task.cancel()
                raise TransferBroken(self._version, dead, "")
        task.result()

    def finish(self, calls: Calls, meanwhile: Callable[[], object] | None = None) -> list[Any]:
        """The results of all of them, in order.

        Args:
            meanwhile: done at once, and again before each look.
        """
        began = time.monotonic()
        failed_at = aborted_at = float("inf")
        while len(open_ := self._look(calls, meanwhile)):
            now = time.monotonic()
            found = self._health.silent(_SILENT_S) | self._health.deaths()
            broken = self._broken(calls, open_)
            if found or broken:
                failed_at = min(failed_at, now)
            if found.keys() - self._dead.keys():
                self._dead |= found
                self._say()
            peer_died = any(isinstance(error, RayActorError) for error in broken.values())
            if not self._aborted and (peer_died or now - failed_at >= _WALK_S or now - began >= _LIMIT_S):
                self._aborted, aborted_at = True, now
                self._say()
            if now - aborted_at >= _SETTLE_S:
                break
        broken = self._broken(calls, open_)
        if not broken and not open_ and not self._aborted:
            return ray.get(list(calls))
        self._judge(calls, broken, open_)
        story = "; ".join(f"{type(error).__name__}: {str(error).strip()}" for error in broken.values())
        raise TransferBroken(self._version, self._dead, story or f"given up after {time.monotonic() - began:.0f} s")

    def _look(self, calls: Calls, meanwhile: Callable[[], object] | None) -> list[Any]:
        """The calls that are still open after a while."""
        if meanwhile is not None:
            meanwhile()
        open_: list[Any] = ray.wait(list(calls), num_returns=len(calls), timeout=_GREET_S if meanwhile else _LOOK_S)[1]
        return open_

    def _broken(self, calls: Calls, open_: Sequence[Any]) -> dict[Any, RayError]:
        """The errors of calls that have failed."""
        found = {}
        for call in calls.keys() - set(open_):
            try:
                ray.get(call)
            except RayError as error:
                found[call] = error
        return found

    def _judge(self, calls: Calls, broken: Mapping[Any, RayError], open_: Sequence[Any]) -> None:
        """Note which replicas died.

        Raises:
            TransferStuck: a worker of the trainer died or did not return.
        """
        self._dead |= self._health.deaths(_LOOK_S)
        lost = {calls[call]: "did not come back from a transfer that was given up" for call in open_}
        lost |= {calls[call]: "died" for call, error in broken.items() if isinstance(error, RayActorError)}
        for worker, how in lost.items():
            if worker not in self._trainers:
                self._dead.setdefault(self._replicas[self._owners[worker]], f"its worker {how}")
        named = "; ".join(f"{name_of(replica)}: {reason}" for replica, reason in self._dead.items())
        for rank, worker in enumerate(self._trainers):
            if worker in lost:
                raise TransferStuck(
                    f"trainer worker {rank} {lost[worker]}, version {self._version} "
                    f"({named or 'no replica is known to have died'})"
                )

    def drop_buckets(self) -> None:
        """Have the living members free their buckets: a transfer that broke is not finalized."""
        left = [w for w, owner in self._owners.items() if owner < 0 or self._replicas[owner] not in self._dead]
        ray.wait([w.__ray_call__.remote(members.drop_buckets) for w in left], num_returns=len(left), timeout=_SETTLE_S)

    def _say(self) -> None:
        gone = [number for number, replica in enumerate(self._replicas) if replica in self._dead]
        members.say(self.id, gone=gone, abort=self._aborted)
