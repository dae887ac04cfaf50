"""Are trainer and replicas placed on the intended nodes while a data set loads, every time?

Fake nodes of 8 GPUs (`ray.cluster_utils`), the shipped recipes, and README's own-command example. What runs is the
trainer's and verl's own initialization as far as the placement groups of trainer and standalone replicas: loading the
tokenizer takes no time, the data set takes ``SLOW_S``, and a worker group asks for its placement groups and starts
nobody. Intended: the trainer's groups on ``trainer.nnodes`` nodes, whole; the replicas on
``actor_rollout_ref.rollout.nnodes`` nodes, each replica on as few as it fits.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from benchmarks.records import Record, arguments, report

SLOW_S = 1.0
_HANGS_S = 30.0
_GPUS, _CPUS = 8, 96
OWN_COMMAND = (
    "trainer.n_gpus_per_node=4",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=4",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.hybrid_engine=false",
)
SHAPES = {
    "swe_qwen3_8b": (2, ("+recipe=swe_qwen3_8b",)),
    "swe_qwen3_32b": (4, ("+recipe=swe_qwen3_32b",)),
    "own_command": (2, OWN_COMMAND),
}


@dataclass
class Placed:
    """Nodes of the groups that were made in one round: of the trainer's, and of each replica's."""

    trainer: list[list[str]] = field(default_factory=list)
    replicas: list[list[list[str]]] = field(default_factory=list)
    problem: str = ""


class _TrainerPlaced(Exception):
    """The end of a round's initialization."""


@contextmanager
def nodes(count: int) -> Iterator[None]:
    """A Ray cluster of fake nodes on this machine, joined."""
    import ray
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="svp-", dir="/tmp")  # Ray's sockets need a short path
    settings = {"num_gpus": _GPUS, "num_cpus": _CPUS, "object_store_memory": 80 << 20, "include_dashboard": False}
    with patch.dict(os.environ, {"TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}):
        os.environ.pop("RAY_ADDRESS", None)
        cluster = Cluster(initialize_head=True, head_node_args=settings)
        try:
            for _ in range(count - 1):
                cluster.add_node(**settings)
            ray.init(address=cluster.address, log_to_driver=False)
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def composed(overrides: Sequence[str], platform: str = "gpu") -> Any:
    """verl's configuration with ours and a recipe, as `seamless_verl.main` composes it."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    from seamless_verl.run import compose

    ours = [f"hydra.searchpath=[file://{compose.our_config_dir()}]", "+seamless=default", f"+platform={platform}"]
    with initialize_config_dir(str(compose.verl_config_dir()), version_base=None):
        return hydra_compose("ppo_trainer", overrides=[*ours, *overrides, "seamless.run_dir=null"])


def place_once(config: Any) -> Placed:
    """One initialization, as far as the placement groups of trainer and replicas; they are given back."""
    import verl.trainer.ppo.v1.trainer_base as trainer_base
    from omegaconf import OmegaConf
    from ray.util.placement_group import placement_group_table
    from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

    from seamless_verl.config import RouterConfig, SeamlessConfig
    from seamless_verl.verl_adapter.slices.resource_pools import adopt_resources
    from seamless_verl.verl_adapter.slices.standing import StandingServers
    from seamless_verl.verl_adapter.trainer.trainer import SeamlessTrainer

    trainer = object.__new__(SeamlessTrainer)
    trainer.config, trainer.resource_pool_manager = config, None
    trainer.seamless = SeamlessConfig.from_mapping(OmegaConf.to_container(config.seamless, resolve=True))
    adopt_resources(config, trainer.seamless)
    trainer._enable_hybrid_replicas = bool(config.actor_rollout_ref.hybrid_engine)
    trainer.standing = StandingServers(config, RouterConfig(), hybrid=trainer._enable_hybrid_replicas)
    trainer.reporter = SimpleNamespace(say=lambda line: print(line, file=sys.stderr))
    trainer.use_critic = trainer.use_reference_policy = trainer.use_teacher_policy = False
    placed = Placed()

    class _Replica(RolloutReplica):
        async def launch_servers(self) -> None:
            """A server would take long to start and changes nothing here."""

    class OfTrainer:
        def __init__(self, resource_pool: Any, **_: Any) -> None:
            placed.trainer = _groups(resource_pool, "STRICT_PACK")
            raise _TrainerPlaced

    class OfReplica:
        def __init__(self, resource_pool: Any, **_: Any) -> None:
            self.workers: list[Any] = []
            placed.replicas.append(_groups(resource_pool, "PACK"))

    before = set(placement_group_table())
    with ExitStack() as stack:
        for module in ("verl.workers.rollout.replica", "seamless_verl.verl_adapter.slices.deaths"):
            if module in sys.modules:
                stack.enter_context(patch(f"{module}.RayWorkerGroup", OfReplica))
        stack.enter_context(patch.object(trainer_base, "RayWorkerGroup", OfTrainer))
        stack.enter_context(patch.object(trainer_base.PPOTrainer, "_init_tokenizer", lambda self: None))
        stack.enter_context(patch.object(trainer_base.PPOTrainer, "_init_dataloader", lambda self: time.sleep(SLOW_S)))
        stack.enter_context(patch.object(trainer_base.PPOTrainer, "_init_dump_executor", lambda self: None))
        stack.enter_context(patch("verl.workers.rollout.llm_server.LLMServerManager._init_global_load_balancer", _none))
        stack.enter_context(patch.object(SeamlessTrainer, "_init_dataloader", lambda self: time.sleep(SLOW_S)))
        RolloutReplicaRegistry.register("vllm", lambda: _Replica)
        placed.problem = _initialize(trainer)
    give_back(before)
    return placed


def _initialize(trainer: Any) -> str:
    """What went wrong: an error, or nothing within ``_HANGS_S``; in a thread, since verl waits without a limit."""
    problems: list[str] = ["hangs"]

    def run() -> None:
        try:
            trainer._setup()
        except _TrainerPlaced:
            problems.clear()
        except Exception as error:  # noqa: BLE001 - it is the round's result
            problems[:] = [f"{type(error).__name__}: {error}"]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_HANGS_S)
    return "; ".join(problems)


async def _none(self: Any) -> None:
    return None


def _groups(pool: Any, strategy: str) -> list[list[str]]:
    from ray.util.placement_group import placement_group_table

    groups = pool.get_placement_groups(strategy=strategy, device_name="cuda")
    return [list(placement_group_table(group)["bundles_to_node_id"].values()) for group in groups]


def give_back(kept: set[str]) -> None:
    """Remove all placement groups but the ``kept``, and wait until the whole cluster sees all GPUs free."""
    import ray
    from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

    for group in set(placement_group_table()) - kept:
        remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group)))
    while ray.available_resources().get("GPU", 0) < ray.cluster_resources()["GPU"]:
        time.sleep(0.05)


def as_intended(placed: Placed, config: Any) -> str:
    """What is wrong; empty: nothing."""
    if placed.problem:
        return placed.problem
    rollout = config.actor_rollout_ref.rollout
    size = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    trainers = [node for group in placed.trainer for node in group]
    split = [group for group in placed.trainer if len(set(group)) > 1]
    if split or len(set(trainers)) != config.trainer.nnodes:
        return f"the trainer is on {len(set(trainers))} nodes, {len(split)} of its groups on several"
    wanted = config.trainer.nnodes * config.trainer.n_gpus_per_node
    replicas = [[node for group in groups for node in group] for groups in placed.replicas]
    count = rollout.nnodes * rollout.n_gpus_per_node // size
    if len(trainers) != wanted or len(replicas) != count:
        return f"{len(trainers)} of {wanted} trainer GPUs, {len(replicas)} of {count} replicas"
    if any(len(set(nodes)) > max(1, size // rollout.n_gpus_per_node) for nodes in replicas):
        return "a replica is spread over nodes"
    used = {node for nodes in replicas for node in nodes}
    return "" if len(used) == rollout.nnodes else f"replicas are on {len(used)} nodes instead of {rollout.nnodes}"


def main() -> int:
    parsed = arguments(__doc__ or "")
    rounds = 1 if parsed.quick else 20
    records = []
    for name, (count, overrides) in SHAPES.items():
        config = composed(overrides)
        right, seconds = 0, []
        with nodes(count):
            for number in range(rounds):
                began = time.monotonic()
                wrong = as_intended(place_once(config), config)
                seconds.append(time.monotonic() - began)
                right += not wrong
                if wrong:
                    print(f"{name} {number}: {wrong}", file=sys.stderr)
                    if wrong == "hangs":
                        break  # its threads go on waiting in this cluster
        bar = f"{rounds} of {rounds}"
        records.append(Record(name=f"placed_{name}", value=right, unit="rounds", bar=bar, holds=right == rounds))
        records.append(Record(name=f"slowest_{name}", value=max(seconds), unit="s"))
    return report(records, parsed.json)


if __name__ == "__main__":
    sys.exit(main())
