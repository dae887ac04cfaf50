"""The lanes of a recording: for each slice what it did when, and how many requests it had, small enough to draw.

A recording of a long run on many slices has more stretches than a screen has pixels. `thin` keeps the picture: short
stretches are joined into one of the category that fills most of it. Figures are never taken from thinned lanes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from seamless_verl.observe.time_ledger import Stretch


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One slice.

    Attributes:
        stretches: in order of time, disjoint; gaps are times in which the slice did not exist.
        load: ``(time, requests out on it from then on)``, in order of time.
    """

    slice: str
    pool: str
    devices: int
    stretches: tuple[Stretch, ...]
    load: tuple[tuple[float, int], ...]


def thin(lanes: Sequence[Lane], *, budget: int) -> tuple[tuple[Lane, ...], float]:
    """Join what is too short to be seen until about ``budget`` stretches and ``budget`` points of load remain in all;
    a gap between stretches is never closed.

    Returns:
        The lanes, and the length in seconds below which stretches were joined; 0 when nothing had to be.
    """
    most = max(sum(len(lane.stretches) for lane in lanes), sum(len(lane.load) for lane in lanes))
    if most <= budget:
        return tuple(lanes), 0.0
    span = max(lane.stretches[-1].stop for lane in lanes if lane.stretches) - min(
        lane.stretches[0].start for lane in lanes if lane.stretches
    )
    # At most one joined and one long stretch per grain and lane.
    grain = 2.0 * span * len(lanes) / budget
    return tuple(
        Lane(
            slice=lane.slice,
            pool=lane.pool,
            devices=lane.devices,
            stretches=_join(lane.stretches, grain),
            load=_peaks(lane.load, grain),
        )
        for lane in lanes
    ), grain


def _join(stretches: Sequence[Stretch], grain: float) -> tuple[Stretch, ...]:
    joined: list[Stretch] = []
    group: list[Stretch] = []
    for stretch in stretches:
        apart = bool(group) and stretch.start > group[-1].stop
        if stretch.stop - stretch.start >= grain or apart:
            _flush(group, joined)
        if stretch.stop - stretch.start >= grain:
            joined.append(stretch)
            continue
        group.append(stretch)
        if stretch.stop - group[0].start >= grain:
            _flush(group, joined)
    _flush(group, joined)
    return tuple(joined)


def _flush(group: list[Stretch], joined: list[Stretch]) -> None:
    if not group:
        return
    weights: defaultdict[tuple[object, object], float] = defaultdict(float)
    for stretch in group:
        weights[stretch.state, stretch.category] += stretch.stop - stretch.start
    winner = max(group, key=lambda stretch: weights[stretch.state, stretch.category])
    joined.append(
        Stretch(
            slice=winner.slice,
            start=group[0].start,
            stop=group[-1].stop,
            state=winner.state,
            category=winner.category,
        )
    )
    group.clear()


def _peaks(load: Sequence[tuple[float, int]], grain: float) -> tuple[tuple[float, int], ...]:
    """The highest load of each grain of time, and the load that it ends with."""
    kept: list[tuple[float, int]] = []
    index = 0
    while index < len(load):
        start, level = load[index]
        peak = level
        while index < len(load) and load[index][0] < start + grain:
            level = load[index][1]
            peak = max(peak, level)
            index += 1
        kept.append((start, peak))
        if level != peak:
            kept.append((start + grain, level))
    return tuple(kept)
