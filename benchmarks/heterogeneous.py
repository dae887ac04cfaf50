"""Adaptive against static priorities on unlike slices (open question 2 of SeamlessFlow's paper).

Half of the trainers' slices decode at half the speed (an older card, a shared host). The scheduler ranks slices for
rollout and predicts with their speeds: from a data sheet that is right, from one that is wrong (it names the slow
half as the fast one), from one that says all are alike, or as it measures while the run goes on.

    python -m benchmarks.heterogeneous [--quick] [--json FILE] [--resume FILE --minutes N]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from statistics import mean

from benchmarks import parts
from benchmarks.intervals import LEVEL, interval
from benchmarks.records import Record, arguments
from benchmarks.runs import Figures, Runs, conclude, figures
from benchmarks.settings import cell
from seamless_verl.scheduling.cluster import Roofline
from seamless_verl.scheduling.slices import Slice, SliceId
from seamless_verl.simulation.replica import EnginePhysics, slower
from seamless_verl.simulation.run import Simulation
from seamless_verl.simulation.scenario import Scenario

_SLOWER = 2.0


class _Static(Roofline):
    """Speeds as a data sheet has them; what is measured is ignored."""

    def __init__(self, speeds: Mapping[str, float], slices: Iterable[Slice]) -> None:
        super().__init__()
        self._speeds = speeds
        for one in slices:
            self.add(one)

    def measured(self, slice_id: SliceId, *, expected_s: float, took_s: float) -> None:
        pass

    def speed(self, slice_id: SliceId) -> float:
        return self._speeds[slice_id.split("/")[0]]


def _slowed(engine: EnginePhysics) -> EnginePhysics:
    return replace(engine, decode=slower(engine.decode, _SLOWER))


def mixed(system: str, work: str, *, seed: int, steps: int) -> Scenario:
    """32 GPUs: two fast and two slow trainer slices, four fast rollout slices."""
    base = cell(system, work, 32, 0.5, seed=seed, steps=steps)
    trainers, rollouts = base.pools
    fast = replace(trainers, name="fast", slices=trainers.slices // 2)
    slow = replace(fast, name="slow", engine=_slowed(trainers.engine))
    return replace(base, pools=(slow, fast, rollouts))


def run(scenario: Scenario, speeds: Mapping[str, float] | None) -> Figures:
    """``speeds``: static ones by pool; None: measured."""
    simulation = Simulation(scenario)
    if speeds is not None:
        cluster = simulation.scheduler.cluster
        cluster.roofline = _Static(speeds, (status.slice for status in cluster))
    return figures(simulation.run())


def main() -> int:
    options = arguments(__doc__ or "", parts.extend)
    return conclude(options, partial(compare, quick=options.quick))


def compare(runs: Runs, *, quick: bool) -> list[Record]:
    """Step times with each data sheet over those with measured speeds, seed by seed."""
    seeds, steps = (range(1), 10) if quick else (range(10), 14)
    average = 8 / (6 + 2 / _SLOWER)
    slow = average / _SLOWER
    sheets: dict[str, Mapping[str, float] | None] = {
        "adaptive": None,
        "static, sheet right": {"fast": average, "slow": slow, "rollouts": average},
        "static, all alike": {"fast": 1.0, "slow": 1.0, "rollouts": 1.0},
        "static, sheet wrong": {"fast": slow, "slow": average, "rollouts": average},
    }
    records = []
    for work in ("lognormal", "skewed"):
        settings = [mixed("predictive", work, seed=seed, steps=steps) for seed in seeds]
        found = {
            name: [runs.other(f"{setting!r} {name}", partial(run, setting, speeds))["step_s"] for setting in settings]
            for name, speeds in sheets.items()
        }
        records += [Record(name=f"{work}: step, {name}", value=mean(times), unit="s") for name, times in found.items()]
        for name in list(sheets)[1:]:
            ratios = [theirs / ours for theirs, ours in zip(found[name], found["adaptive"], strict=True)]
            low, high = interval(ratios)
            told = f"ahead or level [{low:.2f}, {high:.2f}]"
            value = mean(ratios)
            records.append(
                Record(name=f"{work}: {name} / adaptive", value=value, unit="x", bar=told, holds=value >= LEVEL)
            )
    return records


if __name__ == "__main__":
    sys.exit(main())
