"""A recording becomes a scenario again: what is waiting comes off, what is work stays."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

import pytest

from seamless_verl.config import RouterConfig, StalenessConfig, WeightsConfig
from seamless_verl.observe import flight
from seamless_verl.observe.flight import FlightEvent, SliceState
from seamless_verl.observe.recording import Recording
from seamless_verl.simulation.agents import Agentic, Constant, Turn
from seamless_verl.simulation.options import apply
from seamless_verl.simulation.recorded_run import NothingToReplay, Recorded, Settings, from_recording
from seamless_verl.simulation.recorded_work import requests_of, served, serving_of, work_of
from seamless_verl.simulation.replica import EnginePhysics
from seamless_verl.simulation.run import Simulation, simulate
from seamless_verl.simulation.scenario import Scenario, TrainPhysics
from tests.kernel.simulation.build import COST, scenario

AS_THEY_COME = RouterConfig(oldest_first=False)
FEW_AT_ONCE = EnginePhysics(decode=COST, prefill_s_per_token=0.0, kv_tokens=400_000, max_running=4)


def recorded(base: Scenario, **asked: Any) -> tuple[Recorded, float]:
    """The scenario that its recording gives, and the mean step of those that the replay counts."""
    events: list[FlightEvent] = []
    result = Simulation(replace(base, warm=0), record=events.append).run()
    running = base.pools[0].engine.max_running
    found = from_recording(Recording(events=tuple(events)), max_running=running, settings=Settings(**asked))
    return found, mean(step.ended - step.began for step in result.steps[found.scenario.warm :])


@pytest.mark.parametrize("system", ["predictive", "greedy", "disaggregated", "colocated"])
@pytest.mark.parametrize("load_s", [0.2, 6.0])  # the longer ones take a third of a step
def test_a_replay_takes_as_long_as_what_was_recorded(system: str, load_s: float) -> None:
    """In the mean of three seeds: a single run differs by up to 15 %, as loans begin and end at other times. More under
    greedy where loads are long: its loans are about worth their price then, and some pay in a run only."""
    were, are = [], []
    for seed in range(3):
        base = scenario(system, steps=16, seed=seed)
        pools = tuple(replace(pool, engine=FEW_AT_ONCE) for pool in base.pools)
        costs = replace(base.costs, load=load_s)
        found, step_s = recorded(replace(base, pools=pools, costs=costs, workload=replace(base.workload, mean=300)))
        assert (found.scenario.batch, found.scenario.attempts) == (8, 4)
        assert mean(found.step_s[found.scenario.warm :]) == pytest.approx(step_s, rel=1e-6)
        were.append(step_s)
        are.append(simulate(found.scenario).step_s)
    assert mean(are) == pytest.approx(mean(were), rel=0.13 if (system, load_s) == ("greedy", 6.0) else 0.10)


def test_a_queue_is_replayed_in_the_order_that_it_was_recorded_in() -> None:
    """Greedy's lent slices interrupt and spread requests again and again; first come, first served takes longer. Means
    of four seeds: a single run differs from its replay by up to 15 %, as loans begin at other times. Switches are
    cheap: where loans are not made in each step nothing is interrupted either."""
    were, are, oldest_first = [], [], []
    for seed in range(4):
        base = scenario("greedy", steps=16, seed=seed)
        pools = tuple(replace(pool, engine=FEW_AT_ONCE) for pool in base.pools)
        base = replace(base, pools=pools, workload=replace(base.workload, mean=300), router=AS_THEY_COME)
        base = replace(base, costs=replace(base.costs, wake=0.2, drain=0.1))
        found, step_s = recorded(base, router=AS_THEY_COME)
        were.append(step_s)
        are.append(simulate(found.scenario).step_s)
        oldest_first.append(simulate(replace(found.scenario, router=None)).step_s)
    assert mean(are) == pytest.approx(mean(were), rel=0.03)
    assert mean(oldest_first) < 0.95 * mean(were)


def test_as_many_batches_are_under_way_as_when_it_was_recorded() -> None:
    """One of four: the trainer waits for each batch from its beginning."""
    base = scenario("disaggregated", eta=3, in_flight=1, steps=12)
    found, step_s = recorded(base, staleness=StalenessConfig(eta=3, in_flight=1))
    assert found.scenario.in_flight == 1
    assert simulate(found.scenario).step_s == pytest.approx(step_s, rel=0.10)
    assert simulate(replace(found.scenario, in_flight=None)).step_s < 0.7 * step_s


def test_weights_that_were_taken_in_turn_are_again() -> None:
    weights = WeightsConfig(sync="rolling", cache="keep")
    found, step_s = recorded(scenario("disaggregated", steps=12, weights=weights), weights=weights)
    assert found.scenario.weights == weights
    assert found.scenario.costs.push == pytest.approx(0.5)
    assert any("one replica after the other" in note for note in found.notes)
    assert simulate(found.scenario).step_s == pytest.approx(step_s, rel=0.10)


@pytest.mark.parametrize(
    ("system", "asked", "told"),
    [
        ("predictive", Settings(staleness=StalenessConfig(eta=3, mask_older_than=1)), ""),
        ("predictive", Settings(staleness=StalenessConfig(policy="verl")), "cannot play staleness.policy=verl:"),
        (
            "predictive",
            Settings(staleness=StalenessConfig(redundancy=1.5, group_redundancy=1.25)),
            "cannot play staleness.redundancy=1.5, staleness.group_redundancy=1.25:",
        ),
        ("colocated", Settings(weights=WeightsConfig(sync="rolling")), "cannot play weights.sync=rolling:"),
        ("areal", Settings(staleness=StalenessConfig(stuck="retry", in_flight=1.5)), "cannot play staleness.stuck="),
    ],
)
def test_a_setting_that_cannot_be_played_is_told(system: str, asked: Settings, told: str) -> None:
    events: list[FlightEvent] = []
    Simulation(scenario(system, steps=3, warm=0), record=events.append).run()
    found = from_recording(Recording(events=tuple(events)), settings=asked)
    notes = [note for note in found.notes if "cannot play" in note]
    assert len(notes) == bool(told)
    assert told in "".join(notes)


def test_sessions_come_back_turn_by_turn() -> None:
    agents = Agentic(turns=4, max_turns=8, answer=60, observation=30, tool_s=0.5, prompt=100, max_answer=200)
    base = scenario("predictive", workload=agents, steps=8)
    found, _ = recorded(base)
    turns = [len(attempt) for _ in range(20) for attempt in found.scenario.workload.group(None, 4)]  # type: ignore[arg-type]
    assert len(set(turns)) > 3
    assert mean(turns) == pytest.approx(4, rel=0.3)


def test_a_replay_is_the_same_each_time() -> None:
    found, _ = recorded(scenario("predictive", steps=8))
    assert simulate(found.scenario).step_s == simulate(found.scenario).step_s


def test_a_trainer_that_awaits_loads_pays_for_them_where_it_holds_everybody_up() -> None:
    train = TrainPhysics(gpu_s_per_token=2e-2, update_s=0.5)
    base = scenario("staleflow", steps=8, train=train, workload=Constant(answer=300))
    base = replace(base, costs=replace(base.costs, load=3.0))
    waits = simulate(replace(base, train=replace(train, awaits_load=True)))
    assert waits.step_s - simulate(base).step_s == pytest.approx(3.0, abs=0.1)


def run_of(steps: int) -> list[FlightEvent]:
    events: list[FlightEvent] = []
    Simulation(scenario("disaggregated", steps=steps, warm=0), record=events.append).run()
    return events


def _cut(events: list[FlightEvent], step: int) -> list[FlightEvent]:
    """Killed in this step."""
    began = next(e.at for e in events if isinstance(e, flight.StepBegan) and e.step == step)
    return [event for event in events if event.at <= began + 1.0]


def _later(events: list[FlightEvent], by_s: float = 3600.0, steps: int = 0) -> list[FlightEvent]:
    numbered = (flight.StepBegan, flight.StepEnded, flight.PhaseBegan, flight.PhaseEnded, flight.RowsTrained)
    moved = [replace(event, at=event.at + by_s) for event in events]
    return [replace(event, step=event.step + steps) if isinstance(event, numbered) else event for event in moved]


@pytest.mark.parametrize("first_is_longer", [True, False])
@pytest.mark.parametrize("killed", [True, False])
def test_of_a_run_that_was_continued_one_process_is_replayed(first_is_longer: bool, killed: bool) -> None:
    """Killed in its last step or ended, and an hour later begun again where it was: the longer one tells as much as it
    would by itself."""
    long, short = run_of(7), run_of(4)
    first, second = (long, short) if first_is_longer else (short, long)
    steps = 6 if first_is_longer else 3
    first, second = (_cut(first, steps + 1) if killed else first), _later(second, steps=steps)
    found = from_recording(Recording(events=(*first, *second)))
    alone = from_recording(Recording(events=tuple(first if first_is_longer else second)))
    assert found.step_s == pytest.approx(alone.step_s)
    assert found.scenario.train.gpu_s_per_token == pytest.approx(alone.scenario.train.gpu_s_per_token)
    number = 1 if first_is_longer else 2
    assert f"2 processes recorded; number {number} is replayed, of {len(alone.step_s)} complete steps" in found.notes
    assert not any("processes" in note for note in alone.notes)


def test_of_two_processes_of_equally_many_steps_the_last_is_replayed() -> None:
    events = (*run_of(3), *_later(run_of(3)))
    assert (
        "2 processes recorded; number 2 is replayed, of 3 complete steps"
        in from_recording(Recording(events=events)).notes
    )


def _live(*events: FlightEvent) -> Recording:
    added = flight.SliceAdded(
        at=0.0, slice="r/0", pool="r", devices=1, capabilities=("rollout",), state=SliceState.ROLLOUT, address="a"
    )
    return Recording(events=tuple(sorted((added, *events), key=lambda event: event.at)))


def _request(name: str, began: float, ended: float, tokens: int, finish: str = "completed") -> tuple[FlightEvent, ...]:
    return (
        flight.RequestStarted(at=began, request=name, slice="a", prompt_tokens=10),
        flight.RequestEnded(at=ended, request=name, slice="a", tokens=tokens, finish=finish),
    )


@pytest.mark.parametrize("lacks", ["RowsTrained", "StepEnded", "RequestEnded", "RunStarted"])
def test_a_recording_that_lacks_something_is_refused_by_its_name(lacks: str) -> None:
    events: list[FlightEvent] = []
    Simulation(scenario("predictive", steps=3, warm=0), record=events.append).run()
    kept = tuple(event for event in events if type(event).__name__ != lacks)
    with pytest.raises(NothingToReplay, match=r"the recording holds no (trained rows|complete (step|group)|start)"):
        from_recording(Recording(events=kept))


def test_what_sharing_saved_is_a_factor_of_the_training_time_that_a_question_may_take_away() -> None:
    events: list[FlightEvent] = []
    Simulation(scenario("predictive", steps=4, warm=0), record=events.append).run()
    recording = Recording(events=tuple(events))
    plain, shared = (from_recording(recording, saved_s=saved_s).scenario for saved_s in (0.0, 3.0))
    assert (plain.train.shared_prefix, 0 < shared.train.shared_prefix < 1) == (1.0, True)
    assert shared.train.seconds(9000, 4) == pytest.approx(plain.train.seconds(9000, 4))
    without = apply(shared, ["train.shared_prefix=1"]).train
    factor = shared.train.shared_prefix
    assert without.seconds(9000, 4) == pytest.approx(shared.train.seconds(9000, 4) / factor)
    assert any(f"leaves {factor:.2f} of it" in note for note in from_recording(recording, saved_s=3.0).notes)


@pytest.mark.parametrize(("oldest_first", "x_ends", "y_ends"), [(True, 14.0, 20.0), (False, 20.0, 16.0)])
def test_whose_seat_it_was_by_hand(oldest_first: bool, x_ends: float, y_ends: float) -> None:
    """One seat, which z gives free at 10. Since 6 y has waited, since 7 the second request of x, which began first of
    all: it is served from 10 on, and then y from 14 on; or, as they came, y from 10 on and x from 16 on."""

    def told(at: float, request: str, session: str) -> FlightEvent:
        fields = {"request": request, "group": "g", "session": session}
        return flight.SchedulerInput(at=at, name="RequestStarted", fields=fields)

    recording = _live(
        *(told(1.0, "x1", "x"), *_request("x1", 1.0, 5.0, 40)),
        *(told(4.0, "z1", "z"), *_request("z1", 4.0, 10.0, 50)),
        *(told(6.0, "y1", "y"), *_request("y1", 6.0, y_ends, 60)),
        *(told(7.0, "x2", "x"), *_request("x2", 7.0, x_ends, 30)),
    )
    found = served(requests_of(recording, []), serving_of(recording), 1, oldest_first=oldest_first)
    seconds = {one.tokens: one.seconds for one in found}
    assert seconds == {40: 4.0, 50: 5.0, 30: 4.0, 60: 6.0}
    assert {one.beside for one in found} == {1}


def test_time_in_the_queue_and_while_weights_load_is_not_decoding() -> None:
    loads = (
        flight.SliceMoved(at=5.0, slice="r/0", state=SliceState.SYNCING),
        flight.SliceMoved(at=8.0, slice="r/0", state=SliceState.ROLLOUT),
    )
    recording = _live(*_request("first", 1.0, 10.0, 60), *_request("second", 1.0, 20.0, 100), *loads)
    one_at_a_time = served(requests_of(recording, []), serving_of(recording), 1, oldest_first=False)
    assert [(one.seconds, one.tokens, one.beside) for one in one_at_a_time] == [(6.0, 60, 1), (10.0, 100, 1)]
    both = served(requests_of(recording, []), serving_of(recording), 2, oldest_first=False)
    assert sorted(one.seconds for one in both) == [6.0, 16.0]
    assert sorted(one.beside for one in both) == [1, 2]


def test_an_interrupted_answer_is_one_turn() -> None:
    """Its second request brings the prompt and what was generated before."""

    def told(at: float, name: str, **fields: object) -> FlightEvent:
        return flight.SchedulerInput(at=at, name=name, fields=fields)

    recording = _live(
        told(1.0, "RequestStarted", request="x", group="g", session="g_0"),
        *_request("x", 1.0, 2.0, 7, "aborted"),
        told(3.0, "RequestStarted", request="y", group="g", session="g_0"),
        *_request("y", 3.0, 4.0, 5),
        told(6.0, "RequestStarted", request="z", group="g", session="g_0"),
        flight.RequestStarted(at=6.0, request="z", slice="a", prompt_tokens=30),
        flight.RequestEnded(at=7.0, request="z", slice="a", tokens=4, finish="completed"),
    )
    work = work_of(recording, requests_of(recording, []), [])
    assert work.exact
    assert work.groups == [[(Turn(prompt=10, answer=12, tool_s=2.0), Turn(prompt=8, answer=4))]]
