"""The part ``table`` of ``benchmarks.simulator``: step times of the rivals over ours, cell by cell.

A cell is a workload on a cluster with a split, its rivals run on the same GPUs with the same bound. Colocated systems
have no split: theirs is run once per workload and cluster, and stands beside every split of ours.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import mean

from benchmarks.intervals import LEVEL, interval
from benchmarks.records import Record
from benchmarks.runs import Figures, OutOfTime, Runs
from benchmarks.settings import cell
from seamless_verl.simulation.fluid import fluid_limit
from seamless_verl.simulation.regimes import REGIMES
from seamless_verl.simulation.scenario import Scenario

RIVALS = (
    "verl_separate_async",
    "verl_separate_async_wait",
    "verl_enable_switch",
    "verl_enable_switch_wait",
    "verl_sync",
    "verl_colocate_async",
    "verl_colocate_async_wait",
    "staleflow",
)
SIZES = (16, 32, 64, 128)
SPLITS = (0.25, 0.5, 0.75)
_OURS = "predictive"
# Steps before those that count: the threshold of verl's gate goes from 0.4 to at most 1 of the batch, by 0.05 a step
# after two idle ones; and ours knows nothing of lengths and speeds in the beginning.
_FIRST = 16
_EVERYTHING = 1.0  # all slices train and roll out
_NO_BOUND = "its oldest samples are older, no bar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of the table."""

    system: str
    work: str
    gpus: int
    split: float
    seed: int
    steps: int

    def scenario(self) -> Scenario:
        """With as many counted steps for all, after as many that do not count."""
        steps = _FIRST + self.steps
        return cell(self.system, self.work, self.gpus, self.split, seed=self.seed, steps=steps, warm=_FIRST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What is known of the cells, by seed.

    Attributes:
        seeds: as many as are asked for; a cell may know fewer.
    """

    known: Mapping[Cell, Figures]
    seeds: int
    steps: int

    def runs(self, system: str, work: str, gpus: int, split: float) -> dict[int, Figures]:
        split = _EVERYTHING if REGIMES[system].colocated else split
        cells = [
            Cell(system=system, work=work, gpus=gpus, split=split, seed=seed, steps=self.steps)
            for seed in range(self.seeds)
        ]
        return {one.seed: self.known[one] for one in cells if one in self.known}

    def compare(self, rival: str, work: str, gpus: int, split: float) -> Record | None:
        """Their step time over ours; None where one of them was not run."""
        ours, theirs = self.runs(_OURS, work, gpus, split), self.runs(rival, work, gpus, split)
        seeds = sorted(ours.keys() & theirs.keys())
        if not seeds:
            return None
        ratios = [theirs[seed]["step_s"] / ours[seed]["step_s"] for seed in seeds]
        name, value = f"{work}, {gpus} GPUs, {split:.0%} train: {rival}", mean(ratios)
        low, high = interval(ratios)
        spread = f"[{low:.2f}, {high:.2f}]" if len(ratios) > 1 else "one seed"
        told = f"{spread}, age {_age(theirs, seeds)}, ours {_age(ours, seeds)}"
        if any(theirs[seed]["staleness"] > ours[seed]["staleness"] for seed in seeds):
            return Record(name=name, value=value, unit="x", bar=f"{_NO_BOUND} {told}")
        if value >= LEVEL:
            return Record(name=name, value=value, unit="x", bar=f"ahead or level {told}", holds=True)
        step_s = mean(ours[seed]["step_s"] for seed in seeds)
        why = _why(step_s, value * step_s, self._limit_s(work, gpus, split), high)
        return Record(name=name, value=value, unit="x", bar=f"ahead or level {told}; {why}", holds=False)

    def share(self, work: str, gpus: int, split: float) -> Record | None:
        """Of the fluid limit with costs paid, what ours reaches."""
        ours = self.runs(_OURS, work, gpus, split)
        if not ours:
            return None
        value = self._limit_s(work, gpus, split) / mean(run["step_s"] for run in ours.values())
        return Record(name=f"{work}, {gpus} GPUs, {split:.0%} train: {_OURS}, of its limit", value=value, unit="")

    def _limit_s(self, work: str, gpus: int, split: float) -> float:
        return fluid_limit(Cell(system=_OURS, work=work, gpus=gpus, split=split, seed=0, steps=4).scenario()).paid_s


def _age(runs: Mapping[int, Figures], seeds: Sequence[int]) -> str:
    """Mean and most over the trained groups, in weight versions."""
    oldest = max(runs[seed]["staleness"] for seed in seeds)
    return f"{mean(runs[seed]['mean_staleness'] for seed in seeds):.1f}/{oldest:.0f}"


def _why(ours_s: float, theirs_s: float, limit_s: float, high: float) -> str:
    """What keeps us behind: the split (its limit lies above what they reach), chance, or the policy."""
    if theirs_s < LEVEL * limit_s:
        return f"no policy is level with this split: limit {limit_s:.0f} s, theirs {theirs_s:.0f} s"
    if high >= LEVEL:
        return "the interval reaches level"
    return f"the policy's loss: {limit_s / ours_s:.2f} of the limit"


def table(options: argparse.Namespace) -> Iterator[Record]:
    """All cells; those that were not run are left out and counted."""
    seeds, steps = (1, 8) if options.quick else (options.seeds, 10)
    places = [(work, gpus) for gpus in options.sizes for work in options.workloads]
    known = _run(Runs(options), places, seeds=seeds, steps=steps)
    found = Table(known=known, seeds=seeds, steps=steps)
    missing = 0
    compared, shares = [], []
    for work, gpus in places:
        for split in (*SPLITS, _EVERYTHING):
            rivals = [rival for rival in RIVALS if split != _EVERYTHING or REGIMES[rival].colocated]
            for rival in rivals:
                record = found.compare(rival, work, gpus, split)
                missing += record is None
                compared += [record] if record else []
            share = found.share(work, gpus, split)
            shares += [share] if share else []
    yield from compared
    yield from shares
    for work, gpus in places:
        yield from _best(found, work, gpus)
    for gpus in options.sizes:
        fewest = min(len(found.runs(_OURS, work, gpus, split)) for work in options.workloads for split in SPLITS)
        yield Record(name=f"table, {gpus} GPUs: seeds of every cell", value=fewest, unit="")
    behind = [record for record in compared if record.holds is False]
    split_s = sum("no policy" in record.bar for record in behind)
    yield Record(name="table: comparisons behind", value=len(behind), unit="", bar="0", holds=not behind)
    yield Record(name="table: of them, where no policy is level with the split", value=split_s, unit="")
    judged = [record for record in compared if record.holds is not None]
    sync = sum(record.name.endswith("verl_sync") for record in judged)
    unsure = [record for record in judged if record.holds and _lowest(record) < LEVEL]
    older = [record for record in compared if record.bar.startswith(_NO_BOUND)]
    yield Record(name="table: comparisons that have a bar", value=len(judged), unit="")
    yield Record(name="table: of them, with verl_sync, whose samples are younger", value=sync, unit="")
    alone = sum(bool(record.holds) and "one seed" in record.bar for record in judged)
    yield Record(name="table: ahead or level, with one seed", value=alone, unit="")
    yield Record(name="table: ahead or level, with an interval that reaches below", value=len(unsure), unit="")
    yield Record(name="table: comparisons whose oldest samples are older, no bar", value=len(older), unit="")
    yield Record(name="table: of them, faster than ours", value=sum(r.value < LEVEL for r in older), unit="")
    yield Record(name="table: comparisons not run", value=missing, unit="")


def _lowest(record: Record) -> float:
    """The lower end of its interval; where there is one seed, its value."""
    found = re.search(r"\[(-?[\d.]+), ", record.bar)
    return float(found[1]) if found else record.value


def _run(runs: Runs, places: Sequence[tuple[str, int]], *, seeds: int, steps: int) -> dict[Cell, Figures]:
    """Until time is up, all cells with one seed before any with two; what an earlier run has kept is known anyway."""
    known: dict[Cell, Figures] = {}
    for seed in range(seeds):
        for work, gpus in places:
            for system in (_OURS, *RIVALS):
                splits = (*SPLITS, _EVERYTHING) if system == _OURS else SPLITS
                for split in (_EVERYTHING,) if REGIMES[system].colocated else splits:
                    wanted = Cell(system=system, work=work, gpus=gpus, split=split, seed=seed, steps=steps)
                    with suppress(OutOfTime):
                        known[wanted] = runs.get(wanted.scenario())
    return known


def _best(found: Table, work: str, gpus: int) -> Iterator[Record]:
    """Each rival's best split over our best: what a user gets who is free to choose the split."""

    def best(system: str) -> float | None:
        means = [
            mean(run["step_s"] for run in runs.values())
            for split in (*SPLITS, _EVERYTHING)
            if (runs := found.runs(system, work, gpus, split))
        ]
        return min(means, default=None)

    ours = best(_OURS)
    for rival in RIVALS:
        theirs = best(rival)
        if ours is not None and theirs is not None:
            yield Record(name=f"{work}, {gpus} GPUs, best split of each: {rival}", value=theirs / ours, unit="x")
