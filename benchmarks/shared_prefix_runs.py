"""Whole runs with ``seamless.shared_prefix`` on, beside the same runs with it off.

    python -m benchmarks.shared_prefix_runs --resume FILE --minutes 8 [--json FILE]

Two jobs: ``+recipe=swe`` (sessions of several turns, eight to a task), and sums that are asked after 24 solved ones, so
that eight answers share a prompt of 700 tokens. On and off of one seed run one after the other, in an order that
differs from seed to seed; a partial record is balanced.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks import parts
from benchmarks.intervals import interval
from benchmarks.parts import Parts
from benchmarks.records import Record, arguments, report
from benchmarks.staleness_live import LONGEST, Measured, finished, run

_SEEDS, _STEPS, _QUICK_STEPS = 3, 10, 3
_WARM = 1  # steps left out of times
_SHOTS, _PROMPT = 24, 752
_WAYS = ("off", "on")
_QUIET = ("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1")


def _swe(way: str, seed: int, steps: int) -> Measured:
    with tempfile.TemporaryDirectory(prefix="shared-") as temporary:
        settings = (f"seamless.shared_prefix={way}", f"data.seed={seed}", f"trainer.total_training_steps={steps}")
        return finished(Path(temporary) / "run", "+recipe=swe", *settings, *_QUIET)


def _long_prompts(way: str, seed: int, steps: int) -> Measured:
    lengths = (f"data.max_prompt_length={_PROMPT}", f"actor_rollout_ref.rollout.max_model_len={_PROMPT + LONGEST}")
    return run(1, seed, steps, f"seamless.shared_prefix={way}", *lengths, *_QUIET, shots=_SHOTS)


_JOBS = {"+recipe=swe": _swe, "long prompts": _long_prompts}


def records(found: Parts) -> list[Record]:
    told = []
    for job in _JOBS:
        off, on = ([Measured(**taken) for taken in found.of(f"{job}, {way}")] for way in _WAYS)
        for way, measured in zip(_WAYS, (off, on), strict=True):
            step_s = statistics.median(map(_step_s, measured))
            told.append(Record(name=f"{job}, {way}: time of a step, median of the seeds", value=step_s, unit="s"))
            reward = statistics.fmean(one.mean_reward for one in measured)
            told.append(Record(name=f"{job}, {way}: reward of all steps", value=reward, unit=""))
        pairs = [*zip(off, on, strict=True)]
        ratios = [_step_s(without) / _step_s(with_) for without, with_ in pairs]
        told.append(
            Record(name=f"{job}: off over on, time of a step (median)", value=statistics.median(ratios), unit="x")
        )
        told.append(Record(name=f"{job}: the same (least)", value=min(ratios), unit="x"))
        low, high = interval([with_.mean_reward - without.mean_reward for without, with_ in pairs])
        judged = {"bar": "the interval has 0", "holds": low <= 0 <= high} if len(pairs) > 1 else {}
        told.append(Record(name=f"{job}: reward on minus off, low", value=low, unit="", **judged))
        told.append(Record(name=f"{job}: reward on minus off, high", value=high, unit="", **judged))
    return told


def _step_s(run: Measured) -> float:
    return statistics.fmean(run.step_s[_WARM:])


def main() -> int:
    options = arguments(__doc__ or "", parts.extend)
    steps, seeds = (_QUICK_STEPS, 1) if options.quick else (_STEPS, _SEEDS)
    found = Parts(options)
    for seed in range(seeds):
        for job, start in _JOBS.items():
            for way in random.Random(seed).sample(_WAYS, len(_WAYS)):
                name = f"{job}, {way}"
                if len(found.of(name)) > seed:
                    continue
                if found.out_of_time:
                    return found.pause()
                measured = start(way, seed, steps)
                found.add(name, asdict(measured))
                print(f"seed {seed}, {name}: {_step_s(measured):.2f} s per step", flush=True)
    return report(records(found), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
