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

_KEPT = 0.97  # of what is known, at each further request


def balance(slice_: Slice) -> float:
    """FLOP per byte of the slice's GPUs; 0 when unknown (all alike then)."""
    return slice_.hardware.flops / slice_.hardware.bandwidth if slice_.hardware else 0.0


def static_speed(slice_: Slice) -> float | None:
    """Expected generation speed in arbitrary units: bandwidth of all its GPUs."""
    return slice_.hardware.bandwidth * len(slice_.gpus) if slice_.hardware else None


@dataclass(slots=True)
class Roofline:
    """Static priorities and the correction.

    ``speed`` is the generation speed of a slice relative to the mean of the known slices. Measured ones replace the
    static ones as they come in: what its last requests should have taken, summed, over what they took. Sums, because
    who of many requests got a seat first is not always known: what one seems to have taken less another took more.
    """

    _slices: dict[SliceId, Slice] = field(default_factory=dict)
    _measured: dict[SliceId, tuple[float, float]] = field(default_factory=dict)  # expected seconds, seconds

    def add(self, slice_: Slice) -> None:
        self._slices[slice_.id] = slice_

    def measured(self, slice_id: SliceId, *, expected_s: float, took_s: float) -> None:
        """One more request.

        Args:
            expected_s: what it would have taken on a slice of speed 1 under the same load.
        """
        before = self._measured.get(slice_id, (0.0, 0.0))
        self._measured[slice_id] = (_KEPT * before[0] + expected_s, _KEPT * before[1] + took_s)

    def speed(self, slice_id: SliceId) -> float:
        """Generation speed relative to an average slice; 1 when nothing is known."""
        if slice_id in self._measured:
            speeds = {name: expected_s / max(took_s, 1e-9) for name, (expected_s, took_s) in self._measured.items()}
            return speeds[slice_id] / (sum(speeds.values()) / len(speeds))
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
