"""Refuses settings under which replicas must not have unlike weights (``seamless.weights.sync=rolling``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seamless_verl.checked import value_of
from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.run.check_combinations import MANAGER

_ROLLOUT = "actor_rollout_ref.rollout"
_KEY = "seamless.weights.sync"
_FIX = f"or write {_KEY}=together"


def check_weights(config: Mapping[str, Any], seamless: SeamlessConfig) -> None:
    """A replica that lags must not begin a prompt for which it is too old: reservations say how old it may be, rollout
    workers hand that on, and the router keeps to it.

    Raises:
        ConfigError: one of the three is not ours.
    """
    if seamless.weights.sync == "together":
        return
    if seamless.staleness.policy != "reserve":
        problem = "verl's own buffer takes every prompt to begin with the newest weights"
        raise ConfigError("seamless.staleness.policy", seamless.staleness.policy, problem, f"write reserve, {_FIX}")
    lag, eta = seamless.weights.max_lag, seamless.staleness.eta
    if lag > max(1, eta):
        problem = f"no prompt may begin with weights so old (seamless.staleness.eta={eta}), so who lags would idle"
        raise ConfigError("seamless.weights.max_lag", lag, problem, f"write {max(1, eta)} or less, {_FIX}")
    strangers = (
        (f"{_ROLLOUT}.agent.agent_loop_manager_class", (None, MANAGER), "its workers hand no floors to the router"),
        (f"{_ROLLOUT}.router_config_path", (None,), "it does not know which replica is too old for a prompt"),
        ("trainer.v1.sampler.custom_sampler.path", (None,), "it does not reserve prompts by version"),
        (f"{_ROLLOUT}.full_determinism", (None, False), "who serves a prompt would depend on who has new weights"),
    )
    for key, ours, problem in strangers:
        value = value_of(config, key, None)
        if value not in ours:
            raise ConfigError(key, value, problem, f"leave it out, {_FIX}")
    raise ConfigError(_KEY, seamless.weights.sync, "is not built into the replicas yet", "write together")
