"""The part ``table`` of ``benchmarks.simulator``: step times of the rivals over ours, cell by cell.

A cell is a workload on a cluster with a split, its rivals run on the same GPUs with the same bound. Colocated systems
have no split: theirs is run once per workload and cluster, and stands beside every split of ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import mean

from benchmarks.intervals import LEVEL, interval
from benchmarks.records import Record
from benchmarks.runs import Figures, OutOfTime, Runs
from benchmarks.settings import cell
from seamless_verl.config import RouterConfig
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of the table."""

    system: str
    work: str
    gpus: int
    split: float
    seed: int
    steps: int
    router: RouterConfig | None = None

    def scenario(self) -> Scenario:
        """With as many counted steps for all, after as many that do not count."""
        changes = {"seed": self.seed, "steps": _FIRST + self.steps, "warm": _FIRST}
        asked = self.router if self.system == _OURS else None
        return cell(self.system, self.work, self.gpus, self.split, router=asked, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Step times of a rival over ours.

    Attributes:
        ratios: by seed.
        ages: of the samples of both, mean and most, in words.
        older: their oldest samples are older than ours, so that nothing is judged.
        step_s: ours.
        limit_s: fluid limit with costs paid.
    """

    name: str
    rival: str
    ratios: tuple[float, ...]
    ages: str
    older: bool
    step_s: float
    limit_s: float

    @property
    def value(self) -> float:
        return mean(self.ratios)

    @property
    def ahead(self) -> bool:
        """Or level."""
        return self.value >= LEVEL

    @property
    def surely(self) -> bool:
        """The whole interval is ahead or level, so there is more than one seed."""
        return len(self.ratios) > 1 and interval(self.ratios)[0] >= LEVEL

    @property
    def hopeless(self) -> bool:
        """What they reach, no policy could with these slices."""
        return self.value * self.step_s < LEVEL * self.limit_s

    def record(self) -> Record:
        low, high = interval(self.ratios)
        told = f"[{low:.2f}, {high:.2f}]" if len(self.ratios) > 1 else "one seed"
        told = f"{told}, {self.ages}"
        if self.older:
            bar = f"its oldest samples are older, no bar {told}"
            return Record(name=self.name, value=self.value, unit="x", bar=bar)
        if not self.ahead:
            told += f"; {self._why(high)}"
        return Record(name=self.name, value=self.value, unit="x", bar=f"ahead or level {told}", holds=self.ahead)

    def _why(self, high: float) -> str:
        """What keeps us behind: the split (its limit lies above what they reach), chance, or the policy."""
        if self.hopeless:
            theirs_s = self.value * self.step_s
            return f"no policy is level with this split: limit {self.limit_s:.0f} s, theirs {theirs_s:.0f} s"
        if high >= LEVEL:
            return "the interval reaches level"
        return f"the policy's loss: {self.limit_s / self.step_s:.2f} of the limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What is known of the cells, by seed.

    Attributes:
        seeds: as many as are asked for; a cell may know fewer.
        router: of ours.
    """

    known: Mapping[Cell, Figures]
    seeds: int
    steps: int
    router: RouterConfig | None = None

    def runs(self, system: str, work: str, gpus: int, split: float) -> dict[int, Figures]:
        split = _EVERYTHING if REGIMES[system].colocated else split
        cells = [
            Cell(system=system, work=work, gpus=gpus, split=split, seed=seed, steps=self.steps, router=self.router)
            for seed in range(self.seeds)
        ]
        return {one.seed: self.known[one] for one in cells if one in self.known}

    def compare(self, rival: str, work: str, gpus: int, split: float) -> Comparison | None:
        """None where one of them was not run."""
        ours, theirs = self.runs(_OURS, work, gpus, split), self.runs(rival, work, gpus, split)
        seeds = sorted(ours.keys() & theirs.keys())
        if not seeds:
            return None
        return Comparison(
            name=f"{work}, {gpus} GPUs, {split:.0%} train: {rival}",
            rival=rival,
            ratios=tuple(theirs[seed]["step_s"] / ours[seed]["step_s"] for seed in seeds),
            ages=f"age {_age(theirs, seeds)}, ours {_age(ours, seeds)}",
            older=any(theirs[seed]["staleness"] > ours[seed]["staleness"] for seed in seeds),
            step_s=mean(ours[seed]["step_s"] for seed in seeds),
            limit_s=self._limit_s(work, gpus, split),
        )

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


def table(options: argparse.Namespace) -> Iterator[Record]:
    """All cells; those that were not run are left out and counted."""
    seeds, steps = (1, 8) if options.quick else (options.seeds, 10)
    places = [(work, gpus) for gpus in options.sizes for work in options.workloads]
    known = _run(Runs(options), places, seeds=seeds, steps=steps, router=options.router)
    found = Table(known=known, seeds=seeds, steps=steps, router=options.router)
    missing = 0
    compared: list[Comparison] = []
    shares: list[Record] = []
    for work, gpus in places:
        for split in (*SPLITS, _EVERYTHING):
            for rival in RIVALS:
                if split == _EVERYTHING and not REGIMES[rival].colocated:
                    continue
                comparison = found.compare(rival, work, gpus, split)
                missing += comparison is None
                compared += [comparison] if comparison else []
            share = found.share(work, gpus, split)
            shares += [share] if share else []
    yield from (comparison.record() for comparison in compared)
    yield from shares
    for work, gpus in places:
        yield from _best(found, work, gpus)
    for gpus in options.sizes:
        fewest = min(len(found.runs(_OURS, work, gpus, split)) for work in options.workloads for split in SPLITS)
        yield Record(name=f"table, {gpus} GPUs: seeds of every cell", value=fewest, unit="")
    yield from _counted(compared)
    yield Record(name="table: comparisons not run", value=missing, unit="")


def _counted(compared: Sequence[Comparison]) -> Iterator[Record]:
    judged = [one for one in compared if not one.older]
    behind = [one for one in judged if not one.ahead]
    older = [one for one in compared if one.older]
    yield Record(name="table: comparisons behind", value=len(behind), unit="", bar="0", holds=not behind)
    for name, value in (
        ("of them, where no policy is level with the split", sum(one.hopeless for one in behind)),
        ("comparisons that have a bar", len(judged)),
        ("of them, with verl_sync, whose samples are younger", sum(one.rival == "verl_sync" for one in judged)),
        ("ahead or level, with one seed", sum(one.ahead and len(one.ratios) == 1 for one in judged)),
        ("ahead or level, with the whole interval", sum(one.surely for one in judged)),
        ("comparisons whose oldest samples are older, no bar", len(older)),
        ("of them, faster than ours", sum(not one.ahead for one in older)),
    ):
        yield Record(name=f"table: {name}", value=value, unit="")


def _run(
    runs: Runs, places: Sequence[tuple[str, int]], *, seeds: int, steps: int, router: RouterConfig | None
) -> dict[Cell, Figures]:
    """Until time is up, all cells with one seed before any with two; what an earlier run has kept is known anyway."""
    known: dict[Cell, Figures] = {}
    for seed in range(seeds):
        for work, gpus in places:
            for system in (_OURS, *RIVALS):
                splits = (*SPLITS, _EVERYTHING) if system == _OURS else SPLITS
                for split in (_EVERYTHING,) if REGIMES[system].colocated else splits:
                    wanted = Cell(
                        system=system, work=work, gpus=gpus, split=split, seed=seed, steps=steps, router=router
                    )
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
