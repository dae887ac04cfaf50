"""What of a run is laid over another one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from seamless_verl.observe import flight
from seamless_verl.observe.digest import digest
from seamless_verl.observe.page.html import _subtitle
from seamless_verl.observe.recording import Recording
from seamless_verl.observe.time_ledger import IDLE
from seamless_verl.watch.compared import figures
from tests.kernel.observe.made_up import made_up_run

EVENTS = tuple(made_up_run(steps=3))


def _record(step: int, **told: Any) -> dict[str, Any]:
    return {"step": step, "step_s": 50.0, "tokens_per_s": 100.0, "reward": 0.25 * step, "pass_rate": None, **told}


def _curves(told: dict[str, Any]) -> dict[str, Any]:
    return {curve["name"]: curve["points"] for curve in told["curves"]}


def test_curves_are_of_what_was_recorded_only() -> None:
    curves = _curves(figures(digest(Recording(events=EVENTS), [_record(1), _record(2)], [])))
    assert curves["reward"] == [(1, 0.25), (2, 0.5)]
    assert "pass rate" not in curves
    assert [step for step, _ in curves["step time in seconds"]] == [1, 2, 3]  # the third from the recording
    assert curves["step time in seconds"][0] == (1, 50.0)


def test_a_run_of_the_simulator_has_step_times_and_a_ledger() -> None:
    run = digest(Recording(events=EVENTS), [], [])
    told = figures(run)
    pools = run.pools_in_steps()
    assert set(_curves(told)) == {"step time in seconds"}
    assert {pool: sum(part[2] for part in parts) for pool, parts in told["pools"].items()} == {
        pool: pytest.approx(sum(seconds.values())) for pool, seconds in pools.items()
    }
    idle = sum(seconds[category] for seconds in pools.values() for category in IDLE)
    whole = sum(sum(seconds.values()) for seconds in pools.values())
    assert {name: value for name, value, _ in told["facts"]}["idle"] == f"{idle / whole:.0%}"


def test_a_step_that_was_repeated_counts_once_and_one_that_goes_on_not_at_all() -> None:
    """Killed after three steps; from the checkpoint after the first on it goes on, and is in the third again."""
    again = [event for event in made_up_run(steps=3, seed=2) if not isinstance(event, flight.RunEnded)]
    third = next(e.at for e in again if isinstance(e, flight.StepBegan) and e.step == 3)
    second = next(e.at for e in again if isinstance(e, flight.StepBegan) and e.step == 2)
    later = [event for event in again if event.at <= third + 1 and (event.at >= second or event.at == 0)]
    killed = [event for event in EVENTS if not isinstance(event, flight.RunEnded)]
    events = [*killed, *(replace(event, at=event.at + 1000) for event in later)]
    run = digest(Recording(events=tuple(events)), [_record(step) for step in (1, 2, 3)], [])
    assert [span.step for span in run.step_spans] == [1, 2, 3, 2, 3]
    assert run.whole_steps == tuple(run.step_spans[number] for number in (0, 3, 2))
    told = {name: value for name, value, _ in figures(run)["facts"]}
    assert told["steps"] == "3"
    assert "3 of 3 steps" in _subtitle(run)
    device_s = sum(sum(sum(seconds.values()) for seconds in span.pools.values()) for span in run.whole_steps)
    assert run.device_s_per_token() == pytest.approx(device_s / (3 * 5000))
    alone = digest(Recording(events=tuple(events[: len(killed)])), [], [])
    short = digest(Recording(events=tuple(event for event in killed if event.at <= third)), [], [])
    assert [len(_curves(figures(found))["step time in seconds"]) for found in (alone, short)] == [3, 2]


def test_device_seconds_per_trained_token_are_of_steps_with_both_known() -> None:
    run = digest(Recording(events=EVENTS), [_record(1), _record(9)], [])
    of_first = sum(sum(seconds.values()) for seconds in run.step_spans[0].pools.values())
    assert run.device_s_per_token() == pytest.approx(of_first / 5000)
    assert digest(Recording(events=EVENTS), [], []).device_s_per_token() is None
