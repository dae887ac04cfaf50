"""Measured costs of moving slices between training and rollout.

An episode is everything that was ordered at one instant with one kind of command; it lasts until the last of its
slices answered. That is the time the gang is away from both uses, and what verl 0.9.1 calls a switch.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from seamless_verl.scheduling.slices import SliceId

_WINDOW = 5


class Switch(Enum):
    TO_ROLLOUT = "to_rollout"
    TO_TRAIN = "to_train"  # by interrupt; a drain that waits for requests measures the requests


@dataclass(slots=True)
class SwitchCosts:
    """Seconds per episode, oldest first, at most five of each kind; failed slices are left out."""

    measured: dict[Switch, deque[float]] = field(
        default_factory=lambda: {switch: deque(maxlen=_WINDOW) for switch in Switch}
    )
    counts: dict[Switch, int] = field(default_factory=lambda: dict.fromkeys(Switch, 0))
    _open: dict[SliceId, tuple[Switch, float]] = field(default_factory=dict)

    def begin(self, slice_id: SliceId, switch: Switch, at: float) -> None:
        self._open[slice_id] = (switch, at)

    def abandon(self, slice_id: SliceId) -> None:
        self._open.pop(slice_id, None)

    def end(self, slice_id: SliceId, at: float) -> None:
        episode = self._open.pop(slice_id, None)
        if episode is None or episode in self._open.values():
            return
        switch, began = episode
        self.measured[switch].append(at - began)
        self.counts[switch] += 1

    def typical_s(self, switch: Switch) -> float | None:
        """Median of the last episodes; None before the first."""
        measured = self.measured[switch]
        return statistics.median(measured) if measured else None
