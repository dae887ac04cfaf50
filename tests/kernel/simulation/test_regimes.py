"""The table of systems, against what their publications say of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seamless_verl.config import RouterConfig, SchedulerConfig
from seamless_verl.errors import ConfigError
from seamless_verl.scheduling.policies import Colocated, Disaggregated, Greedy, SeamlessFlow
from seamless_verl.scheduling.prediction.predictive import Predictive
from seamless_verl.scheduling.verl_gate import VerlGate
from seamless_verl.simulation.regimes import REGIMES, BatchPerStep, Bounded, Bucket, Quota, regime

POLICIES = {
    Colocated: {"verl_sync", "verl_colocate_async", "verl_colocate_async_wait", "colocated"},
    SeamlessFlow: {"seamlessflow"},
    Greedy: {"greedy"},
    Predictive: {"predictive"},
    VerlGate: {"verl_enable_switch", "verl_enable_switch_wait", "verl_gate"},
}
BOUNDS = {  # given eta = 3
    "verl_sync": 0,
    "verl_one_step_off": 1,
    "verl_colocate_async": None,
    "verl_separate_async": None,
    "verl_enable_switch": None,
    "areal": None,
}
FLAGS = {
    "colocated": {"verl_sync", "verl_colocate_async", "verl_colocate_async_wait", "colocated"},
    "lends": {"verl_enable_switch", "verl_enable_switch_wait", "seamlessflow", "greedy", "predictive", "verl_gate"},
    "needs_standing": {"verl_enable_switch", "verl_enable_switch_wait", "verl_gate"},
    "barrier": {"verl_one_step_off"},
    "releases": {"greedy", "predictive", "verl_gate"},
    "awaits_load": {"greedy", "predictive", "verl_gate", "disaggregated"},
    "rebalances": {"seamlessflow", "greedy", "predictive", "verl_gate", "colocated"},
    "reserves": {"staleflow", "seamlessflow", "greedy", "predictive", "verl_gate", "disaggregated", "colocated"},
    "streaming": {
        *("verl_separate_async", "verl_separate_async_wait", "verl_enable_switch", "verl_enable_switch_wait"),
        *("greedy", "predictive", "verl_gate", "disaggregated"),
    },
}
GOES_ON_WHILE_WEIGHTS_LOAD = {"staleflow", "seamlessflow", "greedy", "predictive", "verl_gate", "disaggregated"}


@pytest.mark.parametrize("flag", sorted(FLAGS))
def test_which_systems_do_it(flag: str) -> None:
    assert {name for name, rules in REGIMES.items() if getattr(rules, flag)} == FLAGS[flag]


def test_who_stops_the_world_for_new_weights() -> None:
    assert {name for name, rules in REGIMES.items() if not rules.stop_the_world} == GOES_ON_WHILE_WEIGHTS_LOAD


@pytest.mark.parametrize("name", sorted(REGIMES))
def test_bounds_policies_and_admission(name: str) -> None:
    rules = REGIMES[name]
    assert rules.bound(3) == BOUNDS.get(name, 3)
    kind = next((kind for kind, systems in POLICIES.items() if name in systems), Disaggregated)
    assert type(rules.policy(SchedulerConfig(), 8, 2)) is kind
    feed = rules.feed(lambda version: pytest.fail("nothing is drawn before it may start"), 8, 3)
    own = {"areal": Quota, "roll": Bucket}.get(name, Bounded if rules.reserves else BatchPerStep)
    assert type(feed) is own


def test_only_verls_trainers_that_sample_a_buffer_look_from_time_to_time() -> None:
    polling = {name for name, rules in REGIMES.items() if rules.poll_s}
    assert polling == {name for name in REGIMES if name.startswith("verl_")} - {"verl_one_step_off", "verl_gate"}


def test_only_staleflow_routes_by_marginal_gain() -> None:
    assert [name for name, rules in REGIMES.items() if rules.router.policy == "marginal_gain"] == ["staleflow"]


@pytest.mark.parametrize("name", sorted(REGIMES))
def test_a_router_that_is_asked_for_decides_where_it_would_live(name: str) -> None:
    """A published system keeps its own, and takes the order in which the recorded run's engines served."""
    rules = REGIMES[name]
    asked = RouterConfig(policy="marginal_gain", mu=0.7, migrate=name != "staleflow")
    if name in {"greedy", "predictive", "verl_gate", "disaggregated", "colocated"}:
        assert rules.routed(asked) == asked
        assert rules.routed(None) == RouterConfig()
    else:
        assert rules.routed(asked) == replace(rules.router, oldest_first=True)
        assert rules.routed(replace(asked, oldest_first=False)) == rules.routed(None) == rules.router


def test_mini_batches_are_trained_as_they_come_only_where_a_system_streams() -> None:
    assert REGIMES["predictive"].update(64, 16) == 16
    assert REGIMES["staleflow"].update(64, 16) == 64


def test_verls_modes_with_a_bound_differ_from_those_without_in_nothing_else() -> None:
    for name in ("verl_colocate_async", "verl_separate_async", "verl_enable_switch"):
        free, bounded = REGIMES[name], REGIMES[f"{name}_wait"]
        for field in ("colocated", "lends", "needs_standing", "streaming", "stop_the_world", "poll_s", "router"):
            assert getattr(free, field) == getattr(bounded, field)


def test_names_of_live_runs_are_known_and_a_misspelt_one_is_answered_with_the_nearest() -> None:
    assert REGIMES.keys() >= {"predictive", "greedy", "verl_gate", "colocated", "disaggregated"}
    assert regime("greedy") is REGIMES["greedy"]
    with pytest.raises(ConfigError, match=r"scheduler\.policy=staleflw: no such system. Fix: write staleflow;"):
        regime("staleflw")
