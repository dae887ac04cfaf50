"""How the rows of a batch go through the model: as tries, in which micro-batches, or verl's way.

All ranks of a data-parallel group come to the same, since both ways talk to the other ranks, each in its own way.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.model import extract_multi_modal_inputs

from seamless_verl.errors import ConfigError
from seamless_verl.token_trie import Ids, Shape, Work, micro_batches, work
from seamless_verl.verl_adapter.shared_prefix import MODE

_PLAN = "seamless_shared_prefix"
"""Goes with the data through `prepare_micro_batches`; False: verl's way."""


@dataclass(frozen=True, slots=True)
class Plan:
    """``parts``: rows of each micro-batch."""

    parts: list[list[int]]
    work: Work


def plan(data: TensorDict, group: Any, shape: Shape) -> Plan | None:
    """None: the batch stays flat.

    Raises:
        ConfigError: no micro-batches within the limit can be made of it.
    """
    if _most(group, stays_flat(data))[0]:
        return None
    rows = rows_of(data["input_ids"])
    if tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True):
        budget = int(data["max_token_len_per_gpu"])
        try:
            parts = micro_batches(rows, budget, _agree(group))
        except ValueError as error:
            fix = "raise it (actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu and the like)"
            raise ConfigError("max_token_len_per_gpu", budget, str(error), fix) from None
    else:
        size = int(data["micro_batch_size_per_gpu"])
        parts = [list(range(len(rows))[first : first + size]) for first in range(0, len(rows), size)]
    return Plan(parts, _work(data, rows, parts, shape))


def _work(data: TensorDict, rows: list[Ids], parts: list[list[int]], shape: Shape) -> Work:
    prompts = data["prompts"].offsets().diff().tolist()
    padded = not tu.get_non_tensor_data(data, "use_remove_padding", default=False)
    return work(rows, prompts, parts, shape, padded=padded)


def could_gain(of: Work, group: Any) -> bool:
    """Under ``auto``, whether a trie has less to compute on the rank that has most; under ``on`` nobody asks."""
    if os.environ.get(MODE) != "auto":
        return True
    rows, trie = _most(group, of.rows, of.trie)
    return trie < rows


def gains(of: Work, price: float, group: Any) -> bool:
    """The same in time. ``price``: of a multiply-add on a trie, see `Price`."""
    if os.environ.get(MODE) != "auto":
        return True
    rows, trie = _most(group, of.rows, of.trie * price)
    return trie < rows


def on_any_rank(there: bool, group: Any) -> bool:
    return bool(_most(group, there)[0])


def mark(data: TensorDict, plan: Plan | None) -> None:
    tu.assign_non_tensor(data, **{_PLAN: plan or False})


def marked(data: TensorDict) -> Plan | None:
    return tu.get_non_tensor_data(data, _PLAN, default=False) or None


def grouped(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In the place of verl's `prepare_micro_batches`, which `FSDPEngine.forward_backward_batch` calls by name."""
    data: Any = args[0] if args else kwargs["data"]
    plan = marked(data)
    if plan is None or not tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True):
        return wrapped(*args, **kwargs)
    return [tu.index_select_tensor_dict(data, part) for part in plan.parts], plan.parts


def stays_flat(batch: TensorDict) -> bool:
    """Pictures, positions that do not count from 0, distillation: nothing is shared then."""
    positions = batch["position_ids"]
    if positions.dim() == 3 or extract_multi_modal_inputs(batch.get("multi_modal_inputs", [])):
        return True
    if any(tu.get_non_tensor_data(batch, key, default=False) for key in ("distillation_use_topk", "distillation_only")):
        return True
    offsets = batch["input_ids"].offsets()
    counted = torch.arange(int(offsets[-1]), device=offsets.device)
    counted -= torch.repeat_interleave(offsets[:-1], offsets.diff())
    return not torch.equal(positions.values(), counted)


def rows_of(nested: Any) -> list[Ids]:
    ids, offsets = nested.values().cpu().numpy(), nested.offsets().cpu().numpy()
    return [ids[start:stop] for start, stop in itertools.pairwise(offsets)]


def _most(group: Any, *numbers: float) -> list[float]:
    """The largest of each among the ranks of a data-parallel group."""
    found = torch.tensor(numbers, dtype=torch.float64, device=get_device_id())
    if group is not None and torch.distributed.is_initialized():
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX, group=group)
    most: list[float] = found.tolist()
    return most


def _agree(group: Any) -> Any:
    def agree(groups: int, rows: int) -> tuple[int, int]:
        most, fewest = _most(group, groups, -rows)
        return int(most), -int(fewest)

    return agree
