"""Per-token figures that our losses need, written beside verl's advantages in TransferQueue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from seamless_verl.verl_adapter.rows import ROW_FIELD


def zero_overlong_advantages(batch: KVBatchMeta, limit: int) -> float:
    """Rows that ran into the length limit teach nothing (SRPO): their advantages become 0.

    Args:
        limit: tokens of a response at which it was cut off (``data.max_response_length``).

    Returns:
        Share of the rows that this concerns.
    """
    real = [(key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    overlong = [key for key, tag in real if tag["response_len"] >= limit]
    if overlong:
        data = tq.kv_batch_get(keys=overlong, partition_id=batch.partition_id, select_fields=["advantages"])
        rows = [torch.zeros_like(row) for row in data["advantages"].unbind()]
        _put(batch.partition_id, overlong, "advantages", rows)
    return len(overlong) / max(1, len(real))


def write_interpolation_weights(batch: KVBatchMeta, version: int) -> KVBatchMeta:
    """A-3PO's ``a`` per response token, from the weight version that generated it.

    Args:
        version: weight version being trained.

    Returns:
        ``batch`` with the new field: workers fetch only what it names.
    """
    fields = ["response_mask", "extra_fields"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    extra = data["extra_fields"]
    rows = []
    for mask, info, tag in zip(
        data["response_mask"].unbind(), extra.tolist() if hasattr(extra, "tolist") else extra, batch.tags, strict=True
    ):
        spans = ((info or {}).get(ROW_FIELD) or {}).get("version_spans")
        rows.append(interpolation_weights(mask, tag, spans, version))
    return _put(batch.partition_id, batch.keys, "rollout_is_weights", rows)


def interpolation_weights(
    mask: torch.Tensor, tag: Mapping[str, Any], spans: Sequence[tuple[int, int]] | None, version: int
) -> torch.Tensor:
    """``1 / lag``, at most 1, for one row of response tokens; 1 where no version is known (padding, tools).

    Args:
        mask: 1 on policy tokens.
        tag: verl's tag of the row; its oldest version stands for all tokens where ``spans`` are not known.
        spans: ``(weight version, policy tokens)`` along the row.
    """
    weights = torch.ones(mask.shape, dtype=torch.float32)
    oldest = tag.get("min_global_steps")
    if oldest is None:
        return weights
    policy = mask.bool().nonzero().flatten()
    lags = torch.full((len(policy),), float(version - oldest))
    begin = 0
    for generated_by, tokens in spans or ():
        lags[begin : begin + tokens] = float(version - generated_by)
        begin += tokens
    weights[policy] = 1.0 / lags.clamp(min=1.0)
    return weights


def _put(partition_id: str, keys: Sequence[str], name: str, rows: Sequence[torch.Tensor]) -> KVBatchMeta:
    nested = torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
    fields = TensorDict({name: nested}, batch_size=len(keys))
    return tq.kv_batch_put(keys=list(keys), partition_id=partition_id, fields=fields)
