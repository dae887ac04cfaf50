"""Resources in a configuration file become slices, or an error that says what to write."""

from __future__ import annotations

from typing import Any

import pytest

from seamless_verl.config import ResourceConfig, SchedulerConfig, SeamlessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.scheduling.declaration import policy_of, slices_of, verl_keys
from seamless_verl.scheduling.policies import Greedy
from seamless_verl.scheduling.prediction.predictive import Predictive
from seamless_verl.scheduling.slices import Tag
from tests.kernel.scheduling.world import BOTH, ROLLOUT, TRAIN


def resources(*entries: dict[str, Any]) -> tuple[ResourceConfig, ...]:
    return SeamlessConfig.from_mapping({"resources": list(entries)}).resources


TRAINERS = {"name": "trainers", "nodes": 2, "gpus_per_node": 8, "capabilities": ["train", "rollout"]}
ROLLOUTS = {"name": "rollouts", "nodes": 1, "gpus_per_node": 8, "capabilities": ["rollout"]}


def test_the_documented_example() -> None:
    slices = slices_of(resources(TRAINERS, ROLLOUTS), replica_gpus=4)
    assert [s.id for s in slices] == [
        "trainers/0",
        "trainers/1",
        "trainers/2",
        "trainers/3",
        "rollouts/0",
        "rollouts/1",
    ]
    assert [s.capabilities for s in slices] == [BOTH] * 4 + [ROLLOUT] * 2
    gpus = [gpu for s in slices for gpu in s.gpus]
    assert len(gpus) == len(set(gpus)) == 24
    assert {gpu.node for gpu in slices[0].gpus} == {"trainers/0"}  # a replica stays on a node


def test_an_entry_without_nodes_counts_as_not_written() -> None:
    """As a recipe's after ``actor_rollout_ref.rollout.nnodes=0``."""
    assert resources(TRAINERS, {**ROLLOUTS, "nodes": 0, "gpus_per_node": 0}) == resources(TRAINERS)


def test_a_replica_may_span_whole_nodes() -> None:
    slices = slices_of(resources(TRAINERS, {**ROLLOUTS, "nodes": 2}), replica_gpus=16)
    assert [len({gpu.node for gpu in s.gpus}) for s in slices] == [2, 2]


def test_only_tags_tell_the_architectures_apart() -> None:
    def tags(*entries: dict[str, Any]) -> list[frozenset[Tag]]:
        return [s.capabilities for s in slices_of(resources(*entries), replica_gpus=8)]

    assert tags(TRAINERS) == [BOTH, BOTH]  # colocated
    assert tags({**TRAINERS, "capabilities": ["train"]}, ROLLOUTS) == [TRAIN, TRAIN, ROLLOUT]  # disaggregated
    assert tags(TRAINERS, ROLLOUTS) == [BOTH, BOTH, ROLLOUT]  # multiplexed


@pytest.mark.parametrize(
    ("entries", "replica_gpus", "key", "says"),
    [
        ([TRAINERS, TRAINERS], 4, "seamless.resources[trainers]", "two owners"),
        ([ROLLOUTS], 4, "seamless.resources", "no entry can train"),
        ([{**TRAINERS, "capabilities": ["train"]}], 4, "seamless.resources", "no entry can rollout"),
        ([TRAINERS, ROLLOUTS], 3, "seamless.resources[trainers].gpus_per_node", "straddle"),
        ([TRAINERS, {**ROLLOUTS, "gpus_per_node": 6}], 4, "seamless.resources[rollouts].gpus_per_node", "straddle"),
        ([TRAINERS, ROLLOUTS], 16, "seamless.resources[rollouts].gpus_per_node", "straddle"),
    ],
)
def test_impossible_declarations_are_refused(
    entries: list[dict[str, Any]], replica_gpus: int, key: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        slices_of(resources(*entries), replica_gpus=replica_gpus)
    assert refused.value.key == key
    assert refused.value.fix


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"resources": [{**TRAINERS, "capabilities": ["trian"]}]}, "seamless.resources[trainers].capabilities"),
        ({"resources": [{**TRAINERS, "capabilities": []}]}, "seamless.resources[trainers].capabilities"),
        ({"resources": [{**TRAINERS, "nodes": -1}]}, "seamless.resources[trainers].nodes"),
        ({"resources": [{**TRAINERS, "nodes": "2"}]}, "seamless.resources[trainers].nodes"),
        ({"resources": [{**TRAINERS, "gpus_per_node": 0}]}, "seamless.resources[trainers].gpus_per_node"),
        ({"resources": [{"name": "a", "nodes": 1, "gpus_per_node": 8}]}, "seamless.resources[0].capabilities"),
        ({"resources": [{**TRAINERS, "tflops": 989}]}, "seamless.resources[trainers].bandwidth_gbs"),
        ({"scheduler": {"policy": "predictiv"}}, "seamless.scheduler.policy"),
        ({"scheduler": {"margin": -1}}, "seamless.scheduler.margin"),
        ({"scheduler": {"max_loans_per_step": 0}}, "seamless.scheduler.max_loans_per_step"),
    ],
)
def test_bad_values_are_refused_with_their_key(section: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        SeamlessConfig.from_mapping(section)
    assert refused.value.key == key


def test_facts_about_the_hardware_reach_the_slices() -> None:
    facts = {"tflops": 989, "bandwidth_gbs": 3350, "memory_gb": 80}
    (slice_, *_) = slices_of(resources({**TRAINERS, **facts}, ROLLOUTS), replica_gpus=8)
    assert slice_.hardware is not None
    assert slice_.hardware.flops == 989e12
    assert slice_.hardware.bandwidth == 3350e9


def test_a_declaration_in_verls_own_keys() -> None:
    assert verl_keys(()) == {}
    keys = verl_keys(resources(TRAINERS, ROLLOUTS))
    assert (keys["trainer.nnodes"], keys["actor_rollout_ref.rollout.nnodes"]) == (2, 1)
    assert keys["actor_rollout_ref.hybrid_engine"] is True
    apart = verl_keys(resources({**TRAINERS, "capabilities": ["train"]}, ROLLOUTS))
    assert apart == {**keys, "actor_rollout_ref.hybrid_engine": False}
    together = verl_keys(resources(TRAINERS))
    assert together["actor_rollout_ref.rollout.nnodes"] == 0
    assert together["actor_rollout_ref.hybrid_engine"] is True
    with pytest.raises(ConfigError, match="write 8 for each") as refused:
        verl_keys(resources(TRAINERS, {**TRAINERS, "name": "more", "gpus_per_node": 16}, ROLLOUTS))
    assert refused.value.key == "seamless.resources[more].gpus_per_node"


def test_policies_by_name() -> None:
    assert isinstance(policy_of(SchedulerConfig(policy="greedy"), batch=8, mini_batch=2), Greedy)
    assert isinstance(policy_of(SchedulerConfig(policy="predictive"), batch=8, mini_batch=2), Predictive)
    with pytest.raises(ConfigError, match="write predictive"):
        SchedulerConfig(policy="predictiv")
