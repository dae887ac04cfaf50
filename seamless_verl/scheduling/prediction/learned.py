"""What finished requests and sessions teach: the speed of decoding, the lengths of sessions, how alike groups are."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence
from statistics import NormalDist, mean

import numpy as np

from seamless_verl.decode_cost import DecodeCost

_KNEES = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_DISCOUNT = 0.9995
_PRIOR = 1.0  # observations that the prior counts for: half of the mean step time is fixed, half grows with n


class DecodeModel:
    """Seconds per decode step of an average slice, and per token that it prefills: `DecodeCost`, fitted online.

    With the knee n0 where requests begin to count, a step takes ``a + k * max(n, n0) + c * kv``. For a few knees the
    coefficients are fitted by discounted least squares and none is negative; the knee with the smallest error wins.
    One observation per finished request: seconds per token against the load that it shared its slice with. A fourth
    coefficient takes what is no decoding: the seconds per token that the slice prefilled meanwhile, for whomever. A
    request that moved, or whose cache new weights cleared, would seem to decode at a fraction of its speed else.
    """

    def __init__(self) -> None:
        self._gram = np.zeros((len(_KNEES), 4, 4))  # of the features 1, max(n, knee), kv, tokens prefilled per own one
        self._moment = np.zeros((len(_KNEES), 4))
        self._squares = 0.0
        self._n = 0.0
        self._best: tuple[DecodeCost, float] | None = None  # with seconds per prefilled token, while they are fresh
        self._unsolved = 0  # observations since the coefficients were last worked out

    @property
    def _weight(self) -> float:
        """Of all observations."""
        return float(self._gram[0, 0, 0])

    @property
    def known(self) -> bool:
        return self._weight > 0

    def observe(self, *, n: float, kv: float, seconds_per_token: float, tokens: int, prefilled: float = 0.0) -> None:
        """A request of ``tokens`` ran beside ``n - 1`` others over ``kv`` tokens of context in all.

        Args:
            prefilled: tokens that its slice prefilled meanwhile.
        """
        weight = min(tokens, 256) / 256  # a longer request is a better average, up to a point
        features = np.array([(1.0, max(n, knee), kv, prefilled / tokens) for knee in _KNEES])
        weighted = weight * features
        self._gram = _DISCOUNT * self._gram + weighted[:, :, None] * features[:, None, :]
        self._moment = _DISCOUNT * self._moment + weighted * seconds_per_token
        self._squares = _DISCOUNT * self._squares + weight * seconds_per_token * seconds_per_token
        self._n = _DISCOUNT * self._n + weight * n
        self._unsolved += 1
        if self._unsolved > min(0.1 * self._weight, 32):
            self._best = None

    def step_s(self, n: float, kv: float = 0.0) -> float:
        """Predicted seconds of a step; raises ValueError before the first observation."""
        cost, _ = self._best or self._solve()
        return max(cost.step_s(n, kv), 1e-9)

    def prefill_s(self) -> float:
        """Seconds per prefilled token, in which nobody on the slice decodes; 0 while nothing tells.

        Never more than a token takes that is decoded at the usual load: that is the same arithmetic, and prefilling
        reads the weights for many tokens at once. Short contexts would seem dear else: what an interruption takes by
        itself, whatever the context, is observed together with the tokens that are prefilled after it.
        """
        if not self.known:
            return 0.0
        n, kv = max(self._n / self._weight, 1.0), float(self._gram[0, 0, 2]) / self._weight
        return min((self._best or self._solve())[1], self.step_s(n, kv) / n)

    def _solve(self) -> tuple[DecodeCost, float]:
        if not self.known:
            raise ValueError("no request was observed yet")
        solved = [(*self._fit(index), knee) for index, knee in enumerate(_KNEES)]
        _, (a, k, c, prefill_s), knee = min(solved, key=lambda fit: fit[0])
        cost = DecodeCost(
            floor_s=a + k * knee, base_s=a, per_request_s=k, attention_base_s=0.0, attention_per_token_s=c
        )
        self._best, self._unsolved = (cost, prefill_s), 0
        return self._best

    def _fit(self, index: int) -> tuple[float, list[float]]:
        """(sum of squared errors, non-negative coefficients) with one knee."""
        data = (np.triu(self._gram[index]) + np.triu(self._gram[index], 1).T).tolist()
        target = self._moment[index].tolist()
        mean_n, mean_kv, mean_s = self._n / self._weight, data[0][2] / self._weight, target[0] / self._weight
        gram, moment = [row[:] for row in data], target[:]
        for n, seconds in ((_KNEES[index], 0.5 * mean_s), (_KNEES[index] + 2 * mean_n, 1.5 * mean_s)):
            x = (1.0, n, mean_kv, 0.0)
            for i in range(4):
                for j in range(4):
                    gram[i][j] += 0.5 * _PRIOR * x[i] * x[j]
                moment[i] += 0.5 * _PRIOR * x[i] * seconds
        gram[2][2] += 1e-3 * gram[0][0] * max(mean_kv, 1.0) ** 2
        gram[3][3] += 1e-3 * gram[0][0]
        active = [0, 1, 2, 3]
        while True:
            found = _solve([[gram[i][j] for j in active] for i in active], [moment[i] for i in active])
            negative = [i for i, value in zip(active, found, strict=True) if value < 0]
            if not negative or len(active) == 1:
                break
            active.remove(negative[-1])
        w = [0.0, 0.0, 0.0, 0.0]
        for i, value in zip(active, found, strict=True):
            w[i] = max(value, 0.0)
        error = self._squares - 2 * sum(w[i] * target[i] for i in range(4))
        error += sum(w[i] * data[i][j] * w[j] for i in range(4) for j in range(4))
        return error, w


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss-Jordan with pivots; a singular direction gets 0.

    Not `numpy.linalg`, which rounds differently from one build of LAPACK to the next: plans may be worth the same, and
    a forecast whose last digit differs then decides otherwise. For four unknowns lists are four times as fast, too.
    """
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    least = 1e-12 * max(abs(value) for row in matrix for value in row)
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < least:
            continue
        for r in range(size):
            if r != i:
                factor = rows[r][i] / rows[i][i]
                rows[r] = [x - factor * y for x, y in zip(rows[r], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] if abs(rows[i][i]) >= least else 0.0 for i in range(size)]


_REMEMBERED = 1024
_BEYOND = 0.25  # a session longer than all before is expected to grow by this share of itself
_LIMIT = 3  # longest sessions of equal length are a limit on tokens: there is nothing beyond it


class LengthModel:
    """How many tokens a session will still generate: totals of the last ones, conditional quantiles of what remains."""

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

    def _longer(self, generated: float) -> tuple[int, int]:
        """Where the totals above ``generated`` begin, and how many there are."""
        if not self._sorted:
            raise ValueError("no session finished yet")
        first = bisect.bisect_right(self._sorted, generated)
        return first, len(self._sorted) - first

    def remaining(self, generated: float, u: float) -> float:
        """Tokens still to come for a session that generated so many, at quantile ``u`` of those that got that far.

        Raises:
            ValueError: no session finished yet.
        """
        longer, left = self._longer(generated)
        if left == 0:
            limited = self._sorted[-_LIMIT:] == [self._sorted[-1]] * _LIMIT
            return 1.0 if limited else max(_BEYOND * generated, 1.0)
        total = self._sorted[longer + min(int(u * left), left - 1)]
        return max(total - generated, 1.0)

    def ends_within(self, generated: float, tokens: float) -> float:
        """Chance that a session which has generated so many tokens ends with at most so many further ones.

        Raises:
            ValueError: no session finished yet.
        """
        longer, left = self._longer(generated)
        if left == 0:
            return 1.0 if self.remaining(generated, 1.0) <= tokens else 0.0
        return (bisect.bisect_right(self._sorted, generated + tokens) - longer) / left


_REMEMBERED_GROUPS = 128
_ENOUGH = 8
_MOST = 0.95
_EQUAL = 1e-9  # variance of a logarithm below which all lengths are the same
_EDGE = 1e-4  # quantiles nearer to 0 and 1 are taken for this one
_NORMAL = NormalDist()


class Likeness:
    """How alike the sessions of a group are: a hard prompt is long for everybody.

    A group is ready with its longest member. Were members independent, nearly every group of eight would have a long
    one, and no group would be forecast to be ready early; groups that are short as a whole are.

    Attributes:
        share: of the variance of the logarithm of the lengths, what the members of a group have in common (intraclass
            correlation by one-way analysis of variance, over the last groups); 0 until some groups are known.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._groups: deque[tuple[int, float, float]] = deque(
            maxlen=_REMEMBERED_GROUPS
        )  # members, mean, squares around it

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
