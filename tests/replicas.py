"""verl's side of the slices, without Ray: replicas, their servers' manager, the checkpoint engine and the router.

Calls of actors are done at once, so `ray.get` has only to give back what it is given: patch it with `given`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

from seamless_verl.verl_adapter.weights.rolling_weights import RollingWeights

Switch = Callable[[str, str], None]


def _at_once(address: str, what: str) -> None:
    """Nothing takes time."""


class FakeReplica:
    """In place of `RolloutReplica`: notes what it was told.

    Args:
        takes: called before each thing it is told to do, with its address and the thing's name.
    """

    def __init__(self, address: str, takes: Switch = _at_once) -> None:
        self.server_address, self.server_handle = address, f"server of {address}"
        self.replica_rank, self.rollout_mode, self.servers = 0, None, []
        self.told: list[str] = []
        self._takes = takes

    async def _do(self, what: str) -> None:
        self._takes(self.server_address, what)
        self.told.append(what)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        await self._do("abort")

    async def resume_generation(self) -> None:
        await self._do("resume")

    async def sleep(self) -> None:
        await self._do("sleep")


class FakeWeights:
    """In place of `CheckpointEngineManager`."""

    def __init__(self, replicas: list[FakeReplica], takes: Switch = _at_once) -> None:
        self.replicas, self.versions = replicas, list[int]()
        self._takes = takes

    def update_weights(self, version: int) -> dict[str, Any]:
        self._takes("", "weights")
        self.versions.append(version)
        return {}

    def add_replicas(self, replicas: list[FakeReplica]) -> None:
        self.replicas += replicas

    def remove_replicas(self, replicas: list[FakeReplica]) -> None:
        self.replicas = [replica for replica in self.replicas if replica not in replicas]


class FakeStore(RollingWeights):
    """Without a thread and a folder; ``refuses``: addresses of replicas that cannot take what is published."""

    def __init__(self) -> None:
        self.published: list[int] = []
        self.woken: list[tuple[str, int]] = []
        self.refuses: dict[str, Exception] = {}

    def publish(self, version: int) -> None:
        self.published.append(version)

    def wake(self, replicas: list[FakeReplica], version: int) -> dict[FakeReplica, Exception]:
        refused = {each: self.refuses[each.server_address] for each in replicas if each.server_address in self.refuses}
        self.woken += [(replica.server_address, version) for replica in replicas if replica not in refused]
        return refused


class FakeRouter:
    """In place of the load balancer's actor; ``on_it``: addresses of servers."""

    def __init__(self) -> None:
        self.on_it: set[str] = set()
        self.evened: list[set[str]] = []  # who was on it each time
        self.even_out = SimpleNamespace(remote=lambda: self.evened.append(set(self.on_it)))
        self.outlasting: frozenset[str] = frozenset()
        self.add_servers = SimpleNamespace(remote=lambda servers: self.on_it.update(servers))
        self.remove_servers = SimpleNamespace(remote=self.on_it.difference_update)
        self.clear_sticky_cache = SimpleNamespace(remote=lambda: None)
        self.set_horizon = SimpleNamespace(remote=self._set_horizon)

    def _set_horizon(self, addresses: list[str], outlasting: frozenset[str]) -> None:
        self.outlasting = outlasting


def fake_slices(
    hybrid: list[str], standing: list[str], takes: Switch = _at_once, store: FakeStore | None = None
) -> tuple[Any, FakeRouter]:
    """Our `ReplicaSlices` on fakes of verl's parts; a slice's server has the slice's name as its address."""
    from seamless_verl.verl_adapter.slices.replica_slices import ReplicaSlices

    router = FakeRouter()

    def manager(names: list[str]) -> tuple[Any, FakeWeights]:
        replicas = [FakeReplica(name, takes) for name in names]
        servers = SimpleNamespace(get_replicas=lambda: replicas, global_load_balancer=router)
        return servers, FakeWeights(list(replicas), takes)

    (hybrid_servers, hybrid_weights), (standing_servers, standing_weights) = manager(hybrid), manager(standing)
    router.on_it.update(hybrid, standing)
    made = ReplicaSlices(
        hybrid=hybrid,
        standing=standing,
        hybrid_servers=hybrid_servers,
        standing_servers=standing_servers,
        hybrid_weights=hybrid_weights,
        standing_weights=store or standing_weights,
        published_weights=nullcontext,
    )
    return made, router


def given() -> AbstractContextManager[Any]:
    """While it lasts, `ray.get` in our slices gives back what the fakes answered."""
    from seamless_verl.verl_adapter.slices import replica_slices

    return mock.patch.object(replica_slices.ray, "get", lambda answer: answer)
