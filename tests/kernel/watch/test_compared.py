"""What of a run is laid over another one."""

from __future__ import annotations

from typing import Any

import pytest

from seamless_verl.observe.digest import digest
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


def test_device_seconds_per_trained_token_are_of_steps_with_both_known() -> None:
    run = digest(Recording(events=EVENTS), [_record(1), _record(9)], [])
    of_first = sum(sum(seconds.values()) for seconds in run.step_spans[0].pools.values())
    assert run.device_s_per_token() == pytest.approx(of_first / 5000)
    assert digest(Recording(events=EVENTS), [], []).device_s_per_token() is None
