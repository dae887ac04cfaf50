"""``seamless-verl simulate``: what a cluster would do under other tags and policies, before it is burnt.

simulate --preset separate_async --set scheduler.policy=predictive        what if
simulate --from RUN --set scheduler.policy=predictive                     what if, after a recorded run
simulate --search --gpus 48                                               which split and which tags
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median

from seamless_verl.errors import ConfigError, SeamlessError
from seamless_verl.observe import flight
from seamless_verl.observe.flight_codec import FlightHeader
from seamless_verl.observe.recording import FLIGHT, write_recording
from seamless_verl.observe.run_folder import write_report
from seamless_verl.simulation.options import KEYS, PRESETS, apply, preset
from seamless_verl.simulation.outcome import Outcome, outcome, table, write_json, write_parquet
from seamless_verl.simulation.regimes import REGIMES, regime
from seamless_verl.simulation.replay import from_run
from seamless_verl.simulation.run import Simulation
from seamless_verl.simulation.scenario import Result, Scenario
from seamless_verl.simulation.search import Sensitivity, candidates, rank, sensitivity

_SEARCHED = ("predictive", "greedy_streaming", "disaggregated_streaming", "colocated_bounded")
_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"keys of --set: {', '.join(KEYS)}\npresets: {', '.join(PRESETS)}\nsystems: {', '.join(REGIMES)}"
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--preset", default="separate_async", help="published set-up to start from (%(default)s)")
    source.add_argument("--from", dest="run_folder", type=Path, metavar="RUN", help="recorded run to start from")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change it; may be repeated")
    parser.add_argument("--search", action="store_true", help="try splits and tags, rank them, say how sure that is")
    parser.add_argument("--gpus", type=int, metavar="N", help="budget of --search; default: as many as now")
    parser.add_argument(
        "--systems", default=",".join(_SEARCHED), metavar="A,B", help="systems that --search tries (%(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs per candidate of --search (1)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write a run folder with recording and report page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON")
    parser.add_argument("--parquet", type=Path, metavar="FILE", help="write the table as Parquet")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Simulate and print; 2 with one line that names key, value and fix when the question cannot be asked."""
    try:
        _check(options)
        return _search(options) if options.search else _what_if(options)
    except SeamlessError as error:
        print(f"seamless-verl simulate: {error}", file=sys.stderr)
        return 2


def _check(options: argparse.Namespace) -> None:
    if options.gpus is not None and not options.search:
        raise ConfigError("--gpus", options.gpus, "is the budget of --search", "add --search, or --set resources=…")
    if options.seeds < 1:
        raise ConfigError("--seeds", options.seeds, "must be at least 1", "write --seeds 3")
    if options.out is not None and (options.out / FLIGHT).exists():
        raise ConfigError("--out", options.out, "holds a recording already", "name a new folder")
    for name in ("json", "parquet"):
        file = getattr(options, name)
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"--{name}", file, "lies in a folder that does not exist", f"mkdir -p {file.parent}")


# ---------------------------------------------------------------- what if


def _what_if(options: argparse.Namespace) -> int:
    base, name, measured = _base(options)
    asked = [(name, base)]
    if options.set:
        asked.append((", ".join(options.set), apply(base, options.set)))
    total = sum(scenario.steps for _, scenario in asked)
    bar = _Bar("steps", total)
    rows = []
    replayed: list[float] = []
    events: list[flight.FlightEvent] = []
    for number, (label, scenario) in enumerate(asked):
        last = number == len(asked) - 1
        result = _simulate(scenario, bar, events.append if last and options.out else None)
        rows.append(outcome(_short(label), result))
        replayed = replayed or [step.ended - step.began for step in result.steps]
    bar.end()
    print(table(rows))
    if measured:
        off = mean(replayed) / mean(measured) - 1
        print(f"mean step: measured {mean(measured):.1f} s, replayed {mean(replayed):.1f} s ({off:+.1%})")
        print(f"median step: measured {median(measured):.1f} s, replayed {median(replayed):.1f} s")
    if len(rows) == 2:
        print(f"steps take {rows[1].step_s / rows[0].step_s:.2f} times as long as before")
        for note in _unlike_ages(*rows):
            print(note)
    _write(options, rows, {"measured_step_s": list(measured)} if measured else {})
    if options.out:
        _write_run(options.out, events)
    return 0


def _unlike_ages(before: Outcome, after: Outcome) -> Iterator[str]:
    """Who trains on older samples is faster for it."""
    oldest, age = before.max_staleness, after.max_staleness
    if oldest == age:
        return
    yield f"not at equal age of the samples (weight versions): at most {age}, {oldest} before"
    if age < oldest == regime(after.system).bound(oldest):
        yield f"with --set staleness.eta={oldest} they may be as old"


def _base(options: argparse.Namespace) -> tuple[Scenario, str, tuple[float, ...]]:
    """Where to start, its name, and measured step times where there are some."""
    if options.run_folder is None:
        return preset(options.preset), options.preset, ()
    recorded = from_run(options.run_folder)
    for note in recorded.notes:
        print(note)
    return recorded.scenario, options.run_folder.name, recorded.step_s[recorded.scenario.warm :]


def _simulate(scenario: Scenario, bar: _Bar, record: Callable[[flight.FlightEvent], None] | None) -> Result:
    return Simulation(scenario, record=record, progress=lambda step: bar.advance()).run()


def _write_run(folder: Path, events: Sequence[flight.FlightEvent]) -> None:
    header = FlightHeader(writer="simulation", clock_s=0.0, wall_s=time.time(), virtual=True)
    write_recording(folder / FLIGHT / "simulation.jsonl", header, events)
    print(write_report(folder))


# ---------------------------------------------------------------- search


def _search(options: argparse.Namespace) -> int:
    base, _, _ = _base(options)
    base = apply(base, options.set)
    found = list(candidates(base, options.systems.split(","), options.gpus or base.gpus))
    bar = _Bar("candidates", len(found))
    ranked = rank(found, options.seeds, lambda done, total: bar.advance())
    bar.end()
    rows = [outcome(candidate.label, result) for candidate, result in ranked]
    print(table(rows[:_SHOWN]))
    moved: list[Sensitivity] = []
    if len(ranked) > 1:
        bar = _Bar("parameters", 2 * len(ranked[:2]))
        moved = sensitivity(ranked[0][0], ranked[1][0], lambda done, total: bar.show(done, total))
        bar.end()
        _tell_sensitivity(moved)
    _write(options, rows, {"sensitivity": [asdict(move) for move in moved]})
    if options.out:
        events: list[flight.FlightEvent] = []
        best = ranked[0][0].scenario
        bar = _Bar("steps", best.steps)
        _simulate(best, bar, events.append)
        bar.end()
        _write_run(options.out, events)
    return 0


def _tell_sensitivity(moved: Sequence[Sensitivity]) -> None:
    print("\nthe first two when one uncertain parameter is moved (step s):")
    for move in moved:
        verdict = "" if move.best_s <= move.second_s else "   the order turns"
        print(f"  {move.key:<24} x{move.factor:<5.2f} {move.best_s:8.1f} {move.second_s:8.1f}{verdict}")


# ---------------------------------------------------------------- small things


def _write(options: argparse.Namespace, rows: Sequence[Outcome], extra: dict[str, object]) -> None:
    if options.json:
        write_json(options.json, rows, extra)
        print(options.json)
    if options.parquet:
        write_parquet(options.parquet, rows)
        print(options.parquet)


def _short(label: str) -> str:
    return label if len(label) <= 60 else label[:57] + "..."


class _Bar:
    """A progress bar on a terminal; nothing elsewhere."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._done = 0

    def advance(self) -> None:
        self._done += 1
        self.show(self._done, self._total)

    def show(self, done: int, total: int) -> None:
        if sys.stderr.isatty():
            filled = 30 * done // max(total, 1)
            sys.stderr.write(f"\r[{'#' * filled}{'.' * (30 - filled)}] {done}/{total} {self._what}")
            sys.stderr.flush()

    def end(self) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
