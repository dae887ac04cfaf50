"""Sets of moments, as intervals: when a run was in some state or phase."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

Intervals = Sequence[tuple[float, float]]  # seconds, disjoint and ascending


def within(intervals: Intervals, at: float) -> bool:
    last = bisect_right(intervals, at, key=lambda interval: interval[0])
    return last > 0 and at <= intervals[last - 1][1]


def overlap(intervals: Intervals, low: float, high: float) -> float:
    """Seconds that ``low`` to ``high`` shares with the intervals."""
    first = max(0, bisect_right(intervals, low, key=lambda interval: interval[0]) - 1)
    last = bisect_left(intervals, high, key=lambda interval: interval[0])
    return sum(max(0.0, min(high, end) - max(low, begin)) for begin, end in intervals[first:last])


def union(intervals: Sequence[tuple[float, float]]) -> Intervals:
    """Disjoint intervals that cover the same time."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
