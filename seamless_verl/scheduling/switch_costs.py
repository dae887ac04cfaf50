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
    """Seconds per episode, oldest first, at most five of each kind; failed slices are left out.

    Attributes:
        at_least: how long a switch lasted that was broken off, while none was ever completed.
    """

    measured: dict[Switch, deque[float]] = field(
        default_factory=lambda: {switch: deque(maxlen=_WINDOW) for switch in Switch}
    )
    counts: dict[Switch, int] = field(default_factory=lambda: dict.fromkeys(Switch, 0))
    at_least: dict[Switch, float] = field(default_factory=dict)
    _open: dict[SliceId, tuple[Switch, float]] = field(default_factory=dict)

    def begin(self, slice_id: SliceId, switch: Switch, at: float) -> None:
        self._open[slice_id] = (switch, at)

    def abandon(self, slice_id: SliceId, at: float) -> None:
        """Broken off: superseded, or the slice failed."""
        episode = self._open.pop(slice_id, None)
        if episode is not None:
            switch, began = episode
            self.at_least[switch] = max(self.at_least.get(switch, 0.0), at - began)

    def end(self, slice_id: SliceId, at: float) -> None:
        episode = self._open.pop(slice_id, None)
        if episode is None or episode in self._open.values():
            return
        switch, began = episode
        self.measured[switch].append(at - began)
        self.counts[switch] += 1

    def typical_s(self, switch: Switch) -> float | None:
        """Median of the last episodes; before the first what is known of one that was broken off, or None."""
        measured = self.measured[switch]
        return statistics.median(measured) if measured else self.at_least.get(switch)
