"""The published decode cost model (PAPERS 2.3), fitted online to the requests that finish.

    step time = attn_b + attn_k * kv + max(floor, b + k * n)      n running requests over kv cached tokens

which is ``a + c * kv + k * max(n, knee)`` with ``knee = (floor - b) / k``. For a few knees the three coefficients are
fitted by discounted least squares; the knee with the smallest error wins. One observation per finished request:
seconds per token against the load that it shared its slice with. A fourth coefficient takes what is no decoding: the
seconds per token that the slice prefilled meanwhile, for whomever. A request that moved, or whose cache new weights
cleared, would seem to decode at a fraction of its speed else.
"""

from __future__ import annotations

from dataclasses import dataclass

KNEES = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_DISCOUNT = 0.9995
_PRIOR = 1.0  # observations that the prior counts for: half of the mean step time is fixed, half grows with n


@dataclass(slots=True)
class _Sums:
    """Discounted sums that all knees share."""

    one: float = 0.0
    n: float = 0.0
    kv: float = 0.0
    kv_kv: float = 0.0
    p: float = 0.0
    p_p: float = 0.0
    kv_p: float = 0.0
    s: float = 0.0
    kv_s: float = 0.0
    p_s: float = 0.0
    s_s: float = 0.0

    def add(self, n: float, kv: float, p: float, seconds: float, weight: float) -> None:
        self.one = _DISCOUNT * self.one + weight
        self.n = _DISCOUNT * self.n + weight * n
        self.kv = _DISCOUNT * self.kv + weight * kv
        self.kv_kv = _DISCOUNT * self.kv_kv + weight * kv * kv
        self.p = _DISCOUNT * self.p + weight * p
        self.p_p = _DISCOUNT * self.p_p + weight * p * p
        self.kv_p = _DISCOUNT * self.kv_p + weight * kv * p
        self.s = _DISCOUNT * self.s + weight * seconds
        self.p_s = _DISCOUNT * self.p_s + weight * p * seconds
        self.kv_s = _DISCOUNT * self.kv_s + weight * kv * seconds
        self.s_s = _DISCOUNT * self.s_s + weight * seconds * seconds


@dataclass(slots=True)
class _Fit:
    """The sums of one knee, with x = max(n, knee); the features are (1, x, kv, p), p tokens prefilled per own one."""

    knee: float
    x: float = 0.0
    x_x: float = 0.0
    x_kv: float = 0.0
    x_p: float = 0.0
    x_s: float = 0.0

    def add(self, n: float, kv: float, p: float, seconds: float, weight: float) -> None:
        x = max(n, self.knee)
        self.x = _DISCOUNT * self.x + weight * x
        self.x_x = _DISCOUNT * self.x_x + weight * x * x
        self.x_kv = _DISCOUNT * self.x_kv + weight * x * kv
        self.x_p = _DISCOUNT * self.x_p + weight * x * p
        self.x_s = _DISCOUNT * self.x_s + weight * x * seconds

    def solve(self, sums: _Sums) -> tuple[float, list[float]]:
        """(sum of squared errors, non-negative coefficients)."""
        mean_n, mean_kv, mean_s = sums.n / sums.one, sums.kv / sums.one, sums.s / sums.one
        data = [
            [sums.one, self.x, sums.kv, sums.p],
            [self.x, self.x_x, self.x_kv, self.x_p],
            [sums.kv, self.x_kv, sums.kv_kv, sums.kv_p],
            [sums.p, self.x_p, sums.kv_p, sums.p_p],
        ]
        target = [sums.s, self.x_s, sums.kv_s, sums.p_s]
        gram, moment = [row[:] for row in data], target[:]
        for n, seconds in ((self.knee, 0.5 * mean_s), (self.knee + 2 * mean_n, 1.5 * mean_s)):
            x = (1.0, n, mean_kv, 0.0)
            for i in range(4):
                for j in range(4):
                    gram[i][j] += 0.5 * _PRIOR * x[i] * x[j]
                moment[i] += 0.5 * _PRIOR * x[i] * seconds
        gram[2][2] += 1e-3 * gram[0][0] * max(mean_kv, 1.0) ** 2
        gram[3][3] += 1e-3 * gram[0][0]
        active = [0, 1, 2, 3]
        while True:
            solution = _solve([[gram[i][j] for j in active] for i in active], [moment[i] for i in active])
            negative = [i for i, value in zip(active, solution, strict=True) if value < 0]
            if not negative or len(active) == 1:
                break
            active.remove(negative[-1])
        w = [0.0, 0.0, 0.0, 0.0]
        for i, value in zip(active, solution, strict=True):
            w[i] = max(value, 0.0)
        error = sums.s_s - 2 * sum(w[i] * target[i] for i in range(4))
        error += sum(w[i] * data[i][j] * w[j] for i in range(4) for j in range(4))
        return error, w


class DecodeModel:
    """Seconds per decode step of an average slice, and per token that it prefills."""

    def __init__(self) -> None:
        self._sums = _Sums()
        self._fits = [_Fit(knee) for knee in KNEES]
        self._best: tuple[float, list[float]] | None = None  # the knee and its coefficients, while they are fresh
        self._unsolved = 0  # observations since the coefficients were last worked out

    @property
    def known(self) -> bool:
        return self._sums.one > 0

    def observe(self, *, n: float, kv: float, seconds_per_token: float, tokens: int, prefilled: float = 0.0) -> None:
        """A request of ``tokens`` ran beside ``n - 1`` others over ``kv`` tokens of context in all.

        Args:
            prefilled: tokens that its slice prefilled meanwhile.
        """
        weight = min(tokens, 256) / 256  # a longer request is a better average, up to a point
        self._sums.add(n, kv, prefilled / tokens, seconds_per_token, weight)
        for fit in self._fits:
            fit.add(n, kv, prefilled / tokens, seconds_per_token, weight)
        self._unsolved += 1
        if self._unsolved > min(0.1 * self._sums.one, 32):
            self._best = None

    def step_s(self, n: float, kv: float = 0.0) -> float:
        """Predicted seconds of a step; raises ValueError before the first observation."""
        knee, (a, k, c, _) = self._best or self._solve()
        return max(a + k * max(n, knee) + c * kv, 1e-9)

    def prefill_s(self) -> float:
        """Seconds per prefilled token, in which nobody on the slice decodes; 0 while nothing tells."""
        return (self._best or self._solve())[1][3] if self.known else 0.0

    def _solve(self) -> tuple[float, list[float]]:
        if not self.known:
            raise ValueError("no request was observed yet")
        solved = [(fit.solve(self._sums), fit.knee) for fit in self._fits]
        (_, w), knee = min(solved, key=lambda item: item[0][0])
        self._best, self._unsolved = (knee, w), 0
        return self._best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination with pivots for a few unknowns; a singular direction gets 0."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    scale = max((abs(value) for row in matrix for value in row), default=1.0)
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < 1e-12 * scale:
            continue
        for r in range(size):
            if r != i:
                factor = rows[r][i] / rows[i][i]
                rows[r] = [x - factor * y for x, y in zip(rows[r], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] if abs(rows[i][i]) >= 1e-12 * scale else 0.0 for i in range(size)]
