"""What a rollout engine cannot do under verl 0.9.1, refused before anything starts; each check says when it may go.

Called with the composed configuration by the command (`preflight`) and again by the trainer, for those who start verl
themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.run.devices import value_of

_ROLLOUT = "actor_rollout_ref.rollout"
_AGENT_LOOP = "seamless_agent"


def check_engine(config: Mapping[str, Any], seamless: SeamlessConfig) -> None:
    """Raise on what is asked of an engine that cannot do it.

    Raises:
        ConfigError: naming the key that asks.
    """
    _check_single_requests(config, seamless)
    if seamless.scheduler.policy is not None:
        _check_lending(config)
    if value_of(config, f"{_ROLLOUT}.agent.default_agent_loop", None) == _AGENT_LOOP:
        check_routing_replay(config)


def _check_single_requests(config: Mapping[str, Any], seamless: SeamlessConfig) -> None:
    """Only our own vLLM server ends a single request; verl's others do not, its servers of split replicas neither."""
    engine = value_of(config, f"{_ROLLOUT}.name", None)
    is_split = bool(value_of(config, f"{_ROLLOUT}.disaggregation.enabled", False))
    if engine == "vllm" and not is_split:
        return
    what = f"{engine} with disaggregation.enabled" if is_split else engine
    problem = f"{what} under verl cannot end a single request"
    if seamless.staleness.stuck == "truncate":
        raise ConfigError("seamless.staleness.stuck", "truncate", problem, "write retry or wait")
    if seamless.router.policy == "marginal_gain" and seamless.router.migrate:
        raise ConfigError("seamless.router.migrate", True, problem, "write false")


def _check_lending(config: Mapping[str, Any]) -> None:
    name = f"{_ROLLOUT}.name"
    if value_of(config, name, None) == "sglang":
        # Until verl's SGLang server refuses requests while it is paused (its SGLangReplica.abort_all_requests says so).
        raise ConfigError(
            name,
            "sglang",
            "cannot be lent: a request that reaches a replica on its way back to the trainer would wait there until "
            "the next loan",
            "write vllm, or leave seamless.scheduler.policy out",
        )
    split = f"{_ROLLOUT}.disaggregation.enabled"
    if value_of(config, split, False):
        raise ConfigError(
            split,
            True,
            "such replicas cannot be lent: verl starts servers of its own for them",
            "write false, or leave seamless.scheduler.policy out",
        )
    for key in (f"{_ROLLOUT}.data_parallel_size", f"{_ROLLOUT}.engine_kwargs.vllm.data_parallel_size"):
        size = value_of(config, key, None)
        if isinstance(size, int) and size > 1:
            # Until loans of a replica with two engine cores have gone through on two GPUs (docs/gpu.md, row 12).
            raise ConfigError(
                key,
                size,
                "replicas of several engine cores have never been lent: how they sleep and wake together is untried",
                "write 1 and more replicas, or leave seamless.scheduler.policy out",
            )


def check_routing_replay(config: Mapping[str, Any]) -> None:
    """Agents' sessions carry no routed experts, and a trainer that replays them raises after a whole rollout.

    Raises:
        ConfigError: R3 is asked for; R2 records its routes in the trainer and is fine.
    """
    problem = f"rows of {_AGENT_LOOP} do not tell which experts made a token"
    key = f"{_ROLLOUT}.enable_rollout_routing_replay"
    if value_of(config, key, False):
        raise ConfigError(key, True, problem, "write false, and R2 or disabled as router_replay.mode")
    strategy = value_of(config, "actor_rollout_ref.actor.strategy", None)
    key = f"actor_rollout_ref.actor.{strategy}.router_replay.mode"
    if value_of(config, key, None) == "R3":
        raise ConfigError(key, "R3", problem, "write R2 or disabled")


def check_rows(config: Mapping[str, Any], files: Iterable[Path]) -> None:
    """`check_routing_replay`, where a row of these parquet files names our agent loop.

    Raises:
        ConfigError: see there.
    """
    try:
        check_routing_replay(config)
    except ConfigError:  # only then are the files worth reading
        if any(_asks_for_agents(file) for file in files):
            raise


def _asks_for_agents(file: Path) -> bool:
    import pyarrow.parquet as parquet

    if "agent_name" not in parquet.read_schema(file).names:
        return False
    names = parquet.read_table(file, columns=["agent_name"])["agent_name"].unique()
    return _AGENT_LOOP in names.to_pylist()
