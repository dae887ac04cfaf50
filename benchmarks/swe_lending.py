"""What lending is worth to ``+recipe=swe``: as it is, under ``predictive``, and without loans, in turns.

    python -m benchmarks.swe_lending [--rounds N] [--resume FILE --minutes 8] [--json FILE]

One order of prompts per round. The trainer and each replica have a core; with ``nothing declared`` they float over all
of them. The time of a step is the mean of a run without its first two steps.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks import parts
from benchmarks.parts import Parts
from benchmarks.records import Record, arguments, report
from benchmarks.staleness_live import finished

_APART = (
    "seamless.resources=[{name: trainer, nodes: 1, gpus_per_node: 1, capabilities: [train]},"
    "{name: rollout, nodes: 1, gpus_per_node: 1, capabilities: [rollout]}]"
)
_WAYS: Mapping[str, list[str]] = {
    "as it is": [],
    "predictive": ["seamless.scheduler.policy=predictive"],
    "nothing lent": [_APART, "seamless.scheduler.policy=null"],
    "nothing declared": ["seamless.resources=[]", "seamless.scheduler.policy=null"],
}
_STEPS, _QUICK_STEPS, _LEFT_OUT = 8, 3, 2
_QUIET = ("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1")


def step_s(way: str, seed: int, steps: int) -> float:
    with tempfile.TemporaryDirectory(prefix="lending-") as temporary:
        settings = (*_WAYS[way], f"data.seed={seed}", f"trainer.total_training_steps={steps}", *_QUIET)
        return statistics.fmean(finished(Path(temporary) / "run", "+recipe=swe", *settings).step_s[_LEFT_OUT:])


def records(found: Mapping[str, list[float]]) -> list[Record]:
    told = []
    for way, took in found.items():
        told.append(Record(name=f"{way}: time of a step, median", value=statistics.median(took), unit="s"))
        if way == "as it is":
            continue
        ratios = sorted(other / it for other, it in zip(took, found["as it is"], strict=True))
        told.append(Record(name="  over the recipe's as it is, median", value=statistics.median(ratios), unit="x"))
        told.append(Record(name="  least", value=ratios[0], unit="x"))
        told.append(Record(name="  greatest", value=ratios[-1], unit="x"))
    return told


def _options(parser: argparse.ArgumentParser) -> None:
    parts.extend(parser)
    parser.add_argument("--rounds", type=int, default=4)


def main() -> int:
    options = arguments(__doc__ or "", _options)
    steps, rounds = (_QUICK_STEPS, 1) if options.quick else (_STEPS, options.rounds)
    found = Parts(options)
    for seed in range(rounds):
        for way in random.Random(seed).sample(list(_WAYS), len(_WAYS)):
            if len(found.of(way)) > seed:
                continue
            if found.out_of_time:
                return found.pause()
            found.add(way, step_s(way, seed, steps))
            print(f"{seed + 1}/{rounds} {way}: {found.of(way)[-1]:.2f} s per step", flush=True)
    return report(records({way: found.of(way) for way in _WAYS}), options.json)


if __name__ == "__main__":
    sys.exit(main())
