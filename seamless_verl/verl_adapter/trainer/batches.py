"""What we change in a batch before verl trains on it: the order of its rows, and figures per token for our losses.

* Rows of like length lie side by side within each optimizer step, which saves padding. Every rank cuts its share in
  order into mini-batches, one per optimizer step (``TrainingWorker.train_mini_batch``). Which rows a step gets stays as
  verl has it, or its gradient would depend on their lengths. The order within a step changes no loss but those that
  compare or average within a micro-batch, whatever its rows (``clip_cov``, ``kl_cov``, ``geo_mean``).
  Where prefixes are shared, rows of a group lie side by side instead, on one rank.
* Padding is spread over the optimizer steps. verl 0.9.1 fills a batch up to whole mini-batches, with padding at its
  end: one session more with a second row, and that row alone would be a step, with the weight of all others.
* Corrections are written to TransferQueue, beside verl's advantages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from seamless_verl.config import SeamlessConfig
from seamless_verl.token_trie import deal
from seamless_verl.verl_adapter.rollout.verl_samples import stamps

Limits = tuple[int, int | None]
"""Tokens of a response (``data.max_response_length``), and of a row (``rollout.max_model_len``)."""
_OF_REWARDS = ("advantages", "returns", "token_level_rewards", "rollout_is_weights")  # new in `_compute_advantage`


def in_training_order(
    batch: KVBatchMeta, config: DictConfig, seamless: SeamlessConfig, actor_ranks: int, critic_ranks: int | None
) -> KVBatchMeta:
    """``batch`` as verl dealt it to the actor's ranks, with rows side by side that are computed together.

    Args:
        critic_ranks: the critic's are its own (sequence parallelism may differ); None: there is no critic.
    """
    lengths = _lengths_of_cuts(config, len(batch.keys), actor_ranks, critic_ranks)
    spread_padding(batch, lengths[0], math.gcd(*lengths))
    if seamless.shared_prefix == "off":
        return side_by_side(batch, lengths)
    # Other ranks of the critic would cut what lies on one of the actor's: then nothing changes its rank.
    return kin_together(batch, lengths, actor_ranks if critic_ranks in (None, actor_ranks) else 1)


def _lengths_of_cuts(config: DictConfig, rows: int, actor_ranks: int, critic_ranks: int | None) -> list[int]:
    """Lengths at whose multiples a batch of ``rows`` is cut: into shares of ranks, and each share into mini-batches."""
    n = config.actor_rollout_ref.rollout.n
    lengths = [rows // actor_ranks, config.actor_rollout_ref.actor.ppo_mini_batch_size * n // actor_ranks]
    if critic_ranks is not None:
        lengths.append(config.critic.ppo_mini_batch_size * n // critic_ranks)
    return lengths


def spread_padding(batch: KVBatchMeta, share: int, part: int) -> None:
    """Give the parts of each rank's rows equally many that are no padding, in their order.

    Args:
        share: rows of a rank. Where they are no multiple of ``part``, nothing changes.
        part: rows that no optimizer step cuts, the critic's neither: its mini-batches may be shorter.
    """
    if share % part:
        return
    order, parts = [], share // part
    for first in range(0, len(batch.keys), share):
        padding = [row for row in range(first, first + share) if batch.tags[row].get("is_padding", False)]
        real = [row for row in range(first, first + share) if not batch.tags[row].get("is_padding", False)]
        for each in range(parts):
            taken = real[each * len(real) // parts : (each + 1) * len(real) // parts]
            order += [*taken, *(padding.pop() for _ in range(part - len(taken)))]
    batch.reorder(order)


def side_by_side(batch: KVBatchMeta, lengths: Sequence[int]) -> KVBatchMeta:
    """``batch``, sorted by length between all multiples of ``lengths``."""
    together, rows = math.gcd(*lengths), len(batch.keys)
    order = [
        row
        for first in range(0, rows, together)
        for row in sorted(range(first, first + together), key=lambda row: batch.tags[row]["seq_len"])
    ]
    batch.reorder(order)
    return batch


def kin_together(batch: KVBatchMeta, lengths: Sequence[int], ranks: int) -> KVBatchMeta:
    """``batch``, with rows of a group on one rank and side by side, as far as every optimizer step keeps its rows.

    Args:
        lengths: at whose multiples it is cut.
        ranks: each gets an equal part, in order.
    """
    together, rows = math.gcd(*lengths), len(batch.keys)
    share = rows // ranks
    order = [0] * rows
    for first in range(0, share, together):  # what these parts of all ranks hold is trained in one step
        step = [rank * share + first + place for rank in range(ranks) for place in range(together)]
        tags = [batch.tags[row] for row in step]
        sizes = [tag["seq_len"] for tag in tags]
        prompts = [tag["seq_len"] - tag["response_len"] for tag in tags]
        dealt = deal([batch.keys[row].split("_", 1)[0] for row in step], prompts, sizes, ranks)
        for place, row in zip(step, (row for part in dealt for row in part), strict=True):
            order[place] = step[row]
    batch.reorder(order)
    return batch


def on_real_rows(batch: KVBatchMeta, compute: Callable[[KVBatchMeta], KVBatchMeta]) -> KVBatchMeta:
    """``batch`` with what verl computes from its rewards; padding gets zeros, or it would count where rows are counted.

    verl 0.9.1 takes it for rows of a group of their own: ``gpg`` scales by their number, ``grpo_passk`` refuses a group
    of one, an adaptive KL coefficient sees a KL of zero.
    """
    padding = {key: tag for key, tag in zip(batch.keys, batch.tags, strict=True) if tag.get("is_padding", False)}
    if not padding:
        return compute(batch)
    done = compute(batch.select_keys([key for key in batch.keys if key not in padding]))
    written = [name for name in _OF_REWARDS if name in done.fields]
    some = tq.kv_batch_get(keys=done.keys[:1], partition_id=batch.partition_id, select_fields=written)
    for name in written:
        zeros = [torch.zeros(tag["response_len"], dtype=some[name].dtype) for tag in padding.values()]
        _put(batch.partition_id, [*padding], name, zeros)
    return replace(done, keys=batch.keys, tags=batch.tags)


def correct(
    batch: KVBatchMeta, metrics: dict[str, Any], seamless: SeamlessConfig, *, limits: Limits, version: int
) -> KVBatchMeta:
    """Apply what the configuration asks for to a batch that has verl's advantages.

    Args:
        limits: see `zero_overlong_advantages`.
        version: weight version being trained.
    """
    if seamless.curriculum.zero_overlong_advantage:
        metrics["training/overlong_share"] = zero_overlong_advantages(batch, limits)
    if seamless.staleness.correction == "a3po":
        batch = write_interpolation_weights(batch, version)
    if seamless.staleness.mask_older_than is not None:
        metrics["training/masked_share"] = mask_old_tokens(batch, version, seamless.staleness.mask_older_than)
    return batch


def zero_overlong_advantages(batch: KVBatchMeta, limits: Limits) -> float:
    """Rows whose answers were cut off teach nothing (SRPO): their advantages become 0.

    A row's stamp says whether it was cut off. Its length does not: that counts what tools and users said, too, and
    another limit may have cut an answer off long before.

    Args:
        limits: at which rows without a stamp, of verl's own agent loops, were cut off.

    Returns:
        Share of the rows that this concerns.
    """
    real = [(key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    if not real:
        return 0.0
    keys = [key for key, _ in real]
    extra = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["extra_fields"])["extra_fields"]
    response, row = limits
    overlong = []
    for (key, tag), stamp in zip(real, stamps(extra), strict=True):
        # Rows of a checkpoint may have a stamp from before it said so.
        if stamp.get("cut_off", tag["response_len"] >= response or (row is not None and tag["seq_len"] >= row)):
            overlong.append(key)
    if overlong:
        data = tq.kv_batch_get(keys=overlong, partition_id=batch.partition_id, select_fields=["advantages"])
        rows = [torch.zeros_like(row) for row in data["advantages"].unbind()]
        _put(batch.partition_id, overlong, "advantages", rows)
    return len(overlong) / len(real)


def mask_old_tokens(batch: KVBatchMeta, version: int, most: int) -> float:
    """Leave tokens out of the losses that weights more than ``most`` versions older than ``version`` made.

    Advantages are there already and stay: a reward is the whole row's. verl's own rejection masks in the same field.
    Where nothing would be left, nothing is left out.

    Returns:
        Share of the policy's tokens that this concerns.
    """
    fields = ["response_mask", "extra_fields"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    masks = list(data["response_mask"].unbind())
    kept = []
    for mask, stamp, tag in zip(masks, stamps(data["extra_fields"]), batch.tags, strict=True):
        lags = _lags(mask, tag, stamp.get("made_by"), version)
        kept.append(mask if lags is None else mask * (lags <= most))
    before, after = (sum(int(mask.sum()) for mask in each) for each in (masks, kept))
    if not after:  # a mean over a row's tokens would be no number
        return 0.0
    _put(batch.partition_id, batch.keys, "response_mask", kept)
    return 1 - after / before


def write_interpolation_weights(batch: KVBatchMeta, version: int) -> KVBatchMeta:
    """A-3PO's ``a`` per response token, from the weight version that generated it.

    Args:
        version: weight version being trained.

    Returns:
        ``batch`` with the new field: workers fetch only what it names.
    """
    fields = ["response_mask", "extra_fields"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    rows = [
        interpolation_weights(mask, tag, stamp.get("made_by"), version)
        for mask, stamp, tag in zip(
            data["response_mask"].unbind(), stamps(data["extra_fields"]), batch.tags, strict=True
        )
    ]
    return _put(batch.partition_id, batch.keys, "rollout_is_weights", rows)


def interpolation_weights(
    mask: torch.Tensor, tag: Mapping[str, Any], made_by: Sequence[tuple[int, int, int]] | None, version: int
) -> torch.Tensor:
    """``1 / lag``, at most 1, for one row of response tokens; 1 where no version is known (padding, tools).

    Args:
        mask: 1 on policy tokens.
        tag: verl's tag of the row; its oldest version stands for all tokens where ``made_by`` is not known.
        made_by: `RowStamp.made_by` of the row.
    """
    lags = _lags(mask, tag, made_by, version)
    ones = torch.ones(mask.shape, dtype=torch.float32)
    return ones if lags is None else torch.where(mask.bool(), 1.0 / lags.clamp(min=1.0), ones)


def _lags(
    mask: torch.Tensor, tag: Mapping[str, Any], made_by: Sequence[tuple[int, int, int]] | None, version: int
) -> torch.Tensor | None:
    """Versions between the weights that made each response token of a row and ``version``; None where none is known.

    By position, not by count along the mask: it leaves out answers that another row trains, and what verl rejected.
    The arguments are those of `interpolation_weights`.
    """
    oldest = tag.get("min_global_steps")
    if oldest is None:
        return None
    lags = torch.full(mask.shape, float(version - oldest))
    for start, stop, generated_by in made_by or ():
        lags[start:stop] = float(version - generated_by)
    return lags


def _put(partition_id: str, keys: Sequence[str], name: str, rows: Sequence[torch.Tensor]) -> KVBatchMeta:
    nested = torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
    fields = TensorDict({name: nested}, batch_size=len(keys))
    return tq.kv_batch_put(keys=list(keys), partition_id=partition_id, fields=fields)
