"""Whole runs whose every second can be worked out by hand, and what any run must keep to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.decode_cost import DecodeCost
from seamless_verl.errors import ConfigError
from seamless_verl.observe import flight
from seamless_verl.observe.flight import SliceState
from seamless_verl.simulation.agents import Agentic, Bimodal, Constant, LogNormal, Replay, Turn
from seamless_verl.simulation.books import Use
from seamless_verl.simulation.regimes import REGIMES
from seamless_verl.simulation.replica import EnginePhysics, slower
from seamless_verl.simulation.run import Result, Simulation, simulate
from seamless_verl.simulation.scenario import Noise, Pool, Scenario, SwitchCosts, TrainPhysics, divisor
from tests.kernel.simulation.build import scenario, trained_s

SECOND = DecodeCost(floor_s=1.0, base_s=0.0, per_request_s=0.0, attention_base_s=0.0, attention_per_token_s=0.0)
ENGINE = EnginePhysics(decode=SECOND, prefill_s_per_token=0.0, kv_tokens=100_000)
TRAINERS = Pool(name="trainers", slices=2, gpus=1, trains=True, engine=ENGINE)
ROLLOUTS = replace(TRAINERS, name="rollouts", trains=False)
TRAIN_S = 21.0  # of a batch: 80 answers and prompts of 100 and 0 tokens at 5 GPU-ms on two GPUs, and a second beside


def by_hand(system: str, **changes: Any) -> Scenario:
    """Answers of 100 tokens; a token takes a second, however many are generated."""
    colocated = REGIMES[system].colocated
    values: dict[str, Any] = {
        "system": system,
        "pools": (TRAINERS,) if colocated else (TRAINERS, ROLLOUTS),
        "workload": Constant(answer=100, prompt=0),
        "train": TrainPhysics(gpu_s_per_token=5e-3, update_s=1.0),
        "costs": SwitchCosts(wake=7.0, drain=3.0, load=2.0, push=4.0),
        "batch": 20,
        "mini_batch": 20,
        "attempts": 4,
        "steps": 5,
        "warm": 1,
    }
    return Scenario(**{**values, **changes})


def watched(base: Scenario) -> tuple[Result, Simulation, list[flight.FlightEvent]]:
    events: list[flight.FlightEvent] = []
    simulation = Simulation(base, record=events.append)
    return simulation.run(), simulation, events


def stretches(events: list[flight.FlightEvent], state: SliceState) -> list[float]:
    """Seconds of each whole stretch that a slice spent in this state."""
    since: dict[str, tuple[SliceState, float]] = {}
    found = []
    for event in events:
        if isinstance(event, (flight.SliceAdded, flight.SliceMoved)):
            before = since.get(event.slice)
            if before is not None and before[0] is state:
                found.append(event.at - before[1])
            since[event.slice] = event.state, event.at
    return found


# Generate 100 s, train 21, push 4, load 2, wake 7, drain 3: seconds of the five steps of each system.
BY_HAND = {
    # One batch at a time: generated, trained, pushed, loaded, and only then the next one is admitted.
    ("disaggregated", 0): [100 + 21 + 4 + 2] * 5,
    # Two batches begin together. The second is whole when its step begins; a third was admitted with that step, and
    # the load at its end stops it for 2 s: from 154 on step 3 waits until 229.
    ("disaggregated", 1): [127, 21 + 4 + 2, 75 + 21 + 4 + 2, 27, 102],
    # All slices wake up, generate, are drained and train.
    ("verl_sync", 0): [7 + 100 + 3 + 21] * 5,
    ("colocated", 0): [7 + 100 + 3 + 21] * 5,
    # The second batch is whole: the slices have hardly begun to wake when they are called back.
    ("colocated", 1): [131, 3 + 21, 131, 24, 131],
    # The next batch is generated, under new weights, while this one is trained.
    ("verl_one_step_off", 1): [100 + 21, 2 + 100, 102, 102, 102],
    # As `disaggregated`, but nobody waits for the load; it stops batch 3 twice, at its beginning and in the middle.
    ("staleflow", 1): [100 + 21 + 4, 21 + 4, 79 + 21 + 4, 25, 104],
    # All replicas load while the trainer waits, and nothing is pushed beforehand.
    ("areal", 0): [100 + 21 + 2] * 5,
    ("verl_separate_async_wait", 1): [123, 21 + 2, 79 + 21 + 2, 23, 102],
    # The trainers' slices are lent: drained before they train; from the second step on they wake for 7 s and what was
    # given to them waits, where the others have loaded after 2.
    ("greedy", 0): [100 + 3 + 21 + 4 + 2, 135, 135, 135, 135],
}


@pytest.mark.parametrize(("system", "eta"), sorted(BY_HAND))
def test_steps_by_hand(system: str, eta: int) -> None:
    result, _, events = watched(by_hand(system, eta=eta, warm=0))
    times = [step.ended - step.began for step in result.steps]
    assert times == pytest.approx(BY_HAND[system, eta], abs=1e-3)
    assert trained_s(events) == pytest.approx([TRAIN_S] * 5)
    assert result.max_staleness <= eta
    for state, seconds in ((SliceState.SYNCING, 2.0), (SliceState.DRAINING, 3.0)):
        assert stretches(events, state) == pytest.approx([seconds] * len(stretches(events, state)))


def test_a_trainer_that_is_the_bottleneck_sets_the_pace() -> None:
    slow = by_hand("disaggregated", train=TrainPhysics(gpu_s_per_token=0.1, update_s=1.0))
    assert simulate(slow).step_s == pytest.approx(401.0 + 4.0 + 2.0, rel=1e-3)  # training, push, the load awaited


def test_a_trainer_that_looks_from_time_to_time_begins_late() -> None:
    """Half of the answers have 100 tokens, half 132. The first half is trained from 100 to 111; for the second one it
    waits 21 s, which it sees after 22."""
    groups = [[(Turn(prompt=0, answer=100 if number < 10 else 132),)] for number in range(20)]
    odd = by_hand("verl_separate_async", eta=0, warm=0, mini_batch=10, workload=Replay(groups))
    first = simulate(odd).steps[0]
    assert first.waited_s == pytest.approx(22.0)
    assert first.ended == pytest.approx(133.0 + 14.2 + 2.0, abs=1e-3)
    woken = simulate(odd, replace(REGIMES[odd.system], poll_s=0.0)).steps[0]
    assert woken.ended == pytest.approx(132.0 + 14.2 + 2.0, abs=1e-3)


def test_the_books_by_hand() -> None:
    """Two GPUs in turn, 131 s a step, of which none is idle: 100 s generate, 21 train, 10 switch."""
    result = simulate(by_hand("colocated", eta=0))
    books = result.books
    assert books.wall_s == pytest.approx(4 * 131.0, abs=1e-3)
    assert books.gpu_seconds[Use.TRAIN] == pytest.approx(2 * 4 * TRAIN_S)
    assert books.gpu_seconds[Use.GENERATE] == pytest.approx(2 * 4 * 100.0, abs=1e-2)
    assert books.gpu_seconds[Use.SWITCH] == pytest.approx(2 * 4 * 10.0)
    assert books.idle_share == pytest.approx(0.0, abs=1e-6)
    assert books.trainable_gpu_seconds == books.gpu_seconds
    assert result.step_s == pytest.approx(131.0, abs=1e-3)
    assert result.tokens_per_s == pytest.approx(8000 / 131.0, rel=1e-5)


@pytest.mark.parametrize("system", sorted(REGIMES))
def test_no_token_is_trained_that_was_not_generated_and_none_is_generated_twice(system: str) -> None:
    work = Agentic(turns=3, max_turns=5, answer=60, observation=20, tool_s=1.0, prompt=50, max_answer=300)
    base = scenario(system, workload=work, warm=0, noise=Noise(slowdown=0.05))
    result, simulation, events = watched(base)
    units = simulation.fleet.units.values()
    for unit in units:
        unit.charge()
    generated = sum(unit.replica.generated for unit in units)
    ended = sum(event.tokens for event in events if isinstance(event, flight.RequestEnded))
    trained = sum(step.generated for step in result.steps)
    assert trained == sum(sum(step.answers) for step in result.steps)
    assert trained <= ended + 1
    under_way = {e.request for e in events if isinstance(e, flight.RequestStarted)}
    under_way -= {e.request for e in events if isinstance(e, flight.RequestEnded)}
    assert ended <= generated + 1 + 0.5 * len(events)  # tokens of a request are told as whole numbers
    assert under_way or generated == pytest.approx(ended, rel=0.01)


@pytest.mark.parametrize("system", sorted(REGIMES))
def test_no_slice_generates_more_than_its_engine_can(system: str) -> None:
    result, simulation, _ = watched(scenario(system, warm=0))
    for unit in simulation.fleet.units.values():
        unit.charge()
        physics, seconds = unit.replica.physics, unit.account.seconds
        fastest = max(n / physics.decode.step_s(n, 0) for n in (1, 8, 64, physics.max_running))
        assert unit.replica.generated <= fastest * seconds[Use.GENERATE] + 1e-6
        assert sum(seconds.values()) == pytest.approx(simulation.clock.now)
        assert not seconds[Use.TRAIN] or unit.account.trainable
    assert result.books.balance == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("system", sorted(REGIMES))
def test_every_request_that_begins_ends_once_and_where_it_began(system: str) -> None:
    _, _, events = watched(scenario(system, warm=0, noise=Noise(failures_per_hour=20.0)))
    out: dict[str, str] = {}
    last = 0.0
    for event in events:
        assert event.at >= last - 1e-9
        last = event.at
        if isinstance(event, flight.RequestStarted):
            assert event.request not in out
            out[event.request] = event.slice
        elif isinstance(event, flight.RequestEnded):
            assert out.pop(event.request) == event.slice
            assert event.tokens >= 0


def step_s(base: Scenario) -> float:
    return simulate(base).step_s


def _faster(base: Scenario, factor: float) -> Scenario:
    pools = (replace(p, engine=replace(p.engine, decode=slower(p.engine.decode, 1 / factor))) for p in base.pools)
    return replace(base, pools=tuple(pools))


def _more(base: Scenario) -> Scenario:
    return replace(base, pools=tuple(replace(pool, slices=2 * pool.slices) for pool in base.pools))


BETTER: dict[str, Callable[[Scenario], Scenario]] = {
    "faster engines": lambda base: _faster(base, 2.0),
    "twice the slices": _more,
    "faster training": lambda base: replace(base, train=replace(base.train, gpu_s_per_token=1e-3)),
    "shorter answers": lambda base: replace(base, workload=Constant(answer=300)),
    "cheap switches": lambda base: replace(base, costs=SwitchCosts(wake=0.1, drain=0.1, load=0.1, push=0.1)),
}


@pytest.mark.parametrize("better", sorted(BETTER))
@pytest.mark.parametrize("system", sorted(REGIMES))
def test_what_is_better_makes_no_step_longer(system: str, better: str) -> None:
    """Equal lengths and no noise, so that nothing but the change tells; a twentieth for other moments of loans."""
    base = scenario(system, workload=Constant(answer=900), warm=2)
    assert step_s(BETTER[better](base)) <= 1.05 * step_s(base)


@pytest.mark.parametrize("system", ["disaggregated", "staleflow", "areal", "verl_separate_async_wait"])
def test_looser_bounds_make_no_step_longer_where_lengths_are_skewed(system: str) -> None:
    skewed = LogNormal(mean=800, sigma=1.2, cap=8000)
    times = [step_s(scenario(system, workload=skewed, eta=eta, steps=14, warm=4)) for eta in (0, 1, 3)]
    assert times[1] <= 1.02 * times[0]
    assert times[2] <= 1.02 * times[1]


def test_a_failed_slice_comes_back_after_its_repair() -> None:
    base = by_hand("greedy", noise=Noise(failures_per_hour=60.0), steps=8)
    base = replace(base, costs=replace(base.costs, repair=50.0))
    result, _, events = watched(base)
    repairs = stretches(events, SliceState.FAILED)
    assert repairs
    assert all(seconds == pytest.approx(50.0) for seconds in repairs)
    assert result.books.gpu_seconds[Use.FAILED] > 0
    assert step_s(base) > step_s(replace(base, noise=Noise()))


def test_a_replica_that_failed_loses_its_requests_to_others_with_their_tokens() -> None:
    base = by_hand("disaggregated", noise=Noise(failures_per_hour=60.0), steps=4)
    _, _, events = watched(replace(base, costs=replace(base.costs, repair=50.0)))
    resumed = [e for e in events if isinstance(e, flight.RequestStarted) and e.resumed]
    assert resumed
    assert all(e.prompt_tokens <= 100 for e in resumed)


def test_transitions_that_begin_together_take_equally_long_and_spread_as_said() -> None:
    costs = SwitchCosts(wake=7.0, drain=3.0, load=2.0, push=4.0, spread=0.2)
    _, _, events = watched(by_hand("greedy", costs=costs, steps=12))
    wakes = stretches(events, SliceState.WAKING)
    assert len(wakes) >= 20
    assert len({round(seconds, 6) for seconds in wakes}) <= len(wakes) // 2  # two slices at a time
    assert 5.0 < sum(wakes) / len(wakes) < 9.0
    assert max(wakes) - min(wakes) > 0.5


@settings(max_examples=8, deadline=None)
@given(system=st.sampled_from(sorted(REGIMES)), seed=st.integers(0, 99), mini=st.sampled_from([1, 2, 4, 8]))
def test_every_step_trains_a_batch_of_whole_groups(system: str, seed: int, mini: int) -> None:
    work = Bimodal(short=100, long=900, long_share=0.3)
    result = simulate(scenario(system, workload=work, seed=seed, mini_batch=mini, warm=0, steps=4))
    assert len(result.steps) == 4
    for step in result.steps:
        assert len(step.staleness) == 8
        assert len(step.answers) == 8 * 4
        assert step.tokens == sum(step.answers) + 160 * 32
        assert step.ended > step.began
        assert min(step.staleness) >= 0
    assert [step.step for step in result.steps] == [1, 2, 3, 4]


def test_progress_is_told_after_every_step_and_the_record_changes_nothing() -> None:
    seen: list[int] = []
    base = scenario("predictive")
    plain = Simulation(base, progress=lambda step: seen.append(step.step)).run()
    recorded, _, _ = watched(base)
    assert seen == [1, 2, 3, 4, 5, 6]
    assert plain == recorded


def test_a_divisor_is_the_largest_that_fits() -> None:
    assert [divisor(12, wanted) for wanted in (1, 5, 6, 11, 12, 40)] == [1, 4, 6, 6, 12, 12]
    assert divisor(7, 0) == 1


def test_what_is_left_out_at_first_is_less_than_everything() -> None:
    with pytest.raises(ConfigError, match="must be below steps=5"):
        by_hand("greedy", warm=5)


def test_the_gang_hands_weights_over_only_where_somebody_stands_by() -> None:
    apart, together = by_hand("greedy"), by_hand("greedy", pools=(TRAINERS,))
    assert apart.push_s(REGIMES["greedy"]) == 4.0
    assert together.push_s(REGIMES["greedy"]) == 0.0
    assert apart.push_s(REGIMES["verl_separate_async"]) == 0.0  # all replicas load at once instead
    assert ([p.name for p in apart.gang], [p.name for p in apart.standing]) == (["trainers"], ["rollouts"])
    assert apart.gpus == 4


def test_training_time_by_hand() -> None:
    physics = TrainPhysics(gpu_s_per_token=0.01, old_log_prob=0.5, update_s=2.0)
    assert physics.seconds(1000, 5) == pytest.approx(2.0 + 1000 * 0.01 * 1.5 / 5)
