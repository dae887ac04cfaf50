"""What is read off a recording, piece by piece, on recordings written by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.decode_cost import DecodeCost
from seamless_verl.observe import flight
from seamless_verl.observe.flight import FlightEvent, Phase, SliceState
from seamless_verl.observe.intervals import overlap, union, within
from seamless_verl.observe.recording import Recording
from seamless_verl.simulation import recorded_run
from seamless_verl.simulation.agents import Turn
from seamless_verl.simulation.recorded_work import (
    Served,
    fit_decode,
    fitted,
    requests_of,
    served,
    serving_of,
    spans_of,
    work_of,
)
from seamless_verl.simulation.run import Simulation
from tests.kernel.simulation.build import scenario

SPANS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda pair: (min(pair), max(pair))), max_size=8)


@given(SPANS, st.integers(0, 50))
def test_a_union_covers_the_same_moments_once(spans: list[tuple[int, int]], at: int) -> None:
    merged = union(spans)
    assert within(merged, at) == any(begin <= at <= end for begin, end in spans)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(merged))


@given(SPANS, st.integers(0, 50), st.integers(0, 50))
def test_an_overlap_is_what_one_counts_second_by_second(spans: list[tuple[int, int]], one: int, other: int) -> None:
    low, high = min(one, other), max(one, other)
    merged = union(spans)
    assert overlap(merged, low, high) == sum(any(b <= s < e for b, e in merged) for s in range(low, high))


def slice_added(name: str = "r/0", at: float = 0.0, **changes: object) -> flight.SliceAdded:
    added = flight.SliceAdded(
        at=at, slice=name, pool="r", devices=1, capabilities=("rollout",), state=SliceState.ROLLOUT, address=""
    )
    return replace(added, **changes)  # type: ignore[arg-type]


def request(
    name: str, began: float, ended: float, tokens: int, *, on: str = "r/0", prompt: int = 10, finish: str = "completed"
) -> list[FlightEvent]:
    return [
        flight.RequestStarted(at=began, request=name, slice=on, prompt_tokens=prompt),
        flight.RequestEnded(at=ended, request=name, slice=on, tokens=tokens, finish=finish),
    ]


def session(at: float, group: str, seconds: float, turns: int) -> flight.SessionEnded:
    return flight.SessionEnded(
        at=at, session=f"{group}_0", group=group, seconds=seconds, turns=turns, rows=1, reward=0.0, status="done"
    )


def recording(*events: FlightEvent) -> Recording:
    return Recording(events=tuple(sorted(events, key=lambda event: event.at)))


def moved(at: float, state: SliceState, name: str = "r/0") -> flight.SliceMoved:
    return flight.SliceMoved(at=at, slice=name, state=state)


def phase(kind: Phase, began: float, ended: float, step: int = 1) -> list[FlightEvent]:
    return [flight.PhaseBegan(at=began, phase=kind, step=step), flight.PhaseEnded(at=ended, phase=kind, step=step)]


def test_states_of_a_slice_as_spans() -> None:
    found = recording(
        slice_added(),
        moved(3.0, SliceState.SYNCING),
        moved(5.0, SliceState.ROLLOUT),
        moved(5.0, SliceState.SYNCING),
        moved(6.0, SliceState.ROLLOUT),
        flight.StepEnded(at=9.0, step=1),
    )
    assert spans_of(found, SliceState.SYNCING) == {"r/0": [(3.0, 5.0), (5.0, 6.0)]}
    assert spans_of(found, SliceState.ROLLOUT) == {"r/0": [(0.0, 3.0), (6.0, 9.0)]}  # open at the end of the recording
    assert spans_of(found, SliceState.TRAINING) == {}


def test_a_slice_that_is_declared_anew_has_been_in_its_state_until_then() -> None:
    trains = SliceState.TRAINING
    found = recording(slice_added(state=trains), slice_added(at=4.0), moved(6.0, trains), moved(7.0, SliceState.IDLE))
    assert spans_of(found, trains) == {"r/0": [(0.0, 4.0), (6.0, 7.0)]}
    assert spans_of(recording(slice_added(), moved(1.0, trains, "nobody")), trains) == {}


def test_a_server_serves_while_its_slice_does() -> None:
    found = recording(slice_added(address="10.0.0.1:1"), moved(4.0, SliceState.DRAINING), moved(9.0, SliceState.IDLE))
    assert serving_of(found) == {"10.0.0.1:1": [(0.0, 4.0)]}


def test_requests_of_validation_and_those_that_never_ended_do_not_count() -> None:
    found = recording(
        slice_added(),
        *request("kept", 1.0, 4.0, 30),
        *request("validated", 5.0, 6.0, 30),
        *request("at once", 7.0, 7.0, 0),
        request("open", 8.0, 9.0, 5)[0],
    )
    (only,) = requests_of(found, [(4.5, 6.5)])
    assert (only.name, only.began, only.ended, only.tokens, only.completed) == ("kept", 1.0, 4.0, 30, True)


def test_requests_come_in_the_order_in_which_they_began() -> None:
    found = recording(slice_added(), *request("long", 1.0, 9.0, 80), *request("short", 2.0, 3.0, 10))
    assert [one.name for one in requests_of(found, [])] == ["long", "short"]


def test_sessions_of_which_nobody_told_get_consecutive_requests() -> None:
    """Two sessions of two turns and one of one; of 30 s outside of requests each of the five turns gets 4."""
    events = [slice_added()]
    for number in range(5):
        events += request(f"q{number}", float(number), number + 2.0, 10 * (number + 1), prompt=100 + 20 * number)
    events += [session(20.0, "g", 12.0, 2), session(21.0, "h", 12.0, 2), session(22.0, "g", 6.0, 1)]
    found = recording(*events)
    work = work_of(found, requests_of(found, []), [])
    assert not work.exact
    (one, three), (two,) = work.groups
    assert one == (Turn(prompt=100, answer=10, tool_s=4.0), Turn(prompt=10, answer=20, tool_s=4.0))
    assert two == (Turn(prompt=140, answer=30, tool_s=4.0), Turn(prompt=1, answer=40, tool_s=4.0))
    assert three == (Turn(prompt=180, answer=50, tool_s=4.0),)


def test_without_sessions_each_request_is_a_group_and_the_time_beside_it_is_seen_while_nothing_runs() -> None:
    """A step begins 2 s before its request; the trainer has its batch 3 s after the last one."""
    found = recording(
        slice_added(),
        flight.StepBegan(at=0.0, step=1),
        *request("a", 2.0, 5.0, 30),
        *request("b", 2.0, 7.0, 50),
        flight.PhaseEnded(at=10.0, phase=Phase.WAIT_FOR_BATCH, step=1),
    )
    work = work_of(found, requests_of(found, []), [])
    assert work.groups == [
        [(Turn(prompt=10, answer=30, tool_s=5.0),)],
        [(Turn(prompt=10, answer=50, tool_s=5.0),)],
    ]


def test_sessions_that_were_told_of_come_as_they_were() -> None:
    """A group of two attempts; one has two turns with 3 s of tools between, and another group had not ended."""

    def told(at: float, name: str, **fields: object) -> flight.SchedulerInput:
        return flight.SchedulerInput(at=at, name=name, fields=fields)

    def of(name: str, group: str, owner: str, at: float) -> flight.SchedulerInput:
        return told(at, "RequestStarted", request=name, group=group, session=owner)

    found = recording(
        slice_added(),
        told(0.0, "GroupsSubmitted", groups=["g"]),
        *(of("a", "g", "g0", 1.0), *request("a", 1.0, 4.0, 30)),
        *(of("b", "g", "g1", 1.0), *request("b", 1.0, 5.0, 40)),
        *(of("c", "g", "g0", 7.0), *request("c", 7.0, 9.0, 20, prompt=55)),
        told(6.0, "SessionFinished", session="g1"),
        told(10.0, "SessionFinished", session="g0"),
        *(of("d", "h", "h0", 8.0), *request("d", 8.0, 9.5, 10, finish="aborted")),
    )
    work = work_of(found, requests_of(found, []), [])
    assert work.exact
    beside = 1.0 + 1.0  # from the submission to the first request, and from the last one to the end
    assert work.groups == [
        [
            (Turn(prompt=10, answer=30, tool_s=3.0), Turn(prompt=15, answer=20, tool_s=beside)),
            (Turn(prompt=10, answer=40, tool_s=beside),),
        ]
    ]


COST = DecodeCost(floor_s=0.0, base_s=0.01, per_request_s=0.001, attention_base_s=0.0, attention_per_token_s=0.0)


def measured(beside: int, tokens: int = 100) -> Served:
    kv = beside * 200
    return Served(slice="r", seconds=tokens * COST.step_s(beside, kv), tokens=tokens, beside=beside, kv_tokens=kv)


def test_a_cost_is_found_again_from_what_it_cost() -> None:
    found = fit_decode([measured(beside) for beside in range(1, 60)])
    for beside in (2, 20, 50):
        assert found.step_s(beside, beside * 200) == pytest.approx(COST.step_s(beside, beside * 200), rel=0.05)


def test_too_few_requests_give_their_mean() -> None:
    found = fit_decode([measured(1, 100)])
    assert found.step_s(1, 200) == pytest.approx(0.011)
    assert found.step_s(50, 10_000) == pytest.approx(0.011)


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_a_pool_is_as_slow_as_its_requests_were(factor: float) -> None:
    slow = [replace(measured(beside), seconds=factor * measured(beside).seconds) for beside in (1, 5, 9)]
    assert fitted(COST, slow).step_s(7, 0) == pytest.approx(factor * COST.step_s(7, 0))
    assert fitted(COST, []) == COST


def test_who_shared_an_engine_by_hand() -> None:
    """a decodes for 4 s alone and for 4 s beside b: 1.5 on average; b always beside a."""
    found = recording(slice_added(), *request("a", 0.5, 8.5, 80), *request("b", 4.5, 8.5, 40))
    by_tokens = {one.tokens: one for one in served(requests_of(found, []), {}, 8, oldest_first=False)}
    assert by_tokens[80].seconds == 8.0
    assert by_tokens[80].beside == 2  # 1.5, rounded
    assert by_tokens[80].kv_tokens == round(1.5 * (10 + 40))
    assert (by_tokens[40].seconds, by_tokens[40].beside) == (4.0, 2)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=12), st.integers(1, 4))
def test_no_more_decode_at_once_than_there_are_seats(jobs: list[tuple[int, int]], seats: int) -> None:
    """Whatever was recorded: what is left of a request when its wait is off lies within it."""
    events = [slice_added()]
    for number, (began, lasts) in enumerate(jobs):
        events += request(f"q{number}", float(began), float(began + lasts), 10 + number)
    found = served(requests_of(recording(*events), []), {}, seats, oldest_first=False)
    lasts_of = {10 + number: lasts for number, (_, lasts) in enumerate(jobs)}
    assert all(0 < one.seconds <= lasts_of[one.tokens] for one in found)
    assert all(1 <= one.beside <= max(seats, 1) for one in found)


# ---------------------------------------------------------------- the trainer of a recording


def test_phases_that_did_not_end_are_none() -> None:
    found = recording(*phase(Phase.SYNC_WEIGHTS, 1.0, 3.0), flight.PhaseBegan(at=5.0, phase=Phase.SYNC_WEIGHTS, step=2))
    assert recorded_run._phases(found, Phase.SYNC_WEIGHTS) == [(1.0, 3.0)]
    assert recorded_run._phases(found, Phase.VALIDATE) == []


def test_a_step_lasts_until_the_next_one_begins() -> None:
    steps = [flight.StepBegan(at=at, step=n) for n, at in ((1, 0.0), (2, 10.0), (3, 25.0))]
    steps += [flight.StepEnded(at=at, step=n) for n, at in ((1, 9.0), (2, 20.0))]  # type: ignore[misc]
    assert recorded_run._steps(recording(*steps)) == [(0.0, 10.0), (10.0, 25.0)]


def test_a_trainer_is_busy_while_it_holds_its_gang_and_waits_for_nothing() -> None:
    """The gang trains from 4 to 12; of that it waits for the batch 1 s and publishes 2 s. It had asked at 3."""
    trainer = slice_added("t/0", pool="t", capabilities=("train",), state=SliceState.IDLE)
    found = recording(
        trainer,
        flight.SchedulerInput(at=3.0, name="AcquireRequested", fields={"batch": 8, "minimum": 8}),
        moved(4.0, SliceState.TRAINING, "t/0"),
        *phase(Phase.WAIT_FOR_BATCH, 4.0, 5.0),
        *phase(Phase.SYNC_WEIGHTS, 10.0, 12.0),
        moved(12.0, SliceState.IDLE, "t/0"),
        flight.StepEnded(at=15.0, step=1),
    )
    assert recorded_run._busy_seconds(found, [(0.0, 15.0)], []) == [3.0 + 5.0]
    assert recorded_run._busy_seconds(found, [(0.0, 15.0)], [(6.0, 8.0)]) == [3.0 + 3.0]


def test_without_states_of_slices_waiting_is_taken_off_the_steps() -> None:
    found = recording(*phase(Phase.WAIT_FOR_BATCH, 1.0, 5.0), *phase(Phase.SYNC_WEIGHTS, 9.0, 10.0))
    assert recorded_run._busy_seconds(found, [(0.0, 10.0)], []) == [5.0]


def test_batches_are_as_asked_for_or_as_trained() -> None:
    asked = recording(flight.SchedulerInput(at=1.0, name="AcquireRequested", fields={"batch": 12, "minimum": 4}))
    assert recorded_run._batches(asked, 4) == (12, 4)
    rows = flight.RowsTrained(at=9.0, step=1, rollouts=32, staleness=(), prompt_tokens=(), response_tokens=())
    updates = [event for n in range(4) for event in phase(Phase.UPDATE_ACTOR, float(n), n + 0.5)]
    assert recorded_run._batches(recording(rows, *updates), 4) == (8, 2)
    assert recorded_run._batches(recording(rows), 4) == (8, 8)


def test_switches_cost_what_they_took_and_unseen_ones_a_share_of_the_load() -> None:
    seen = recording(
        slice_added(),
        moved(1.0, SliceState.WAKING),
        moved(4.0, SliceState.ROLLOUT),
        moved(9.0, SliceState.DRAINING),
        moved(11.0, SliceState.IDLE),
        flight.StepEnded(at=20.0, step=1),
    )
    costs, switched, _ = recorded_run._switch_costs(seen)
    assert (costs.wake, costs.drain, switched) == (3.0, 2.0, True)
    loads = recording(
        slice_added(),
        *phase(Phase.SYNC_WEIGHTS, 4.0, 7.0),
        moved(5.0, SliceState.SYNCING),
        moved(7.0, SliceState.ROLLOUT),
    )
    costs, switched, awaits = recorded_run._switch_costs(loads)
    assert (costs.load, costs.push, switched, awaits) == (2.0, 1.0, False, True)
    assert (costs.wake, costs.drain) == (3.0, 2.0)  # one and a half loads, and one


def test_a_replica_stands_still_in_three_stages_of_its_pull_and_the_trainer_hands_over_for_the_whole_phase() -> None:
    def pull(at: float, load_s: float, **changes: object) -> flight.PullEnded:
        stages = {"prefetch": 9.0, "gate": 9.0, "pause": 0.1, "load": load_s, "resume": 0.2}
        return replace(flight.PullEnded(at=at, slice="r/0", before=0, version=1, seconds=stages), **changes)  # type: ignore[arg-type]

    rolled = recording(
        slice_added(),
        *phase(Phase.SYNC_WEIGHTS, 4.0, 7.0),
        *(moved(5.0, SliceState.SYNCING), moved(7.0, SliceState.ROLLOUT)),  # it was handed them, and pulls later
        *(pull(8.0, 0.3), pull(9.0, 0.5), pull(10.0, 7.0)),
        pull(11.0, 0.0, seconds={}, failure="died"),
    )
    costs, _, _ = recorded_run._switch_costs(rolled, rolling=True)
    assert (costs.pull, costs.push) == (pytest.approx(0.8), 3.0)
    assert recorded_run._switch_costs(recording(slice_added(), *phase(Phase.SYNC_WEIGHTS, 4.0, 7.0)))[0].pull is None


def test_a_recorded_policy_names_a_system() -> None:
    for policy in ("verl_gate", "verl_enable_switch", "greedy"):
        assert recorded_run._system_of(policy) == policy
    assert recorded_run._system_of("none of ours") == "disaggregated"


def test_the_notes_say_what_was_read_off() -> None:
    events: list[FlightEvent] = []
    Simulation(scenario("predictive", steps=4, warm=0), record=events.append).run()
    found = recorded_run.from_recording(Recording(events=tuple(events)), max_running=256)
    told = "\n".join(found.notes)
    assert "groups of 4, 8 groups per step" in told
    assert "estimated" not in told
    assert "as seen" in told
    assert len(found.step_s) == 4
    assert found.scenario.eta == 1
    assert [(pool.name, pool.slices, pool.gpus) for pool in found.scenario.pools] == [
        ("trainers", 2, 4),
        ("rollouts", 2, 4),
    ]
