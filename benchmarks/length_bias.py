"""verl's drop and wait against the streaming dataloader: how long are the answers that are trained on?

    python -m benchmarks.length_bias [--quick] [--json FILE]

The buffers are verl's own `ReplayBufferAsync` and ours, both filled as their trainers fill them. Scripted are
TransferQueue (a dict) and rollout, on virtual time: every group takes as long as its answer is, whatever else runs.
"""

from __future__ import annotations

import heapq
import importlib
import os
import random
import statistics
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.records import Record, arguments, report
from benchmarks.staleness import skewed
from tests.fakes import ScriptedTransferQueue

BATCH, TRAIN_S = 16, 1.0
LONGEST_S = 8.0  # of `skewed`
BUFFERS = ("drop", "wait", "reserve")


@dataclass(slots=True)
class Outcome:
    trained_length: float  # mean over the groups trained, of those submitted before the cut-off
    generated_length: float  # mean over all groups submitted before it
    dropped: float  # share of these that no step trained
    wall_s: float
    lags: list[int] = field(default_factory=list)

    @property
    def bias(self) -> float:
        return self.trained_length / self.generated_length - 1


class Trainer:
    """The loop around a buffer: what verl's trainer does with it, as far as a buffer can see."""

    def __init__(self, kind: str, queue: ScriptedTransferQueue, eta: int, seed: int) -> None:
        from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

        from seamless_verl.verl_adapter.dataloader.streaming_buffer import StreamingReplayBuffer

        self.queue, self.rng = queue, random.Random(seed)
        self.now, self.step = 0.0, 0
        self.lengths: list[float] = []
        self.submitted_in: list[int] = []
        self.ends: list[tuple[float, int]] = []
        self.buffer: Any
        if kind == "reserve":
            self.buffer = StreamingReplayBuffer(
                eta=eta, batch_size=BATCH, refill_fn=self.submit, trainer_config={}, sampler_kwargs={}
            )
        else:
            self.buffer = ReplayBufferAsync(
                trainer_mode="separate_async",
                trainer_config={},
                max_off_policy_threshold=eta + 1,  # versions that a group may span; eta is how far it may lag
                max_off_policy_strategy=kind,
                sampler_kwargs={},
                refill_fn=self.submit,
            )
        self.reserves = kind == "reserve"
        self.eta = eta
        self.buffer._wait_for_next_poll = self.wait

    def submit(self, count: int) -> int:
        numbers = range(len(self.lengths), len(self.lengths) + count)
        if self.reserves:
            self.buffer.reserve([f"g{number}" for number in numbers], self.step)
        for number in numbers:
            self.lengths.append(skewed(self.rng))
            self.submitted_in.append(self.step)
            heapq.heappush(self.ends, (self.now + self.lengths[-1], number))
        tag = {"is_prompt": True, "status": "running", "global_steps": self.step}
        self.queue.kv_batch_put([f"g{number}" for number in numbers], "train", [tag] * count)
        return count

    def wait(self, partition: str, last_debug_time: float) -> float:
        """Nothing to train on: time goes on to the next answer."""
        self.finish_until(self.ends[0][0])
        return last_debug_time

    def finish_until(self, instant: float) -> None:
        self.now = max(self.now, instant)
        while self.ends and self.ends[0][0] <= self.now:
            _, number = heapq.heappop(self.ends)
            began = self.submitted_in[number] - 1
            row = {"status": "success", "seq_len": 1, "min_global_steps": began}
            self.queue.kv_batch_put([f"g{number}_0_0"], "train", [row], [{}])
            self.queue.kv_batch_put([f"g{number}"], "train", [{"status": "finished"}])

    def train(self, steps: int) -> Outcome:
        trained: set[int] = set()
        lags = []
        self.step = 1
        if not self.reserves:
            self.submit(self.eta * BATCH)  # num_warmup_batches = eta: as many in flight as ours
        for step in range(1, steps + 1):
            self.step = step
            if self.reserves:
                self.buffer.admit(step)
            else:
                self.submit(BATCH)
            batch, _ = self.buffer.sample(global_steps=step, partition_id="train", batch_size=BATCH)
            groups = [int(key.split("_")[0].removeprefix("g")) for key in batch.keys]
            trained.update(groups)
            lags += [step - self.submitted_in[number] for number in groups]
            self.queue.kv_clear(batch.keys, "train")
            self.finish_until(self.now + TRAIN_S)
        # Later groups may still be on their way, and the long ones more likely so.
        early = [n for n, step in enumerate(self.submitted_in) if step <= steps - LONGEST_S / TRAIN_S - self.eta]
        kept = [number for number in early if number in trained]
        return Outcome(
            trained_length=statistics.fmean(self.lengths[number] for number in kept),
            generated_length=statistics.fmean(self.lengths[number] for number in early),
            dropped=1 - len(kept) / len(early),
            wall_s=self.now,
            lags=lags,
        )


def run(kind: str, eta: int, seed: int, steps: int) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        return Trainer(kind, ScriptedTransferQueue().install(patch), eta, seed).train(steps)


def main() -> int:
    options = arguments("Answers trained on against answers generated: verl's drop and wait, and ours.")
    os.environ.setdefault("VERL_PLATFORM", "cpu")
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    importlib.import_module("verl.trainer.ppo.v1")
    seeds, steps = (range(1), 40) if options.quick else (range(5), 150)
    records = []
    for eta in (1, 2, 3):
        walls = {}
        for kind in BUFFERS:
            outcomes = [run(kind, eta, seed, steps) for seed in seeds]
            walls[kind] = statistics.median(outcome.wall_s for outcome in outcomes)
            worst = max(lag for outcome in outcomes for lag in outcome.lags)
            bias = statistics.median(outcome.bias for outcome in outcomes)
            dropped = statistics.median(outcome.dropped for outcome in outcomes)
            ours = kind == "reserve"
            name = f"{kind if ours else f'verl {kind}'}, eta {eta}"
            records += [
                Record(
                    name=f"{name}: trained length against generated",
                    value=bias,
                    unit="share",
                    bar="0" if ours else "",
                    holds=abs(bias) < 1e-9 if ours else None,
                ),
                Record(name=f"{name}: groups generated in vain", value=dropped, unit="share"),
                Record(
                    name=f"{name}: largest lag",
                    value=worst,
                    unit="versions",
                    bar=f"<= {eta}" if ours else "",
                    holds=worst <= eta if ours else None,
                ),
                Record(name=f"{name}: virtual time", value=walls[kind] / steps, unit="s/step"),
            ]
    return report(records, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
