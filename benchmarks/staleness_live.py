"""Whole runs under the bounds 0 to 3 on skewed lengths: tokens per second, how stale what was trained is, reward.

    python -m benchmarks.staleness_live --resume FILE --minutes 8 [--svg FILE] [--json FILE]

Real verl, Ray, vLLM and FSDP2 on the CPU, one core for the trainer and one for the replica. Every answer has the length
that the data prescribes (log-normal, the same for all bounds) but only what it says up to its end mark is graded and
trained, so that reward means what it means elsewhere. The bounds of one seed run one after the other, in an order that
differs from seed to seed; a partial record is balanced.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import plots
from benchmarks.forced_lengths import write_graded
from benchmarks.parts import Parts
from benchmarks.records import Record, arguments, report

ROOT = Path(__file__).parents[1]
ETAS = (0, 1, 2, 3)
SEEDS, STEPS = 3, 16
# The run fills its pipeline in these; with a bound above 0 the first batch alone pays for the groups ahead.
_LEFT_OUT = 4
BATCH, ROLLOUTS, LONGEST = 8, 8, 256
_KL = "rollout_corr/k3_kl"
_RESOURCES = (
    "seamless.resources=[{name: trainers, nodes: 1, gpus_per_node: 1, capabilities: [train]},"
    "{name: rollouts, nodes: 1, gpus_per_node: 1, capabilities: [rollout]}]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run; lists are per step.

    Attributes:
        step_s: wall time.
        tokens: generated tokens of the rows trained.
        rewards: mean over the rows.
        lags: rows per staleness, over all steps.
        kl: of the trainer's policy to the one that generated, verl's k3 estimate; nothing where
            the trainer takes the rollout's log-probs for its own (``bypass_mode``).
    """

    step_s: list[float]
    tokens: list[float]
    rewards: list[float]
    lags: Mapping[str, int]
    kl: list[float]

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens[_LEFT_OUT:]) / sum(self.step_s[_LEFT_OUT:])

    @property
    def reward(self) -> float:
        """Of the last quarter."""
        return statistics.fmean(self.rewards[-len(self.rewards) // 4 :])

    @property
    def mean_reward(self) -> float:
        """Of all steps."""
        return statistics.fmean(self.rewards)

    @property
    def max_lag(self) -> int:
        return max(map(int, self.lags))

    def share(self, lag: int) -> float:
        return self.lags.get(str(lag), 0) / sum(self.lags.values())


def run(eta: int, seed: int, steps: int, *further: str, shots: int = 0) -> Measured:
    """A run with further overrides; ``shots``: solved sums before each prompt."""
    with tempfile.TemporaryDirectory(prefix="eta-") as temporary:
        work, folder = Path(temporary), Path(temporary) / "run"
        prompts = BATCH * (steps + max(ETAS) + 1)
        data = write_graded(work, prompts=prompts, sessions=ROLLOUTS, longest=LONGEST, seed=seed, shots=shots)
        ours = (_RESOURCES, f"seamless.staleness.eta={eta}", "actor_rollout_ref.rollout.max_num_seqs=16")
        return finished(folder, *overrides(work, data, steps, seed), *ours, *further)


def finished(folder: Path, *arguments: str) -> Measured:
    """Start a run as a user would, and read what it leaves in ``folder``.

    Raises:
        RuntimeError: it did not end well, or a row was not what the engine returned.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "seamless_verl.main", *arguments, f"hydra.run.dir={folder}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return _read(folder)


def overrides(work: Path, data: Path, steps: int, seed: int) -> list[str]:
    """Overrides of what is trained, under whichever trainer."""
    return [
        "+recipe=arithmetic",
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"data.seed={seed}",
        f"data.train_batch_size={BATCH}",
        f"data.max_response_length={LONGEST}",
        f"actor_rollout_ref.rollout.max_model_len={LONGEST + 32}",
        f"+actor_rollout_ref.rollout.agent.agent_loop_config_path={work}/agent_loops.yaml",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
        "trainer.rollout_data_dir=null",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        f"trainer.total_training_steps={steps}",
    ]


def _read(folder: Path) -> Measured:
    from seamless_verl.observe.flight import RowsTrained
    from seamless_verl.observe.recording import read_recording

    summary = json.loads((folder / "summary.json").read_text())
    if summary["rows_audited"] != summary["rows"]:
        raise RuntimeError(f"{summary['rows'] - summary['rows_audited']} rows of {summary['rows']} were not audited")
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [event for event in read_recording(folder / "flight").events if isinstance(event, RowsTrained)]
    lags = Counter(lag for event in trained for lag in event.staleness)
    return Measured(
        step_s=[step["step_s"] for step in steps],
        tokens=[sum(event.response_tokens) for event in trained],
        rewards=[step["reward"] for step in steps],
        lags={str(lag): count for lag, count in sorted(lags.items())},
        kl=[step[_KL] for step in metrics if _KL in step],
    )


def records(runs: Mapping[int, Sequence[Measured]]) -> list[Record]:
    found = [Record(name="seeds", value=len(runs[0]), unit="runs per eta")]
    for eta, measured in runs.items():
        speed = statistics.median(one.tokens_per_s for one in measured)
        found.append(Record(name=f"eta {eta}: generated tokens trained", value=speed, unit="token/s"))
        if eta:
            gains = [one.tokens_per_s / base.tokens_per_s for one, base in zip(measured, runs[0], strict=True)]
            gain = statistics.median(gains)
            told = {"unit": "x", "bar": "> 1", "holds": gain > 1}
            found.append(Record(name=f"eta {eta}: against eta 0, same seed (median)", value=gain, **told))
        worst = max(one.max_lag for one in measured)
        bound = {"unit": "versions", "bar": f"<= {eta}", "holds": worst <= eta}
        found.append(Record(name=f"eta {eta}: largest staleness", value=worst, **bound))
        for lag in range(eta + 1):
            share = statistics.median(one.share(lag) for one in measured)
            found.append(Record(name=f"eta {eta}: rows of staleness {lag}", value=share, unit="share"))
        first = statistics.median(one.rewards[0] for one in measured)
        last = statistics.median(one.reward for one in measured)
        found.append(Record(name=f"eta {eta}: reward, first step", value=first, unit=""))
        found.append(Record(name=f"eta {eta}: reward, last quarter", value=last, unit=""))
    return found


def plot(file: Path, runs: Mapping[int, Sequence[Measured]]) -> None:
    names = {eta: f"eta {eta}" for eta in runs}
    rewards = {
        names[eta]: [statistics.median(step) for step in zip(*(one.rewards for one in measured), strict=True)]
        for eta, measured in runs.items()
    }
    speeds = {names[eta]: [one.tokens_per_s for one in measured] for eta, measured in runs.items()}
    lags = {
        names[eta]: {f"{lag} old": statistics.fmean(one.share(lag) for one in measured) for lag in range(eta + 1)}
        for eta, measured in runs.items()
    }
    panels = [plots.bars("tokens per second", speeds), plots.stacks("staleness of trained rows", lags)]
    plots.figure(file, [*panels, plots.lines("reward (median of the seeds)", rewards, "steps")])


def main() -> int:
    options = arguments(__doc__ or "", plots.extend)
    steps, seeds = (_LEFT_OUT + 2, 1) if options.quick else (STEPS, SEEDS)
    found = Parts(options)
    for seed in range(seeds):
        for eta in random.Random(seed).sample(ETAS, len(ETAS)):
            if len(found.of(f"eta {eta}")) > seed:
                continue
            if found.out_of_time:
                return found.pause()
            measured = run(eta, seed, steps)
            found.add(f"eta {eta}", asdict(measured))
            print(f"seed {seed}, eta {eta}: {measured.tokens_per_s:.0f} token/s, lags {measured.lags}", flush=True)
    runs = {eta: [Measured(**taken) for taken in found.of(f"eta {eta}")] for eta in ETAS}
    if options.svg is not None:
        plot(options.svg, runs)
    return report(records(runs), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
