"""What the predictive policy is worth on clusters that we do not have, beside the systems it is compared with.

    python -m benchmarks.simulator --part NAME [--router POLICY] [--quick] [--json FILE] [--resume FILE --minutes N]

Parts: ``limit``, ``table``, ``ages``, ``rolling``, ``idle``, ``scale``, ``large``, ``shards``. The table takes what is
known when time is up. ``--router cache_aware`` plays ours as the recipes for GPUs route (limit, table, idle).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import parts
from benchmarks.intervals import interval
from benchmarks.records import Record, arguments, report
from benchmarks.settings import WORKLOADS, cell
from benchmarks.simulator_table import SIZES, SPLITS, table
from seamless_verl.config import RouterConfig, WeightsConfig
from seamless_verl.errors import ConfigError
from seamless_verl.simulation.fluid import fluid_limit
from seamless_verl.simulation.presets import CALIBRATED, RUNS, scenario
from seamless_verl.simulation.run import simulate
from seamless_verl.simulation.scenario import Scenario

# ---------------------------------------------------------------- parts


def limit(options: argparse.Namespace) -> Iterator[Record]:
    """Share of the fluid limit on the published set-ups and on the agentic workload."""
    steps, seeds = (10, 1) if options.quick else (16, options.seeds)
    for name in ("separate_async", "no_switch"):
        base = scenario(RUNS[name], CALIBRATED, steps=steps)
        train = replace(base.train, old_log_prob=0.0)
        ours = replace(base, system="predictive", router=options.router, train=train, warm=4)
        yield from _share(f"{name} set-up", ours, seeds)
    base = scenario(RUNS["sync"], CALIBRATED, steps=steps)
    yield from _share(
        "all nodes {train, rollout}", replace(base, system="predictive", router=options.router, warm=4), seeds
    )
    gpus = 16 if options.quick else 32
    yield from _share("agentic", cell("predictive", "agentic", gpus, steps=steps, router=options.router), seeds)


def _share(name: str, wanted: Scenario, seeds: int) -> Iterator[Record]:
    found = fluid_limit(wanted)
    steps_s = [simulate(replace(wanted, seed=seed)).step_s for seed in range(seeds)]
    step_s, (low, high) = mean(steps_s), interval(steps_s)
    yield Record(name=f"limit, {name}: step", value=step_s, unit="s", bar=f"[{low:.1f}, {high:.1f}]")
    yield Record(name=f"limit, {name}: of (W_r+W_t)/(a+b)", value=found.work_s / step_s, unit="")
    yield Record(name=f"limit, {name}: of the limit under eta", value=found.bounded_s / step_s, unit="")
    share = found.paid_s / step_s
    yield Record(
        name=f"limit, {name}: of the limit under eta, costs paid",
        value=share,
        unit="",
        bar=">= 0.95",
        holds=share >= 0.95,
    )


def ages(options: argparse.Namespace) -> Iterator[Record]:
    """Two batches in flight, so samples that are one version old on average, under several bounds and under none."""
    bounds = ({"eta": 1}, {"eta": 2, "in_flight": 2}, {"eta": 3, "in_flight": 2})
    unbounded = ("verl_separate_async", "verl_enable_switch", "verl_colocate_async")
    ways: list[tuple[str, dict[str, Any]]] = [
        (ours, bound) for ours in ("predictive", "disaggregated") for bound in bounds
    ]
    ways += [(theirs, {}) for theirs in unbounded]
    for work in ("lognormal", "skewed", "bimodal"):
        for split in SPLITS[:1] if options.quick else SPLITS:
            for system, bound in ways:
                seeds = range(1 if options.quick else options.seeds)
                runs = [simulate(cell(system, work, 32, split, steps=18, warm=6, seed=s, **bound)) for s in seeds]
                told = f"eta {bound['eta']}" if bound else "no bound"
                age, oldest = mean(run.mean_staleness for run in runs), max(run.max_staleness for run in runs)
                yield Record(
                    name=f"ages, {work}, {split:.0%} train: {system}, {told}",
                    value=mean(run.step_s for run in runs),
                    unit="s",
                    bar=f"age {age:.2f}/{oldest}",
                )


def rolling(options: argparse.Namespace) -> Iterator[Record]:
    """Weights that ours take in turn, beside ours that stop together, verl's modes and StaleFlow (loads of 8 s)."""
    for name in ("separate_async", "no_switch"):
        base = scenario(RUNS[name], CALIBRATED, steps=10 if options.quick else 16)
        base = replace(base, train=replace(base.train, old_log_prob=0.0), warm=4)
        ways: dict[str, Scenario] = {
            system: replace(base, system=system)
            for system in ("disaggregated", "predictive", "verl_separate_async", "verl_enable_switch", "staleflow")
        }
        for system in ("disaggregated", "predictive"):
            for pull_s in (8.0, 2.0):
                for cache in ("refill", "keep"):
                    turns = WeightsConfig(sync="rolling", cache=cache)
                    costs = replace(base.costs, pull=pull_s)
                    told = f"{system}, in turn, {pull_s:g} s, {cache}"
                    ways[told] = replace(base, system=system, weights=turns, costs=costs)
        for way, wanted in ways.items():
            runs = [simulate(replace(wanted, seed=seed)) for seed in range(1 if options.quick else options.seeds)]
            age = mean(run.mean_staleness for run in runs)
            value = mean(run.step_s for run in runs)
            yield Record(name=f"rolling, {name} set-up: {way}", value=value, unit="s", bar=f"age {age:.2f}")


def idle(options: argparse.Namespace) -> Iterator[Record]:
    """Idle share of slices that can train, on workloads with skew, and what less of it would be worth.

    Greedy lends what idles for longer than two switches take. The limits say what an ideal policy gains by doing so.
    """
    for work in ("lognormal", "skewed", "bimodal"):
        for split in SPLITS[:1] if options.quick else SPLITS:
            seeds, steps = ((0,), 10) if options.quick else ((0, 1, 2), 14)
            ours, greedy = (
                [
                    simulate(cell(system, work, 32, split, steps=steps, seed=seed, router=options.router))
                    for seed in seeds
                ]
                for system in ("predictive", "greedy")
            )
            share = mean(result.books.trainable_idle_share for result in ours)
            name = f"idle, {work}, {split:.0%} train"
            yield Record(name=f"{name}: trainable slices", value=100 * share, unit="%", bar="< 5 %", holds=share < 0.05)
            never = mean(result.books.trainable_idle_share for result in greedy)
            yield Record(name=f"{name}: trainable slices under greedy", value=100 * never, unit="%")
            ratios = [theirs.step_s / own.step_s for theirs, own in zip(greedy, ours, strict=True)]
            yield Record(name=f"{name}: greedy's step over ours", value=mean(ratios), unit="x")
            wanted = cell("predictive", work, 32, split)
            gain = fluid_limit(wanted, idle=share).paid_s / fluid_limit(wanted).paid_s - 1
            yield Record(name=f"{name}: an ideal policy gains by lending that, too", value=100 * gain, unit="%")


def scale(options: argparse.Namespace) -> Iterator[Record]:
    """CPU seconds (one core) of large runs, and how they grow with events."""
    points = []
    simulate(cell("predictive", "lognormal", 32, steps=2, warm=1))  # imports and first calls are not growth
    for gpus in (32, 64, 128, 256):
        began = time.process_time()
        result = simulate(cell("predictive", "lognormal", gpus, steps=5, warm=2))
        points.append((result.events, time.process_time() - began))
        yield Record(name=f"scale, {gpus} GPUs: events in 5 steps", value=result.events, unit="")
        yield Record(name=f"scale, {gpus} GPUs: time per event", value=1e6 * points[-1][1] / points[-1][0], unit="us")
    # From 64 GPUs on plans are played with a sample of the sessions; below, their cost is shared by fewer events.
    (first, cheap), (last, dear) = points[1], points[-1]
    growth = (dear / cheap) / ((last * math.log(last)) / (first * math.log(first)))
    holds = growth <= 1.25
    yield Record(name="scale: time over n log n, 256 / 64 GPUs", value=growth, unit="x", bar="<= 1.25", holds=holds)
    if options.quick:
        return
    began = time.process_time()
    simulate(cell("predictive", "lognormal", 32, steps=150))
    spent = time.process_time() - began
    yield Record(name="scale: 32 GPUs x 150 steps x 512", value=spent, unit="s CPU", bar="<= 60", holds=spent <= 60)


def large(options: argparse.Namespace) -> Iterator[Record]:
    """4,096 GPUs with 100,000 trajectories in flight."""
    gpus, steps = (1024, 2) if options.quick else (4096, 3)
    batch = 6256 * gpus // 4096
    began = time.process_time()
    wanted = cell("predictive", "lognormal", gpus, batch=batch, mini_batch=batch // 4, steps=steps, warm=1)
    result = simulate(wanted)
    spent = (time.process_time() - began) / 60
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    name = f"large, {gpus} GPUs, {2 * batch * 8} trajectories in flight, {steps} steps"
    yield Record(name=f"{name}: time", value=spent, unit="min CPU", bar="<= 15", holds=spent <= 15)
    yield Record(name=f"{name}: memory", value=peak, unit="GiB", bar="<= 16", holds=peak <= 16)
    yield Record(name=f"{name}: events", value=result.events, unit="")


def shards(options: argparse.Namespace) -> Iterator[Record]:
    """Proxy shards for 100,000 concurrent agents: queues of sessions hashed to shards, served at the measured cost."""
    if options.measured is None:
        print("shards: left out; measure one shard (benchmarks.many_agents --json FILE) and give it as --measured FILE")
        return
    taken = json.loads(options.measured.read_text())["records"]
    cost_s = 1.0 / max(record["value"] for record in taken if record["name"].endswith(": turns/s"))
    turn_s = 500 * 0.014 + 8.0  # the agentic workload: 500 tokens at 14 ms, a tool of 8 s
    agents = 10_000 if options.quick else 100_000
    yield Record(name="shards: measured cost of a turn", value=1e3 * cost_s, unit="ms")
    yield Record(name="shards: turns per second", value=agents / turn_s, unit="1/s")
    for busy in (0.9, 0.7, 0.5):
        count = math.ceil(agents / turn_s * cost_s / busy)
        waits = _waits(agents, count, turn_s, cost_s, seconds=20.0)
        yield Record(name=f"shards: needed at {busy:.0%} load", value=count, unit="")
        waits.sort()
        for share in (0.5, 0.99):
            value = 1e3 * waits[int(share * (len(waits) - 1))]
            yield Record(name=f"shards: wait of a turn at {busy:.0%} load, p{share:.0%}", value=value, unit="ms")


def _waits(agents: int, count: int, turn_s: float, cost_s: float, seconds: float) -> list[float]:
    """Waiting times of turns whose sessions are hashed to shards (not balanced), each shard a queue of its own."""
    rng = random.Random(11)
    sizes = [0] * count
    for _ in range(agents):
        sizes[rng.randrange(count)] += 1
    waits = []
    for size in rng.sample(sizes, min(count, 40)):
        now = free = 0.0
        while now < seconds:
            now += rng.expovariate(size / turn_s)
            waits.append(max(0.0, free - now))
            free = max(free, now) + rng.expovariate(1 / cost_s)
    return waits


_PARTS = {
    "limit": limit,
    "table": table,
    "ages": ages,
    "rolling": rolling,
    "idle": idle,
    "scale": scale,
    "large": large,
    "shards": shards,
}


_ROUTED = ("limit", "table", "idle")  # the parts that play ours with ``--router``


def _router(policy: str) -> RouterConfig:
    try:
        return RouterConfig(policy=policy)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _extend(parser: argparse.ArgumentParser) -> None:
    parts.extend(parser)
    parser.add_argument("--part", choices=tuple(_PARTS), action="append", help="only this; may be repeated")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each cell")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="GPUS", help="only these clusters")
    parser.add_argument("--router", type=_router, metavar="POLICY", help="seamless.router.policy of ours")
    parser.add_argument("--workloads", nargs="+", default=tuple(WORKLOADS), choices=tuple(WORKLOADS))
    parser.add_argument("--measured", type=Path, metavar="FILE", help="records of many_agents on one shard, for shards")


def main() -> int:
    options: Any = arguments(__doc__ or "", _extend)
    wanted = options.part or tuple(_PARTS)
    others = [part for part in wanted if part not in _ROUTED]
    if options.router is not None and others:
        named = " ".join(f"--part {part}" for part in _ROUTED)
        raise SystemExit(
            f"simulator: --router means nothing to {', '.join(others)}; with it write {named}, or some of them"
        )
    records: list[Record] = []
    for part in wanted:
        records += _PARTS[part](options)
    return report(records, options.json)


if __name__ == "__main__":
    sys.exit(main())
