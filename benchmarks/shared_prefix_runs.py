"""Whole runs with ``seamless.shared_prefix`` on, beside the same runs with it off.

    python -m benchmarks.shared_prefix_runs --resume FILE --minutes 8 [--json FILE]

Three jobs: ``+recipe=swe`` (sessions of several turns, eight to a task); sums that are asked after 24 solved ones, so
that eight answers share a prompt of 700 tokens; and the same sums under verl's own command, ``verl.trainer.main_ppo``,
and trainer, in its mode ``sync`` with GRPO. Lengths are prescribed there, as in the second job, and the settings are
those of our CPU platform; of the package only the one key is on. On and off of one seed run one after the other, in an
order that differs from seed to seed; a partial record is balanced.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import parts
from benchmarks.forced_lengths import write_graded
from benchmarks.intervals import interval
from benchmarks.parts import Parts
from benchmarks.records import Record, arguments, report
from benchmarks.staleness_live import BATCH, LONGEST, ROLLOUTS, ROOT, finished, overrides, run
from seamless_verl.recipes.arithmetic import assets
from seamless_verl.run.environment import CPU_ENVIRONMENT

_SEEDS, _STEPS, _QUICK_STEPS = 3, 10, 3
_WARM = 1  # steps left out of times
_SHOTS, _PROMPT = 24, 752
_WAYS = ("off", "on")
_LONG_ENOUGH = (
    f"data.max_prompt_length={_PROMPT}",
    f"actor_rollout_ref.rollout.max_model_len={_PROMPT + LONGEST}",
)
_QUIET = ("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1")


@dataclass(frozen=True, slots=True)
class Measured:
    """One run; seconds and the mean reward of each step."""

    step_s: list[float]
    rewards: list[float]

    @property
    def per_step_s(self) -> float:
        return statistics.fmean(self.step_s[_WARM:])

    @property
    def reward(self) -> float:
        return statistics.fmean(self.rewards)


def _swe(way: str, seed: int, steps: int) -> Measured:
    with tempfile.TemporaryDirectory(prefix="shared-") as temporary:
        settings = (f"seamless.shared_prefix={way}", f"data.seed={seed}", f"trainer.total_training_steps={steps}")
        measured = finished(Path(temporary) / "run", "+recipe=swe", *settings, *_QUIET)
        return Measured(measured.step_s, measured.rewards)


def _long_prompts(way: str, seed: int, steps: int) -> Measured:
    measured = run(1, seed, steps, f"seamless.shared_prefix={way}", *_LONG_ENOUGH, *_QUIET, shots=_SHOTS)
    return Measured(measured.step_s, measured.rewards)


def _main_ppo(way: str, seed: int, steps: int) -> Measured:
    with tempfile.TemporaryDirectory(prefix="main-ppo-") as temporary:
        work = Path(temporary)
        data = write_graded(
            work, prompts=BATCH * (steps + 1), sessions=ROLLOUTS, longest=LONGEST, seed=seed, shots=_SHOTS
        )
        command = [
            *(sys.executable, "-m", "verl.trainer.main_ppo", "trainer.v1.trainer_mode=sync"),
            *("hydra.searchpath=[pkg://seamless_verl.hydra_configs]", "+platform=cpu", f"hydra.run.dir={work}"),
            *("actor_rollout_ref.hybrid_engine=true", "actor_rollout_ref.rollout.nnodes=0"),
            *(f"+seamless.assets.dir={assets.build()}", f"trainer.default_local_dir={work}/checkpoints"),
            *("trainer.logger=[console,file]", *overrides(work, data, steps, seed)),
            *(*_LONG_ENOUGH, *_QUIET, *([] if way == "off" else ["+seamless.shared_prefix=on"])),
        ]
        metrics = work / "metrics.jsonl"
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**CPU_ENVIRONMENT, **os.environ, "PYTHONPATH": path, "VERL_FILE_LOGGER_PATH": str(metrics)}
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        logged = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    took = [step for step in logged if "timing_s/step" in step]
    if any(("actor/shared_prefix/computed" in step) != (way == "on") for step in took):
        raise RuntimeError(f"shared prefixes were to be {way}; the metrics say otherwise: {took[0]}")
    return Measured([step["timing_s/step"] for step in took], [step["critic/score/mean"] for step in took])


_JOBS = {"+recipe=swe": _swe, "long prompts": _long_prompts, "verl's main_ppo, long prompts": _main_ppo}


def records(found: Parts) -> list[Record]:
    told = []
    for job in _JOBS:
        off, on = ([Measured(one["step_s"], one["rewards"]) for one in found.of(f"{job}, {way}")] for way in _WAYS)
        for way, measured in zip(_WAYS, (off, on), strict=True):
            step_s = statistics.median(one.per_step_s for one in measured)
            told.append(Record(name=f"{job}, {way}: time of a step, median of the seeds", value=step_s, unit="s"))
            reward = statistics.fmean(one.reward for one in measured)
            told.append(Record(name=f"{job}, {way}: reward of all steps", value=reward, unit=""))
        pairs = [*zip(off, on, strict=True)]
        ratios = [without.per_step_s / with_.per_step_s for without, with_ in pairs]
        told.append(
            Record(name=f"{job}: off over on, time of a step (median)", value=statistics.median(ratios), unit="x")
        )
        told.append(Record(name=f"{job}: the same (least)", value=min(ratios), unit="x"))
        low, high = interval([with_.reward - without.reward for without, with_ in pairs])
        judged = {"bar": "the interval has 0", "holds": low <= 0 <= high} if len(pairs) > 1 else {}
        told.append(Record(name=f"{job}: reward on minus off, low", value=low, unit="", **judged))
        told.append(Record(name=f"{job}: reward on minus off, high", value=high, unit="", **judged))
    return told


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
                print(f"seed {seed}, {name}: {measured.per_step_s:.2f} s per step", flush=True)
    return report(records(found), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
