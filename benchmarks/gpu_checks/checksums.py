"""Checksums of parameters that two processes with different layouts agree on, if every number is the same.

vLLM fuses what verl keeps apart (q, k, v; gate, up), pads vocabularies with zeros, and holds another precision. So the
bits of all numbers of a layer are added up, in the engine's precision: the order does not matter, zeros add nothing,
and shards of several ranks add up to the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_PIECE = 1 << 24
Sums = dict[str, int]


def sums_of(named: Iterable[tuple[str, Any]], dtype: str) -> Sums:
    """By layer, and of the rest: the sum of each number's bits and of their squares, modulo 2**64.

    Args:
        named: names and tensors, DTensors by their local shard.
        dtype: torch's name of the precision to compare in, e.g. ``bfloat16``.
    """
    import torch

    kind = getattr(torch, dtype)
    bits = torch.int32 if kind.itemsize == 4 else torch.int16
    found: Sums = {}
    with torch.no_grad():
        for name, tensor in named:
            layer = _LAYER.search(name)
            key = layer.group(1) if layer else "rest"
            local = getattr(tensor, "_local_tensor", tensor).detach().reshape(-1)
            for piece in local.split(_PIECE):
                on_device = (
                    piece.cuda() if torch.cuda.is_available() else piece
                )  # a GPU adds up what takes a host seconds
                numbers = on_device.to(kind).view(bits).to(torch.int64)
                total = int(numbers.sum()) + (int((numbers * numbers).sum()) << 1)
                found[key] = (found.get(key, 0) + total) % (1 << 64)
    return found


def add(parts: Iterable[Sums]) -> Sums:
    """Of all ranks together."""
    whole: Sums = {}
    for part in parts:
        for key, value in part.items():
            whole[key] = (whole.get(key, 0) + value) % (1 << 64)
    return whole
