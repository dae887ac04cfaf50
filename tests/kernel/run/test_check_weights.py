"""Replicas may have unlike weights only where reservations, rollout workers and the router are ours."""

from __future__ import annotations

from typing import Any

import pytest

from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.run.check_combinations import MANAGER
from seamless_verl.run.check_weights import check_weights


def refusal(rollout: dict[str, Any] | None = None, **seamless: Any) -> ConfigError:
    config = {
        "actor_rollout_ref": {"rollout": {"agent": {"agent_loop_manager_class": MANAGER}, **(rollout or {})}},
        "trainer": {"nnodes": 1, "v1": {"sampler": {"custom_sampler": {"path": None}}}},
    }
    with pytest.raises(ConfigError) as refused:
        check_weights(config, SeamlessConfig.from_mapping({"weights": {"sync": "rolling"}} | seamless))
    return refused.value


def test_together_asks_for_nothing() -> None:
    check_weights({}, SeamlessConfig.from_mapping({"staleness": {"policy": "verl"}}))


@pytest.mark.parametrize(
    ("rollout", "seamless", "key"),
    [
        ({}, {"staleness": {"policy": "verl"}}, "seamless.staleness.policy"),
        ({}, {"weights": {"sync": "rolling", "max_lag": 2}}, "seamless.weights.max_lag"),
        (
            {"agent": {"agent_loop_manager_class": "mine.Manager"}},
            {},
            "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
        ),
        ({"router_config_path": "mine.yaml"}, {}, "actor_rollout_ref.rollout.router_config_path"),
        ({"full_determinism": True}, {}, "actor_rollout_ref.rollout.full_determinism"),
    ],
)
def test_what_does_not_know_floors_is_refused(rollout: dict[str, Any], seamless: dict[str, Any], key: str) -> None:
    error = refusal(rollout, **seamless)
    assert error.key == key
    assert "seamless.weights.sync=together" in str(error)


@pytest.mark.parametrize(
    ("rollout", "key"),
    [
        ({"name": "sglang"}, "name"),
        ({"disaggregation": {"enabled": True}}, "disaggregation.enabled"),
        ({"data_parallel_size": 2}, "data_parallel_size"),
        ({"quantization": "fp8"}, "quantization"),
        ({"nnodes": 0}, "nnodes"),
        ({"tensor_model_parallel_size": 4, "n_gpus_per_node": 2}, "tensor_model_parallel_size"),
        ({"checkpoint_engine": {"backend": "nccl"}}, "checkpoint_engine.backend"),
    ],
)
def test_replicas_that_cannot_pull_are_refused(rollout: dict[str, Any], key: str) -> None:
    error = refusal({"name": "vllm", "nnodes": 1, "n_gpus_per_node": 8, "tensor_model_parallel_size": 1, **rollout})
    assert error.key == f"actor_rollout_ref.rollout.{key}"
    assert "seamless.weights.sync=together" in str(error)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qat.enable", True),
        ("engine_kwargs.vllm.quantization", "fp8"),
        ("engine_kwargs.vllm.speculative_config", {"method": "ngram"}),
    ],
)
def test_engines_that_are_quantised_or_draft_by_another_key_are_refused_too(key: str, value: Any) -> None:
    rollout: dict[str, Any] = {"name": "vllm", "nnodes": 1, "n_gpus_per_node": 8, "tensor_model_parallel_size": 1}
    *parents, last = key.split(".")
    section = rollout
    for parent in parents:
        section = section.setdefault(parent, {})
    section[last] = value
    assert refusal(rollout).key == f"actor_rollout_ref.rollout.{key}"


def test_vllm_replicas_on_any_number_of_nodes_may_roll() -> None:
    rollout = {"name": "vllm", "nnodes": 3, "agent": {"agent_loop_manager_class": MANAGER}}
    rollout |= {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "n_gpus_per_node": 8}
    config = {"actor_rollout_ref": {"rollout": rollout}, "trainer": {"nnodes": 2}}
    check_weights(config, SeamlessConfig.from_mapping({"weights": {"sync": "rolling"}}))
