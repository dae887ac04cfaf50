"""Model, tokenizer and data of the SRPO recipe: sums (``math``) and values of short Python expressions (``code``).

The warm start imitates answers of which ``_RIGHT`` are right, so that there is something left to reinforce.
``python -m seamless_verl.recipes.srpo.assets [--cache DIR]`` builds into `folder`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seamless_verl.recipes import cache as asset_cache

_NAME = "srpo"
_SOURCES = [Path(__file__)]
_RIGHT = 0.8
_LARGEST, _LARGEST_SECOND = 19, 9
_STEPS, _BATCH = 400, 64
_TRAIN, _VAL = 96, 40  # prompts per source


@dataclass(frozen=True, slots=True)
class Problem:
    source: str
    question: str
    answer: int


def folder(cache: str | None = None) -> Path:
    """Where ``model/``, ``train.parquet`` and ``val.parquet`` are, or will be once built."""
    found: Path = asset_cache.folder(_NAME, _SOURCES, cache)
    return found


def build(cache: str | None = None) -> Path:
    """Build unless built; return the folder."""
    built: Path = asset_cache.build(_NAME, _SOURCES, cache, _build)
    return built


def problems(source: str, seed: int) -> list[Problem]:
    """Every problem of a source, shuffled: sums, or ``max``, ``min`` and ``%``, of a number below 20 and a digit."""
    pairs = [(a, b) for a in range(_LARGEST + 1) for b in range(_LARGEST_SECOND + 1)]
    if source == "math":
        found = [Problem(source, f"{a}+{b}", a + b) for a, b in pairs]
    else:
        found = [Problem(source, f"max({a},{b})", max(a, b)) for a, b in pairs]
        found += [Problem(source, f"min({a},{b})", min(a, b)) for a, b in pairs]
        found += [Problem(source, f"{a}%{b}", a % b) for a, b in pairs if b]
    random.Random(seed).shuffle(found)
    return found


def _build(folder: Path) -> None:
    from seamless_verl.recipes.swe.tiny import tokenizer as tokenizers

    every = {source: problems(source, seed=0) for source in ("math", "code")}
    texts = [[problem.question, str(problem.answer)] for found in every.values() for problem in found]
    tokenizer = tokenizers.train(texts)
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
    from seamless_verl.recipes.swe.tiny.tokenizer import encode_conversation

    known = [p for found in every.values() for p in found[:_TRAIN] + found[_TRAIN + _VAL :]]
    for _ in range(_STEPS):
        batch = []
        for problem in rng.choices(known, k=_BATCH):
            answer = problem.answer if rng.random() < _RIGHT else rng.randint(0, _LARGEST + _LARGEST_SECOND)
            batch.append(encode_conversation(tokenizer, [problem.question, str(answer)]))
        yield batch


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
