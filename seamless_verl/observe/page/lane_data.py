"""The lanes as compact JSON for the script of the page: columns instead of objects, times in units of ``tick_s``.

A recording of a long run on many slices has more stretches than a screen has pixels. `thin` keeps the picture: short
stretches are joined into one of the category that fills most of it. Figures are never taken from thinned lanes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from seamless_verl.observe.digest import Lane, RunDigest
from seamless_verl.observe.page.words import LABELS, style_of
from seamless_verl.observe.time_ledger import Category, Stretch
from seamless_verl.scheduling.slices import ACTIVE_TAG

# About 1 MB of text; a laptop draws that many rectangles in a few milliseconds.
_BUDGET = 60_000
_TAGS = ("", "train", "rollout")
T = TypeVar("T")


def lane_data(run: RunDigest) -> dict[str, Any]:
    """Keys: ``tick_s``, ``span`` (ticks), ``grain_s``, ``categories``, ``pools``, ``steps``, ``versions``,
    ``decisions``. A lane has ``start``, ``stop``, ``category``, ``tag`` of each stretch, and the ``load`` as two
    columns; ``category`` and ``tag`` are indices.
    """
    lanes, grain_s = thin(run.lanes, budget=_BUDGET)
    tick_s = max(run.span_s / 1e6, 1e-4)

    def ticks(at: float) -> int:
        return round(at / tick_s)

    order = list(Category)

    def columns(lane: Lane) -> dict[str, Any]:
        tags = [ACTIVE_TAG[stretch.state] for stretch in lane.stretches]
        return {
            "name": lane.slice,
            "devices": lane.devices,
            "start": [ticks(stretch.start) for stretch in lane.stretches],
            "stop": [ticks(stretch.stop) for stretch in lane.stretches],
            "category": [order.index(stretch.category) for stretch in lane.stretches],
            "tag": [_TAGS.index(tag.value if tag is not None else "") for tag in tags],
            "state": [stretch.state.value for stretch in lane.stretches],
            "load": [[ticks(at) for at, _ in lane.load], [level for _, level in lane.load]],
        }

    pools: dict[str, list[dict[str, Any]]] = {}
    for lane in lanes:
        pools.setdefault(lane.pool, []).append(columns(lane))
    return {
        "tick_s": tick_s,
        "span": ticks(run.span_s),
        "grain_s": grain_s,
        "categories": [{"style": style_of(category), "label": LABELS[category]} for category in order],
        "pools": [{"name": name, "lanes": members} for name, members in pools.items()],
        "steps": [[span.step, ticks(span.start), ticks(span.stop)] for span in run.step_spans],
        "versions": [[ticks(at), version] for at, version in run.tallies.versions],
        "decisions": [
            [ticks(row.made.at), row.made.action, ", ".join(row.made.slices), row.made.reason] for row in run.decisions
        ],
    }


def as_script(data: Any) -> str:
    """JSON that may stand inside of a ``<script>`` element, whatever strings it holds."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# ---------------------------------------------------------------- small enough to draw


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
            load=tuple(peaks(lane.load, grain, float, grain)),
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
    joined.append(replace(winner, start=group[0].start, stop=group[-1].stop))
    group.clear()


def peaks(
    levels: Sequence[tuple[float, T]], grain: float, size: Callable[[T], float], settles_s: float
) -> list[tuple[float, T]]:
    """Of each grain of time the largest level, and ``settles_s`` after it the one that the grain ends with."""
    kept: list[tuple[float, T]] = []
    index = 0
    while index < len(levels):
        start, largest = levels[index]
        last = largest
        while index < len(levels) and levels[index][0] < start + grain:
            last = levels[index][1]
            largest = max(largest, last, key=size)
            index += 1
        kept.append((start, largest))
        if last != largest:
            kept.append((start + settles_s, last))
    return kept
