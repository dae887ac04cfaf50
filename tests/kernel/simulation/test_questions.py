"""What a user may ask (`--set`, `--search`) and what the answers hold: assignments, refusals, splits, rows, tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import MEASURED
from seamless_verl.config import RouterConfig, WeightsConfig
from seamless_verl.errors import ConfigError
from seamless_verl.simulation.agents import Agentic, Bimodal, Constant, LogNormal
from seamless_verl.simulation.fluid import best_limit
from seamless_verl.simulation.options import KEYS, alike, apply
from seamless_verl.simulation.outcome import LEGEND, described, outcome, table, write_json, write_parquet
from seamless_verl.simulation.presets import CALIBRATED, RUNS, engine, preset
from seamless_verl.simulation.regimes import REGIMES
from seamless_verl.simulation.run import Result, simulate
from seamless_verl.simulation.search import UNCERTAIN, Candidate, _moved, candidates, rank, sensitivity
from tests.kernel.simulation.build import scenario

# ---------------------------------------------------------------- what may be set

SET: dict[str, tuple[str, Any]] = {
    "scheduler.policy=greedy": ("system", "greedy"),
    "seamless.scheduler.policy=greedy": ("system", "greedy"),
    "scheduler.policy=verl_gate": ("system", "verl_gate"),
    "seamless.staleness.eta=3": ("eta", 3),
    "data.train_batch_size=16": ("batch", 16),
    "actor_rollout_ref.actor.ppo_mini_batch_size=4": ("mini_batch", 4),
    "actor_rollout_ref.rollout.n=5": ("attempts", 5),
    "router.oldest_first=TRUE": ("router", RouterConfig()),
    "router.oldest_first=false": ("router", RouterConfig(oldest_first=False)),
    "seamless.router.policy=marginal_gain": ("router", RouterConfig(policy="marginal_gain")),
    "router.mu=0.5": ("router", RouterConfig(mu=0.5)),
    "router.migrate=true": ("router", RouterConfig(migrate=True)),
    "steps=9": ("steps", 9),
    "seed=4": ("seed", 4),
    "workload={kind: constant, answer: 80}": ("workload", Constant(answer=80)),
    "workload={kind: lognormal, mean: 80, sigma: 0.5, cap: 900}": ("workload", LogNormal(mean=80, sigma=0.5, cap=900)),
    "workload={kind: bimodal, short: 8, long: 80, long_share: 0}": (
        "workload",
        Bimodal(short=8, long=80, long_share=0),
    ),
    "workload={kind: agentic, turns: 3, max_turns: 5, answer: 50, observation: 0, tool_s: 2}": (
        "workload",
        Agentic(turns=3, max_turns=5, answer=50, observation=0, tool_s=2),
    ),
}


@pytest.mark.parametrize("assignment", sorted(SET))
def test_an_assignment_changes_what_it_names_and_nothing_else(assignment: str) -> None:
    base = scenario("predictive")
    field, value = SET[assignment]
    changed = apply(base, [assignment])
    assert getattr(changed, field) == value
    follows = {"steps": "warm", "batch": "mini_batch"}.get(field, field)
    assert replace(changed, **{name: getattr(base, name) for name in (field, follows)}) == base


def test_costs_noise_and_speeds_are_set_one_by_one() -> None:
    base = scenario("predictive")
    changed = apply(base, ["costs.wake=9", "costs.spread=0.5", "noise.slowdown=0.1", "train.gpu_s_per_token=0.5"])
    assert changed.costs == replace(base.costs, wake=9.0, spread=0.5)
    assert changed.noise == replace(base.noise, slowdown=0.1)
    assert changed.train == replace(base.train, gpu_s_per_token=0.5)
    shared = apply(base, ["train.shared_prefix=0.5", "train.gpu_s_per_token=0.5"]).train
    assert shared == replace(base.train, gpu_s_per_token=0.5, shared_prefix=0.5)
    assert shared.seconds(100, 1) - shared.update_s == pytest.approx(25.0)
    slow = apply(base, ["decode.slowdown=4"])
    step_s = base.pools[0].engine.decode.step_s(10, 5000)
    assert all(pool.engine.decode.step_s(10, 5000) == pytest.approx(4 * step_s) for pool in slow.pools)


def test_a_published_system_keeps_its_router_whatever_the_order_of_the_assignments() -> None:
    base = scenario("predictive")
    assert apply(base, ["router.oldest_first=true", "scheduler.policy=staleflow"]).router == RouterConfig(
        policy="marginal_gain", migrate=True
    )
    for assignments in (["router.mu=0.5", "scheduler.policy=staleflow"], ["scheduler.policy=roll", "router.mu=0.5"]):
        with pytest.raises(ConfigError, match=r"router\.mu=0\.5: (staleflow|roll) places requests by its own rule"):
            apply(base, assignments)


def test_fewer_steps_leave_fewer_out() -> None:
    base = preset("separate_async")
    assert (base.steps, base.warm) == (20, 5)
    assert [apply(base, [f"steps={n}"]).warm for n in (2, 8, 16, 100)] == [0, 2, 4, 5]


_POOL = "resources=[{name: a, nodes: %s, gpus_per_node: %s, capabilities: %s}]"
REFUSED = {
    "train.shared_prefix=0": "is no share of the training time",
    "train.shared_prefix=1.5": "is no share of the training time",
    "staleness.eta": "is no assignment",
    "staleness.eta=two": "staleness.eta=two: is no int",
    "staleness.eta=-1": "eta",
    "staleness.eta=101": "eta",
    "steps=0": "steps",
    "steps=100001": "steps",
    "rollout.n=0": "rollout.n",
    "data.train_batch_size=0": "batch",
    "costs.wake=-1": "must be finite and not negative",
    "costs.wake=nan": "must be finite and not negative",
    "costs.wake=inf": "must be finite and not negative",
    "noise.slowdown=6": "is no spread of a logarithm",
    "noise.failures_per_hour=20": "slices would fail faster than they are repaired",
    "decode.slowdown=0": "is no factor between 0.001 and 1000",
    "router.oldest_first=perhaps": "is no bool",
    "router.policy=random": r"seamless\.router\.policy=random",
    "router.mu=2": "must be between 0 and 1",
    "router.cost=7b-tp1": "know what a decode step costs",
    "staleness.etta=1": "write staleness.eta",
    "data.max_response_length=9": "write it as the cap of workload",
    "trainer.nnodes=9": r"write resources=\[",
    "actor_rollout_ref.model.path=x": "record a short run",
    "scheduler.policy=gredy": "write greedy",
    "actor.ppo_mini_batch_size=3": "does not divide data.train_batch_size=8. Fix: write 2",
    "workload=[": "is no YAML",
    "workload=text": "kind must be one of constant, lognormal, bimodal, agentic",
    "workload={kind: uniform}": "kind must be one of",
    "workload={kind: constant}": "lacks answer",
    "workload={kind: constant, answer: 9, colour: 1}": "colour: not known",
    "workload={kind: constant, answer: 8e3}": "in YAML 8e3 is text, write 8000",
    "workload={kind: constant, answer: 1.5}": "is no whole number",
    "workload={kind: constant, answer: 0}": "answer: 0 must be positive",
    "workload={kind: constant, answer: true}": "is no number",
    "workload={kind: lognormal, mean: 9, sigma: 7, cap: 99}": "sigma: 7 is no spread of a logarithm",
    "workload={kind: lognormal, mean: 99, sigma: 1, cap: 9}": "needs a cap above it",
    "workload={kind: bimodal, short: 1, long: 2, long_share: 1.5}": "is no share",
    "workload={kind: constant, answer: 99999999}": "a cache for",
    "resources=text": "is no list of pools",
    "resources=[]": "is no list of pools",
    "resources=[{name: a}]": "an entry lacks nodes, gpus_per_node, capabilities",
    _POOL % (0, 8, "[train, rollout]"): "must be whole numbers above 0",
    _POOL % (1, 8, "[]"): "capabilities must be some of train and rollout",
    _POOL % (1, 8, "[train, sleep]"): "capabilities must be some of train and rollout",
    _POOL % (1, 6, "[train, rollout]"): "does not split into slices of 4 GPUs",
    "resources=[{name: a, nodes: 1, gpus_per_node: 4, capabilities: [train], color: red}]": "color cannot be simulated",
}


@pytest.mark.parametrize("assignment", sorted(REFUSED))
def test_what_cannot_be_is_refused_with_a_fix(assignment: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[assignment]) as refused:
        apply(scenario("predictive"), [assignment])
    assert "Fix: " in str(refused.value)


def test_two_pools_of_one_name_are_refused() -> None:
    pool = "{name: a, nodes: 1, gpus_per_node: 4, capabilities: [train, rollout]}"
    with pytest.raises(ConfigError, match="two pools have the same name"):
        apply(scenario("predictive"), [f"resources=[{pool}, {pool}]"])


def test_new_slices_are_like_the_pool_of_their_name_or_role() -> None:
    base = scenario("predictive")
    assert alike(base, trains=True).name == "trainers"
    assert alike(base, trains=False).name == "rollouts"
    assert alike(base, trains=True, name="rollouts").name == "rollouts"


# ---------------------------------------------------------------- presets


@pytest.mark.parametrize("name", sorted(RUNS))
def test_a_preset_is_the_published_run(name: str) -> None:
    run = RUNS[name]
    found = preset(name)
    assert found.system == run.system
    assert found.gpus == 8 * (run.trainer_nodes + run.rollout_nodes)
    assert sum(pool.slices for pool in found.standing) == 2 * run.rollout_nodes
    assert bool(found.train.old_log_prob) == run.decoupled


def test_every_preset_was_measured() -> None:
    assert MEASURED.keys() == RUNS.keys()
    assert MEASURED["sync"].step_s == pytest.approx(546.96)


@pytest.mark.parametrize("name", ["sync", "separate_async", "switch"])
def test_the_calibrated_simulator_is_within_a_tenth_of_what_was_measured(name: str) -> None:
    result = simulate(replace(preset(name), steps=14, warm=4))
    assert result.step_s == pytest.approx(MEASURED[name].step_s, rel=0.1)


def test_an_unknown_preset_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="write separate_async"):
        preset("seperate_async")


def test_more_devices_hold_more_and_are_faster() -> None:
    engines = [engine(CALIBRATED, size) for size in (2, 4, 8)]
    assert [e.kv_tokens for e in engines] == sorted(e.kv_tokens for e in engines)
    for cost in (lambda e: e.prefill_s_per_token, lambda e: e.decode.step_s(64, 10**5), lambda e: e.decode.base_s):
        assert [cost(e) for e in engines] == sorted((cost(e) for e in engines), reverse=True)


# ---------------------------------------------------------------- the search


def splits(system: str, gpus: int) -> list[tuple[int, ...]]:
    found = candidates(scenario("predictive"), [system], gpus)
    return [tuple(pool.slices for pool in candidate.scenario.pools) for candidate in found]


def test_a_budget_is_split_in_eighths() -> None:
    assert splits("disaggregated", 32) == [(n, 8 - n) for n in range(1, 8)]
    assert splits("disaggregated", 8) == [(1, 1)]
    assert splits("greedy", 8) == [(2,), (1, 1)]
    assert splits("colocated", 32) == [(8,)]
    assert splits("verl_enable_switch", 8) == [(1, 1)]


@pytest.mark.parametrize("system", sorted(REGIMES))
def test_every_candidate_uses_the_whole_budget_and_can_be_run(system: str) -> None:
    for candidate in candidates(scenario("predictive"), [system], 24):
        assert candidate.scenario.gpus == 24
        assert candidate.scenario.system == system
        assert candidate.label.startswith(system)


@pytest.mark.parametrize("gpus", [4, 6, 0])
def test_a_budget_that_cannot_be_split_is_refused(gpus: int) -> None:
    with pytest.raises(ConfigError, match="does not split into slices of 4"):
        splits("greedy", gpus)


def test_what_a_system_has_not_is_left_out_where_it_is_tried() -> None:
    """As after a recorded run of ours."""
    base = scenario("predictive", eta=2, in_flight=2, weights=WeightsConfig(sync="rolling"))
    tried = {}
    for candidate in candidates(base, ["predictive", "colocated", "areal"], 16):
        tried[candidate.scenario.system] = candidate.scenario
    asked = {name: (found.in_flight, found.weights.sync) for name, found in tried.items()}
    assert asked == {"predictive": (2, "rolling"), "colocated": (2, "together"), "areal": (None, "together")}


def test_as_many_batches_as_the_bound_allows_are_asked_for_by_null() -> None:
    base = scenario("predictive", eta=2, in_flight=2)
    with pytest.raises(ConfigError, match="write null"):
        apply(base, ["scheduler.policy=areal"])
    assert apply(base, ["scheduler.policy=areal", "staleness.in_flight=null"]).in_flight is None


def test_the_fastest_comes_first_by_the_mean_of_its_seeds() -> None:
    found = list(candidates(scenario("predictive", steps=4), ["disaggregated", "greedy"], 16))
    told: list[tuple[str, float]] = []
    ranked = rank(found, 2, lambda candidate, step_s: told.append((candidate.label, step_s)))
    means = [sum(result.step_s for result in results) / 2 for _, results in ranked]
    assert means == sorted(means)
    assert [label for label, _ in told] == [candidate.label for candidate in found]
    assert dict(told) == {candidate.label: mean for (candidate, _), mean in zip(ranked, means, strict=True)}
    assert [result.scenario.seed for result in ranked[0][1]] == [0, 1]


def test_each_uncertain_figure_is_moved_up_and_down() -> None:
    one, other = (Candidate(scenario=scenario(s, steps=4), label=s) for s in ("greedy", "disaggregated"))
    told: list[tuple[int, int]] = []
    found = sensitivity(one, other, lambda done, total: told.append((done, total)))
    assert [(move.key, move.factor) for move in found] == [(k, f) for k, up in UNCERTAIN.items() for f in (1 / up, up)]
    assert told[-1] == (len(found), len(found))
    slower_decoding = next(move for move in found if move.key == "decode.slowdown" and move.factor > 1)
    assert slower_decoding.best_s > simulate(one.scenario).step_s


@pytest.mark.parametrize("key", sorted(UNCERTAIN))
def test_moving_by_one_changes_nothing(key: str) -> None:
    base = scenario("greedy")
    assert _moved(base, key, 1.0) == base
    assert _moved(base, key, 2.0) != base
    assert key in KEYS


# ---------------------------------------------------------------- the answers


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return [simulate(scenario("predictive", seed=seed)) for seed in range(3)]


def test_a_row_is_of_the_seed_in_the_middle_and_its_shares_add_up(results: list[Result]) -> None:
    row = outcome("mine", results, ["seed=0"])
    middle = sorted(results, key=lambda result: result.step_s)[1]
    times = [result.step_s for result in results]
    assert (row.step_s, row.step_s_least, row.step_s_most) == (pytest.approx(sum(times) / 3), min(times), max(times))
    assert row.tokens_per_s == middle.tokens_per_s
    assert row.train + row.generate + row.prefill + row.sync + row.switch + row.failed + row.idle == pytest.approx(1.0)
    assert (row.system, row.gpus, row.eta, row.slices) == ("predictive", 16, 1, "trainers 2 + rollouts 2")
    assert row.changed == ("seed=0",)
    limit = best_limit(middle.scenario)
    assert limit is not None
    assert row.limit_share == pytest.approx(limit / row.step_s)


def test_a_table_has_a_line_per_row_under_aligned_heads(results: list[Result]) -> None:
    rows = [outcome("a", results[:1]), outcome("longer label", [simulate(scenario("verl_separate_async"))])]
    head, *lines = table(rows).splitlines()
    assert len({len(line) for line in (head, *lines)}) == 1
    assert lines[0].startswith("a   ")
    assert "%" in lines[0]
    assert " - " in lines[1]  # its age has no bound, so it has no limit
    assert "least-most" not in head
    assert "least-most" in table([outcome("a", results)])
    assert "failed" not in head
    assert "failed" in table([replace(rows[0], failed=0.1)])
    for column in ("step s", "tok/s", "of limit", "staleness", "loans"):
        assert column in head
        assert column in LEGEND


def test_rows_are_written_for_machines(results: list[Result], tmp_path: Path) -> None:
    rows = [outcome("a", results, ["x=1"])]
    write_json(tmp_path / "rows.json", rows, {"more": [1]})
    told = json.loads((tmp_path / "rows.json").read_text())
    assert told["more"] == [1]
    assert told["settings"][0]["step_s"] == rows[0].step_s
    assert told["settings"][0]["changed"] == ["x=1"]
    parquet = pytest.importorskip("pyarrow.parquet")
    write_parquet(tmp_path / "rows.parquet", rows)
    (read,) = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert read == told["settings"][0]


def test_a_scenario_in_one_line() -> None:
    assert described(scenario("predictive", eta=2, in_flight=2)) == (
        "predictive on 16 GPUs in slices of 4 (trainers 2 + rollouts 2), eta 2, 2 batches in flight, "
        "8 x 4 answers a step; steps 3 to 6 count"
    )
    assert described(scenario("predictive", warm=0)).endswith("6 steps")


def test_figures_of_a_result_by_hand(results: list[Result]) -> None:
    result = results[0]
    ages = [age for step in result.steps for age in step.staleness]
    assert result.mean_staleness == pytest.approx(sum(ages) / len(ages))
    assert result.max_staleness == max(ages)
    assert result.step_s == pytest.approx(result.books.wall_s / 4)
    assert result.tokens_per_s * result.books.wall_s == pytest.approx(sum(step.tokens for step in result.steps))
