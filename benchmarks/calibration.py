"""Fits the simulator's physical parameters to published runs and predicts those it was not fitted to.

``python -m benchmarks.calibration``: three splits (two of verl's three modes are fitted, the third is predicted), then
the fit to all three, which predicts the published switching experiment, then the fit to all five runs, which the
simulator uses. Residuals and what it does to fix the spread of lengths are printed and written.

    python -m benchmarks.calibration [--quick] [--json FILE] [--resume FILE --minutes N] [--parameters FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import parts
from benchmarks.published import MEASURED, MODES, SWITCHING
from benchmarks.records import Record, arguments
from benchmarks.runs import Figures, Runs, conclude
from benchmarks.settings import KV_BYTES_PUBLISHED
from seamless_verl.decode_cost import PUBLISHED
from seamless_verl.simulation.presets import H20, RUNS, Fitted, scenario

_BAR = 0.10
_NAMES = ("decode factor", "training", "attention efficiency", "sigma")
_MODEL_SD = 0.05  # of the logarithm of a step time: what the model leaves out
# GPU-seconds per token. verl's documentation ("Fully async", 30B-A3B on 128 H20) has 86.3 s for 8192 trajectories of at
# most 8192 tokens; their mean is not given. 165e-6 if all were that long, 540e-6 if the mean was 2500.
_TRAINING, _TRAINING_SD = 300e-6, 0.5
# The spread of lengths is not published. Answers of reasoning models to one data set: 0.5 to 1.3.
_SIGMA, _SIGMA_SD = 0.8, 0.25
_OTHER_SIGMAS = (0.5, 0.7, 0.9, 1.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """How published runs are simulated; every figure is the mean over the seeds.

    Attributes:
        known: figures of an earlier record, whose parameters are taken as they are; empty: they are fitted.
    """

    runs: Runs
    seeds: Sequence[int]
    steps: int
    known: Mapping[str, float]

    def parameters(self, tag: str, runs: Sequence[str], *, sigma: float | None = None) -> Fitted:
        """What the runs show, or an earlier record; ``sigma``, of the lengths, is fitted where it is None."""
        if not self.known:
            return fit(runs, self, sigma=sigma)
        decode, training, attention, spread = (self.known[f"{tag}: {name}"] for name in _NAMES)
        return Fitted(decode=decode, train_gpu_s_per_token=1e-6 * training, attention=attention, sigma=spread)

    def figures(self, run: str, fitted: Fitted) -> Figures:
        wanted = [scenario(RUNS[run], fitted, steps=self.steps, seed=seed) for seed in self.seeds]
        found = [self.runs.get(one) for one in wanted]
        return {name: statistics.mean(one[name] for one in found) for name in ("step_s", "tokens_per_s")}

    def step_s(self, run: str, fitted: Fitted) -> float:
        return self.figures(run, fitted)["step_s"]


def attention_efficiencies() -> dict[str, float]:
    """Share of an H20's bandwidth that the published attention terms imply."""
    sizes = KV_BYTES_PUBLISHED.items()
    return {name: size / PUBLISHED[name].attention_per_token_s / H20.bandwidth for name, size in sizes}


def fit(runs: Sequence[str], simulated: Simulated, *, sigma: float | None) -> Fitted:
    """Most probable parameters, by Gauss-Newton on the logarithms of the step times from two starts.

    A few step times do not determine four parameters: a pipeline may be held up by training or by generation with the
    same result. What is known of training, attention and lengths from elsewhere decides between such solutions.

    Args:
        sigma: of the lengths; None: fitted with the others.
    """
    found = [_descend(runs, simulated, sigma, start) for start in (_TRAINING, 2 * _TRAINING)]
    return min(found, key=lambda pair: pair[0])[1]


def _descend(runs: Sequence[str], simulated: Simulated, sigma: float | None, training: float) -> tuple[float, Fitted]:
    efficiencies = [math.log(value) for value in attention_efficiencies().values()]
    expected = [
        (math.log(2.0), math.inf),
        (math.log(_TRAINING), _TRAINING_SD),
        (statistics.mean(efficiencies), statistics.stdev(efficiencies)),
        *([(math.log(_SIGMA), _SIGMA_SD)] if sigma is None else []),
    ]

    def at(point: Sequence[float]) -> Fitted:
        decode, train, attention, *spread = (math.exp(value) for value in point)
        return Fitted(
            decode=decode,
            train_gpu_s_per_token=train,
            attention=attention,
            sigma=sigma if sigma is not None else spread[0],
        )

    def residuals(point: Sequence[float]) -> list[float]:
        times = [math.log(simulated.step_s(run, at(point)) / MEASURED[run].step_s) / _MODEL_SD for run in runs]
        return times + [(value - centre) / spread for value, (centre, spread) in zip(point, expected, strict=True)]

    point = [centre for centre, _ in expected]
    point[1] = math.log(training)
    best, error = point, math.inf
    for _ in range(6):
        here = residuals(point)
        now = sum(r * r for r in here)
        if now > error - 1e-3:
            break
        best, error = list(point), now
        columns = []
        for index in range(len(point)):
            moved = list(point)
            moved[index] += 0.03
            columns.append([(a - b) / 0.03 for a, b in zip(residuals(moved), here, strict=True)])
        jacobian = np.array(columns).T
        step = np.linalg.lstsq(jacobian, -np.array(here), rcond=None)[0]
        point = [p + float(np.clip(s, -0.5, 0.5)) for p, s in zip(point, step, strict=True)]
    return error, at(best)


def _split(left_out: str, simulated: Simulated, *, sigma: float | None = None) -> list[Record]:
    runs = [run for run in MODES if run != left_out]
    tag = f"without {left_out}" if sigma is None else f"sigma {sigma}: without {left_out}"
    fitted = simulated.parameters(tag, runs, sigma=sigma)
    found = simulated.figures(left_out, fitted)
    errors = {
        "predicted error": found["step_s"] / MEASURED[left_out].step_s - 1,
        "predicted error, tokens/s": found["tokens_per_s"] / MEASURED[left_out].tokens_per_s - 1,
    }
    records = _fitted(tag, fitted) + _residuals(tag, runs, fitted, simulated)
    for name, error in errors.items():
        if sigma is None:
            bar, holds = f"within {_BAR:.0%}", abs(error) <= _BAR
        else:
            bar, holds = f"not fitted, {'within' if abs(error) <= _BAR else 'beyond'} {_BAR:.0%}", None
        records.append(Record(name=f"{tag}: {name}", value=100 * error, unit="%", bar=bar, holds=holds))
    return records


def _fitted(tag: str, fitted: Fitted) -> list[Record]:
    values = (fitted.decode, fitted.train_gpu_s_per_token * 1e6, fitted.attention, fitted.sigma)
    units = ("", "GPU-us/t", "", "")
    return [
        Record(name=f"{tag}: {name}", value=value, unit=unit)
        for name, value, unit in zip(_NAMES, values, units, strict=True)
    ]


def _residuals(tag: str, runs: Sequence[str], fitted: Fitted, simulated: Simulated) -> list[Record]:
    return [
        Record(
            name=f"{tag}: residual of {run}",
            value=100 * (simulated.step_s(run, fitted) / MEASURED[run].step_s - 1),
            unit="%",
        )
        for run in runs
    ]


def _gain_of_switching(tag: str, fitted: Fitted, simulated: Simulated, *, held: bool) -> list[Record]:
    """What the published experiment gained by lending, beside what the simulator says: of two residuals with opposite
    signs each may be small, and the gain far off.

    Args:
        held: whether there is a bar, i.e. the experiment was not fitted.
    """
    without, switched = SWITCHING
    published = MEASURED[without].step_s / MEASURED[switched].step_s
    found = simulated.step_s(without, fitted) / simulated.step_s(switched, fitted)
    tag, ratio = f"{tag}: gain of switching", found / published
    bar, holds = (f"1 +- {_BAR:.2f}", abs(ratio - 1) <= _BAR) if held else ("", None)
    return [
        Record(name=f"{tag}, published", value=published, unit="x"),
        Record(name=f"{tag}, simulated", value=found, unit="x"),
        Record(name=f"{tag}, simulated / published", value=ratio, unit="x", bar=bar, holds=holds),
    ]


def main() -> int:
    options = arguments(__doc__ or "", _extend)
    taken = json.loads(options.parameters.read_text())["records"] if options.parameters else []
    known = {record["name"]: record["value"] for record in taken}
    return conclude(options, partial(calibrate, quick=options.quick, known=known))


def _extend(parser: argparse.ArgumentParser) -> None:
    parts.extend(parser)
    parser.add_argument("--parameters", type=Path, metavar="FILE", help="take those of this record, fit nothing")


def calibrate(runs: Runs, *, quick: bool, known: Mapping[str, float]) -> list[Record]:
    """All fits, their residuals and predictions."""
    seeds, steps = ((0,), 16) if quick else ((0, 1), 24)
    simulated = Simulated(runs=runs, seeds=seeds, steps=steps, known=known)
    records = []
    for left_out in MODES:
        records += _split(left_out, simulated)
    modes, everything = "all three modes", "all five runs"
    fitted = simulated.parameters(modes, [*MODES])
    records += _fitted(modes, fitted) + _residuals(modes, [*MODES], fitted, simulated)
    records += _residuals(f"{modes}, never fitted", [*SWITCHING], fitted, simulated)
    records += _gain_of_switching(f"{modes}, never fitted", fitted, simulated, held=True)
    fitted = simulated.parameters(everything, [*MEASURED])
    records += _fitted(everything, fitted) + _residuals(everything, [*MEASURED], fitted, simulated)
    records += _gain_of_switching(everything, fitted, simulated, held=False)
    if not quick and not known:
        rough = replace(simulated, seeds=simulated.seeds[:1], steps=simulated.steps // 2)
        for sigma in _OTHER_SIGMAS:
            for left_out in MODES:
                records += _split(left_out, rough, sigma=sigma)[-2:]
    return records


if __name__ == "__main__":
    sys.exit(main())
