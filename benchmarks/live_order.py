"""The simulator against reality: recorded runs are replayed, and policies put in the order that live runs had them in.

    python -m benchmarks.live_order [--run RUN …] [--order RUN …] [--verl SYSTEM=RUN …] [--measured FILE] [--json FILE]

RUN is the folder of a recorded run. Each is replayed as it was. Those given as ``--order``, of our own systems in
``benchmarks.multiplexing``, are simulated under all systems, too; FILE has the step times that were measured. verl's
systems publish their weights at the price of our run, or at that of a run of their own (``--verl``).

Steps alternate between a long and a short one where two batches are in flight, so that the median of six says little
(an average of a long and a short one): the bar is on their mean, the median stands beside it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.intervals import interval
from benchmarks.records import Record, arguments, report
from seamless_verl.simulation.recorded_run import Recorded, from_run
from seamless_verl.simulation.run import simulate

SYSTEMS = {
    "verl separate_async": "verl_separate_async",
    "verl enable_switch": "verl_enable_switch",
    "ours greedy": "greedy",
    "ours predictive": "predictive",
}
_BAR = 0.10
_MEDIAN_BAR = 0.05  # of the errors of all runs
_LEVEL = 0.05  # measured step times closer than this have no order: rounds differ by more
_STEPS = 24


def replayed(runs: Mapping[str, Recorded]) -> list[Record]:
    """Replayed step times over measured ones, run by run, and the error of the run in the middle."""
    records, errors = [], []
    for name, run in runs.items():
        steps = [step.ended - step.began for step in simulate(run.scenario).steps]
        measured = run.step_s[run.scenario.warm :]
        error, middle = mean(steps) / mean(measured) - 1, median(steps) / median(measured) - 1
        errors.append(abs(error))
        tag = f"replay, {name} ({run.scenario.system}, {len(measured)} steps)"
        records += [
            Record(name=f"{tag}: measured", value=mean(measured), unit="s"),
            Record(name=f"{tag}: error of the median step", value=100 * middle, unit="%"),
            Record(
                name=f"{tag}: error",
                value=100 * error,
                unit="%",
                bar=f"within {_BAR:.0%}",
                holds=abs(error) <= _BAR,
            ),
        ]
    value = median(errors)
    told = "replay: error, median over the runs"
    held = value <= _MEDIAN_BAR
    records.append(Record(name=told, value=100 * value, unit="%", bar=f"<= {_MEDIAN_BAR:.0%}", holds=held))
    return records


def update_s(folder: Path) -> float:
    """Seconds in which one of verl's own runs publishes its weights: mean of its steps but the first two."""
    log = (folder / "logs" / "trainer.log").read_text(errors="replace")
    return mean(float(value) for value in re.findall(r"timing_s/update_weights:([0-9.e-]+)", log)[2:])


def ordered(
    runs: Sequence[Recorded], measured: Mapping[str, float], updates_s: Mapping[str, float], *, tag: str
) -> list[Record]:
    """Step times of every two systems over each other, as measured and as simulated from each recording.

    Args:
        updates_s: of systems that take another time to publish weights than the recorded runs did.
    """
    found = {}
    for name, system in SYSTEMS.items():
        scenarios = [replace(run.scenario, system=system, steps=_STEPS, warm=_STEPS // 4) for run in runs]
        if name.startswith("verl"):  # without us engines serve as requests come
            scenarios = [replace(one, router=None) for one in scenarios]
        if name in updates_s:
            scenarios = [replace(one, costs=replace(one.costs, load=updates_s[name])) for one in scenarios]
        found[name] = [simulate(one).step_s for one in scenarios]
    records = [Record(name=f"{tag}: {name} publishes weights in", value=s, unit="s") for name, s in updates_s.items()]
    for name in SYSTEMS:
        records.append(Record(name=f"{tag}: {name}: measured step", value=measured[name], unit="s"))
        records.append(Record(name=f"{tag}: {name}: simulated step", value=mean(found[name]), unit="s"))
    for one, other in combinations(SYSTEMS, 2):
        live = measured[other] / measured[one]
        ratios = [b / a for a, b in zip(found[one], found[other], strict=True)]
        value, (low, high) = mean(ratios), interval(ratios)
        records.append(Record(name=f"{tag}: {other} / {one}: measured", value=live, unit="x"))
        if abs(live - 1) <= _LEVEL:
            bar, holds = f"level as measured, no bar [{low:.2f}, {high:.2f}]", None
        else:
            bar, holds = f"same side of 1 [{low:.2f}, {high:.2f}]", (live < 1) == (value < 1)
        records.append(Record(name=f"{tag}: {other} / {one}: simulated", value=value, unit="x", bar=bar, holds=holds))
        if holds is not None:
            told, off = f"{tag}: {other} / {one}: simulated / measured", value / live
            within = abs(off - 1) <= _BAR
            records.append(Record(name=told, value=off, unit="x", bar=f"1 +- {_BAR:.2f}", holds=within))
    return records


def _extend(parser: argparse.ArgumentParser) -> None:
    results = Path(__file__).with_name("results") / "2026-11-24-multiplexing.json"
    parser.add_argument("--run", type=Path, default=[], action="append", help="folder of a recorded run; repeat it")
    parser.add_argument(
        "--order", type=Path, default=[], action="append", metavar="RUN", help="one to order systems by"
    )
    parser.add_argument("--verl", default=[], action="append", metavar="SYSTEM=RUN", help="a run of verl's own trainer")
    parser.add_argument("--measured", type=Path, default=results, help="records of multiplexing (%(default)s)")


def main() -> int:
    options: Any = arguments(__doc__ or "", _extend)
    folders = [*options.run, *options.order]
    twice = [name for name, count in Counter(folder.name for folder in folders).items() if count > 1]
    if twice:
        raise SystemExit(f"live_order: two of the runs are called {twice[0]}; rename a folder, the table goes by names")
    runs = {folder.name: from_run(folder) for folder in folders}
    if not runs:
        raise SystemExit("live_order: give at least one recorded run, --run RUN or --order RUN")
    records = replayed(runs)
    if options.order:
        taken = {record["name"]: record["value"] for record in json.loads(options.measured.read_text())["records"]}
        measured = {name: taken[f"{name}: wall time per step"] for name in SYSTEMS}
        recorded = [runs[folder.name] for folder in options.order]
        records += ordered(recorded, measured, {}, tag="at our prices")
        if options.verl:
            updates_s = {name: update_s(Path(folder)) for name, folder in (one.split("=", 1) for one in options.verl)}
            records += ordered(recorded, measured, updates_s, tag="at their own prices")
    return report(records, options.json)


if __name__ == "__main__":
    sys.exit(main())
