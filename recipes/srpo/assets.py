"""Model, tokenizer and data of the SRPO recipe: sums (``math``) and values of short Python expressions (``code``).

An answer is a thought and a value. The model imitates answers with and without a thought, some of them wrong, so that
there is something left to reinforce. What the paper found on real tasks is built in: sums that were thought through are
right more often, expressions are right as often without a thought.
``python -m seamless_verl.recipes.srpo.assets [--cache DIR]`` builds into `folder`.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seamless_verl.recipes import cache as asset_cache

SYSTEM_PROMPT = "Think, then answer."  # the recipe's data.system_prompts
_NAME = "srpo"
_SOURCES = [Path(__file__)]
_THOUGHT = 0.3  # of the demonstrations
# By source, and whether there is a thought.
_RIGHT = {("math", True): 0.95, ("math", False): 0.4, ("code", True): 0.8, ("code", False): 0.8}
_LARGEST_SUMMAND, _LARGEST, _LARGEST_SECOND = 6, 19, 9
_STEPS, _BATCH = 400, 32
_TRAIN, _VAL = 96, 40  # prompts per source


@dataclass(frozen=True, slots=True)
class Problem:
    source: str
    question: str
    thought: str
    answer: int

    def written(self, answer: int, *, thinks: bool) -> str:
        """A demonstration, in the form that the reward asks for."""
        return f"<think>{self.thought if thinks else ''}</think><answer>{answer}</answer>"


def folder(cache: str | None = None) -> Path:
    """Where ``model/``, ``train.parquet`` and ``val.parquet`` are, or will be once built."""
    found: Path = asset_cache.folder(_NAME, _SOURCES, cache)
    return found


def build(cache: str | None = None) -> Path:
    """Build unless built; return the folder."""
    built: Path = asset_cache.build(_NAME, _SOURCES, cache, _build)
    return built


def problems(source: str, seed: int) -> list[Problem]:
    """Every problem of a source, shuffled: sums of three numbers below 7; ``max``, ``min`` and ``%`` of a number below
    20 and a digit."""
    if source == "math":
        found = [
            Problem(source, f"{a}+{b}+{c}", f"{a}+{b}={a + b} {a + b}+{c}={a + b + c}", a + b + c)
            for a, b, c in itertools.product(range(_LARGEST_SUMMAND + 1), repeat=3)
        ]
    else:
        pairs = [(a, b) for a in range(_LARGEST + 1) for b in range(_LARGEST_SECOND + 1)]
        found = [
            Problem(source, f"{name}({a},{b})", f"{max(a, b)}>={min(a, b)}", function(a, b))
            for name, function in (("max", max), ("min", min))
            for a, b in pairs
        ]
        found += [Problem(source, f"{a}%{b}", f"{a}-{a - a % b}={a % b}", a % b) for a, b in pairs if b]
    random.Random(seed).shuffle(found)
    return found


def _build(folder: Path) -> None:
    from seamless_verl.recipes.swe.tiny import tokenizer as tokenizers

    every = {source: problems(source, seed=0) for source in ("math", "code")}
    texts = [[p.question, p.written(p.answer, thinks=True)] for found in every.values() for p in found]
    tokenizer = tokenizers.train([*texts, ["system", SYSTEM_PROMPT]])
    model = _warm_start(tokenizer, every)
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    _write([p for found in every.values() for p in found[:_TRAIN]], "train", folder / "train.parquet")
    _write([p for found in every.values() for p in found[_TRAIN : _TRAIN + _VAL]], "val", folder / "val.parquet")


def _warm_start(tokenizer: Any, every: dict[str, list[Problem]]) -> Any:
    import torch
    import torch.nn.functional as functional

    from seamless_verl.recipes.swe.tiny.model import new_model, optimizers
    from seamless_verl.recipes.swe.tiny.tokenizer import PAD_ID

    model = new_model(seed=0)
    pair = optimizers(model, muon_lr=0.02, adam_lr=4e-3)
    for batch in _demonstrations(tokenizer, every, random.Random(1)):
        width = max(len(ids) for ids, _ in batch)
        ids = torch.full((len(batch), width), PAD_ID)
        labels = torch.full((len(batch), width), -100)
        for row, (tokens, mask) in enumerate(batch):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            answer = torch.tensor(mask, dtype=torch.bool)
            labels[row, : len(tokens)][answer] = torch.tensor(tokens)[answer]
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss: torch.Tensor = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        torch.autograd.backward(loss)
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
    return model


def _demonstrations(
    tokenizer: Any, every: dict[str, list[Problem]], rng: random.Random
) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Batches of token ids and a mask that is 1 on the answer; nothing of the validation problems."""
    known = [p for found in every.values() for p in found[:_TRAIN] + found[_TRAIN + _VAL :]]
    for _ in range(_STEPS):
        batch = []
        for problem in rng.choices(known, k=_BATCH):
            thinks = rng.random() < _THOUGHT
            is_right = rng.random() < _RIGHT[problem.source, thinks]
            answer = problem.answer if is_right else rng.randint(0, _LARGEST)
            batch.append(conversation(tokenizer, problem.question, problem.written(answer, thinks=thinks)))
        yield batch


def conversation(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Token ids of system prompt, question and answer, and a mask that is 1 on the answer and its closing mark."""
    from seamless_verl.recipes.swe.tiny.tokenizer import TURN_END, TURN_START, encode_conversation

    system = tokenizer.encode(f"{TURN_START}system\n{SYSTEM_PROMPT}{TURN_END}\n", add_special_tokens=False)
    ids, mask = encode_conversation(tokenizer, [question, answer])
    return system + ids, [0] * len(system) + mask


def _write(found: list[Problem], split: str, path: Path) -> None:
    import pandas as pd

    rows = [
        {
            "data_source": problem.source,
            "prompt": [{"role": "user", "content": problem.question}],
            "agent_name": "single_turn_agent",
            "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
            "extra_info": {"index": index, "split": split},
        }
        for index, problem in enumerate(found)
    ]
    pd.DataFrame(rows).to_parquet(path)


if __name__ == "__main__":
    sys.exit(asset_cache.main(build))
