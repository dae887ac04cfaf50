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
_ALIKE = 1.25  # ratio of speeds up to which slices count as alike: measuring errs by some percent


def balance(slice_: Slice) -> float:
    """FLOP per byte of the slice's GPUs; 0 when unknown (all alike then)."""
    return slice_.hardware.flops / slice_.hardware.bandwidth if slice_.hardware else 0.0


def static_speed(slice_: Slice) -> float | None:
    """Expected generation speed in arbitrary units: bandwidth of all its GPUs."""
    return slice_.hardware.bandwidth * len(slice_.gpus) if slice_.hardware else None


@dataclass(slots=True)
class Roofline:
    """Static priorities and the correction.

    ``speed`` is on one scale for all slices, whichever of them were measured: 1 is the mean of what data sheets say.
    Measuring says how the measured slices share the speed that their data sheets promise of them together; one that was
    not measured yet has the speed of its data sheet, or is an average slice without one.
    """

    _slices: dict[SliceId, Slice] = field(default_factory=dict)
    _static: dict[SliceId, float] = field(default_factory=dict)  # by data sheets, their mean is 1
    _measured: dict[SliceId, tuple[float, float]] = field(default_factory=dict)  # expected seconds, seconds
    _total: float = 0.0  # of what was measured: the ratios of all slices
    _promised: float = 0.0  # of the same slices: the static speeds
    _kinds: dict[SliceId, float] | None = None

    def add(self, slice_: Slice) -> None:
        self._slices[slice_.id] = slice_
        self._kinds = None
        sheets = {name: static_speed(slice_) for name, slice_ in self._slices.items()}
        known = [sheet for sheet in sheets.values() if sheet is not None]
        average = sum(known) / len(known) if known else 1.0
        self._static = {name: 1.0 if sheet is None else sheet / average for name, sheet in sheets.items()}
        self._promised = sum(self._static[name] for name in self._measured)

    def measured(self, slice_id: SliceId, *, expected_s: float, took_s: float) -> None:
        """One more request.

        Sums of the last ones are compared, because who of many requests got a seat first is not always known: what one
        seems to have taken less another took more.

        Args:
            expected_s: what it would have taken on a slice of speed 1 under the same load.
        """
        before = self._measured.get(slice_id)
        self._kinds = None
        if before is None:
            self._promised += self._static[slice_id]
        else:
            self._total -= _ratio(before)
        sums = before or (0.0, 0.0)
        self._measured[slice_id] = sums = (_KEPT * sums[0] + expected_s, _KEPT * sums[1] + took_s)
        self._total += _ratio(sums)

    def speed(self, slice_id: SliceId) -> float:
        """Generation speed relative to an average slice; 1 when nothing is known."""
        if slice_id not in self._measured:
            return self._static[slice_id]
        return _ratio(self._measured[slice_id]) * self._promised / self._total

    def kinds(self) -> dict[SliceId, float]:
        """The speed of every slice, rounded to the mean of those that are about as fast: unlike ones stand out."""
        if self._kinds is None:
            ranked = sorted(self._slices, key=lambda name: (self.speed(name), name))
            self._kinds = {}
            while ranked:
                fastest = _ALIKE * self.speed(ranked[0])
                alike = [name for name in ranked if self.speed(name) <= fastest]
                mean = sum(self.speed(name) for name in alike) / len(alike)
                self._kinds.update(dict.fromkeys(alike, mean))
                ranked = ranked[len(alike) :]
        return self._kinds

    def order(self, slices: Iterable[Slice], tag: Tag) -> list[SliceId]:
        """Best for ``tag`` first; ties by id, so that the order is the same on every machine."""
        if tag is Tag.TRAIN:
            ranked = sorted(slices, key=lambda s: (-balance(s), self.speed(s.id), s.id))
        else:
            ranked = sorted(slices, key=lambda s: (-self.speed(s.id), balance(s), s.id))
        return [s.id for s in ranked]


def _ratio(sums: tuple[float, float]) -> float:
    """How much faster than a slice of speed 1 it was."""
    expected_s, took_s = sums
    return expected_s / max(took_s, 1e-9)
