"""``seamless-verl simulate``, as a user meets it: tables, run folders, files, and errors that say what to write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seamless_verl.cli import main
from seamless_verl.observe.run_folder import load_digest
from seamless_verl.simulation.replay import from_run

_SMALL = (
    "workload={kind: lognormal, mean: 900, sigma: 0.8, cap: 4000}",
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=2",
    "rollout.n=4",
    "steps=6",
)


def simulate(*arguments: object) -> int:
    settings = [part for setting in _SMALL for part in ("--set", setting)]
    return main(["simulate", *settings, *map(str, arguments)])


def test_what_if_prints_both_and_writes_a_run_folder_that_report_renders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.json"
    assert simulate("--set", "scheduler.policy=predictive", "--out", tmp_path / "run", "--json", rows) == 0
    told = capsys.readouterr().out
    assert "separate_async " in told
    assert "times as long as before" in told
    first, second = json.loads(rows.read_text())["settings"]
    assert (first["system"], second["system"]) == ("verl_separate_async", "predictive")
    assert first["limit_share"] is None  # its samples may be of any age
    assert 0 < second["limit_share"] < 1.05
    run = load_digest(tmp_path / "run")
    assert run.recording.virtual
    assert len(run.step_spans) == 6
    assert {lane.pool for lane in run.lanes} == {"trainers", "rollouts"}
    assert run.decisions
    page = (tmp_path / "run" / "report.html").read_text()
    assert main(["report", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "report.html").read_text() == page
    assert "predictive" in page


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("predictive", "1"), ["at most 1, 2 before", "with --set staleness.eta=2 they may be"]),
        (("predictive", "2"), []),
        (("verl_sync", "1"), ["at most 0, 2 before"]),
    ],
)
def test_unlike_ages_of_the_samples_are_said(
    asked: tuple[str, str], told: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    system, eta = asked
    pools = ["--set", "resources=[{name: all, nodes: 4, gpus_per_node: 8, capabilities: [train, rollout]}]"]
    rows = tmp_path / "rows.json"
    settings = ["--set", f"scheduler.policy={system}", "--set", f"staleness.eta={eta}"]
    assert simulate(*settings, *(pools if system == "verl_sync" else []), "--json", rows) == 0
    ages = [row["max_staleness"] for row in json.loads(rows.read_text())["settings"]]
    assert ages == [2, 0 if system == "verl_sync" else int(eta)]
    said = [
        line for line in capsys.readouterr().out.splitlines() if "weight versions" in line or "may be as old" in line
    ]
    assert len(said) == len(told)
    assert all(part in line for part, line in zip(told, said, strict=True))


def test_a_recording_is_replayed_to_the_step_times_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The simulator's own recording: lengths, speeds and training are recovered from nothing but events."""
    run = tmp_path / "run"
    quick = ["--set", "costs.load=0.2", "--set", "costs.push=0.2"]
    assert simulate("--set", "scheduler.policy=disaggregated", "--set", "steps=12", *quick, "--out", run) == 0
    known = from_run(run)
    assert known.scenario.batch == 8
    assert known.scenario.mini_batch == 2
    assert known.scenario.attempts == 4
    costs = known.scenario.costs
    assert costs.wake == pytest.approx(1.5 * costs.load)  # no switch was seen: in proportion to what was
    assert costs.drain == pytest.approx(costs.load)
    assert main(["simulate", "--from", str(run), "--set", "scheduler.policy=predictive"]) == 0
    told = capsys.readouterr().out
    off = float(told.split(" s (")[1].split("%")[0])
    assert abs(off) < 10.0
    assert known.scenario.oldest_first is None  # a simulated run: as each system does it
    for policy in ("fcfs", "priority"):
        (run / "config.yaml").write_text(f"actor_rollout_ref: {{rollout: {{scheduling_policy: {policy}}}}}")
        assert from_run(run).scenario.oldest_first is (policy == "priority")


def test_search_ranks_splits_and_says_what_moves_the_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.json"
    assert simulate("--search", "--gpus", 12, "--systems", "predictive,verl_sync", "--json", rows) == 0
    found = json.loads(rows.read_text())
    times = [row["step_s"] for row in found["settings"]]
    assert times == sorted(times)
    assert {row["slices"] for row in found["settings"]} == {
        "trainers 1 + rollouts 2",
        "trainers 2 + rollouts 1",
        "all 3",
    }
    assert {row["system"] for row in found["settings"] if row["slices"] == "all 3"} == {"predictive", "verl_sync"}
    assert all(row["gpus"] == 12 for row in found["settings"])
    assert {move["key"] for move in found["sensitivity"]} >= {"decode.slowdown", "train.gpu_s_per_token", "costs.wake"}
    assert "decode.slowdown" in capsys.readouterr().out


def test_parquet_has_one_column_per_figure(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "rows.parquet"
    assert simulate("--parquet", file) == 0
    columns = parquet.read_table(file).to_pydict()
    assert columns["gpus"] == [32, 32]
    assert columns["step_s"][1] > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--set", "scheduler.polcy=greedy"], "scheduler.polcy=greedy: unknown key. Fix: write scheduler.policy"),
        (["--set", "scheduler.policy=predictve"], "no such system. Fix: write predictive"),
        (["--set", "steps"], "--set=steps: is no assignment. Fix: write key=value"),
        (["--set", "staleness.eta=two"], "staleness.eta=two: is no int. Fix: write e.g. staleness.eta=2"),
        (["--set", "staleness.eta=-1"], "staleness.eta=-1: is too small. Fix: write 0 or more"),
        (["--set", "steps=0"], "steps=0: is too small"),
        (["--set", "router.oldest_first=perhaps"], "is no bool. Fix: write e.g. router.oldest_first=true"),
        (["--set", "costs.wake=nan"], "costs.wake=nan: must be finite"),
        (["--set", "resources=[{name: a}]"], "needs name, nodes, gpus_per_node and capabilities only"),
        (
            ["--set", "resources=[{name: a, nodes: x, gpus_per_node: 8, capabilities: [train]}]"],
            "must be whole numbers",
        ),
        (["--set", "resources=[{name: a, nodes: 1, gpus_per_node: 6, capabilities: [train]}]"], "slices of 4 GPUs"),
        (
            ["--set", "resources=[{name: a, nodes: 1, gpus_per_node: 8, capabilities: [trian]}]"],
            "capabilities must be some of train and rollout",
        ),
        (
            ["--set", "resources=[{name: a, nodes: 1, gpus_per_node: 8, capabilities: }]"],
            "capabilities must be some of train and rollout",
        ),
        (
            ["--set", "scheduler.policy=colocated"],
            "write resources=[{name: all, nodes: 1, gpus_per_node: 32, capabilities: [train, rollout]}]",
        ),
        (
            [
                *("--set", "scheduler.policy=predictive"),
                *("--set", "resources=[{name: a, nodes: 1, gpus_per_node: 8, capabilities: [train]}]"),
            ],
            "needs slices that only generate. Fix: add a pool with capabilities: [rollout]",
        ),
        (
            ["--set", "resources=[" + 2 * "{name: a, nodes: 1, gpus_per_node: 8, capabilities: [train]}, " + "]"],
            "two pools have the same name. Fix: rename one",
        ),
        (["--set", "decode.slowdown=0"], "decode.slowdown=0: would make decoding free. Fix: write e.g."),
        (
            ["--set", "data.train_batch_size=9", "--set", "actor.ppo_mini_batch_size=4"],
            "actor.ppo_mini_batch_size=4: does not divide data.train_batch_size=9. Fix: write 3",
        ),
        (["--set", "workload={kind: [x]}"], "kind must be one of constant"),
        (["--set", "workload={kind: lognormal, mean: 900, sigma: 0, cap: 4000}"], "sigma: 0 must be positive"),
        (["--set", "workload={kind: constant, answer: -5}"], "answer: -5 must be positive"),
        (["--set", "workload={kind: constant, answer: many}"], "takes answer, prompt"),
        (["--set", "workload={kind: bimodal, short: 9, long: 90, long_share: 5}"], "long_share: 5 is no share"),
        (["--set", "workload={kind: normal}"], "kind must be one of constant, lognormal, bimodal, agentic"),
        (["--set", "workload={kind: lognormal, mean: 9000, sigma: 1, cap: 100}"], "needs a cap above it"),
        (["--preset", "separate"], "no such preset. Fix: write separate_async"),
        (["--search", "--gpus", "10"], "--gpus=10: does not split into slices of 4. Fix: write 8"),
        (["--search", "--systems", "greedi"], "no such system"),
        (["--gpus", "16"], "add --search"),
        (["--from", "/nonexistent"], "/nonexistent does not exist"),
        (["--json", "/nonexistent/rows.json"], "mkdir -p /nonexistent"),
    ],
)
def test_errors_name_key_value_and_fix(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_recording_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "flight").mkdir()
    assert simulate("--out", tmp_path) == 2
    assert "name a new folder" in capsys.readouterr().err
