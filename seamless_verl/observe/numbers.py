"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def share(value: float | None) -> str:
    """``42%``; a question mark where nobody knows, ``<1%`` for what is small but there."""
    if value is None:
        return "?"
    return "<1%" if 0 < value < 0.005 else f"{value:.0%}"


def si(value: float) -> str:
    """``950``, ``1.5k``, ``2.3M``."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """``12 ms``, ``4.2 s``, ``38 s``, ``5 min 14 s``, ``3 h 05 min``."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if 0 < seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least a share ``q`` of the values does not exceed.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values, no quantile")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]
