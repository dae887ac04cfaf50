"""Every system on a small cluster: the books balance, bounds hold, nothing hangs, nothing beats the limit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.config import SchedulerConfig
from seamless_verl.decode_cost import DecodeCost
from seamless_verl.errors import ConfigError
from seamless_verl.observe import flight
from seamless_verl.scheduling.verl_gate import GateRule
from seamless_verl.simulation.agents import Agentic, Bimodal, Constant, LogNormal, Replay, Turn
from seamless_verl.simulation.books import Use
from seamless_verl.simulation.fluid import best_limit, fluid_limit
from seamless_verl.simulation.presets import CALIBRATED, COSTS
from seamless_verl.simulation.presets import engine as engine_of_four_h100
from seamless_verl.simulation.regimes import REGIMES
from seamless_verl.simulation.replica import EnginePhysics, slower
from seamless_verl.simulation.run import Result, Simulation, simulate
from seamless_verl.simulation.scenario import Noise, Pool, Scenario, SwitchCosts, TrainPhysics
from tests.kernel.simulation.build import ENGINE, scenario, trained_s

pytestmark = pytest.mark.timeout(300)  # some take 15 s of a core, on a loaded machine several times that
SYSTEMS = tuple(REGIMES)
BOUNDED = (
    "staleflow",
    "seamlessflow",
    "greedy",
    "predictive",
    "disaggregated",
    "colocated",
)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_books_balance_and_the_limit_holds(system: str) -> None:
    result = simulate(scenario(system))
    assert result.books.balance == pytest.approx(1.0, abs=1e-9)
    assert result.step_s >= 0.98 * fluid_limit(result.scenario).work_s  # a sampled limit, four steps
    assert len(result.steps) == 4
    assert result.stalls == 0


@pytest.mark.parametrize("system", BOUNDED)
@pytest.mark.parametrize("eta", [0, 1, 2])
def test_staleness_keeps_its_bound(system: str, eta: int) -> None:
    result = simulate(scenario(system, eta=eta, warm=0))
    assert result.max_staleness <= eta


def test_the_gang_is_not_called_for_groups_of_which_none_has_come() -> None:
    """Equal lengths end all at once, and later than predicted where a wake-up made everybody prefill again. A policy
    that believes the forecast takes 3 of the 4 slices away a few seconds before they would have been done."""
    engine = engine_of_four_h100(CALIBRATED)
    trainers = Pool(name="trainers", slices=3, gpus=4, trains=True, engine=engine)
    wanted = Scenario(
        system="predictive",
        pools=(trainers, replace(trainers, name="rollouts", slices=1, trains=False)),
        workload=Constant(answer=12_700),
        train=TrainPhysics(gpu_s_per_token=CALIBRATED.train_gpu_s_per_token, update_s=2.0),
        costs=COSTS,
        batch=32,
        mini_batch=8,
        steps=8,
        warm=2,
        noise=Noise(slowdown=0.03),
    )
    greedy = simulate(replace(wanted, system="greedy"))
    assert simulate(wanted).step_s <= 1.01 * greedy.step_s


def of_published_hardware(system: str, trainers: int, rollouts: int, steps: int) -> Scenario:
    engine = engine_of_four_h100(CALIBRATED)
    train = Pool(name="trainers", slices=trainers, gpus=4, trains=True, engine=engine)
    rollout = replace(train, name="rollouts", slices=rollouts, trains=False)
    return Scenario(
        system=system,
        pools=(train, rollout) if rollouts else (train,),
        workload=LogNormal(mean=12_700, sigma=0.7, cap=32_768),
        train=TrainPhysics(gpu_s_per_token=CALIBRATED.train_gpu_s_per_token, update_s=2.0),
        costs=COSTS,
        batch=32,
        mini_batch=8,
        steps=steps,
        warm=min(4, steps - 1),
        noise=Noise(slowdown=0.03),
    )


PUBLISHED = of_published_hardware("predictive", 2, 2, steps=12)


@pytest.fixture(scope="module")
def predictive() -> Result:
    return simulate(PUBLISHED)


def test_predictive_comes_near_the_limit_on_the_published_hardware(predictive: Result) -> None:
    assert predictive.step_s <= fluid_limit(PUBLISHED).paid_s / 0.93


def test_trainers_hardly_idle_on_the_published_hardware(predictive: Result) -> None:
    other = simulate(replace(PUBLISHED, seed=1))
    assert (predictive.books.trainable_idle_share + other.books.trainable_idle_share) / 2 < 0.05


@pytest.mark.parametrize("rival", ["greedy", "disaggregated"])
def test_predictive_is_ahead_of_its_rivals_on_the_published_hardware(predictive: Result, rival: str) -> None:
    assert predictive.step_s < simulate(replace(PUBLISHED, system=rival)).step_s


def test_slow_trainers_are_lent_without_loss() -> None:
    """Half of the trainers' slices decode at a quarter of the speed; each slice gets as many requests as the others."""

    def step_s(system: str) -> float:
        base = of_published_hardware(system, 2, 2, steps=8)
        trainers, rollouts = base.pools
        half = replace(trainers, slices=trainers.slices // 2)
        slow = replace(half, name="slow", engine=replace(trainers.engine, decode=slower(trainers.engine.decode, 4.0)))
        return simulate(replace(base, pools=(slow, half, rollouts))).step_s

    assert step_s("predictive") <= 1.02 * step_s("disaggregated")


def test_trainers_do_not_idle_where_lengths_are_skewed() -> None:
    """A quarter of the slices train; the longest answer holds the step up, so that a loan is worth little."""
    skewed = LogNormal(mean=6_000, sigma=1.2, cap=32_768)
    wanted = replace(of_published_hardware("predictive", 1, 3, steps=12), workload=skewed)
    runs = [simulate(replace(wanted, seed=seed)) for seed in range(2)]
    assert sum(result.books.trainable_idle_share for result in runs) / 2 < 0.05


def test_a_gang_of_all_slices_leaves_nobody_to_generate_while_it_trains() -> None:
    """The longest trajectory decodes alone at best, and not at all during eta + 1 trainings."""
    wanted = of_published_hardware("predictive", 4, 0, steps=6)
    limit = fluid_limit(wanted)
    alone_s = 32_768 * wanted.pools[0].engine.decode.step_s(1, 16_000)
    assert limit.bounded_s >= 0.97 * (limit.train_s + alone_s / (wanted.eta + 1))
    assert simulate(replace(wanted, system="colocated")).step_s >= 0.95 * limit.bounded_s


@pytest.mark.parametrize("system", ["greedy", "verl_enable_switch"])
def test_slices_that_join_with_new_weights_get_their_share_of_what_these_interrupt(system: str) -> None:
    simulation = Simulation(of_published_hardware(system, 2, 2, steps=3))
    fleet, spread = simulation.fleet, simulation.fleet.spread
    loads = []

    def watched(names: list[str], version: int) -> None:
        spread(names, version)
        loads.append([fleet.units[name].replica.load for name in names])

    fleet.spread = watched  # type: ignore[method-assign, assignment]
    simulation.run()
    assert loads
    assert all(max(found) - min(found) <= 1 and len(found) == 4 for found in loads)


def test_tags_decide_what_may_be_lent_and_what_the_limit_is() -> None:
    """Trainers that can only train stay with the trainer under a policy that lends; theirs is the limit of who never
    does."""
    base = scenario("predictive", warm=0)
    trainers, rollouts = base.pools
    assert simulate(base).lends > 0
    apart = replace(base, pools=(replace(trainers, rolls_out=False), rollouts))
    result = simulate(apart)
    assert result.lends == 0
    assert result.books.trainable_gpu_seconds[Use.GENERATE] == 0
    never = replace(apart, system="disaggregated")
    assert fluid_limit(apart).paid_s == pytest.approx(fluid_limit(never).paid_s, rel=1e-6)
    assert fluid_limit(apart).paid_s > 1.01 * fluid_limit(base).paid_s
    third = replace(trainers, name="third", rolls_out=False)
    mixed = simulate(replace(base, pools=(replace(trainers, slices=1), replace(third, slices=1), rollouts)))
    assert mixed.lends > 0
    assert mixed.books.balance == pytest.approx(1.0, abs=1e-9)


def test_a_loan_that_must_save_more_is_made_less_often_and_so_it_is_where_few_are_allowed() -> None:
    """The settings of the policy are those of a live run. With a margin that nothing reaches only the loan is left
    without which nobody would generate, before the first step."""
    base = scenario("predictive", steps=12, warm=0)

    def lends(**asked: float) -> int:
        return simulate(replace(base, scheduler=SchedulerConfig(**asked))).lends

    assert lends() > lends(max_loans_per_step=1) > lends(margin=5.0) >= lends(margin=1000.0) == 1


@pytest.mark.parametrize("system", ["greedy", "disaggregated", "staleflow"])
def test_other_policies_have_no_such_settings(system: str) -> None:
    shy = SchedulerConfig(margin=1000.0, max_loans_per_step=1)
    base = scenario(system)
    assert simulate(replace(base, scheduler=shy)).steps == simulate(base).steps


def test_the_best_limit_is_that_of_the_slices_whoever_shares_them() -> None:
    apart, lent = (best_limit(scenario(system)) for system in ("disaggregated", "predictive"))
    assert apart == lent
    assert apart is not None
    assert apart <= min(fluid_limit(scenario(s)).paid_s for s in ("disaggregated", "predictive"))
    assert best_limit(scenario("verl_separate_async")) is None
    assert best_limit(scenario("verl_sync")) == best_limit(scenario("verl_sync", eta=0))
    assert best_limit(scenario("verl_sync")) == best_limit(scenario("verl_sync", eta=5))


def test_no_limit_rises_because_others_would_train_in_smaller_pieces() -> None:
    dear = TrainPhysics(gpu_s_per_token=2e-3, update_s=5.0)
    whole, pieces = (best_limit(scenario("roll", train=dear, mini_batch=size)) for size in (8, 1))
    assert whole is not None
    assert pieces is not None
    assert pieces <= whole


@pytest.mark.parametrize("system", ["verl_enable_switch", "verl_enable_switch_wait"])
def test_verls_switch_lends_what_can_generate_where_other_slices_only_train(system: str) -> None:
    base = scenario(system, warm=0)
    trainers, rollouts = (next(pool for pool in base.pools if pool.trains is trains) for trains in (True, False))
    result = simulate(replace(base, pools=(trainers, replace(trainers, name="third", rolls_out=False), rollouts)))
    assert result.lends > 0
    assert len(result.steps) == base.steps


def test_verl_interrupts_requests_for_new_weights_and_for_the_trainer_only() -> None:
    """Not when lent slices wake up: they were on its router before the weights went out."""
    events: list[flight.FlightEvent] = []
    base = scenario("verl_enable_switch", costs=SwitchCosts(wake=2.0, drain=1.0, load=1.5, push=0.0))
    assert Simulation(base, record=events.append).run().lends > 0
    aborted = {e.at for e in events if isinstance(e, flight.RequestEnded) and e.finish == "aborted"}
    states = (flight.SliceState.SYNCING, flight.SliceState.DRAINING)
    assert aborted <= {e.at for e in events if isinstance(e, flight.SliceMoved) and e.state in states}
    woken = {e.at for e in events if isinstance(e, flight.SliceMoved) and e.state is flight.SliceState.WAKING}
    begun = [e.at for e in events if isinstance(e, flight.StepBegan)]
    assert all(any(at + 2.0 == pytest.approx(began) for began in begun) for at in woken)  # steps begin on awake slices


def test_verls_gate_holds_where_the_next_batch_is_there_already() -> None:
    """Training takes several times as long as generating a batch: whatever ends a step finds the next one complete."""
    slow = TrainPhysics(gpu_s_per_token=2e-2, update_s=0.5)
    assert simulate(scenario("verl_enable_switch", train=slow, warm=0)).lends == 0
    assert simulate(scenario("verl_enable_switch", warm=0)).lends > 0


def test_verls_gate_is_told_of_every_wait_of_a_trainer_that_nobody_else_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first update of a step, too; what is not waiting of a step is training and the load of the weights."""
    told: list[tuple[float, int]] = []
    learn = GateRule.step_ended

    def watched(self: GateRule, waited_s: float, waited_groups: int) -> None:
        told.append((waited_s, waited_groups))
        learn(self, waited_s, waited_groups)

    monkeypatch.setattr(GateRule, "step_ended", watched)
    monkeypatch.setattr(GateRule, "should_lend", lambda self, ready, *, last_step: False)
    quick = TrainPhysics(gpu_s_per_token=1e-5, update_s=0.5)
    events: list[flight.FlightEvent] = []
    result = Simulation(scenario("verl_enable_switch", train=quick, warm=0), record=events.append).run()
    for step, trained, (waited_s, waited_groups) in list(zip(result.steps, trained_s(events), told, strict=True))[1:]:
        assert waited_s == pytest.approx(step.ended - step.began - trained - 1.0, abs=1e-6)
        assert waited_groups > 0


@pytest.mark.parametrize("system", ["greedy", "predictive"])
def test_no_policy_beats_the_limit_where_requests_queue_for_seats(system: str) -> None:
    """128 in flight have 8 seats; the oldest session is served first, so the longest answer never waits."""
    flat = DecodeCost(floor_s=4e-3, base_s=4e-3, per_request_s=0.0, attention_base_s=0.0, attention_per_token_s=0.0)
    seats = EnginePhysics(decode=flat, prefill_s_per_token=0.0, kv_tokens=10**6, max_running=4)
    answers = [1200, *range(8, 260, 4)]
    queueing = scenario(
        system,
        pools=tuple(replace(pool, slices=1, gpus=1, engine=seats) for pool in scenario(system).pools),
        workload=Replay([[(Turn(prompt=24, answer=answer),)] for answer in answers]),
        train=TrainPhysics(gpu_s_per_token=1.2 / (sum(answers) + 24 * len(answers)), update_s=0.0),
        costs=SwitchCosts(wake=0.2, drain=0.1, load=0.1, push=0.0),
        batch=64,
        mini_batch=64,
        attempts=1,
        steps=16,
        warm=4,
    )
    assert 0.95 * simulate(queueing).step_s <= fluid_limit(queueing).paid_s <= 1.02 * simulate(queueing).step_s


def test_a_switch_is_no_failure_however_dear_it_is() -> None:
    """The scheduler of a live run gives a drain up after 120 s and has the slice restarted."""
    events: list[flight.FlightEvent] = []
    dear = scenario("greedy", costs=SwitchCosts(wake=700.0, drain=300.0, load=1.0, push=0.5, spread=0.1), warm=0)
    assert Simulation(dear, record=events.append).run().lends > 0
    told = {event.name for event in events if isinstance(event, flight.SchedulerInput)}
    assert "SliceDrained" in told
    assert "SliceReturned" not in told


def test_discarding_what_is_too_old_leaves_the_short_answers() -> None:
    """ROLL's bucket beside StaleFlow's protocol, which waits."""
    skewed = LogNormal(mean=1000, sigma=1.2, cap=8192)

    def trained_length(system: str) -> float:
        result = simulate(scenario(system, workload=skewed, steps=20))
        answers = [length for step in result.steps for length in step.answers]
        return sum(answers) / len(answers)

    assert trained_length("roll") < 0.9 * trained_length("staleflow")


def test_staleflow_moves_requests_when_others_end_not_only_when_replicas_join() -> None:
    lopsided = Bimodal(short=50, long=3000, long_share=0.15)
    assert simulate(scenario("staleflow", workload=lopsided, warm=0)).migrated > 0


def test_who_awaits_the_load_begins_its_step_when_all_replicas_have_it() -> None:
    events: list[flight.FlightEvent] = []
    Simulation(scenario("predictive", warm=0), record=events.append).run()
    begun = [event.at for event in events if isinstance(event, flight.StepBegan)][1:]
    published = [e.at for e in events if isinstance(e, flight.PhaseEnded) and e.phase is flight.Phase.SYNC_WEIGHTS]
    assert [at - before for at, before in zip(begun, published, strict=False)] == pytest.approx([1.0] * len(begun))


@pytest.mark.parametrize("system", ["predictive", "staleflow"])
def test_fewer_batches_in_flight_make_samples_younger_on_average_and_keep_the_bound(system: str) -> None:
    """And steps shorter than with the same mean age and no sample above it: the longest need not fit into two steps."""
    skewed = LogNormal(mean=1000, sigma=1.2, cap=8192)
    few = simulate(scenario(system, workload=skewed, eta=3, in_flight=2, steps=16, warm=4))
    assert few.max_staleness <= 3
    assert 0.7 < few.mean_staleness < 1.1  # Little's law: batches in flight less one
    tight = simulate(scenario(system, workload=skewed, eta=1, steps=16, warm=4))
    assert tight.mean_staleness == pytest.approx(1.0, abs=0.01)
    assert few.step_s < tight.step_s


def test_systems_with_admission_of_their_own_take_no_number_of_batches() -> None:
    with pytest.raises(ConfigError, match="verl_separate_async admits by its own rule"):
        scenario("verl_separate_async", in_flight=2)
    with pytest.raises(ConfigError, match=r"staleness.in_flight=3: must be a number of batches from 1 to 2"):
        scenario("predictive", in_flight=3)


def test_weights_are_handed_over_only_where_somebody_waits_for_them() -> None:
    """Slices that all train take the weights when they wake."""
    base = scenario("predictive")
    together = replace(base, pools=(replace(base.pools[0], slices=4),))
    dear = replace(base.costs, push=100.0)
    assert simulate(replace(together, costs=dear)).step_s == simulate(together).step_s
    assert simulate(replace(base, costs=dear)).step_s > simulate(base).step_s + 50


@pytest.mark.parametrize("system", ["verl_enable_switch", "verl_enable_switch_wait", "disaggregated"])
def test_somebody_must_generate_the_first_batch(system: str) -> None:
    base = scenario("predictive")
    with pytest.raises(ConfigError, match=f"scheduler.policy={system}: needs slices that only generate"):
        replace(base, system=system, pools=base.pools[:1])


def test_the_published_bounds() -> None:
    assert simulate(scenario("verl_sync", warm=0)).max_staleness == 0
    assert simulate(scenario("verl_one_step_off", warm=0)).max_staleness == 1
    assert simulate(scenario("verl_separate_async_wait", warm=0, steps=12)).max_staleness <= 1
    assert simulate(scenario("roll", warm=0, steps=12)).max_staleness <= 1


@pytest.mark.parametrize("system", ["predictive", "verl_enable_switch", "roll"])
def test_a_seed_says_everything(system: str) -> None:
    noisy = scenario(system, noise=Noise(slowdown=0.1), costs=SwitchCosts(wake=2, drain=1, load=1, push=1, spread=0.2))
    assert simulate(noisy) == simulate(noisy)
    assert simulate(noisy).step_s != simulate(replace(noisy, seed=1)).step_s


def test_every_group_is_trained_once_and_whole() -> None:
    source = [[(Turn(prompt=5, answer=100 + 10 * group + index),) for index in range(4)] for group in range(48)]
    for system in ("verl_sync", "predictive", "areal", "verl_colocate_async"):
        result = simulate(scenario(system, workload=Replay(source), warm=0, steps=4))
        answers = sorted(length for step in result.steps for length in step.answers)
        known = sorted(turn.answer for group in source for (turn,) in group)
        assert len(answers) == 4 * 8 * 4
        remaining = list(known)
        for length in answers:  # a multiset inside the multiset of what was drawn
            remaining.remove(length)


@settings(max_examples=10, deadline=None)
@given(
    system=st.sampled_from(SYSTEMS),
    seed=st.integers(0, 1000),
    failures=st.sampled_from([0.0, 30.0]),
    work=st.sampled_from(
        [
            Constant(answer=600),
            Bimodal(short=200, long=3000, long_share=0.2),
            Agentic(turns=3, max_turns=6, answer=150, observation=80, tool_s=4.0, prompt=200, max_answer=800),
        ]
    ),
    room=st.sampled_from([12_000, 400_000]),
)
def test_no_system_hangs(system: str, seed: int, failures: float, work: Constant, room: int) -> None:
    engine = replace(ENGINE, kv_tokens=room)
    base = scenario(system)
    result = simulate(
        replace(
            base,
            pools=tuple(replace(pool, engine=engine) for pool in base.pools),
            workload=work,
            seed=seed,
            noise=Noise(slowdown=0.1, failures_per_hour=failures),
            costs=replace(base.costs, spread=0.3, repair=20.0),
        )
    )
    assert result.books.balance == pytest.approx(1.0, abs=1e-9)
    assert result.books.gpu_seconds[Use.TRAIN] > 0


def test_lengths_have_the_mean_they_should() -> None:
    rng = random.Random(3)
    work = LogNormal(mean=12_700, sigma=0.7, cap=32_768)
    lengths = [turn.answer for _ in range(3000) for (turn,) in work.group(rng, 4)]
    assert sum(lengths) / len(lengths) == pytest.approx(12_700, rel=0.03)
    assert max(lengths) == 32_768
    agents = Agentic(turns=8, max_turns=30, answer=400, observation=300, tool_s=5.0)
    attempts = [attempt for _ in range(500) for attempt in agents.group(rng, 4)]
    assert sum(map(len, attempts)) / len(attempts) == pytest.approx(8, rel=0.2)
    assert max(map(len, attempts)) == 30


def test_impossible_scenarios_are_refused() -> None:
    with pytest.raises(ConfigError, match="write predictive"):
        scenario("predictve")
    with pytest.raises(ConfigError, match="does not divide"):
        scenario("predictive", mini_batch=3)
    with pytest.raises(ConfigError, match="only generate"):
        scenario("staleflow", pools=scenario("predictive").pools[:1])
    with pytest.raises(ConfigError, match="no pool can train"):
        scenario("predictive", pools=scenario("predictive").pools[1:])
    with pytest.raises(ConfigError, match="all train and roll out"):
        scenario("verl_sync", pools=scenario("predictive").pools)
    with pytest.raises(ConfigError, match="a cache for 400000 tokens"):
        scenario("predictive", workload=Constant(answer=10_000_000))


def test_the_scheduler_is_the_real_one() -> None:
    """Its own books say what the simulator's say: every slice serves or trains in both."""
    simulation = Simulation(scenario("predictive"))
    simulation.run()
    assert {status.slice.id for status in simulation.scheduler.cluster} == set(simulation.fleet.units)
    for status in simulation.scheduler.cluster:
        assert simulation.fleet.units[status.slice.id].serving == (status.state.value == "rollout")


@pytest.mark.parametrize(("system", "bound"), [("areal", None), ("verl_one_step_off", 1), ("predictive", 2)])
def test_a_recording_says_which_bound_on_staleness_is_kept(system: str, bound: int | None) -> None:
    events: list[flight.FlightEvent] = []
    Simulation(scenario(system, eta=2, steps=2, warm=0), record=events.append).run()
    assert isinstance(events[0], flight.RunStarted)
    assert events[0].bound == bound
