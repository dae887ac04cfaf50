"""Confidence intervals over seeds, and what counts as level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev

LEVEL = 0.98  # a ratio of step times above this is level
_T_975 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the mean (Student)."""
    if len(values) < 2:
        return values[0], values[0]
    half = _T_975.get(len(values) - 1, 2.0) * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half
