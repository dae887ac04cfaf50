"""History Resampling against plain GRPO and DAPO's filter, on the SRPO recipe's model, data and reward.

``readmitting`` is History Resampling whose solved prompts come back after an epoch: what it is ahead of ``history`` is
what the model forgets of prompts that have left. How each does on those prompts at the end is told, too.

    python -m benchmarks.curriculum [--quick] [--json FILE] [--resume FILE --minutes N] [--seeds N]

Beyond three seeds DAPO's filter is not run. How far the others are apart from seed to seed is told of all held-out
problems, of those that the model mostly solved before, and of the rest: what is solved leaves the pool and is
practised no more.
``--more N`` adds N prompts per source to the recipe's: what History Resampling loses by meeting few prompts often.

The curriculum is the kernel that runs under verl; sampling and the GRPO step are done in this process, synchronously,
because a run of verl per schedule and seed would take hours and change nothing that is compared: who is drawn, what
it costs, what is learnt. One stage over both sources, so that only the schedule differs.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import plots
from benchmarks.parts import Parts
from benchmarks.records import Record, arguments, report
from seamless_verl.curriculum.curriculum import Curriculum, EpochEnded
from seamless_verl.curriculum.prompt_pool import Resampling
from seamless_verl.observe.summary import paired_difference
from seamless_verl.recipes.srpo import assets
from seamless_verl.recipes.srpo.reward import compute_score
from seamless_verl.recipes.swe.tiny.offline import sample
from seamless_verl.recipes.swe.tiny.tokenizer import PAD_ID, TURN_END

# As in the recipe.
BATCH, ROLLOUTS, LONGEST, LEARNING_RATE = 16, 8, 48, 5e-4
SEEDS = 3
EPOCHS = 4  # of rollouts that plain GRPO needs for so many; every schedule gets as many rollouts
BOUNDARIES = 3
# Student's t for a 95 % interval, by the number of seeds.
STUDENT = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
PER_SOURCE = 136  # problems in the recipe's data, to train and held out
HELD_OUT_ROLLOUTS = 16
MOSTLY = 0.5  # of these are right
RESAMPLING: Mapping[str, Resampling | None] = {
    "plain": None,
    "history": Resampling(floor=BATCH),
    "readmitting": Resampling(floor=BATCH, readmit_after=1),
    "dapo": None,
}
SCHEDULES = tuple(RESAMPLING)


def has_no_signal(rewards: Sequence[float]) -> bool:
    """Whether every rollout earned the same, so that group-relative advantages are all zero (DAPO's filter).

    A group of one has no relative advantage to lose and is kept, as verl keeps it.
    """
    return len(rewards) > 1 and max(rewards) == min(rewards)


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

        return [
            self.prompt(row["prompt"][0]["content"], row["data_source"], row["reward_model"]["ground_truth"])
            for row in pd.read_parquet(file).to_dict("records")
        ]

    def prompt(self, question: str, source: str, answer: str) -> Prompt:
        ids, mask = assets.conversation(self.tokenizer, question, "0")
        return Prompt(ids[: mask.index(1)], source, answer)

    def roll_out(self, prompts: Sequence[Prompt], rollouts: int = ROLLOUTS) -> list[Group]:
        rows = [prompt for prompt in prompts for _ in range(rollouts)]
        answers = [ids for ids, _ in sample(self.model, [p.ids for p in rows], self.generator, LONGEST)]
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

    def accuracies(self, prompts: Sequence[Prompt]) -> list[float]:
        return [statistics.fmean(group.accuracies) for group in self.roll_out(prompts, HELD_OUT_ROLLOUTS)]

    def without_advantage(self, prompts: Sequence[Prompt]) -> list[bool]:
        """Which of these have no advantage under the weights as they are; nothing is learnt from it."""
        return [has_no_signal(group.scores) for group in self.roll_out(prompts)]


@dataclass(frozen=True, slots=True)
class Result:
    """What one training with or without resampling gave.

    Attributes:
        silent: per epoch, per group in order: it had no advantage.
        boundaries: per boundary between epochs, the share without advantage in the pool before and after it, both of
            the same rollouts under the same weights, so that learning is not mistaken for resampling.
        before, after: held-out accuracy per prompt.
        trained: accuracy per prompt of the training data, at the end.
        removed: prompts of the training data that left the pool.
    """

    silent: list[list[bool]]
    boundaries: list[list[float]]
    rollouts_per_useful_group: float
    before: list[float]
    after: list[float]
    trained: list[float]
    removed: list[int]
    steps: int

    def share(self, epoch: int) -> float:
        return statistics.fmean(self.silent[epoch])

    @property
    def accuracy(self) -> float:
        return statistics.fmean(self.after)


def run(schedule: str, folder: Path, seed: int, epochs: int, more: int = 0) -> Result:
    """Spend the same rollouts under a schedule; ``dapo`` filters groups and refills until it has a batch.

    Args:
        more: prompts per source beside those of the recipe, which the model was warm-started with as well.
    """
    torch.manual_seed(seed)
    learner = Learner(folder, seed)
    train, held_out = learner.read(folder / "train.parquet"), learner.read(folder / "val.parquet")
    train += [
        learner.prompt(problem.question, source, str(problem.answer))
        for source in sorted({prompt.source for prompt in train})
        for problem in assets.problems(source, seed=0)[PER_SOURCE:][:more]
    ]
    sources = [prompt.source for prompt in train]
    curriculum = Curriculum(sources=sources, resampling=RESAMPLING[schedule], seed=seed)
    before = learner.accuracies(held_out)
    boundaries: list[list[float]] = []
    pool, removed = set(range(len(train))), set[int]()
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
            for event in curriculum.finish(draw, group.accuracies):
                if not isinstance(event, EpochEnded):
                    continue
                removed.update(event.removed)
                if schedule == "history" and event.removed and len(boundaries) < BOUNDARIES:
                    now = dict(
                        zip(sorted(pool), learner.without_advantage([train[p] for p in sorted(pool)]), strict=True)
                    )
                    pool.difference_update(event.removed)
                    boundaries.append([statistics.fmean(now.values()), statistics.fmean(now[p] for p in pool)])
            if schedule != "dapo" or not nothing:
                batch.append(group)
        if len(batch) == BATCH:
            learner.learn(batch)
            batch, steps = [], steps + 1
    after, trained = learner.accuracies(held_out), learner.accuracies(train)
    return Result(silent, boundaries, spent / max(1, useful), before, after, trained, sorted(removed), steps)


def plot(file: Path, runs: Mapping[str, Sequence[Result]]) -> None:
    silent = {
        name: [statistics.median(result.share(epoch) for result in results) for epoch in range(BOUNDARIES + 1)]
        for name, results in runs.items()
    }
    useful = {name: [result.rollouts_per_useful_group for result in results] for name, results in runs.items()}
    accuracy = {name: [result.accuracy for result in results] for name, results in runs.items()}
    panels = [plots.lines("groups without advantage, by epoch", silent, "epochs")]
    panels += [plots.bars("rollouts per useful group", useful), plots.bars("held-out accuracy", accuracy)]
    plots.figure(file, panels)


def _by_prompt(results: Sequence[Result]) -> dict[str, float]:
    """Held-out accuracy after training, by prompt, over the seeds."""
    return {str(n): statistics.fmean(each) for n, each in enumerate(zip(*(r.after for r in results), strict=True))}


def figures(runs: Mapping[str, Sequence[Result]]) -> list[Record]:
    records = [Record(name="seeds", value=len(runs["plain"]), unit="runs per schedule")]
    for name, results in runs.items():
        for epoch in range(BOUNDARIES + 1):
            share = statistics.median(result.share(epoch) for result in results)
            records.append(Record(name=f"{name}: groups without advantage, epoch {epoch}", value=share, unit="share"))
        for figure, unit in (("rollouts_per_useful_group", "rollouts"), ("steps", "updates"), ("accuracy", "")):
            value = statistics.median(getattr(result, figure) for result in results)
            records.append(Record(name=f"{name}: {figure.replace('_', ' ')}", value=value, unit=unit))
    before = statistics.median(statistics.fmean(result.before) for result in runs["plain"])
    records.append(Record(name="held-out accuracy before", value=before, unit=""))
    for number in range(BOUNDARIES):
        pairs = [result.boundaries[number] for result in runs["history"]]
        change = statistics.median(after - before for before, after in pairs)
        told = {"unit": "share", "bar": "< 0", "holds": change < 0}
        records.append(
            Record(name=f"history: pool without advantage at boundary {number + 1}, change", value=change, **told)
        )
    ratio = statistics.median(
        h.rollouts_per_useful_group / d.rollouts_per_useful_group
        for h, d in zip(runs["history"], runs["dapo"], strict=True)
    )
    told = {"unit": "ratio", "bar": "< 1", "holds": ratio < 1}
    records.append(Record(name="rollouts per useful group, history / dapo", value=ratio, **told))
    told = [
        *_against(runs, "history", "plain"),
        *_against(runs, "history", "dapo"),
        *_against(runs, "readmitting", "plain"),
    ]
    return records + told + _on_trained_prompts(runs)


def _against(runs: Mapping[str, Sequence[Result]], name: str, rival: str) -> list[Record]:
    gain = paired_difference(_by_prompt(runs[rival]), _by_prompt(runs[name]))
    bar: dict[str, Any] = {"bar": ">= 0: not worse", "holds": gain.high >= 0} if rival == "plain" else {}
    return [
        Record(name=f"held-out accuracy, {name} - {rival}", value=gain.mean, unit=""),
        Record(name=f"held-out accuracy, {name} - {rival}: lower end of the 95 % interval", value=gain.low, unit=""),
        Record(name=f"held-out accuracy, {name} - {rival}: upper end", value=gain.high, unit="", **bar),
    ]


def _from_seed_to_seed(runs: Mapping[str, Sequence[Result]], name: str) -> list[Record]:
    """The same difference with whole trainings as its sample, not the prompts that a few of them are tried on."""
    before = [statistics.fmean(each) for each in zip(*(one.before for one in runs["plain"]), strict=True)]
    records = []
    for which, is_meant in (
        ("held-out accuracy", lambda solved: True),
        ("on problems mostly solved before", lambda solved: solved >= MOSTLY),
        ("on the other problems", lambda solved: solved < MOSTLY),
    ):
        meant = [number for number, solved in enumerate(before) if is_meant(solved)]
        pairs = zip(runs[name], runs["plain"], strict=False)  # a measurement in pieces may have one more of either
        apart = [statistics.fmean(one.after[n] - plain.after[n] for n in meant) for one, plain in pairs]
        mean, told = statistics.fmean(apart), f"{which}, {name} - plain, {len(apart)} seeds"
        records.append(Record(name=told, value=mean, unit=""))
        if len(apart) in STUDENT:
            half = STUDENT[len(apart)] * statistics.stdev(apart) / len(apart) ** 0.5
            records.append(Record(name="  lower end of the 95 % interval", value=mean - half, unit=""))
            holds = mean + half >= 0 if len(meant) == len(before) else None
            bar = "" if holds is None else ">= 0: not worse"
            records.append(Record(name="  upper end", value=mean + half, unit="", bar=bar, holds=holds))
    return records


def _on_trained_prompts(runs: Mapping[str, Sequence[Result]]) -> list[Record]:
    """Where History Resampling's accuracy goes: at the end, on the prompts that it took out, and on the others."""
    records = []
    for which, has_left in (("that left under history", True), ("that stayed", False)):
        for name in ("plain", "history", "readmitting"):
            values = [
                accuracy
                for one, history in zip(runs[name], runs["history"], strict=True)
                for prompt, accuracy in enumerate(one.trained)
                if (prompt in history.removed) == has_left
            ]
            records.append(Record(name=f"{name}: accuracy on prompts {which}", value=statistics.fmean(values), unit=""))
    return records


def _options(parser: argparse.ArgumentParser) -> None:
    plots.extend(parser)
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help="%(default)s at least")
    parser.add_argument("--more", type=int, default=0, metavar="N", help="prompts per source beside the recipe's")


def main() -> int:
    options = arguments("History Resampling, plain GRPO and DAPO's filter on the SRPO recipe.", _options)
    folder = assets.build()
    found = Parts(options)
    for seed in range(1 if options.quick else options.seeds):
        for name in random.Random(seed).sample(SCHEDULES, len(SCHEDULES)):
            if seed >= SEEDS and name == "dapo":
                continue
            if len(found.of(name)) > seed:
                continue
            if found.out_of_time:
                return found.pause()
            found.add(name, asdict(run(name, folder, seed, EPOCHS, options.more)))
            print(f"seed {seed}, {name}: done", flush=True)
    all_runs = {name: [Result(**taken) for taken in found.of(name)] for name in SCHEDULES}
    runs = {name: results[:SEEDS] for name, results in all_runs.items()}
    if options.svg is not None:
        plot(options.svg, runs)
    spread = [record for name in ("history", "readmitting") for record in _from_seed_to_seed(all_runs, name)]
    return report(figures(runs) + spread, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
