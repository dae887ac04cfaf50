"""How many tokens a session will still generate: the empirical distribution of those that finished."""

from __future__ import annotations

import bisect
from collections import deque

_REMEMBERED = 1024
_BEYOND = 0.25  # a session longer than all before is expected to grow by this share of itself
_LIMIT = 3  # longest sessions of equal length are a limit on tokens: there is nothing beyond it


class LengthModel:
    """Totals of the last sessions, and conditional quantiles of what remains."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._recent)

    def observe(self, total: int) -> None:
        if len(self._recent) == _REMEMBERED:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(total)
        bisect.insort(self._sorted, total)

    def remaining(self, generated: float, u: float) -> float:
        """Tokens still to come for a session that generated so many, at quantile ``u`` of those that got that far.

        Raises:
            ValueError: no session finished yet.
        """
        if not self._sorted:
            raise ValueError("no session finished yet")
        longer = bisect.bisect_right(self._sorted, generated)
        left = len(self._sorted) - longer
        if left == 0:
            limited = self._sorted[-_LIMIT:] == [self._sorted[-1]] * _LIMIT
            return 1.0 if limited else max(_BEYOND * generated, 1.0)
        total = self._sorted[longer + min(int(u * left), left - 1)]
        return max(total - generated, 1.0)
