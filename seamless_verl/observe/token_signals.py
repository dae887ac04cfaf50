"""What the trainer made of the tokens that it trained; one file per batch, from which one row can be read.

``signals/STEP.PART.safetensors`` in a run's folder. Its tensors are named ``KEY/NAME``, with verl's key of the row
(``GROUP_ATTEMPT_ROW``); one that is the same for all tokens of a row has one entry.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

FOLDER = "signals"
_LARGEST = 6e4  # float16


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSignals:
    """Of the response tokens of one row, each of shape ``(response length,)``.

    Attributes:
        mask: 1 where the loss counts the token, after rejections.
        advantage: that its policy gradient is multiplied by.
        log_ratio: its log-prob before the update under the trainer's weights, minus the rollout's. None: not computed
            (verl's ``bypass_mode``).
        weight: of the correction for rollouts that are off policy (``rollout_is_weights``). None: there is none.
    """

    mask: NDArray[Any]
    advantage: NDArray[Any]
    log_ratio: NDArray[Any] | None = None
    weight: NDArray[Any] | None = None


_NAMES = tuple(field.name for field in fields(TokenSignals))


def write(folder: Path, name: str, rows: Mapping[str, TokenSignals]) -> None:
    """Write the rows of one batch, by key; ``name`` is ``STEP.PART``. Who looks sees the whole file or none."""
    tensors = {
        f"{key}/{each}": _stored(each, values)
        for key, row in rows.items()
        for each in _NAMES
        if (values := getattr(row, each)) is not None
    }
    folder.mkdir(exist_ok=True)
    unfinished = folder / f".{name}.part"
    save_file(tensors, unfinished)
    os.replace(unfinished, folder / f"{name}.safetensors")


def _stored(name: str, values: NDArray[Any]) -> NDArray[Any]:
    if name == "mask":
        return values.astype(np.uint8)
    short = values[:1] if values.size and np.all(values == values[0]) else values
    return np.ascontiguousarray(np.clip(short, -_LARGEST, _LARGEST).astype(np.float16))


def read(folder: Path, step: int, key: str) -> TokenSignals | None:
    """Of one row that this step trained; None where nothing is kept of it, or its file is damaged."""
    for file in sorted(folder.glob(f"{step}.*.safetensors")):
        with suppress(SafetensorError), safe_open(file, framework="np") as tensors:  # or another batch has it
            mask = tensors.get_tensor(f"{key}/mask")
            there = set(tensors.keys())
            found = {
                name: np.broadcast_to(tensors.get_tensor(f"{key}/{name}"), mask.shape)
                for name in _NAMES[1:]
                if f"{key}/{name}" in there
            }
            return TokenSignals(mask=mask, **found)
    return None
