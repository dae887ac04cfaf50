"""Which slices should rather train and which rather generate: the roofline, corrected by what is measured.

Decoding reads every weight for every token (bound by memory bandwidth), training multiplies matrices (bound by
FLOP/s). A slice's *balance* = FLOP/s per byte/s; a high balance is better used by training, a low one by rollout
(PAPERS 1.2). Facts from data sheets say how fast a slice should generate relative to others; the tokens it did
generate say how fast it does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from seamless_verl.scheduling.slices import Slice, SliceId, Tag

_FORGET = 0.8


def balance(slice_: Slice) -> float:
    """FLOP per byte of the slice's GPUs; 0 when unknown (all alike then)."""
    return slice_.hardware.flops / slice_.hardware.bandwidth if slice_.hardware else 0.0


def static_speed(slice_: Slice) -> float | None:
    """Expected generation speed in arbitrary units: bandwidth of all its GPUs."""
    return slice_.hardware.bandwidth * len(slice_.gpus) if slice_.hardware else None


@dataclass(slots=True)
class Roofline:
    """Static priorities and the correction.

    ``speed`` is the generation speed of a slice relative to the mean of the known slices. Measured speeds are tokens
    per second of busy time at comparable load; they replace the static ones as they come in (exponential average).
    """

    _slices: dict[SliceId, Slice] = field(default_factory=dict)
    _measured: dict[SliceId, float] = field(default_factory=dict)

    def add(self, slice_: Slice) -> None:
        self._slices[slice_.id] = slice_

    def measured(self, slice_id: SliceId, seconds_per_token_ratio: float) -> None:
        """``seconds_per_token_ratio``: what a request took, over what the model of an average slice expects."""
        speed = 1.0 / max(seconds_per_token_ratio, 1e-6)
        before = self._measured.get(slice_id)
        self._measured[slice_id] = speed if before is None else _FORGET * before + (1 - _FORGET) * speed

    def speed(self, slice_id: SliceId) -> float:
        """Generation speed relative to an average slice; 1 when nothing is known."""
        if slice_id in self._measured:
            return self._measured[slice_id]
        static = static_speed(self._slices[slice_id])
        known = [s for s in map(static_speed, self._slices.values()) if s is not None]
        return static / (sum(known) / len(known)) if static is not None and known else 1.0

    def order(self, slices: Iterable[Slice], tag: Tag) -> list[SliceId]:
        """Best for ``tag`` first; ties by id, so that the order is the same on every machine."""
        if tag is Tag.TRAIN:
            ranked = sorted(slices, key=lambda s: (-balance(s), self.speed(s.id), s.id))
        else:
            ranked = sorted(slices, key=lambda s: (-self.speed(s.id), balance(s), s.id))
        return [s.id for s in ranked]
