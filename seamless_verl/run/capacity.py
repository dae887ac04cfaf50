"""How many attempts of agents may be under way in a rollout worker, and what one of them may do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from seamless_verl.checked import asked_devices, value_of, whole_number
from seamless_verl.config import AgentConfig, SeamlessConfig
from seamless_verl.proxy.session.sessions import SessionSpec
from seamless_verl.run.check_combinations import replica_size

_ROLLOUT = "actor_rollout_ref.rollout"


def fleet_seats(config: Mapping[str, Any], seamless: SeamlessConfig) -> int:
    """Requests that all replicas together decode at a time, lendable ones included."""
    train, gpus = asked_devices(config)
    if seamless.scheduler.policy is not None and value_of(config, "actor_rollout_ref.hybrid_engine", True):
        gpus += train
    each = whole_number(config, f"{_ROLLOUT}.max_num_seqs", default=256)
    return gpus // replica_size(config) * each * whole_number(config, f"{_ROLLOUT}.data_parallel_size", default=1)


def admitted_attempts(config: Mapping[str, Any], seamless: SeamlessConfig) -> int:
    """Attempts of all batches that may be under way (`StalenessConfig`)."""
    staleness = seamless.staleness
    batches = staleness.eta + 1 if staleness.in_flight is None else staleness.in_flight
    groups = batches * staleness.redundancy * whole_number(config, "data.train_batch_size")
    return math.ceil(groups * staleness.group_redundancy * whole_number(config, f"{_ROLLOUT}.n"))


def attempts_per_worker(config: Mapping[str, Any], seamless: SeamlessConfig) -> int:
    """What ``seamless.agent.max_concurrent`` says; else this worker's share of whichever is more, seats or attempts."""
    if seamless.agent.max_concurrent is not None:
        return seamless.agent.max_concurrent
    return math.ceil(max(fleet_seats(config, seamless), admitted_attempts(config, seamless)) / _workers(config))


def session_spec(agent: AgentConfig, sampling: Mapping[str, Any], max_tokens: int, **others: Any) -> SessionSpec:
    """What the session of an attempt may do; the trainer decides how tokens are sampled, agents are overridden.

    Args:
        max_tokens: of the whole session.
        others: fields that the configuration does not decide.
    """
    decided = {key: sampling[key] for key in ("temperature", "top_p", "top_k") if key in sampling}
    if agent.max_tokens_per_turn is not None:
        decided["max_tokens"] = agent.max_tokens_per_turn
    return SessionSpec(
        deadline_s=agent.deadline_s, max_turns=agent.max_turns, max_tokens=max_tokens, sampling=decided, **others
    )


def told_of_cap(config: Mapping[str, Any], seamless: SeamlessConfig) -> str:
    """A warning where a configured limit keeps replicas idle; else empty."""
    caps = {"seamless.agent.max_concurrent": seamless.agent.max_concurrent}
    caps["seamless.agent.kwargs.max_concurrent"] = seamless.agent.kwargs.get("max_concurrent")
    given = {key: cap for key, cap in caps.items() if isinstance(cap, int)}
    if seamless.agent.runner is None or not given:
        return ""
    key = min(given, key=lambda key: given[key])
    seats, admitted, workers = fleet_seats(config, seamless), admitted_attempts(config, seamless), _workers(config)
    if workers * given[key] >= min(seats, admitted):
        return ""
    return (
        f"agents: {key}={given[key]} lets {workers * given[key]} attempts run at a time ({workers} rollout workers); "
        f"the replicas decode {seats}, and seamless.staleness admits {admitted}: the others wait"
    )


def _workers(config: Mapping[str, Any]) -> int:
    return whole_number(config, f"{_ROLLOUT}.agent.num_workers", default=1)
