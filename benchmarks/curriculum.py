"""History Resampling against plain GRPO and DAPO's filter, on the SRPO recipe's model, data and reward.

    python -m benchmarks.curriculum [--quick] [--seeds N] [--json FILE]

The curriculum is the kernel that runs under verl; sampling and the GRPO step are done in this process, synchronously,
because a run of verl per schedule and seed would take hours and change nothing that is compared: who is drawn, what
it costs, what is learnt. One stage over both sources, so that only the schedule differs.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import Record, arguments, report
from seamless_verl.curriculum.curriculum import Curriculum
from seamless_verl.curriculum.pool import Resampling
from seamless_verl.recipes.srpo import assets
from seamless_verl.recipes.srpo.reward import compute_score
from seamless_verl.recipes.swe.tiny.offline import sample
from seamless_verl.recipes.swe.tiny.tokenizer import PAD_ID, TURN_END, encode_conversation
from seamless_verl.staleness.groups import has_no_signal

# As in the recipe.
BATCH, ROLLOUTS, LONGEST, LEARNING_RATE = 16, 8, 8, 5e-4
EPOCHS = 5  # of rollouts that plain GRPO needs for so many; every schedule gets as many rollouts
BOUNDARIES = 3
HELD_OUT_ROLLOUTS = 16
SCHEDULES = ("plain", "history", "dapo")


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    source: str
    answer: str


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of a prompt: ids of each answer, its score and its accuracy."""

    prompt: Prompt
    answers: list[list[int]]
    scores: list[float]
    accuracies: list[float]


class Learner:
    """The tiny model under one on-policy GRPO update per batch."""

    def __init__(self, folder: Path, seed: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder / "model")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self.generator = torch.Generator().manual_seed(seed)

    def read(self, file: Path) -> list[Prompt]:
        import pandas as pd

        prompts = []
        for row in pd.read_parquet(file).to_dict("records"):
            ids, mask = encode_conversation(self.tokenizer, [row["prompt"][0]["content"], "0"])
            prompts.append(Prompt(ids[: mask.index(1)], row["data_source"], row["reward_model"]["ground_truth"]))
        return prompts

    def roll_out(self, prompts: Sequence[Prompt], rollouts: int = ROLLOUTS) -> list[Group]:
        rows = [prompt for prompt in prompts for _ in range(rollouts)]
        answers = [tokens[:LONGEST] for tokens, _ in sample(self.model, [p.ids for p in rows], self.generator)]
        texts = [self.tokenizer.decode(ids).removesuffix(TURN_END) for ids in answers]
        rewards = [compute_score(p.source, text, p.answer) for p, text in zip(rows, texts, strict=True)]
        return [
            Group(
                prompt,
                answers[begin : begin + rollouts],
                [reward["score"] for reward in rewards[begin : begin + rollouts]],
                [reward["acc"] for reward in rewards[begin : begin + rollouts]],
            )
            for prompt, begin in zip(prompts, range(0, len(rows), rollouts), strict=True)
        ]

    def learn(self, groups: Sequence[Group]) -> None:
        """Token-level GRPO without KL; answers that were cut off have zero advantage."""
        rows: list[tuple[list[int], list[int], float]] = []
        for group in groups:
            mean, deviation = statistics.fmean(group.scores), statistics.stdev(group.scores)
            for answer, score in zip(group.answers, group.scores, strict=True):
                advantage = 0.0 if len(answer) >= LONGEST else (score - mean) / (deviation + 1e-6)
                rows.append((group.prompt.ids, answer, advantage))
        width = max(len(prompt) + len(answer) for prompt, answer, _ in rows)
        ids, weights = torch.full((len(rows), width), PAD_ID), torch.zeros(len(rows), width)
        for row, (prompt, answer, advantage) in enumerate(rows):
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor(prompt + answer)
            weights[row, len(prompt) : end] = advantage
        log_probs = torch.log_softmax(self.model(input_ids=ids, use_cache=False).logits[:, :-1], -1)
        chosen = log_probs.gather(2, ids[:, 1:, None])[..., 0]
        tokens = sum(len(answer) for _, answer, _ in rows)
        loss: torch.Tensor = -(chosen * weights[:, 1:]).sum() / tokens
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def accuracy(self, prompts: Sequence[Prompt]) -> float:
        groups = self.roll_out(prompts, HELD_OUT_ROLLOUTS)
        return statistics.fmean(accuracy for group in groups for accuracy in group.accuracies)


@dataclass(frozen=True, slots=True)
class Result:
    silent: list[list[bool]]  # per epoch, per group in order: no advantage
    rollouts_per_useful_group: float
    before: float  # held-out accuracy
    accuracy: float
    steps: int

    def share(self, epoch: int, begin: float = 0.0, end: float = 1.0) -> float:
        """Groups without advantage in a part of an epoch."""
        groups = self.silent[epoch]
        return statistics.fmean(groups[int(begin * len(groups)) : max(1, int(end * len(groups)))])


def run(schedule: str, folder: Path, seed: int, epochs: int) -> Result:
    """Spend the same rollouts under ``schedule``: ``plain``, ``history`` or ``dapo`` (filter, refill, train B)."""
    torch.manual_seed(seed)
    learner = Learner(folder, seed)
    train, held_out = learner.read(folder / "train.parquet"), learner.read(folder / "val.parquet")
    resampling = Resampling(floor=BATCH) if schedule == "history" else None
    curriculum = Curriculum(sources=[prompt.source for prompt in train], resampling=resampling, seed=seed)
    before = learner.accuracy(held_out)
    budget, spent, useful, steps = len(train) * ROLLOUTS * epochs, 0, 0, 0
    silent: list[list[bool]] = []
    batch: list[Group] = []
    while spent < budget:
        draws = [curriculum.draw() for _ in range(BATCH - len(batch))]
        groups = learner.roll_out([train[draw.prompt] for draw in draws])
        spent += len(draws) * ROLLOUTS
        for draw, group in zip(draws, groups, strict=True):
            nothing = has_no_signal(group.scores)
            useful += not nothing
            while len(silent) <= draw.epoch:
                silent.append([])
            silent[draw.epoch].append(nothing)
            curriculum.finish(draw, group.accuracies)
            if schedule != "dapo" or not nothing:
                batch.append(group)
        if len(batch) == BATCH:
            learner.learn(batch)
            batch, steps = [], steps + 1
    return Result(silent, spent / max(1, useful), before, learner.accuracy(held_out), steps)


def boundaries(name: str, results: Sequence[Result]) -> list[float]:
    """Second half of an epoch to first half of the next, median over the seeds: what changed at the boundary."""
    return [
        statistics.median(r.share(epoch + 1, 0.0, 0.5) - r.share(epoch, 0.5, 1.0) for r in results)
        for epoch in range(BOUNDARIES)
    ]


def main() -> int:
    options = arguments(
        "History Resampling, plain GRPO and DAPO's filter on the SRPO recipe.",
        lambda parser: parser.add_argument("--seeds", type=int, default=5, help="runs per schedule"),
    )
    folder = assets.build()
    seeds, epochs = (range(1), BOUNDARIES + 1) if options.quick else (range(options.seeds), EPOCHS)
    runs: dict[str, list[Result]] = {name: [] for name in SCHEDULES}
    for seed in seeds:
        for name in random.Random(seed).sample(SCHEDULES, len(SCHEDULES)):
            runs[name].append(run(name, folder, seed, epochs))
    records = [Record(name="seeds", value=len(seeds), unit="runs per schedule")]
    for name, results in runs.items():
        for epoch in range(BOUNDARIES + 1):
            share = statistics.median(result.share(epoch) for result in results)
            records.append(Record(name=f"{name}: groups without advantage, epoch {epoch}", value=share, unit="share"))
        for figure, unit in (("rollouts_per_useful_group", "rollouts"), ("steps", "updates"), ("accuracy", "")):
            value = statistics.median(getattr(result, figure) for result in results)
            records.append(Record(name=f"{name}: {figure.replace('_', ' ')}", value=value, unit=unit))
    before = statistics.median(result.before for result in runs["plain"])
    records.append(Record(name="held-out accuracy before", value=before, unit=""))
    falls = boundaries("history", runs["history"])
    records += [
        Record(
            name=f"history: share without advantage at boundary {number}: change",
            value=change,
            unit="share",
            bar="< 0",
            holds=change < 0,
        )
        for number, change in enumerate(falls, start=1)
    ]
    records += [
        Record(name=f"plain: share without advantage at boundary {number}: change", value=change, unit="share")
        for number, change in enumerate(boundaries("plain", runs["plain"]), start=1)
    ]
    pairs = list(zip(runs["history"], runs["plain"], runs["dapo"], strict=True))
    ratio = statistics.median(h.rollouts_per_useful_group / d.rollouts_per_useful_group for h, _, d in pairs)
    gain = statistics.median(h.accuracy - p.accuracy for h, p, _ in pairs)
    records += [
        Record(name="rollouts per useful group, history / dapo", value=ratio, unit="ratio", bar="< 1", holds=ratio < 1),
        Record(
            name="held-out accuracy, history - plain",
            value=gain,
            unit="",
            bar=">= 0 at equal rollouts",
            holds=gain >= 0,
        ),
    ]
    return report(records, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
