"""Fits the simulator's physical parameters to published runs and predicts those it was not fitted to.

``python -m benchmarks.calibration``: three splits (two of verl's three modes are fitted, the third is predicted), then
the fit to all three, which also predicts the published switching experiment. Residuals and the effect of every
assumption are printed and written.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence

import numpy as np

from benchmarks.records import Record, arguments, report
from seamless_verl.simulation.published import MODES, SWITCHING, Fitted, Measured, attention_efficiencies, scenario
from seamless_verl.simulation.scenario import simulate

_BAR = 0.10
_MODEL_SD = 0.05  # of the logarithm of a step time: what the model leaves out
# GPU-seconds per token. verl's documentation ("Fully async", 30B-A3B on 128 H20) has 86.3 s for 8192 trajectories of at
# most 8192 tokens; their mean is not given. 165e-6 if all were that long, 540e-6 if the mean was 2500.
_TRAINING, _TRAINING_SD = 300e-6, 0.5


def predicted_step_s(run: Measured, fitted: Fitted, seeds: Sequence[int], steps: int) -> float:
    """Mean seconds per step over the seeds."""
    return sum(simulate(scenario(run, fitted, steps=steps, seed=seed)).step_s for seed in seeds) / len(seeds)


def fit(runs: Sequence[Measured], seeds: Sequence[int], steps: int, *, sigma: float) -> Fitted:
    """Most probable parameters, by Gauss-Newton on the logarithms of the step times from two starts.

    Two step times do not always determine two parameters: a pipeline may be held up by training or by generation with
    the same result. What is known of training from elsewhere (`_TRAINING`) decides between such solutions.
    """
    found = [_descend(runs, seeds, steps, sigma, start) for start in (_TRAINING, 2 * _TRAINING)]
    return min(found, key=lambda pair: pair[0])[1]


def _descend(
    runs: Sequence[Measured], seeds: Sequence[int], steps: int, sigma: float, training: float
) -> tuple[float, Fitted]:
    def at(point: Sequence[float]) -> Fitted:
        decode, train, attention = (math.exp(value) for value in point)
        return Fitted(decode=decode, train_gpu_s_per_token=train, attention=attention, sigma=sigma)

    def residuals(point: Sequence[float]) -> list[float]:
        times = [math.log(predicted_step_s(run, at(point), seeds, steps) / run.step_s) / _MODEL_SD for run in runs]
        prior = [(point[1] - math.log(_TRAINING)) / _TRAINING_SD, (point[2] - centre) / spread]
        return times + prior

    logs = [math.log(value) for value in attention_efficiencies().values()]
    centre, spread = statistics.mean(logs), statistics.stdev(logs)
    point = [math.log(2.0), math.log(training), centre]
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


def _split(left_out: Measured, seeds: Sequence[int], steps: int, *, sigma: float) -> list[Record]:
    runs = [run for run in MODES if run is not left_out]
    fitted = fit(runs, seeds, steps, sigma=sigma)
    error = predicted_step_s(left_out, fitted, seeds, steps) / left_out.step_s - 1
    tag = f"sigma {sigma}: without {left_out.name}"
    records = [
        Record(name=f"{tag}: decode factor", value=fitted.decode, unit=""),
        Record(name=f"{tag}: training", value=fitted.train_gpu_s_per_token * 1e6, unit="GPU-us/t"),
        Record(name=f"{tag}: attention efficiency", value=fitted.attention, unit=""),
    ]
    records += _residuals(tag, runs, fitted, seeds, steps)
    bar = f"within {_BAR:.0%}" if sigma == Fitted(decode=1, train_gpu_s_per_token=1).sigma else ""
    holds = abs(error) <= _BAR if bar else None
    return [*records, Record(name=f"{tag}: predicted error", value=100 * error, unit="%", bar=bar, holds=holds)]


def _residuals(tag: str, runs: Sequence[Measured], fitted: Fitted, seeds: Sequence[int], steps: int) -> list[Record]:
    return [
        Record(
            name=f"{tag}: residual of {run.name}",
            value=100 * (predicted_step_s(run, fitted, seeds, steps) / run.step_s - 1),
            unit="%",
        )
        for run in runs
    ]


def main() -> int:
    options = arguments(__doc__ or "")
    seeds, steps = ((0,), 16) if options.quick else ((0, 1), 24)
    sigma = Fitted(decode=1, train_gpu_s_per_token=1).sigma
    records = []
    for left_out in MODES:
        records += _split(left_out, seeds, steps, sigma=sigma)
    everything = fit(MODES, seeds, steps, sigma=sigma)
    records += [
        Record(name="all three: decode factor", value=everything.decode, unit=""),
        Record(name="all three: training", value=everything.train_gpu_s_per_token * 1e6, unit="GPU-us/t"),
        Record(name="all three: attention efficiency", value=everything.attention, unit=""),
        *_residuals("all three", MODES, everything, seeds, steps),
        *_residuals("all three, never fitted", SWITCHING, everything, seeds, steps),
    ]
    if not options.quick:
        for other in (0.5, 0.9):
            for left_out in MODES:
                records += _split(left_out, seeds[:1], steps // 2, sigma=other)[-1:]
    return report(records, options.json)


if __name__ == "__main__":
    sys.exit(main())
