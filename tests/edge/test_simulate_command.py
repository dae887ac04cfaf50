"""``seamless-verl simulate``, as a user meets it: tables, run folders, files, and errors that say what to write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from seamless_verl.cli import main
from seamless_verl.config import RouterConfig, WeightsConfig
from seamless_verl.errors import ConfigError
from seamless_verl.observe.run_folder import load_digest
from seamless_verl.simulation.recorded_run import from_run

_SMALL = (
    "workload={kind: lognormal, mean: 900, sigma: 0.8, cap: 4000}",
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=2",
    "rollout.n=4",
    "steps=6",
)


def simulate(*arguments: object) -> int:
    settings = [part for setting in _SMALL for part in ("--base", setting)]
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


def test_unlike_ages_of_the_samples_are_said_and_what_has_the_same_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """verl's mode without a bound holds a few samples for long, a bound holds all for equally long."""
    rows = tmp_path / "rows.json"
    assert simulate("--set", "scheduler.policy=predictive", "--json", rows) == 0
    before, after = json.loads(rows.read_text())["settings"]
    assert before["max_staleness"] > after["max_staleness"] == 1
    told = capsys.readouterr().out
    assert f"samples are {after['mean_staleness']:.1f} weight versions old on average and 1 at most, before" in told
    assert f"before {before['mean_staleness']:.1f} and {before['max_staleness']}\n" in told
    assert "with one: --base scheduler.policy=verl_separate_async_wait" in told
    assert simulate("--base", "scheduler.policy=verl_separate_async_wait", "--set", "scheduler.policy=predictive") == 0
    assert "not at equal age" not in capsys.readouterr().out


_MINE = "resources=[{name: all, nodes: 1, gpus_per_node: 8, capabilities: [train, rollout]}]"


def test_a_cluster_of_ones_own_is_compared_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.json"
    base = ["--base", _MINE, "--base", "scheduler.policy=colocated"]
    assert main(["simulate", *base, "--set", "steps=3", "--set", "scheduler.policy=greedy", "--json", str(rows)]) == 0
    first, second = json.loads(rows.read_text())["settings"]
    assert first["gpus"] == second["gpus"] == 8
    assert first["changed"] == [_MINE, "scheduler.policy=colocated", "steps=3"]
    assert second["changed"] == [*first["changed"], "scheduler.policy=greedy"]
    told = capsys.readouterr().out
    assert "times as long as before\n" in told
    assert told.count("3 steps") + told.count("to 3 count") == 2  # how many steps there are is no what-if


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("rollout.n=2", "not the same work per step (answers per prompt), so only tok/s can be compared"),
        (
            "resources=[{name: a, nodes: 1, gpus_per_node: 8, capabilities: [train]}, "
            "{name: b, nodes: 1, gpus_per_node: 8, capabilities: [rollout]}]",
            "times as long as before, on 16 GPUs instead of 32",
        ),
    ],
)
def test_what_is_no_like_for_like_is_said(setting: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--set", "steps=2", "--set", setting]) == 0
    assert told in capsys.readouterr().out


def test_shares_add_up_with_failures_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.json"
    assert simulate("--set", "noise.failures_per_hour=10", "--json", rows) == 0
    assert " failed " in capsys.readouterr().out
    uses = ("train", "generate", "prefill", "sync", "switch", "failed", "idle")
    for row in json.loads(rows.read_text())["settings"]:
        assert sum(row[use] for use in uses) == pytest.approx(1.0)
    assert row["failed"] > 0


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
    assert known.scenario.router is None  # a simulated run: as each system does it
    for policy in ("fcfs", "priority"):
        rollout = f"actor_rollout_ref: {{rollout: {{scheduling_policy: {policy}}}}}"
        (run / "config.yaml").write_text(f"{rollout}\nseamless: {{router: {{policy: marginal_gain, mu: 0.1}}}}")
        recorded = RouterConfig(policy="marginal_gain", mu=0.1, oldest_first=policy == "priority")
        assert from_run(run).scenario.router == recorded
    (run / "config.yaml").write_text("actor_rollout_ref: {rollout: {max_num_seqs: 4, data_parallel_size: 2}}")
    assert from_run(run).scenario.pools[0].engine.max_running == 2 * 4, "of all engine cores of a replica"
    shy = "scheduler: {policy: predictive, margin: 0.5, max_loans_per_step: 1}"
    (run / "config.yaml").write_text(f"actor_rollout_ref: {{rollout: {{}}}}\nseamless: {{{shy}}}")
    assert from_run(run).scenario.scheduler.margin == 0.5
    assert from_run(run).scenario.scheduler.max_loans_per_step == 1
    ours = "staleness: {eta: 1, in_flight: 1.5}, weights: {sync: rolling, at_once: 2}"
    (run / "config.yaml").write_text(f"actor_rollout_ref: {{rollout: {{}}}}\nseamless: {{{ours}}}")
    assert from_run(run).scenario.in_flight == 1.5
    assert from_run(run).scenario.weights == WeightsConfig(sync="rolling", at_once=2)
    (run / "config.yaml").write_text("actor_rollout_ref: {rollout: {}}\nseamless: {router: {polcy: x}}")
    with pytest.raises(ConfigError, match=r"config\.yaml: seamless\.router\.polcy=x: .* did you mean .*\.policy"):
        from_run(run)


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
    assert simulate("--set", "rollout.n=2", "--parquet", file) == 0
    columns = parquet.read_table(file).to_pydict()
    assert columns["gpus"] == [32, 32]
    assert list(columns["changed"][1]) == [*columns["changed"][0], "rollout.n=2"]
    assert columns["step_s"][1] > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--set", "scheduler.polcy=greedy"], "scheduler.polcy=greedy: unknown key. Fix: write scheduler.policy"),
        (["--set", "scheduler.policy=predictve"], "no such system. Fix: write predictive"),
        (["--set", "steps"], "--set=steps: is no assignment. Fix: write key=value"),
        (["--set", "staleness.eta=two"], "staleness.eta=two: is no int. Fix: write e.g. staleness.eta=2"),
        (["--set", "staleness.eta=-1"], "staleness.eta=-1: cannot be simulated. Fix: write a number from 0 to 100"),
        (["--set", "steps=0"], "steps=0: cannot be simulated. Fix: write a number from 1 to 100000"),
        (["--set", "scheduler.margin=-1"], "scheduler.margin=-1: must be finite and not negative"),
        (
            ["--set", "scheduler.max_loans_per_step=2"],
            "has no such setting. Fix: simulate scheduler.policy=predictive",
        ),
        (["--set", "router.oldest_first=perhaps"], "is no bool. Fix: write e.g. router.oldest_first=true"),
        (["--set", "costs.wake=nan"], "costs.wake=nan: must be finite"),
        (["--set", "resources=[{name: a}]"], "an entry lacks nodes, gpus_per_node, capabilities"),
        (
            ["--set", "resources=[{name: a, nodes: 1, gpus_per_node: 8, capabilities: [train], accelerator: H100}]"],
            "accelerator cannot be simulated",
        ),
        (["--set", "resources=[{name: a, nodes: -1, gpus_per_node: -8, capabilities: [train]}]"], "above 0"),
        (["--set", "resources=[{name: a, nodes: true, gpus_per_node: 8, capabilities: [train]}]"], "above 0"),
        (["--set", "resources=[{name: a, nodes: 2, gpus_per_node: 6, capabilities: [train]}]"], "slices of 4 GPUs"),
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
        (["--set", "decode.slowdown=0"], "decode.slowdown=0: is no factor between 0.001 and 1000. Fix: write e.g."),
        (["--set", "noise.failures_per_hour=20"], "slices would fail faster than they are repaired (300 s each"),
        (["--set", "noise.slowdown=1000"], "noise.slowdown=1000.0: is no spread of a logarithm. Fix: write e.g. 0.03"),
        (["--set", "noise.slowdown=yes"], "write e.g. noise.slowdown=0.03"),
        (["--set", "staleness.eta=1000"], "cannot be simulated. Fix: write a number from 0 to 100"),
        (["--set", "data.max_response_length=4096"], "unknown key. Fix: write it as the cap of workload="),
        (["--set", "actor_rollout_ref.model.path=Qwen/Qwen3-8B"], "for your model record a short run"),
        (["--set", "trainer.nnodes=2"], "unknown key. Fix: write resources=["),
        (["--set", "verl=1"], "unknown key. Fix: write one of scheduler.policy"),
        (
            ["--set", "data.train_batch_size=9", "--set", "actor.ppo_mini_batch_size=4"],
            "actor.ppo_mini_batch_size=4: does not divide data.train_batch_size=9. Fix: write 3",
        ),
        (["--set", "workload={kind: [x]}"], "kind must be one of constant"),
        (["--set", "workload={kind: lognormal, mean: 900, sigma: 0, cap: 4000}"], "sigma: 0 must be positive"),
        (["--set", "workload={kind: constant, answer: -5}"], "answer: -5 must be positive"),
        (["--set", "workload={kind: constant, answer: many}"], "answer: many is no number"),
        (["--set", "workload={kind: constant, answer: 1.5}"], "answer: 1.5 is no whole number"),
        (["--set", "workload={kind: constant, answer: .inf}"], "answer: inf is no whole number"),
        (["--set", "workload={kind: constant, answer: .nan}"], "answer: nan is no whole number"),
        (["--set", "workload={kind: constant}"], "lacks answer (constant takes answer, prompt)"),
        (["--set", "workload={kind: constant, answer: 5, mean: 5}"], "mean: not known (constant takes answer, prompt)"),
        (["--set", "workload={kind: lognormal, mean: 900, sigma: 99, cap: 4000}"], "no spread of a logarithm"),
        (["--set", "workload={kind: bimodal, short: 6000000, long: 9, long_share: 0}"], "cache for 4931640 tokens"),
        (["--set", "workload={kind: bimodal, short: 9, long: 90, long_share: 5}"], "long_share: 5 is no share"),
        (["--set", "workload={kind: normal}"], "kind must be one of constant, lognormal, bimodal, agentic"),
        (["--set", "workload={kind: lognormal, mean: 9000, sigma: 1, cap: 100}"], "needs a cap above it"),
        (["--preset", "separate"], "no such preset. Fix: write separate_async"),
        (["--preset", "nope"], "no such preset. Fix: write one of sync, "),
        (["--preset", "sync", "--set", "scheduler.policy=verl_gate"], "needs slices that only generate"),
        (["--search", "--gpus", "0"], "--gpus=0: does not split into slices of 4. Fix: write 8"),
        (["--search", "--set", "scheduler.policy=greedy"], "scheduler.policy=greedy: is what --search tries"),
        (["--search", "--base", _MINE], "is what --search tries"),
        (["--seeds", "3"], "--seeds=3: is for --search only"),
        (["--systems", "greedy"], "--systems=greedy: is for --search only"),
        (["--json", "/"], "--json=/: is a folder. Fix: name a file"),
        (["--out", "/etc/passwd"], "--out=/etc/passwd: is a file. Fix: name a folder"),
        (["--search", "--gpus", "10"], "--gpus=10: does not split into slices of 4. Fix: write 8"),
        (["--search", "--systems", "greedi"], "no such system"),
        (["--gpus", "16"], "add --search"),
        (["--from", "/nonexistent"], "/nonexistent does not exist"),
        (["--from", "/etc/passwd"], "/etc/passwd is a file; name a run folder"),
        (["--json", "/nonexistent/rows.json"], "mkdir -p /nonexistent"),
    ],
)
def test_errors_name_key_value_and_fix(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (b"", "has no actor_rollout_ref.rollout"),
        (b"[1, 2]", "has no actor_rollout_ref.rollout"),
        (b"a: [", "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"actor_rollout_ref: {rollout: [1]}", "has no actor_rollout_ref.rollout"),
        (b"actor_rollout_ref: {rollout: {max_num_seqs: many}}", "max_num_seqs=many: is no count"),
        (b"actor_rollout_ref: {rollout: {max_num_seqs: -4}}", "max_num_seqs=-4: is no count"),
        (b"actor_rollout_ref: {rollout: {data_parallel_size: two}}", "data_parallel_size=two: is no count"),
    ],
)
def test_a_broken_configuration_beside_a_recording_is_named(
    config: bytes, told: str, recorded_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (recorded_run / "config.yaml").write_bytes(config)
    assert main(["simulate", "--from", str(recorded_run)]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert str(recorded_run / "config.yaml") in error
    assert error.count("\n") == 1


@pytest.fixture
def recorded_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert simulate("--base", "steps=2", "--out", tmp_path / "run") == 0
    capsys.readouterr()
    return tmp_path / "run"


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m seamless_verl.cli simulate --help | head -n 1"
    done = subprocess.run(
        ["bash", "-c", command + "; exit ${PIPESTATUS[0]}"], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""


def test_a_recording_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "flight").mkdir()
    assert simulate("--out", tmp_path) == 2
    assert "name a new folder" in capsys.readouterr().err
