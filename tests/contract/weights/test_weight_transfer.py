"""Transfers in which a part of a replica dies, with verl's manager, nccl engine (over gloo) and bucket transfer.

Two workers of the trainer and two replicas, in processes of a real Ray cluster; only the model and vLLM are missing.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")
import ray

from seamless_verl.run.restarts import Exit, exit_of

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def test_the_engine_is_verls_own_line_for_line() -> None:
    from benchmarks import nccl_over_gloo

    engine = nccl_over_gloo.NcclOverGlooEngine
    source = Path(inspect.getsourcefile(engine.init_process_group) or "")
    assert source.parts[-3:] == ("verl", "checkpoint_engine", "nccl_checkpoint_engine.py")
    assert vars(engine).keys() <= {"__module__", "__doc__", "__abstractmethods__", "_abc_impl"}, "nothing is overridden"
    signature = inspect.signature(engine.__init__).parameters
    assert signature["rebuild_group"].default is False
    promises = inspect.getsource(engine.init_process_group)
    assert "assert self.rank == rank" in promises
    assert "assert self.world_size == world_size" in promises


class Fleet:
    def __init__(self, folder: str) -> None:
        from tests.transfers import Replica, Trainers

        self.trainers = Trainers(2)
        self.replicas = [Replica(rank, f"ipc://{folder}/replica-{rank}") for rank in range(2)]
        parts = [part for replica in self.replicas for part in (replica.engine, *replica.workers)]
        # With a limit of its own: what pytest-timeout raises while Ray waits is lost in Ray's C++.
        ray.get([part.__ray_ready__.remote() for part in (*self.trainers.workers, *parts)], timeout=240)
        self.manager = self.managed()
        self.version = 0

    def managed(self) -> Any:
        from seamless_verl.verl_adapter.weights.weight_transfer import GuardedCheckpointManager

        config = SimpleNamespace(backend="nccl_over_gloo", custom_backend_module="benchmarks.nccl_over_gloo")
        return GuardedCheckpointManager(config=config, actor_wg=self.trainers, replicas=list(self.replicas))

    def publish(self) -> None:
        self.version += 1
        self.manager.update_weights(self.version)

    def holds(self, replica: Any) -> int | None:
        """The version that all its layers are of."""
        from tests.transfers import LAYERS

        loaded, _ = ray.get(replica.engine.state.remote())
        versions = {(value - int(name.rpartition("-")[2])) / 100 for name, value in loaded.items()}
        return int(versions.pop()) if len(loaded) == LAYERS and len(versions) == 1 else None


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    environment = {"VERL_PLATFORM": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    before = {key: os.environ.get(key) for key in environment}
    os.environ.update(environment)
    ray.init("local", num_cpus=4, include_dashboard=False, runtime_env={"env_vars": environment})
    yield Fleet(str(tmp_path_factory.mktemp("sockets")))
    ray.shutdown()
    for key, value in before.items():
        os.environ.pop(key) if value is None else os.environ.update({key: value})


@pytest.fixture(autouse=True)
def _whole(request: pytest.FixtureRequest) -> None:
    """Every test begins with two replicas that took weights, whoever died in the one before."""
    if "fleet" in request.fixturenames:
        fleet: Fleet = request.getfixturevalue("fleet")
        fleet.publish()
        assert [fleet.holds(replica) for replica in fleet.replicas] == [fleet.version] * 2


def _leave_out_and_go_on(fleet: Fleet, lost: Any, *, worker_too: bool = False) -> None:
    """What the driver of slices does: without it, then with it in another place."""
    (other,) = [replica for replica in fleet.replicas if replica is not lost]
    fleet.manager.remove_replicas([lost])
    fleet.publish()
    assert fleet.holds(other) == fleet.version
    ray.kill(lost.engine)
    lost.start_engine()
    if worker_too:
        ray.kill(lost.workers[0])
        lost.start_worker()
    else:
        ray.get(lost.workers[0].set.remote(_engine=lost.engine, dies_at=None))
    fleet.manager.add_replicas([lost])
    fleet.publish()
    assert [fleet.holds(replica) for replica in fleet.replicas] == [fleet.version] * 2


def _broken(fleet: Fleet, lost: Any, within_s: float) -> Any:
    from seamless_verl.verl_adapter.weights.weight_transfer import TransferBroken

    began = time.monotonic()
    with pytest.raises(TransferBroken, match=f"rollout replica {lost.replica_rank}") as broken:
        fleet.publish()
    assert set(broken.value.dead) == {lost}
    assert exit_of(broken.value) is Exit.DIED, "before the first step nobody goes on without it: the run starts again"
    assert time.monotonic() - began < within_s
    return broken.value


def test_no_bucket_stays_in_a_pool_that_engines_cannot_use(fleet: Fleet) -> None:
    """On a GPU cupy keeps what verl's engine frees, on the card that a replica of the trainer wakes on."""
    made, kept = ray.get(fleet.trainers.workers[0].__ray_call__.remote(_buckets_of_the_master))
    assert made > 0
    assert kept == 0


def _has_buckets(worker: Any) -> bool:
    from benchmarks import nccl_over_gloo

    engine = worker.checkpoint_engine
    kept = nccl_over_gloo.cupy.get_default_memory_pool().total_bytes()
    return kept > 0 or engine.send_buf is not None or engine.recv_buf is not None


def _buckets_of_the_master(_: Any) -> tuple[int, int]:
    """Bytes that verl's engine would leave behind, and that the last transfer has left."""
    from benchmarks import nccl_over_gloo

    pool = nccl_over_gloo.cupy.get_default_memory_pool()
    kept = pool.total_bytes()
    engine = nccl_over_gloo.NcclOverGlooEngine(bucket_size=1 << 20, is_master=True)
    engine.rank = 0
    engine.prepare()
    engine.finalize()
    made = pool.total_bytes() - kept
    pool.free_all_blocks()
    return made, kept


def test_killed_before_a_transfer_the_others_take_weights_and_it_comes_back(fleet: Fleet) -> None:
    lost = fleet.replicas[0]  # ranks of those behind it shift
    ray.kill(lost.engine)
    _broken(fleet, lost, 5)
    _leave_out_and_go_on(fleet, lost)


@pytest.mark.parametrize("how", ["fails_at", "stops_at"])
def test_an_engine_killed_in_a_transfer_costs_nobody_else_anything(fleet: Fleet, how: str) -> None:
    lost, other = fleet.replicas
    ray.get(lost.engine.set.remote(**{how: 5}))
    _broken(fleet, lost, 30)
    assert fleet.holds(other) == fleet.version
    assert ray.get(other.engine.state.remote())[1] == []
    _leave_out_and_go_on(fleet, lost)


def test_a_worker_killed_in_a_transfer_lets_peers_that_wait_for_it_go(fleet: Fleet) -> None:
    lost, other = fleet.replicas
    ray.get(lost.workers[0].set.remote(dies_at=5))
    _broken(fleet, lost, 45)
    left = (*fleet.trainers.workers, *other.workers)
    assert ray.get([worker.__ray_call__.remote(_has_buckets) for worker in left]) == [False] * 3
    _leave_out_and_go_on(fleet, lost, worker_too=True)
    assert fleet.holds(other) == fleet.version


def test_nothing_is_published_before_everybody_listens(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl announces each bucket over PUB/SUB, where what comes before a subscription does is lost without a word."""
    monkeypatch.setattr("seamless_verl.verl_adapter.weights.weight_transfer._LIMIT_S", 15.0)
    late = fleet.replicas[1].workers[0]
    ray.get(late.set.remote(connects_after_s=1.0))
    fleet.publish()
    assert [fleet.holds(replica) for replica in fleet.replicas] == [fleet.version] * 2
    ray.get(late.set.remote(connects_after_s=0.0))


def test_a_peer_that_is_not_let_go_waits_for_ever(fleet: Fleet) -> None:
    """What the guard is for: verl's manager alone."""
    from verl.checkpoint_engine import CheckpointEngineManager

    lost = fleet.replicas[1]
    ray.get(lost.workers[0].set.remote(dies_at=5))
    with pytest.raises(ray.exceptions.RayActorError):
        CheckpointEngineManager.update_weights(fleet.manager, fleet.version)
    assert ray.wait(fleet.trainers.sending, timeout=8)[0] == []
    for actor in (*fleet.trainers.workers, *(worker for replica in fleet.replicas for worker in replica.workers)):
        ray.kill(actor)
