"""Where an attempt's time went, and which idle seconds of devices fall on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from seamless_verl.observe import flight
from seamless_verl.observe.digest import digest
from seamless_verl.observe.flight import FlightEvent, SliceState
from seamless_verl.observe.recording import Recording
from seamless_verl.observe.time_ledger import IDLE
from seamless_verl.watch.attempt_time import AttemptTimes
from tests.kernel.observe.made_up import made_up_run


def _run(*events: FlightEvent) -> AttemptTimes:
    """Of one slice of two devices that generates."""
    begin = [
        flight.RunStarted(at=0.0, name="a run", policy="", eta=1, bound=1, total_steps=1),
        flight.SliceAdded(
            at=0.0, slice="r", pool="rollouts", devices=2, capabilities=("rollout",), state=SliceState.ROLLOUT
        ),
        flight.StepBegan(at=0.0, step=1),
    ]
    told = sorted([*begin, *events, flight.StepEnded(at=20.0, step=1)], key=lambda event: event.at)
    return AttemptTimes(digest(Recording(events=tuple(told)), [], []))


def _request(name: str, session: str, began: float, ended: float, *, finish: str = "completed") -> list[FlightEvent]:
    return [
        flight.RequestStarted(
            at=began, request=name, slice="r", prompt_tokens=10, session=session, resumed=name.startswith("again")
        ),
        flight.RequestEnded(at=ended, request=name, slice="r", tokens=5, finish=finish),
    ]


def _ended(session: str, began: float, ended: float) -> FlightEvent:
    return flight.SessionEnded(
        at=ended, session=session, group="g", seconds=ended - began, turns=1, rows=1, reward=0.0, status="finished"
    )


def _parts(times: AttemptTimes, session: str) -> dict[str, float]:
    told = times.attempt(session)
    assert told is not None
    assert sum(seconds for _, seconds in told["parts"]) == pytest.approx(told["seconds"])
    return {what: seconds for what, seconds in told["parts"] if seconds}


def test_requests_that_overlap_count_once_and_the_rest_is_the_agents() -> None:
    times = _run(
        *_request("one", "s", 1, 4), *_request("two", "s", 3, 6), *_request("x", "other", 0, 9), _ended("s", 0, 10)
    )
    assert _parts(times, "s") == {"model": 5.0, "start": 1.0, "end": 4.0}


def test_an_interrupted_answer_is_held_up_until_it_goes_on() -> None:
    times = _run(*_request("one", "s", 1, 4, finish="abort"), *_request("again", "s", 7, 9), _ended("s", 0, 10))
    assert _parts(times, "s") == {"model": 5.0, "held up": 3.0, "start": 1.0, "end": 1.0}
    told = times.attempt("s")
    assert told is not None
    assert told["spans"] == [
        ("model", 0.1, 0.4), ("model", 0.7, 0.9), ("held up", 0.4, 0.7), ("start", 0.0, 0.1), ("end", 0.9, 1.0),
    ]  # fmt: skip


def test_until_its_first_token_a_request_waits_for_a_replica_and_in_its_queue() -> None:
    waiting = [replace(event, **told) for event, told in zip(
        _request("one", "s", 3, 9), ({"waited_s": 2.0}, {"first_token_s": 1.5}), strict=True
    )]  # fmt: skip
    times = _run(*waiting, *_request("sub-agent", "s", 1, 2), _ended("s", 0, 10))
    assert _parts(times, "s") == {"model": 5.5, "queue": 2.5, "start": 1.0, "end": 1.0}
    told = times.attempt("s")
    assert told is not None
    assert told["spans"][:3] == [("model", 0.1, 0.2), ("model", 0.45, 0.9), ("queue", 0.2, 0.45)]


def test_an_interrupted_answer_that_waits_for_a_replica_is_in_the_queue() -> None:
    again = [replace(event, waited_s=1.0) if isinstance(event, flight.RequestStarted) else event
             for event in _request("again", "s", 7, 9)]  # fmt: skip
    times = _run(*_request("one", "s", 1, 4, finish="abort"), *again, _ended("s", 0, 10))
    assert _parts(times, "s") == {"model": 5.0, "queue": 1.0, "held up": 2.0, "start": 1.0, "end": 1.0}


def test_another_request_meanwhile_is_not_held_up() -> None:
    times = _run(
        *_request("one", "s", 1, 4, finish="abort"), *_request("sub-agent", "s", 5, 6), *_request("again", "s", 7, 9),
        _ended("s", 0, 10),
    )  # fmt: skip
    assert _parts(times, "s") == {"model": 6.0, "held up": 2.0, "start": 1.0, "end": 1.0}


def test_without_requests_time_is_the_agents_but_for_its_start_and_the_end_of_one_that_was_not_given_up() -> None:
    asked = [*_request("one", "s", 2, 3), *_request("two", "s", 6, 7)]
    given_up = flight.SessionGivenUp(at=10.0, session="s", group="g", index=0, seconds=10.0, status=flight.SURPLUS)
    assert _parts(_run(*asked, _ended("s", 0, 10)), "s") == {"model": 2.0, "start": 2.0, "agent": 3.0, "end": 3.0}
    assert _parts(_run(*asked, given_up), "s") == {"model": 2.0, "start": 2.0, "agent": 6.0}
    assert _parts(_run(*_request("x", "other", 0, 9), _ended("s", 0, 10)), "s") == {"agent": 10.0}


def test_an_attempt_that_was_given_up_is_not_under_way_any_more() -> None:
    """From 6 on nobody generates: until 10 both wait, then the other one alone."""
    given_up = flight.SessionGivenUp(at=10.0, session="a", group="g", index=0, seconds=10.0, status=flight.BEGUN_ANEW)
    times = _run(*_request("one", "a", 0, 6), *_request("two", "b", 0, 6), given_up, _ended("b", 0, 20))
    told = times.attempt("a")
    assert told is not None
    assert told["idle"] == {"rollouts": pytest.approx(2 * 4 / 2)}


@pytest.mark.parametrize("killed", [True, False])
def test_attempts_of_a_process_that_is_gone_have_no_share_of_what_idles_later(killed: bool) -> None:
    """At 8 the run ends, or is killed; it goes on at 12, and idles from 15 to 20 while b is under way alone. Of a's two
    requests one had not ended."""
    gone = (
        flight.RunEnded(at=8.0, outcome="KeyError") if not killed else flight.BatchProgress(at=8.0, ready=0, needed=2)
    )
    again = [
        flight.RunStarted(at=12.0, name="a run", policy="", eta=1, bound=1, total_steps=1),
        flight.SliceAdded(
            at=12.0, slice="r", pool="rollouts", devices=2, capabilities=("rollout",), state=SliceState.ROLLOUT
        ),
        flight.StepBegan(at=12.0, step=1),
    ]
    first = [*_request("one", "a", 0, 2), _request("two", "a", 5, 99)[0], gone]
    times = _run(*first, *again, *_request("three", "b", 12, 15))
    told = times.attempt("a")
    assert told is not None
    assert (told["seconds"], told["idle"]) == (8.0, {"rollouts": pytest.approx(2 * 3)})
    assert _parts(times, "a") == {"model": 2.0 + 3.0, "agent": 3.0}
    step = times.step(1)
    assert step is not None
    assert step["blamed"] == [("b", pytest.approx(10.0))]


def test_an_attempt_whose_worker_died_is_over_unless_it_goes_on() -> None:
    """Both were in the dead worker; b goes on elsewhere."""
    died = [
        *_request("one", "a", 0, 6, finish=flight.WORKER_DIED),
        *_request("two", "b", 0, 6, finish=flight.WORKER_DIED),
    ]
    times = _run(*died, *_request("again", "b", 8, 9))
    lengths = {session: (times.attempt(session) or {})["seconds"] for session in "ab"}
    assert lengths == {"a": 6.0, "b": 20.0}


def test_an_attempt_that_goes_on_in_the_next_process_is_under_way() -> None:
    again = flight.RunStarted(at=8.0, name="a run", policy="", eta=1, bound=1, total_steps=1)
    told = _run(*_request("one", "a", 0, 6), again, *_request("two", "a", 10, 12)).attempt("a")
    assert told is not None
    assert told["seconds"] == 20.0


def test_idle_devices_are_shared_by_the_attempts_under_way() -> None:
    """Busy from 0 to 6; then both wait for 4 s, then the straggler alone for 10 s."""
    times = _run(*_request("one", "a", 0, 6), *_request("two", "b", 0, 6), _ended("a", 0, 10), _ended("b", 0, 20))
    (short, long) = (times.attempt(session) for session in "ab")
    assert short is not None
    assert long is not None
    assert short["idle"] == {"rollouts": pytest.approx(2 * 4 / 2)}
    assert long["idle"] == {"rollouts": pytest.approx(2 * 4 / 2 + 2 * 10)}
    step = times.step(1)
    assert step is not None
    assert (step["idle"], step["alone"]) == (pytest.approx(28.0), pytest.approx(0.0))
    assert step["blamed"] == [("b", pytest.approx(24.0)), ("a", pytest.approx(4.0))]


def test_the_shares_of_all_add_up_to_the_idle_time_with_an_attempt_under_way() -> None:
    run = digest(Recording(events=tuple(made_up_run())), [], [])
    times = AttemptTimes(run)
    ended = [event for event in run.recording.events if isinstance(event, flight.SessionEnded)]
    shares: Sequence[float] = [sum((times.attempt(event.session) or {"idle": {}})["idle"].values()) for event in ended]
    idle = sum(
        lane.devices * (stretch.stop - stretch.start) * run.idle_with_agents(lane.pool)
        for lane in run.lanes
        for stretch in lane.stretches
        if stretch.category in IDLE
    )
    assert sum(shares) == pytest.approx(idle, rel=1e-6)
    assert min(shares) >= 0


def test_an_attempt_under_way_counts_until_now_and_one_without_requests_is_its_agents() -> None:
    times = _run(*_request("one", "s", 2, 6))
    told = times.attempt("s")
    assert told is not None
    assert (told["seconds"], dict(told["parts"])["model"]) == (18.0, 4.0)
    silent = _run(*_request("one", "", 0, 6), _ended("s", 0, 10))
    told = silent.attempt("s")
    assert told is not None
    assert {what: seconds for what, seconds in told["parts"] if seconds} == {"agent": 10.0}
    assert told["idle"] == {"rollouts": 8.0}
    step = silent.step(1)
    assert step is not None
    assert step["alone"] == pytest.approx(20.0)  # after the attempt had ended
    assert silent.attempt("nobody") is None
    assert silent.step(7) is None
