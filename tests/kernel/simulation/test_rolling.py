"""Replicas that take new weights one after the other, by the rule of a live run, on virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from seamless_verl.config import WeightsConfig
from seamless_verl.errors import ConfigError
from seamless_verl.scheduling import commands as cmd
from seamless_verl.simulation.books import Use
from seamless_verl.simulation.options import apply
from seamless_verl.simulation.replica import Request
from seamless_verl.simulation.run import Result, simulate
from tests.kernel.simulation.build import ENGINE, scenario
from tests.kernel.simulation.test_driver import COSTS, A, B, Stage

ROLLING = WeightsConfig(sync="rolling")


def published(cache: str = "refill") -> Stage:
    """Both slices run two requests, and are told of version 1 at second 1. A load takes 2 s."""
    stage = Stage(weights=WeightsConfig(sync="rolling", cache=cache))
    for name in (A, B):
        stage.fleet.units[name].serve(0)
    stage.fleet.submit([Request(number, 1000, 5000) for number in range(4)])
    stage.until(1.0)
    stage.cluster.published = 1
    stage.command(cmd.SyncWeights(command=1, slice=A, version=1), cmd.SyncWeights(command=2, slice=B, version=1))
    return stage


def test_one_pulls_and_the_other_generates_until_its_turn_comes() -> None:
    stage = published()
    before = stage.fleet.units[B].replica.generated
    stage.until(2.9)
    assert (stage.seconds(A, Use.SYNC), stage.seconds(B, Use.SYNC)) == (pytest.approx(1.9), 0.0)
    assert stage.fleet.units[B].replica.generated > before
    stage.fleet.submit([Request("new", 10, 10)])
    assert stage.fleet.idle(A) is False, "its requests wait there"
    stage.until(10.0)
    assert stage.told() == [("SliceReady", 3.0), ("SliceReady", 5.0)]
    assert [stage.fleet.units[name].replica.version for name in (A, B)] == [1, 1]
    assert (stage.seconds(A, Use.SYNC), stage.seconds(B, Use.SYNC)) == (2.0, 2.0)


def test_refilling_prefills_again_what_runs_and_keeping_does_not() -> None:
    spent = {}
    for cache in ("refill", "keep"):
        stage = published(cache)
        stage.until(30.0)
        spent[cache] = stage.seconds(A, Use.PREFILL_AGAIN)
    assert spent["keep"] == 0.0
    assert spent["refill"] == pytest.approx(ENGINE.prefill_s_per_token * 2 * 1050, rel=0.05)


def test_a_slice_that_dies_in_mid_pull_gives_its_turn_to_the_next() -> None:
    stage = published()
    stage.until(2.0)
    stage.driver.fail(A)
    stage.until(6.0)
    assert stage.told()[-1] == ("SliceReady", 4.0)
    assert stage.fleet.units[B].replica.version == 1


def run(**changes: Any) -> Result:
    return simulate(scenario("disaggregated", steps=8, **changes))


@pytest.mark.parametrize("eta", [0, 1, 2])
@pytest.mark.parametrize("max_lag", [1, 2])
def test_the_bound_holds_and_every_step_comes(eta: int, max_lag: int) -> None:
    weights = WeightsConfig(sync="rolling", max_lag=max_lag)
    result = run(eta=eta, weights=weights)  # `occupy` gets the first token's version, and raises below the floor
    assert result.max_staleness <= eta
    assert len(result.steps) == 6


def test_the_trainer_waits_for_no_replica_and_a_cheaper_pull_makes_no_step_longer() -> None:
    together, rolling = run(), run(weights=ROLLING)
    assert rolling.step_s <= 1.02 * together.step_s
    quick = run(weights=ROLLING, costs=type(COSTS)(wake=2.0, drain=1.0, load=1.0, push=0.5, pull=0.1))
    assert quick.step_s < together.step_s


def test_it_is_asked_for_by_the_keys_of_a_live_run_and_refused_where_nothing_rolls() -> None:
    base = scenario("predictive")
    asked = apply(base, ["weights.sync=rolling", "seamless.weights.at_once=2", "costs.pull=0.5"])
    assert asked.weights == WeightsConfig(sync="rolling", at_once=2)
    assert asked.load_s == 0.5
    assert base.load_s == 1.0
    for assignment, key in (
        ("weights.sync=roling", "seamless.weights.sync"),
        ("weights.at_once=x", "weights.at_once"),
        ("weights.max_lags=1", "weights.max_lags"),
    ):
        with pytest.raises(ConfigError) as refused:
            apply(base, [assignment])
        assert refused.value.key == key
    for system in ("verl_separate_async", "colocated", "areal"):
        with pytest.raises(ConfigError, match="write together"):
            scenario(system, weights=ROLLING)
