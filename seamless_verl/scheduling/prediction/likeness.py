"""How alike the sessions of a group are: a hard prompt is long for everybody.

A group is ready with its longest member. Were members independent, nearly every group of eight would have a long one,
and no group would be forecast to be ready early; groups that are short as a whole are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import NormalDist, mean

_REMEMBERED = 128  # groups
_ENOUGH = 8
_MOST = 0.95
_EQUAL = 1e-9  # variance of a logarithm below which all lengths are the same
_EDGE = 1e-4  # quantiles nearer to 0 and 1 are taken for this one
_NORMAL = NormalDist()


class Likeness:
    """Attributes:
    share: of the variance of the logarithm of the lengths, what the members of a group have in common (intraclass
        correlation by one-way analysis of variance, over the last groups); 0 until some groups are known.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._groups: deque[tuple[int, float, float]] = deque(maxlen=_REMEMBERED)  # members, mean, squares around it

    def observe(self, lengths: Sequence[int]) -> None:
        """The tokens of all members of a group."""
        if len(lengths) < 2:
            return
        logs = [math.log(max(length, 1)) for length in lengths]
        centre = mean(logs)
        self._groups.append((len(logs), centre, sum((value - centre) ** 2 for value in logs)))
        if len(self._groups) >= _ENOUGH:
            self.share = self._intraclass()

    def quantile(self, group: float, own: float) -> float:
        """Of a session's length, from two numbers between 0 and 1: one that its whole group has, and its own."""
        if not self.share:
            return own
        common, rest = (_NORMAL.inv_cdf(min(max(u, _EDGE), 1.0 - _EDGE)) for u in (group, own))
        return _NORMAL.cdf(math.sqrt(self.share) * common + math.sqrt(1.0 - self.share) * rest)

    def _intraclass(self) -> float:
        members = sum(count for count, _, _ in self._groups)
        size = members / len(self._groups)
        centre = sum(count * own for count, own, _ in self._groups) / members
        between = sum(count * (own - centre) ** 2 for count, own, _ in self._groups) / (len(self._groups) - 1)
        within = sum(squares for _, _, squares in self._groups) / (members - len(self._groups))
        total = between + (size - 1) * within
        return min(max((between - within) / total, 0.0), _MOST) if total > _EQUAL else 0.0
