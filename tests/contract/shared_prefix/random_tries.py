"""Random tries: verl's stock engine and ours, actor and critic, in one process with the same weights.

Prints how many were tried; fails with Hypothesis's story of the smallest batch on which the engines differ.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from benchmarks.training_workers import data_of, model_folder, worker_of
from tests.contract.shared_prefix.engines import inferred, learned

EXAMPLES = 15
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
Branch = tuple[int, int, int]
"""Which earlier row it leaves (one more than there are: none), after how many tenths of it, with how many tokens."""
BRANCHES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 10), st.integers(0, 40)), min_size=1, max_size=12)
ALONE, EQUAL = [(0, 0, 9)], [(0, 0, 9), (0, 10, 0), (1, 10, 0)]


def batch(branches: Sequence[Branch], masked: str, seed: int) -> TensorDict:
    rng = np.random.default_rng(seed)
    rows: list[np.ndarray] = []
    for parent, tenths, more in branches:
        which = parent % (len(rows) + 1)
        stem = rows[which][: len(rows[which]) * tenths // 10] if which < len(rows) else np.empty(0, np.int64)
        fresh = rng.integers(0, SHAPE["vocab_size"], max(more, 2 - len(stem)))  # a token of a prompt, one of a response
        rows.append(np.concatenate([stem, fresh]))
    cut = [int(rng.integers(1, len(row))) for row in rows]
    share = {"none": 0.0, "half": 0.5, "most": 0.95, "all": 1.0}[masked]
    masks = [(rng.random(len(row) - prompt) >= share).astype(np.int64) for row, prompt in zip(rows, cut, strict=True)]
    return data_of([(row[:at], row[at:]) for row, at in zip(rows, cut, strict=True)], seed, masks=masks)


def assert_alike(stock: dict[str, Any], ours: dict[str, Any]) -> None:
    gradients = {key: value.abs().max().item() for key, value in stock.items() if key.startswith("gradient")}
    for key, value in stock.items():
        if not isinstance(value, torch.Tensor):
            continue
        off, largest = (ours[key] - value).abs().max().item(), value.abs().max().item()
        # A gradient that cancels out is rounding: where all rows are two tokens, that of the queries.
        of = max(largest, 1e-3 * max(gradients.values())) if key in gradients else max(1.0, largest)
        assert off <= (1e-4 if key in gradients else 1e-5) * of, (key, largest, off)


def main() -> None:
    torch.set_num_threads(1)
    import verl  # noqa: F401  (its plug-ins: the CPU platform, our engines)

    with tempfile.TemporaryDirectory() as folder:
        model_folder(folder, **SHAPE, tie_word_embeddings=False)
        kinds = (("per-row",), ("per-row", "critic"))
        pairs = [[worker_of(folder, ours=ours, options=kind) for ours in (False, True)] for kind in kinds]

    tried: list[str] = []

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(BRANCHES, st.sampled_from(["none", "half", "most", "all"]), st.integers(0, 2**16))
    @example(ALONE, "none", 0)
    @example(ALONE, "all", 0)
    @example(EQUAL, "half", 1)
    @example([*EQUAL, (3, 0, 7)], "all", 2)
    def both_engines_tell_the_same(branches: Sequence[Branch], masked: str, seed: int) -> None:
        data = batch(branches, masked, seed)
        tried.append(masked)
        for pair in pairs:
            assert_alike(*({**inferred(worker, data), **learned(worker, data)} for worker in pair))

    both_engines_tell_the_same()
    sys.stdout.write(f"\n{len(tried)}\n")


if __name__ == "__main__":
    main()
