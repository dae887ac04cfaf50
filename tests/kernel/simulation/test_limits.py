"""The fluid limit by hand, and against what simulated systems reach."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.decode_cost import DecodeCost
from seamless_verl.simulation.agents import Agentic, Constant, LogNormal
from seamless_verl.simulation.fluid import _smallest, _windows, best_limit, fluid_limit, sample
from seamless_verl.simulation.regimes import REGIMES
from seamless_verl.simulation.replica import EnginePhysics
from seamless_verl.simulation.run import simulate
from seamless_verl.simulation.scenario import Pool, Scenario, SwitchCosts, TrainPhysics
from tests.kernel.simulation.build import scenario

SECOND = DecodeCost(floor_s=1.0, base_s=0.0, per_request_s=0.0, attention_base_s=0.0, attention_per_token_s=0.0)
FREE = SwitchCosts(wake=0.0, drain=0.0, load=0.0, push=0.0)


def flat(system: str, *, trainers: int, rollouts: int, seats: int = 4, **changes: object) -> Scenario:
    """A token a second for each of ``seats`` requests per slice; 8 groups of one answer of 50 tokens."""
    engine = EnginePhysics(decode=SECOND, prefill_s_per_token=0.0, kv_tokens=10**6, max_running=seats)
    pool = Pool(name="trainers", slices=trainers, gpus=1, trains=True, engine=engine)
    pools = (pool, replace(pool, name="rollouts", slices=rollouts, trains=False)) if rollouts else (pool,)
    base = Scenario(
        system=system,
        pools=pools,
        workload=Constant(answer=50, prompt=0),
        train=TrainPhysics(gpu_s_per_token=0.05 * trainers, update_s=0.0),
        costs=FREE,
        batch=8,
        mini_batch=8,
        attempts=1,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_work_by_hand() -> None:
    """400 tokens, trained in 20 s. Two slices that only generate make 8 tokens a second, with the two others 16."""
    apart = fluid_limit(flat("disaggregated", trainers=2, rollouts=2))
    assert apart.train_s == pytest.approx(20.0)
    assert apart.work_s == pytest.approx(20.0 + (400 - 8 * 20) / 8)
    lent = fluid_limit(flat("predictive", trainers=2, rollouts=2))
    assert lent.work_s == pytest.approx(20.0 + (400 - 8 * 20) / 16)
    in_turn = fluid_limit(flat("colocated", trainers=4, rollouts=0))
    assert in_turn.work_s == pytest.approx(20.0 + 400 / 16)


def test_the_trainer_is_the_limit_where_rollout_is_fast() -> None:
    """Three slices with eight seats each make 24 tokens a second, a batch in 17 s; it is trained in 20."""
    found = fluid_limit(flat("disaggregated", trainers=1, rollouts=3, seats=8, eta=3))
    assert found.work_s == pytest.approx(found.train_s)


@pytest.mark.parametrize("system", sorted(REGIMES))
def test_what_is_taken_into_account_makes_the_limit_no_shorter(system: str) -> None:
    found = fluid_limit(scenario(system))
    assert 0 < found.train_s <= found.work_s <= found.bounded_s <= found.paid_s


@pytest.mark.parametrize("system", ["disaggregated", "predictive", "colocated"])
def test_a_looser_bound_and_cheaper_switches_make_the_limit_no_longer(system: str) -> None:
    skewed = LogNormal(mean=1000, sigma=1.2, cap=8192)
    times = [fluid_limit(scenario(system, workload=skewed, eta=eta)).paid_s for eta in (0, 1, 2, 4)]
    assert all(after <= 1.002 * before for before, after in itertools.pairwise(times))
    base = scenario(system, workload=skewed)
    free = fluid_limit(replace(base, costs=FREE))
    assert free.paid_s <= 1.002 * fluid_limit(base).paid_s


@pytest.mark.parametrize("system", ["disaggregated", "colocated"])
@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_who_never_lends_or_lends_all_comes_close_to_the_limit_and_not_below(system: str, sigma: float) -> None:
    base = scenario(system, workload=LogNormal(mean=2000, sigma=sigma, cap=8192), batch=16, steps=14, warm=4)
    limit_s = fluid_limit(base).paid_s
    step_s = sum(simulate(replace(base, seed=seed)).step_s for seed in range(2)) / 2
    assert 0.94 * limit_s <= step_s <= 1.35 * limit_s


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6))
def test_another_slice_makes_the_limit_of_work_no_longer(trainers: int, rollouts: int) -> None:
    base = flat("predictive", trainers=trainers, rollouts=rollouts)
    more = flat("predictive", trainers=trainers, rollouts=rollouts + 1, train=base.train)
    assert fluid_limit(more).work_s <= fluid_limit(base).work_s + 1e-9


def test_a_loan_covers_its_share_of_the_step_wherever_it_lies() -> None:
    for slices in _windows(2, 3, 100.0, lent_s=25.0):
        assert len(slices) == 48
        assert (slices == 5.0).sum() == 12
        assert (slices == 2.0).sum() == 36
    (always,) = _windows(2, 0, 100.0, lent_s=25.0)
    assert set(always) == {2.0}
    (whole,) = _windows(2, 3, 100.0, lent_s=200.0)
    assert set(whole) == {5.0}


@given(st.floats(1.0, 1e5), st.floats(0.5, 50.0))
def test_the_smallest_that_fits_is_found_to_a_thousandth(low: float, times: float) -> None:
    edge = low * times
    found = _smallest(lambda value: value >= edge, low)
    assert found >= max(low, edge)
    assert found <= max(low, 1.002 * edge)


def test_a_sample_by_hand() -> None:
    """One turn of 100 and 300 tokens: half of the answer is in the cache on average while it is generated."""
    found = sample(scenario("greedy", workload=Constant(answer=300, prompt=100)))
    assert set(found.generated) == {300.0}
    assert (found.trained, found.begins_with) == (400.0, 100.0)
    assert found.decoding_context == pytest.approx(250.0)
    assert found.grows_by == pytest.approx(1.0)
    assert found.prefilled_share == pytest.approx(1 / 3)
    assert set(found.longest) == {300.0}


def test_tools_take_part_in_a_sample() -> None:
    agents = Agentic(turns=4, max_turns=8, answer=60, observation=30, tool_s=2.0, prompt=100, max_answer=200)
    found = sample(scenario("greedy", workload=agents))
    assert found.tool_s.mean() > 2.0
    assert found.grows_by > 1.0  # what tools say comes in, too
    again = sample(scenario("greedy", workload=agents, seed=7))
    assert (again.generated == found.generated).all()  # of the setting, not of a run


def test_the_longest_trajectory_must_fit_into_its_steps() -> None:
    """One slice, one request: 50 tokens at a second each, whole eta + 1 steps later."""
    for eta, least in ((0, 50.0), (1, 25.0), (4, 10.0)):
        base = flat("disaggregated", trainers=1, rollouts=64, eta=eta, train=TrainPhysics(gpu_s_per_token=1e-6))
        assert fluid_limit(base).bounded_s == pytest.approx(least, rel=0.05)


def test_the_best_limit_is_unknown_where_fewer_batches_are_in_flight() -> None:
    assert best_limit(scenario("predictive", eta=2)) is not None
    assert best_limit(scenario("predictive", eta=2, in_flight=2)) is None
    assert best_limit(scenario("verl_separate_async")) is None
