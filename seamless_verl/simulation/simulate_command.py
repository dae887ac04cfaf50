"""``seamless-verl simulate``: what a cluster would do under other tags and policies, before it is burnt.

simulate --preset separate_async --set scheduler.policy=predictive        what if
simulate --from RUN --set scheduler.policy=predictive                     what if, after a recorded run
simulate --base 'resources=[…]' --base 'workload={…}' --set …             what if, on a cluster that you describe
simulate --search --gpus 48                                               which split and which tags

A preset is a published run of verl: Qwen3.5-35B-A3B on H100. For a model of yours record a short run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median

from seamless_verl.errors import ConfigError, SeamlessError
from seamless_verl.observe import flight
from seamless_verl.observe.recording import FLIGHT, FlightHeader, write_recording
from seamless_verl.observe.run_folder import write_report
from seamless_verl.simulation.agents import Replay
from seamless_verl.simulation.options import KEYS, apply
from seamless_verl.simulation.outcome import LEGEND, Outcome, described, outcome, table, write_json, write_parquet
from seamless_verl.simulation.presets import RUNS, preset
from seamless_verl.simulation.recorded_run import from_run
from seamless_verl.simulation.regimes import REGIMES
from seamless_verl.simulation.run import Result, Simulation
from seamless_verl.simulation.scenario import Scenario
from seamless_verl.simulation.search import UNCERTAIN, Sensitivity, candidates, rank, sensitivity

_SEARCHED = ("predictive", "greedy", "disaggregated", "colocated")
_SHOWN = 10
_TRIED = "what if"
_BOTH = ("steps", "seed")  # how long and which chance: for what is compared, too
_LEVEL = 0.01  # step times that differ by less are called level
_WORK = {"workload": "workload", "batch": "prompts per step", "attempts": "answers per prompt"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    known = f"keys of --set and --base: {', '.join(KEYS)}\npresets: {', '.join(RUNS)}\nsystems: {', '.join(REGIMES)}"
    parser.epilog = f"{known}\n\ncolumns of the table:\n{LEGEND}"
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--preset", default="separate_async", help="published set-up to start from (%(default)s)")
    source.add_argument("--from", dest="run_folder", type=Path, metavar="RUN", help="recorded run to start from")
    parser.add_argument(
        "--base", action="append", default=[], metavar="KEY=VALUE", help="what is so in both rows; may be repeated"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="what to try in the second row; may be repeated"
    )
    parser.add_argument("--search", action="store_true", help="try splits and tags, rank them, say how sure that is")
    parser.add_argument("--gpus", type=int, metavar="N", help="budget of --search; default: as many as now")
    parser.add_argument("--systems", metavar="A,B", help=f"systems that --search tries ({','.join(_SEARCHED)})")
    parser.add_argument("--seeds", type=int, metavar="N", help="runs per candidate of --search (1)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write a run folder with recording and report page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON")
    parser.add_argument("--parquet", type=Path, metavar="FILE", help="write the table as Parquet")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Simulate and print; 2 with one line that names key, value and fix when the question cannot be asked."""
    try:
        _check(options)
        return _search(options) if options.search else _what_if(options)
    except BrokenPipeError:
        raise
    except (SeamlessError, OSError) as error:
        print(f"seamless-verl simulate: {error}", file=sys.stderr)
        return 2


def _check(options: argparse.Namespace) -> None:
    for name in () if options.search else ("gpus", "systems", "seeds"):
        if getattr(options, name) is not None:
            problem = "is for --search only"
            raise ConfigError(f"--{name}", getattr(options, name), problem, "add --search, or leave it out")
    if options.seeds is not None and options.seeds < 1:
        raise ConfigError("--seeds", options.seeds, "must be at least 1", "write --seeds 3")
    if options.out is not None and (options.out / FLIGHT).exists():
        raise ConfigError("--out", options.out, "holds a recording already", "name a new folder")
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        raise ConfigError("--out", options.out, "is a file", "name a folder")
    for name in ("json", "parquet"):
        file = getattr(options, name)
        if file is not None and file.is_dir():
            raise ConfigError(f"--{name}", file, "is a folder", "name a file")
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"--{name}", file, "lies in a folder that does not exist", f"mkdir -p {file.parent}")
    for name in ("out", "json", "parquet"):  # now, not after minutes of simulation
        file = getattr(options, name)
        if file is not None and not os.access(_existing(file.absolute()), os.W_OK):
            raise ConfigError(f"--{name}", file, "cannot be written", "name another place")


def _existing(path: Path) -> Path:
    """The path, or the nearest of its parents that exists."""
    return path if path.exists() else _existing(path.parent)


# ---------------------------------------------------------------- what if


def _what_if(options: argparse.Namespace) -> int:
    both = [*options.base, *(text for text in options.set if text.partition("=")[0] in _BOTH)]
    tried = [text for text in options.set if text not in both]
    start, name, measured = _start(options)
    base = apply(start, both)
    asked = [(name, base, both)]
    if tried:
        asked.append((_TRIED, apply(base, tried), tried))
    width = max(len(label) for label, _, _ in asked)
    for label, scenario, changed in asked:
        print(f"{label:<{width}}  {described(scenario)}")
        for setting in changed:
            print(f"{'':<{width}}  {setting}")
        if isinstance(scenario.workload, Replay) and scenario.attempts > start.attempts:
            print(f"{'':<{width}}  ({start.attempts} answers per prompt were recorded; they are repeated)")
    bar = _Bar("steps", sum(scenario.steps for _, scenario, _ in asked))
    rows = []
    replayed: list[float] = []
    events: list[flight.FlightEvent] = []
    for number, (label, scenario, changed) in enumerate(asked):
        last = number == len(asked) - 1
        result = _simulate(scenario, bar, events.append if last and options.out else None)
        rows.append(outcome(label, [result], changed if number == 0 else [*both, *changed]))
        replayed = replayed or [step.ended - step.began for step in result.steps]
    bar.end()
    print(table(rows))
    if measured and base == start:
        off = mean(replayed) / mean(measured) - 1
        print(f"mean step: measured {mean(measured):.1f} s, replayed {mean(replayed):.1f} s ({off:+.1%})")
        print(f"median step: measured {median(measured):.1f} s, replayed {median(replayed):.1f} s")
    if tried:
        for note in _compared(asked[0][1], asked[1][1], rows):
            print(note)
    _write(options, rows, {"measured_step_s": list(measured)} if measured else {})
    if options.out:
        _write_run(options.out, events)
    return 0


def _compared(before: Scenario, after: Scenario, rows: Sequence[Outcome]) -> Iterator[str]:
    """How much longer a step takes, where that can be said."""
    unlike = [told for field, told in _WORK.items() if getattr(before, field) != getattr(after, field)]
    if unlike:
        yield f"not the same work per step ({', '.join(unlike)}), so only tok/s can be compared"
        yield "what describes your cluster and its work goes into --base, what you want to try into --set"
        return
    on = f", on {after.gpus} GPUs instead of {before.gpus}" if after.gpus != before.gpus else ""
    yield f"steps take {rows[1].step_s / rows[0].step_s:.2f} times as long as before{on}"
    ages = [(round(row.mean_staleness, 1), row.max_staleness) for row in rows]
    if ages[0] != ages[1]:
        (mean_before, most_before), (mean_age, most) = ages
        yield (
            f"not at equal age: samples are {mean_age:.1f} weight versions old on average and {most} at most, "
            f"before {mean_before:.1f} and {most_before}"
        )
    bounded = f"{before.system}_wait"
    if bounded in REGIMES:
        yield f"{before.system} has no bound on age; with one: --base scheduler.policy={bounded}"


def _start(options: argparse.Namespace) -> tuple[Scenario, str, tuple[float, ...]]:
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
    changed, seeds = [*options.base, *options.set], options.seeds or 1
    for key in ("scheduler.policy", "resources"):
        for text in changed:
            if text.partition("=")[0].removeprefix("seamless.") == key:
                raise ConfigError(key, text.partition("=")[2], "is what --search tries", "write --systems or --gpus")
    base = apply(_start(options)[0], changed)
    asked = [name.strip() for name in options.systems.split(",")] if options.systems else _SEARCHED
    systems = list(dict.fromkeys(asked))
    found = list(candidates(base, systems, base.gpus if options.gpus is None else options.gpus))
    bar = _Bar("candidates", len(found))
    ranked = rank(found, seeds, lambda candidate, step_s: bar.advance(f"{candidate.label}: {step_s:.1f} s"))
    bar.end()
    rows = [outcome(candidate.label, results, changed) for candidate, results in ranked]
    print(table(rows[:_SHOWN]))
    if len({row.max_staleness for row in rows}) > 1:
        print("not at equal age (column staleness): older samples save time")
    if seeds == 1:
        print("one seed: differences below some 3 % may be chance, --seeds 3 shows the spread")
    moved: list[Sensitivity] = []
    if len(ranked) > 1:
        bar = _Bar("parameters", 2 * len(UNCERTAIN))
        moved = sensitivity(ranked[0][0], ranked[1][0], lambda done, total: bar.advance())
        bar.end()
        _tell_sensitivity(moved)
    _write(options, rows, {"sensitivity": [asdict(move) for move in moved]})
    if options.out:
        events: list[flight.FlightEvent] = []
        best, label = ranked[0][0].scenario, ranked[0][0].label
        bar = _Bar("steps", best.steps)
        _simulate(best, bar, events.append)
        bar.end()
        print(f"the best one, {label}:")
        _write_run(options.out, events)
    return 0


def _tell_sensitivity(moved: Sequence[Sensitivity]) -> None:
    print("\nthe first two when one uncertain parameter is moved (step s):")
    for move in moved:
        ahead = move.second_s / move.best_s - 1
        verdict = "   the order turns" if ahead < -_LEVEL else "   level" if ahead < _LEVEL else ""
        print(f"  {move.key:<24} x{move.factor:<5.2f} {move.best_s:8.1f} {move.second_s:8.1f}{verdict}")


# ---------------------------------------------------------------- small things


def _write(options: argparse.Namespace, rows: Sequence[Outcome], extra: dict[str, object]) -> None:
    if options.json:
        write_json(options.json, rows, extra)
        print(options.json)
    if options.parquet:
        write_parquet(options.parquet, rows)
        print(options.parquet)


class _Bar:
    """A progress bar on a terminal; elsewhere a line for what is worth one."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._done = 0

    def advance(self, note: str = "") -> None:
        self._done += 1
        if sys.stderr.isatty():
            filled = 30 * self._done // max(self._total, 1)
            sys.stderr.write(f"\r[{'#' * filled}{'.' * (30 - filled)}] {self._done}/{self._total} {self._what}")
            sys.stderr.flush()
        elif note:
            print(f"{self._done}/{self._total} {note}", file=sys.stderr, flush=True)

    def end(self) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
