"""The claims that SeamlessFlow and StaleFlow must keep under simulation, negative controls included.

``python -m benchmarks.claims``: each claim with its measurement and whether it holds. Calibrated physics
(``benchmarks/calibration.py``), the live kernels, three seeds.

    python -m benchmarks.claims [--quick] [--json FILE] [--resume FILE --minutes N]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import mean

from benchmarks import parts
from benchmarks.records import Record, arguments
from benchmarks.runs import Figures, Runs, conclude, figures
from benchmarks.settings import cell, staleflow_ground
from seamless_verl.simulation.agents import Constant, Group, LogNormal, Workload
from seamless_verl.simulation.fluid import fluid_limit
from seamless_verl.simulation.regimes import REGIMES, BatchPerStep, Bounded, Bucket, Draw, Feed, Quota, Regime
from seamless_verl.simulation.run import Simulation
from seamless_verl.simulation.scenario import Noise, Scenario
from seamless_verl.staleness.protocol import StalenessProtocol

_STALEFLOW = REGIMES["staleflow"]
_SIGMAS = (0.1, 0.3, 0.5, 0.7, 0.9)
_UP_TO_20K: Mapping[str, Workload] = {
    "skewed": LogNormal(mean=6_000, sigma=1.2, cap=20_000),
    "lognormal": LogNormal(mean=8_000, sigma=0.9, cap=20_000),
    "constant": Constant(answer=6_000),
}


class Claims:
    """Measures the claims and keeps a record of each.

    Args:
        seeds: of every figure.
        steps: of every run.
    """

    def __init__(self, runs: Runs, seeds: Sequence[int], steps: int) -> None:
        self._runs = runs
        self._seeds = seeds
        self._steps = steps
        self.records: list[Record] = []

    def runs(
        self, scenario: Scenario, variant: str = "", rules: Regime | None = None, *, steps: int = 0
    ) -> list[Figures]:
        """``steps``: of a run that is longer or shorter than the others."""
        scenario = _whole_cycles(replace(scenario, steps=steps or self._steps))
        return [self._runs.get(replace(scenario, seed=seed), variant, rules) for seed in self._seeds]

    def step_s(self, scenario: Scenario, variant: str = "", rules: Regime | None = None) -> float:
        return mean(run["step_s"] for run in self.runs(scenario, variant, rules))

    def add(self, name: str, value: float, unit: str, bar: str = "", holds: bool | None = None) -> None:
        self.records.append(Record(name=name, value=value, unit=unit, bar=bar, holds=holds))

    # ---------------------------------------------------------------- SeamlessFlow

    def multiplexing(self) -> None:
        """4: multiplexed beats colocated and disaggregated at equal hardware, trainable slices idle < 5 %."""
        for work in ("lognormal", "skewed"):
            disaggregated = self.step_s(cell("disaggregated", work))
            colocated = self.step_s(cell("colocated", work))
            for system in ("greedy", "predictive"):
                results = self.runs(cell(system, work))
                step_s = mean(run["step_s"] for run in results)
                idle = mean(run["idle"] for run in results)
                tag = f"SeamlessFlow 4, {work}, {system}"
                ratio = disaggregated / step_s
                self.add(f"{tag}: against disaggregated", ratio, "x", "> 1", ratio > 1)
                self.add(f"{tag}: against colocated", colocated / step_s, "x", "> 1", colocated > step_s)
                self.add(f"{tag}: idle share of trainable", 100 * idle, "%", "< 5 %", idle < 0.05)

    def growth(self) -> None:
        """5: the gain grows with length skew and with the cluster."""
        for system in ("greedy", "predictive"):
            self._growth_with_skew(system)
            gains = []
            for gpus in (16, 32, 64):  # the same batch on more devices: the tail weighs more
                settings = [replace(cell(s, "lognormal", gpus), batch=64, mini_batch=16) for s in ("verl_sync", system)]
                gains.append(self.step_s(settings[0]) / self.step_s(settings[1]))
                self.add(f"SeamlessFlow 5, {system}: gain over sync, {gpus} GPUs", gains[-1], "x")
            self.add(f"SeamlessFlow 5, {system}: gain grows with size", gains[-1] / gains[0], "x", "> 1", _rises(gains))

    def _growth_with_skew(self, system: str) -> None:
        """Up to the skew at which the longest answers reach the limit on tokens; from there on the gain of an ideal
        policy falls, too."""
        gains, ideal = [], []
        tag = f"SeamlessFlow 5, {system}"
        for sigma in _SIGMAS:
            work = LogNormal(mean=9000, sigma=sigma, cap=32768)
            sync, ours = (replace(cell(name, "lognormal"), workload=work) for name in ("verl_sync", system))
            gains.append(self.step_s(sync) / self.step_s(ours))
            ideal.append(fluid_limit(sync).paid_s / fluid_limit(ours).paid_s)
            self.add(f"{tag}: gain over sync, sigma {sigma}", gains[-1], "x")
            self.add(f"{tag}: gain over sync of the fluid limits, sigma {sigma}", ideal[-1], "x")
        self.add(f"{tag}: gain grows with skew, all the way", gains[-1] / gains[0], "x", "> 1", _rises(gains))
        most = max(ideal.index(max(ideal)) + 1, 2)  # a gain that falls from the first sigma on must not pass for one
        told = f"{tag}: gain grows with skew up to sigma {_SIGMAS[most - 1]}"
        self.add(told, gains[most - 1] / gains[0], "x", "> 1", _rises(gains[:most]))
        told = f"the limit's: {ideal[-1] / ideal[most - 1]:.2f}"
        self.add(f"{tag}: gain from there to sigma {_SIGMAS[-1]}", gains[-1] / gains[most - 1], "x", told)

    def expensive_switch(self) -> None:
        """7, negative control: the paper's rule loses when the switch is made expensive; ours stop lending."""
        base = cell("disaggregated", "lognormal", 32, 0.25)
        apart = self.step_s(base)
        for factor in (1, 10, 30):
            costs = replace(base.costs, wake=base.costs.wake * factor, drain=base.costs.drain * factor)
            for system in ("seamlessflow", "greedy", "predictive"):
                ratio = apart / self.step_s(replace(base, system=system, costs=costs))
                bar, holds = "", None
                if factor == 30:
                    loses = system == "seamlessflow"
                    bar = "< 1 (control)" if loses else ">= 0.97"
                    holds = ratio < 1 if loses else ratio >= 0.97
                self.add(f"SeamlessFlow 7, {system}, switch x{factor}: against disaggregated", ratio, "x", bar, holds)

    # ---------------------------------------------------------------- StaleFlow

    def bound(self) -> None:
        """1: V_buf - V_traj <= eta at consumption, no group twice, at most (eta + 1) B in flight; failures included."""
        violations = doubled = over = 0.0
        for eta in (0, 1, 2, 3):
            for seed in self._seeds:
                base = cell("staleflow", "skewed")
                noisy = replace(
                    base,
                    eta=eta,
                    seed=seed,
                    steps=self._steps,
                    warm=0,  # a group that is too old while the pipeline fills is too old as well
                    noise=Noise(slowdown=0.2, failures_per_hour=2.0),
                )
                found = self._watched(noisy)
                violations += found["too_old"]
                doubled += found["doubled"]
                over += found["most"] > (eta + 1) * noisy.batch
        self.add("StaleFlow 1: groups older than eta", violations, "", "0", violations == 0)
        self.add("StaleFlow 1: groups consumed twice", doubled, "", "0", doubled == 0)
        self.add("StaleFlow 1: runs with more than (eta+1) B in flight", over, "", "0", over == 0)

    def repair(self) -> None:
        """2: without the repair step STUCK time rises, safety is unchanged; it has work where groups are filtered."""
        for filtered in (0, 5):
            tag = f"StaleFlow 2, every {filtered}th group filtered" if filtered else "StaleFlow 2, none filtered"
            with_it, without = (self._repaired(tag, filtered, repair=repair) for repair in (True, False))
            share = without["stuck"] - with_it["stuck"]
            self.add(f"{tag}: STUCK share of the time rises without repair by", 100 * share, "points", "> 0", share > 0)
            time = without["stuck_s"] / with_it["stuck_s"] - 1
            self.add(f"{tag}: STUCK time of the same steps rises without repair by", 100 * time, "%", "> 0", time > 0)
            whole = without["wall_s"] / with_it["wall_s"]
            self.add(f"{tag}: all steps, the first included, without repair / with", whole, "x")
            self.add(f"{tag}: step time without repair / with", without["step_s"] / with_it["step_s"], "x")

    def _repaired(self, tag: str, filtered: int, *, repair: bool) -> Figures:
        """Means over the seeds."""
        scenario = _whole_cycles(replace(cell("staleflow", "skewed"), eta=2, steps=self._steps))
        runs = [self._watched(replace(scenario, seed=s), repair=repair, filtered=filtered) for s in self._seeds]
        found = {figure: mean(run[figure] for run in runs) for figure in runs[0]}
        name = "with" if repair else "without"
        told = f"{tag}: STUCK with finished groups behind, share of the time, {name} repair"
        self.add(told, 100 * found["stuck"], "%", f"{found['stuck_s']:.0f} s")
        worst = max(run["staleness"] for run in runs)
        self.add(f"{tag}: staleness {name} repair, eta 2", worst, "", "<= 2", worst <= 2)
        return found

    def saturation(self) -> None:
        """3: eta = 0 is the synchronous order; throughput saturates by eta 1 to 3."""
        # Steps become as uneven as they will be only after some cycles of eta + 1.
        steps, warm = 2 * self._steps, 3 * self._steps // 5
        for share in (0.25, 0.5):  # trainers hardly wait, or wait half of the time
            tag = f"StaleFlow 3, {share:.0%} train"
            base = replace(cell("staleflow", "lognormal", trainers=share), warm=warm)
            runs = {eta: self.runs(replace(base, eta=eta), steps=steps) for eta in (0, 1, 2, 3, 4, 6)}
            worst = max(run["staleness"] for run in runs[0])
            self.add(f"{tag}: staleness at eta 0", worst, "", "0", worst == 0)
            speeds = {eta: mean(run["tokens_per_s"] for run in found) for eta, found in runs.items()}
            for eta, speed in speeds.items():
                idle = mean(run["idle"] for run in runs[eta])
                self.add(f"{tag}: tokens/s at eta {eta}", speed, "tok/s", f"trainers idle {idle:.0%}")
            rest = speeds[6] / speeds[3] - 1
            self.add(f"{tag}: further gain from eta 3 to 6", 100 * rest, "%", "< 5 %", rest < 0.05)
            self.add(f"{tag}: gain from eta 0 to 3", speeds[3] / speeds[0], "x", "> 1", speeds[3] > speeds[0])

    def buckets(self) -> None:
        """4: beats the token bucket at equal eta under skew only; router, weights and slices are the same."""
        rivals = {
            "ROLL bucket": replace(_STALEFLOW, feed=lambda draw, batch, eta: Bucket(draw, batch, alpha=eta)),
            "AReaL quota": replace(_STALEFLOW, feed=lambda draw, batch, eta: Quota(draw, batch, eta=eta)),
            "verl, wait": replace(
                _STALEFLOW, feed=lambda draw, batch, eta: BatchPerStep(draw, batch, warmup=eta, oldest=eta + 1)
            ),
        }
        grounds = {work: cell("staleflow", work) for work in ("constant", "skewed")}
        # Slices of unlike speeds are skew, too.
        grounds["constant, speeds too"] = replace(grounds["constant"], noise=Noise())
        for work, base in grounds.items():
            ours = self.runs(base)
            for name, rules in rivals.items():
                self._against(
                    f"StaleFlow 4, {work}: {name}", ours, self.runs(base, name, rules), skewed=work == "skewed"
                )

    def _against(self, tag: str, ours: Sequence[Figures], theirs: Sequence[Figures], *, skewed: bool) -> None:
        """Judged by trained tokens per second, as StaleFlow's authors do, and by step time, which is what a user sees
        first and is shorter for who discards long answers."""

        def ratio(figure: str) -> float:
            return mean(run[figure] for run in theirs) / mean(run[figure] for run in ours)

        judged = {
            "protocol's tokens/s over theirs": 1.0 / ratio("tokens_per_s"),
            "step time over protocol's": ratio("step_s"),
        }
        for what, gain in judged.items():
            bar, holds = "1 +- 0.03 (control)", abs(gain - 1) <= 0.03
            if skewed and tag.endswith("verl, wait"):  # no bucket: it bounds the same age by waiting
                bar, holds = "level, >= 0.97", gain >= 0.97
            elif skewed:
                bar, holds = "> 1", gain > 1
            self.add(f"{tag}, {what}", gain, "x", bar, holds)
        ages = [f"{mean(run['mean_staleness'] for run in runs):.2f}" for runs in (theirs, ours)]
        self.add(f"{tag}, trained length over protocol's", ratio("mean_answer"), "x")
        oldest = max(run["staleness"] for run in theirs)
        self.add(f"{tag}, oldest sample", oldest, "versions", f"mean {ages[0]}, protocol's {ages[1]}")

    def router(self) -> None:
        """5: the router beats least-requests under skew."""
        plain = replace(_STALEFLOW, router=replace(_STALEFLOW.router, policy="least_requests", migrate=False))
        grounds = {work: cell("staleflow", work) for work in ("skewed", "lognormal")}
        # Here caches are too small for all that is in flight.
        grounds |= {f"14B on H20s, {work}": staleflow_ground(lengths) for work, lengths in _UP_TO_20K.items()}
        for name, ground in grounds.items():
            scenario = replace(ground, noise=Noise(slowdown=0.1))
            gain = self.step_s(scenario, "least requests", plain) / self.step_s(scenario)
            bar, holds = ("", None) if name.endswith("constant") else ("> 1", gain > 1)
            self.add(f"StaleFlow 5, {name}: least requests / router, step time", gain, "x", bar, holds)

    def _watched(self, scenario: Scenario, *, repair: bool = True, filtered: int = 0) -> Figures:
        key = f"watched {scenario!r} {repair} {filtered}"
        return self._runs.other(key, lambda: _watched(scenario, repair=repair, filtered=filtered))


class _WatchedFeed(Bounded):
    """The protocol's feed with counters around it; every ``filtered``-th finished group is dropped (zero variance)."""

    def __init__(self, draw: Draw, protocol: StalenessProtocol, filtered: int) -> None:
        super().__init__(draw, protocol)
        self._filtered = filtered
        self._finished = 0
        self.now: Callable[[], float] = float
        self.doubled = 0
        self.most = 0
        self.stuck_s = 0.0
        self._seen: set[str] = set()
        self._drawn: dict[str, Group] = {}
        self._since: float | None = None

    def published(self, version: int) -> list[Group]:
        groups = super().published(version)
        self._drawn.update((group.name, group) for group in groups)
        self._look()
        return groups

    def finish(self, group: Group) -> None:
        self._finished += 1
        if self._filtered and self._finished % self._filtered == 0:
            self.protocol.abort(group.name)
            del self._groups[group.name]
        else:
            super().finish(group)
        self._look()

    def take(self, count: int) -> tuple[list[Group], list[Group]]:
        names = [consumed.group for consumed in self.protocol.consume(count).groups]
        self.doubled += sum(name in self._seen for name in names)
        self._seen.update(names)
        self._look()
        for name in names:
            self._groups.pop(name, None)
        return [self._drawn[name] for name in names], []

    def _look(self) -> None:
        self.most = max(self.most, self.protocol.num_in_flight)
        if self._since is not None:
            self.stuck_s += self.now() - self._since
        blocked = self.protocol.stuck() and self.protocol.num_ahead > 0  # finished groups wait behind a reservation
        self._since = self.now() if blocked else None


def _watched(scenario: Scenario, *, repair: bool, filtered: int) -> Figures:
    def feed(draw: Draw, batch: int, eta: int) -> Feed:
        return _WatchedFeed(draw, StalenessProtocol(eta=eta, batch_size=batch, repair=repair), filtered)

    simulation = Simulation(scenario, rules=replace(_STALEFLOW, feed=feed))
    watched = simulation.feed
    assert isinstance(watched, _WatchedFeed)
    watched.now = lambda: simulation.clock.now
    result = simulation.run()
    return figures(result) | {
        "too_old": sum(value > scenario.eta for step in result.steps for value in step.staleness),
        "doubled": watched.doubled,
        "most": watched.most,
        "stuck": watched.stuck_s / watched.now(),
        "stuck_s": watched.stuck_s,
        "wall_s": watched.now(),
    }


def _whole_cycles(scenario: Scenario) -> Scenario:
    """With so many warm steps more that what counts is a multiple of eta + 1 steps: batches that started together end
    together, and one long step is followed by eta short ones."""
    return replace(scenario, warm=scenario.warm + (scenario.steps - scenario.warm) % (scenario.eta + 1))


def _rises(values: Sequence[float]) -> bool:
    return all(after > before for before, after in pairwise(values))


def check(runs: Runs, *, quick: bool) -> list[Record]:
    """All claims, one after the other."""
    claims = Claims(runs, seeds=(0,) if quick else (0, 1, 2), steps=10 if quick else 20)
    for claim in (
        claims.multiplexing,
        claims.growth,
        claims.expensive_switch,
        claims.bound,
        claims.repair,
        claims.saturation,
        claims.buckets,
        claims.router,
    ):
        claim()
        print(f"\r{claim.__doc__}".strip(), flush=True)
    return claims.records


def main() -> int:
    options = arguments(__doc__ or "", parts.extend)
    return conclude(options, partial(check, quick=options.quick))


if __name__ == "__main__":
    sys.exit(main())
