"""Two rows of a run computed both ways now and then: by the engine on tries, and by verl's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd
from verl.utils import tensordict_utils as tu
from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_

from seamless_verl.token_trie import Rows, in_order

EVERY = 50
"""Batches from one comparison to the next; the first one is compared, too."""
_NOTHING = 1e-3
"""A gradient's norm below it may be rounding."""
_COMPARED = ("log_probs", "values")


def neighbours(rows: Rows) -> list[int]:
    """The two rows that share the most; or the only row."""
    ordered = in_order(rows)
    last = max(range(len(ordered)), key=lambda at: ordered[at][1])
    return [row for row, _ in ordered[max(0, last - 1) : max(0, last - 1) + 2]]


def teaching(data: TensorDict) -> list[int]:
    """Rows with an advantage, where the loss reads one. The policy's gradient of the others is rounding, which two ways
    do not have in common."""
    advantages = data.get("advantages")
    if advantages is None:
        return list(range(len(data)))
    return [index for index, row in enumerate(advantages.unbind()) if bool(row.any())]


def few(data: TensorDict, rows: Rows, among: Sequence[int]) -> TensorDict:
    """Two rows of ``data`` within its own limit of a micro-batch, of those with these indices if there are two.

    As many on every rank, whose passes are collective: the only row is got where there is but one.
    """
    if len(among) < 2:
        among = [*among, *(row for row in range(len(rows)) if row not in among)][:2]
    picked = [among[index] for index in neighbours([rows[index] for index in among])]
    part: TensorDict = tu.index_select_tensor_dict(data, picked)
    size = tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", default=None) or len(part)
    tu.assign_non_tensor(part, return_model_output=True, micro_batch_size_per_gpu=min(size, len(part)))
    return part


@contextlib.contextmanager
def without_dropout(module: torch.nn.Module) -> Iterator[None]:
    """It differs from pass to pass (adapters may have it). All else trains on, or no layer would be recomputed and no
    activation offloaded."""
    silent = [each for each in module.modules() if isinstance(each, _DropoutNd) and each.training]
    for each in silent:
        each.eval()
    try:
        yield
    finally:
        for each in silent:
            each.train()


def gradient_norm(module: Any) -> float:
    """Of all ranks' parameters; verl's functions that clip tell it, and clip nothing at infinity."""
    if isinstance(module, FullyShardedDataParallel):
        return float(module.clip_grad_norm_(math.inf))
    norm = fsdp2_clip_grad_norm_(module.parameters(), max_norm=math.inf)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def share_off(ours: float, theirs: float) -> float:
    """Of two norms of one gradient."""
    return abs(ours - theirs) / max(theirs, _NOTHING)


def differences(ours: Any, theirs: Any, part: TensorDict) -> dict[str, list[float]]:
    """How far log-probs or values are apart in the mean, as verl gathers metrics.

    Args:
        ours, theirs: what `forward_backward_batch` returned for the same rows.
    """
    ends = zip(part["prompts"].offsets().diff().tolist(), part["input_ids"].offsets().diff().tolist(), strict=True)
    spans = [slice(prompt - 1, length - 1) for prompt, length in ends]
    off = []
    for key in set(_COMPARED) & ours["model_output"].keys():
        outputs = (ours["model_output"][key].unbind(), theirs["model_output"][key].unbind(), spans)
        off += [(mine[span] - other[span]).detach().abs().float() for mine, other, span in zip(*outputs, strict=True)]
    return {"off": [float(torch.cat(off).mean())]}
