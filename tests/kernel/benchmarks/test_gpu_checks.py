"""The command of the thirteen checks: order, time limits, what is kept and what is tried again. No check runs here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import gpu
from benchmarks.gpu import FAILED, HELD, MISSED, SKIPPED, Outcome
from benchmarks.gpu_checks.registry import BY_NUMBER, CHECKS
from benchmarks.gpu_checks.whole_runs import memory_by_phase, of_weights
from benchmarks.records import Record


def test_there_are_thirteen_and_each_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert [check.number for check in CHECKS] == list(range(1, 14))
    for check in CHECKS:
        assert callable(check.function())
    assert gpu.main(["--list", "--platform", "gpu"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed[1:]] == [str(number) for number in range(1, 14)]


class Performed:
    """Stands for the processes of checks; answers what it is told to."""

    def __init__(self, **outcomes: str) -> None:
        self.outcomes = outcomes
        self.numbers: list[int] = []

    def __call__(self, check: object, platform: str, folder: Path, limit_s: float, beside: int) -> Outcome:
        number = next(n for n, known in BY_NUMBER.items() if known is check)
        self.numbers.append(number)
        outcome = self.outcomes.get(f"c{number}", HELD)
        records = [Record(name="figure", value=1.0, unit="", bar="= 1", holds=outcome != MISSED)]
        return Outcome(outcome=outcome, seconds=1.0, reason="why" if outcome != HELD else "", records=records)


def perform(monkeypatch: pytest.MonkeyPatch, *arguments: str, **outcomes: str) -> tuple[int, list[int]]:
    performed = Performed(**outcomes)
    monkeypatch.setattr(gpu, "_run", performed)
    return gpu.main(["--platform", "cpu", *arguments]), performed.numbers


def test_what_was_measured_is_kept_and_what_broke_or_was_skipped_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = tmp_path / "state.json"
    resume = ("--resume", str(state))
    code, numbers = perform(monkeypatch, *resume, c2=SKIPPED, c5=FAILED, c7=MISSED)
    assert (code, numbers) == (1, list(range(1, 14)))
    assert perform(monkeypatch, *resume) == (1, [2, 5])  # 7 was measured, and is not good
    assert perform(monkeypatch, *resume, "--only", "7,3") == (0, [7, 3])
    assert perform(monkeypatch, *resume) == (0, [])


def test_out_of_time_says_that_it_is_not_finished(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state.json"
    code, numbers = perform(monkeypatch, "--resume", str(state), "--minutes", "0")
    assert (code, numbers) == (gpu.UNFINISHED, [])
    assert f"--resume {state}" in capsys.readouterr().out


def test_what_was_skipped_does_not_count_as_held(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    arguments = ("--resume", str(tmp_path / "state.json"), "--only", "1,2", "--json", str(file))
    perform(monkeypatch, *arguments, c2=SKIPPED)
    records = {record["name"]: record for record in json.loads(file.read_text())["records"]}
    assert records["checks that held"]["value"] == 1
    assert records[f"2 {BY_NUMBER[2].name}"]["holds"] is None
    assert records[f"2 {BY_NUMBER[2].name}"]["bar"] == "skipped: why"


def test_the_state_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    perform(monkeypatch, "--resume", str(state), "--only", "1")
    told = json.loads(state.read_text())
    state.write_text(json.dumps({**told, "machine": "one with a card"}))
    with pytest.raises(SystemExit, match="is of another machine"):
        perform(monkeypatch, "--resume", str(state))


def test_a_check_that_hangs_costs_its_time_and_no_more(tmp_path: Path) -> None:
    began = time.monotonic()
    outcome = gpu._run(BY_NUMBER[1], "cpu", tmp_path / "1", 0.2)  # not even Python has started by then
    assert (outcome.outcome, outcome.records) == (FAILED, [])
    assert "not done after" in outcome.reason
    assert time.monotonic() - began < 30


def test_whoever_ends_the_command_ends_the_check_that_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--platform", "cpu", "--only", "1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(gpu.__file__).parents[1])}
    process = psutil.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (checks := process.children()) and time.monotonic() < until:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(checks, timeout=10)
    assert (len(checks), alive) == (1, [])


def test_a_check_that_crashes_says_why(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "outcome.json").write_text("{}")  # of an earlier try
    outcome = gpu._run(BY_NUMBER[12], "no such platform", tmp_path / "1", 60.0)
    assert outcome.outcome == FAILED
    assert "no such platform" in outcome.reason


def test_memory_belongs_to_the_phase_in_which_it_was_held() -> None:
    lines = [
        {"kind": "memory", "at": 0.0, "used": 1 << 30, "total": 1},
        {"kind": "phase", "at": 1.0, "phase": "old_log_prob", "edge": "began"},
        {"kind": "phase", "at": 2.0, "phase": "old_log_prob", "edge": "ended"},
        {"kind": "phase", "at": 3.0, "phase": "update_actor", "edge": "began"},
        {"kind": "memory", "at": 3.5, "used": 3 << 30, "total": 1},
        {"kind": "memory", "at": 3.6, "used": 2 << 30, "total": 1},
        {"kind": "phase", "at": 4.0, "phase": "update_actor", "edge": "ended"},
    ]
    found = {record.name: record.value for record in memory_by_phase(lines)}
    assert found == {"memory in old_log_prob, most": 1.0, "memory in update_actor, most": 3.0}


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({"engine": {"0": 0}}, ["loans with an engine of other weights"]),
        ({"given": {"0": 0}}, ["loans whose trainer had other weights"]),
        ({"kept": False}, ["times that a loan lost updates"]),
        ({}, []),
    ],
)
def test_a_loan_with_other_weights_than_its_version_is_found(change: dict[str, object], missed: list[str]) -> None:
    lines = [{"kind": "published", "version": v, "sums": {"0": v}} for v in range(2)]
    lines += [{"kind": "old_log_probs", "kept": True}]
    good = {"kind": "loan", "version": 1, "within_step": True, "engine": {"0": 1}, "given": {"0": 1}, "kept": True}
    found = of_weights([*lines, good, good, {**good, **change}])
    assert [record.name for record in found if not record.holds] == missed
