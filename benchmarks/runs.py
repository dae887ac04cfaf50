"""Simulated runs of a benchmark, each kept on disk when it is done, of this version of the code only.

python -m benchmarks.claims --resume /tmp/claims.json --minutes 8      again and again, until it reports
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import seamless_verl
from benchmarks.parts import Parts
from benchmarks.records import Record, report
from seamless_verl.simulation.regimes import Regime
from seamless_verl.simulation.run import Result, simulate
from seamless_verl.simulation.scenario import Scenario

Figures = dict[str, float]
_NOT_IN_A_RUN = {
    "fluid",
    "options",
    "outcome",
    "recorded_run",
    "recorded_work",
    "search",
    "simulate_command",
}  # what only reads or writes around one


class OutOfTime(Exception):
    """``--minutes`` are over and a run is missing."""


class Runs:
    """What `simulate` found, by scenario and variant."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._parts = Parts(options)
        self._code = _digest_of_code()
        self._done = 0
        self._began = time.monotonic()

    def get(self, scenario: Scenario, variant: str = "", rules: Regime | None = None) -> Figures:
        """Figures of a run; ``variant`` names ``rules`` that are not those of the scenario's system."""
        return self.other(f"{scenario!r} {variant}", lambda: figures(simulate(scenario, rules)))

    def other(self, key: str, run: Callable[[], Figures]) -> Figures:
        """Figures of something that is not a plain `simulate`.

        Raises:
            OutOfTime: it is not known yet and nothing new may begin.
        """
        name = hashlib.sha256(f"{self._code} {key}".encode()).hexdigest()[:24]
        if not self._parts.of(name):
            if self._parts.out_of_time:
                raise OutOfTime
            self._parts.add(name, run())
            self._done += 1
            spent = time.monotonic() - self._began
            print(f"\r{self._done} runs in {spent:.0f} s", end="", file=sys.stderr, flush=True)
        found: Figures = self._parts.of(name)[0]
        return found

    def pause(self) -> int:
        """What ``main`` returns when time ran out."""
        return self._parts.pause()


def conclude(options: argparse.Namespace, measure: Callable[[Runs], list[Record]]) -> int:
    """What ``main`` returns of a benchmark that needs all its runs: the report, or a pause when time runs out."""
    runs = Runs(options)
    try:
        records = measure(runs)
    except OutOfTime:
        return runs.pause()
    return report(records, options.json)


def figures(result: Result) -> Figures:
    """What the benchmarks ask of a run."""
    answers = [length for step in result.steps for length in step.answers]
    return {
        "step_s": result.step_s,
        "tokens_per_s": result.tokens_per_s,
        "idle": result.books.trainable_idle_share,
        "staleness": result.max_staleness,
        "mean_staleness": result.mean_staleness,
        "mean_answer": sum(answers) / len(answers),
        "lends": result.lends,
    }


def _digest_of_code() -> str:
    root = Path(seamless_verl.__file__).parent
    found = hashlib.sha256()
    for name in ("simulation", "scheduling", "staleness"):
        for file in sorted((root / name).rglob("*.py")):
            if file.stem not in _NOT_IN_A_RUN:
                found.update(file.read_bytes())
    return found.hexdigest()
