"""Checksums of parameters that two processes with different layouts agree on, if every number is the same.

vLLM fuses what verl keeps apart (q, k, v; gate, up), pads vocabularies with zeros, and holds another precision. So
`weight_checks.checksum` is taken of each layer, in the engine's precision: the order does not matter, zeros add
nothing, and shards of several ranks add up to the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_PIECE = 1 << 24
Sums = dict[str, int]


def sums_of(named: Iterable[tuple[str, Any]], dtype: str) -> Sums:
    """Of each layer, and of the rest.

    Args:
        named: names and tensors, DTensors by their local shard.
        dtype: torch's name of the precision to compare in, e.g. ``bfloat16``.
    """
    import torch

    from seamless_verl.verl_adapter.weights.weight_checks import checksum

    def pieces(tensor: Any) -> Iterable[torch.Tensor]:
        for piece in getattr(tensor, "_local_tensor", tensor).detach().reshape(-1).split(_PIECE):
            yield piece.cuda() if torch.cuda.is_available() else piece  # a GPU adds up what takes a host seconds

    def sums() -> Iterable[Sums]:
        for name, tensor in named:
            layer = _LAYER.search(name)
            yield {layer.group(1) if layer else "rest": checksum(pieces(tensor), getattr(torch, dtype))}

    with torch.no_grad():
        return add(sums())


def add(parts: Iterable[Sums]) -> Sums:
    """Of all parts together, e.g. of all ranks."""
    whole: Sums = {}
    for part in parts:
        for key, value in part.items():
            whole[key] = (whole.get(key, 0) + value) % (1 << 64)
    return whole
