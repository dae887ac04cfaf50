"""On two fake nodes of 8 GPUs: trainer and replicas are placed where they should be, or people are told why not."""

import inspect
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from benchmarks import placement as benchmark
from seamless_verl.errors import MachineError

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

HERE = "verl.trainer.ppo.v1"  # to begin with a module of ours is a cycle


@pytest.fixture(scope="module")
def two_nodes():
    pytest.importorskip(HERE)
    with benchmark.nodes(2):
        yield


@pytest.mark.parametrize("shape", ["swe_qwen3_8b", "own_command"])
def test_the_trainer_gets_its_nodes_although_its_data_loads_slowly(two_nodes, shape):
    """Twenty rounds of every shape, also of 32B on four nodes: benchmarks.placement."""
    _, overrides = benchmark.SHAPES[shape]
    config = benchmark.composed(overrides)
    assert [benchmark.as_intended(benchmark.place_once(config), config) for _ in range(2)] == ["", ""]


def reservation(*groups, colocated=1):
    from verl.single_controller.ray.base import RayResourcePool

    from seamless_verl.verl_adapter.slices.resource_pools import Reservation

    pool = RayResourcePool(process_on_nodes=list(groups), max_colocate_count=colocated, name_prefix="t")
    return Reservation(name="trainer", pools=[pool], per_node=max(groups))


def test_gpus_that_somebody_else_holds_are_waited_for_and_then_named(two_nodes):
    from ray.util.placement_group import placement_group, remove_placement_group

    from seamless_verl.verl_adapter.slices.resource_pools import place

    others = [placement_group([{"GPU": 5}], strategy="STRICT_PACK") for _ in range(2)]
    assert all(group.wait(30) for group in others)
    told = []
    with pytest.raises(MachineError, match=r"others held the GPUs for 2 s; asked for trainer: 1 x 8 GPUs on one node"):
        place([reservation(8)], limit_s=2.0, say=told.append)
    assert len(told) == 1
    assert told[0].count(" 3 GPUs") == 2, "what each node has free"
    for group in others:
        remove_placement_group(group)
    place([reservation(8)], limit_s=30.0, say=told.append)
    benchmark.give_back(set())


def test_what_no_node_can_hold_is_refused_at_once(two_nodes):
    from seamless_verl.verl_adapter.slices.resource_pools import place

    with pytest.raises(MachineError, match="even on empty nodes.*1 x 9 GPUs"):
        place([reservation(9)])
    with pytest.raises(MachineError, match="20 CPUs per GPU.*more CPUs"):
        place([reservation(8, colocated=20)])


def test_what_we_repeat_of_verl_is_still_there():
    """We make verl's groups and start its standalone replicas; remove what repeats verl's code when this changes."""
    from verl.single_controller.ray.base import RayResourcePool
    from verl.workers.rollout.replica import RolloutReplica

    groups = inspect.getsource(RayResourcePool.get_placement_groups)
    assert 'bundle = {"CPU": self.max_colocate_count}' in groups
    assert "bundle[device_name] = 1\n" in groups
    assert "bundle[self.accelerator_type] = 1e-4" in groups
    start = inspect.getsource(RolloutReplica.init_standalone)
    assert "max_colocate_count=2" in start
    assert "resource_pool_name: [self.gpus_per_replica_node] * self.nnodes" in start
    assert 'name_prefix = f"rollout_standalone_{self.replica_rank}{self.name_suffix}"' in start
    assert start.rstrip().endswith("self.workers = worker_group.workers\n        await self.launch_servers()")


def test_the_sweep_reaches_the_nodes_of_a_joined_cluster(two_nodes, alone_in_shared_memory, monkeypatch, tmp_path):
    """An engine that lost its server there, the shared memory of a killed rank, and nothing of anybody else's."""
    import ray

    from seamless_verl.machine import APART
    from seamless_verl.run.supervisor import RUN_ID
    from seamless_verl.verl_adapter import far_sweep
    from seamless_verl.verl_adapter.far_sweep import sweep_nodes

    asked, on = [], far_sweep.NodeAffinitySchedulingStrategy
    monkeypatch.setattr(
        far_sweep, "NodeAffinitySchedulingStrategy", lambda node, soft: asked.append(node) or on(node, soft=soft)
    )
    run_id, since = uuid.uuid4().hex, time.time() - 1.0
    segment = Path("/dev/shm", f"nccl-{run_id[:6]}")
    segment.write_bytes(b"left")
    (journal := tmp_path / f"{APART}{run_id}" / "agent_loop_worker_0").mkdir(parents=True)
    program = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]
    with (
        subprocess.Popen(program, env={**os.environ, RUN_ID: run_id}, stdout=subprocess.PIPE) as engine,
        subprocess.Popen(program, env={**os.environ, RUN_ID: "another"}, stdout=subprocess.PIPE) as others,
    ):
        for process in (engine, others):
            process.stdout.readline()
        assert sweep_nodes(run_id, since, str(tmp_path)) == {}
        assert sorted(asked) == sorted(node["NodeID"] for node in ray.nodes()), "this one, too: it may hide processes"
        assert engine.wait(timeout=30) == -signal.SIGTERM
        assert others.poll() is None
        others.kill()
    assert not segment.exists()
    assert not journal.parent.exists()
