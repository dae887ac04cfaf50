"""Whole runs whose two replicas take new weights in turn, beside runs in which all stop for them.

    python -m benchmarks.rolling_runs --resume FILE --minutes 8 [--json FILE]

The job of `benchmarks.staleness_live` with two replicas. The ways of one seed and bound run one after the other, in an
order that differs; a partial record is balanced. ``keep`` is run at eta 1 only.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import asdict
from typing import Any

from benchmarks import parts
from benchmarks.intervals import interval
from benchmarks.parts import Parts
from benchmarks.records import Record, arguments, report
from benchmarks.staleness_live import SEEDS, STEPS, Measured, run

_RESOURCES = (
    "seamless.resources=[{name: trainers, nodes: 1, gpus_per_node: 1, capabilities: [train]},"
    "{name: rollouts, nodes: 1, gpus_per_node: 2, capabilities: [rollout]}]"
)
_ROLLING = "seamless.weights.sync=rolling"
WAYS = {
    "together": ["seamless.weights.sync=together"],
    "refill": [_ROLLING, "seamless.weights.cache=refill"],
    "keep": [_ROLLING, "seamless.weights.cache=keep"],
}
_BOUNDS = {0: ["together", "refill"], 1: ["together", "refill", "keep"], 2: ["together", "refill"]}
_QUICK_STEPS = 6


def _name(eta: int, way: str) -> str:
    return f"eta {eta}, {way}"


def records(found: Parts) -> list[Record]:
    told = []
    for eta, ways in _BOUNDS.items():
        runs = {way: [Measured(**taken) for taken in found.of(_name(eta, way))] for way in ways}
        for way, measured in runs.items():
            told += _alone(_name(eta, way), eta, measured)
            if way != "together":
                told += _against(_name(eta, way), eta, measured, runs["together"])
    return told


def _alone(name: str, eta: int, runs: list[Measured]) -> list[Record]:
    speed, worst = statistics.median(one.tokens_per_s for one in runs), max(one.max_lag for one in runs)
    return [
        Record(name=f"{name}: generated tokens trained", value=speed, unit="token/s"),
        Record(name=f"{name}: largest staleness", value=worst, unit="versions", bar=f"<= {eta}", holds=worst <= eta),
        Record(
            name=f"{name}: KL to what generated", value=statistics.fmean(k for one in runs for k in one.kl), unit="nat"
        ),
        Record(name=f"{name}: reward of all steps", value=statistics.fmean(one.mean_reward for one in runs), unit=""),
    ]


def _against(name: str, eta: int, runs: list[Measured], together: list[Measured]) -> list[Record]:
    """Paired by seed. Under bound 0 the trainer waits for the slowest whatever replicas do: told, not judged."""
    pairs = [*zip(runs, together, strict=True)]
    ratios = [one.tokens_per_s / base.tokens_per_s for one, base in pairs]
    told = [
        Record(name=f"{name}: tokens/s against together ({which})", value=value, unit="x", **_ahead(value, eta))
        for which, value in (("median", statistics.median(ratios)), ("least", min(ratios)))
    ]
    low, high = interval([one.mean_reward - base.mean_reward for one, base in pairs])
    judged = {"bar": "the interval has 0", "holds": low <= 0 <= high} if len(pairs) > 1 else {}
    told.append(Record(name=f"{name}: reward minus together's, low", value=low, unit="", **judged))
    return [*told, Record(name=f"{name}: reward minus together's, high", value=high, unit="", **judged)]


def _ahead(ratio: float, eta: int) -> dict[str, Any]:
    return {"bar": "> 1", "holds": ratio > 1} if eta else {}


def main() -> int:
    options = arguments(__doc__ or "", parts.extend)
    steps, seeds = (_QUICK_STEPS, 1) if options.quick else (STEPS, SEEDS)
    found = Parts(options)
    for seed in range(seeds):
        order = random.Random(seed)
        for eta in order.sample([*_BOUNDS], len(_BOUNDS)):
            for way in order.sample(_BOUNDS[eta], len(_BOUNDS[eta])):
                name = _name(eta, way)
                if len(found.of(name)) > seed:
                    continue
                if found.out_of_time:
                    return found.pause()
                measured = run(eta, seed, steps, _RESOURCES, *WAYS[way])
                found.add(name, asdict(measured))
                print(f"seed {seed}, {name}: {measured.tokens_per_s:.0f} token/s", flush=True)
    return report(records(found), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
