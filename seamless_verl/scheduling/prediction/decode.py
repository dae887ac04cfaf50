"""The published decode cost model (PAPERS 2.3), fitted online to the requests that finish.

    step time = attn_b + attn_k * kv + max(floor, b + k * n)      n running requests over kv cached tokens

which is ``a + c * kv + k * max(n, knee)`` with ``knee = (floor - b) / k``. For a few knees the three coefficients are
fitted by discounted least squares; the knee with the smallest error wins. One observation per finished request:
seconds per token against the load that it shared its slice with.
"""

from __future__ import annotations

from dataclasses import dataclass, field

KNEES = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_DISCOUNT = 0.995
_PRIOR = 1.0  # observations that the prior counts for: half of the mean step time is fixed, half grows with n


@dataclass(slots=True)
class _Fit:
    """Normal equations of one knee; features (1, max(n, knee), kv)."""

    knee: float
    gram: list[list[float]] = field(default_factory=lambda: [[0.0] * 3 for _ in range(3)])
    moment: list[float] = field(default_factory=lambda: [0.0] * 3)

    def add(self, n: float, kv: float, seconds: float, weight: float) -> None:
        x = (1.0, max(n, self.knee), kv)
        for i in range(3):
            for j in range(3):
                self.gram[i][j] = _DISCOUNT * self.gram[i][j] + weight * x[i] * x[j]
            self.moment[i] = _DISCOUNT * self.moment[i] + weight * x[i] * seconds

    def solve(self, mean_n: float, mean_kv: float, mean_s: float, squares: float) -> tuple[float, list[float]]:
        """(sum of squared errors, non-negative coefficients)."""
        gram = [row[:] for row in self.gram]
        moment = self.moment[:]
        for n, seconds in ((self.knee, 0.5 * mean_s), (self.knee + 2 * mean_n, 1.5 * mean_s)):
            x = (1.0, n, mean_kv)
            for i in range(3):
                for j in range(3):
                    gram[i][j] += 0.5 * _PRIOR * x[i] * x[j]
                moment[i] += 0.5 * _PRIOR * x[i] * seconds
        gram[2][2] += 1e-3 * gram[0][0] * max(mean_kv, 1.0) ** 2
        active = [0, 1, 2]
        while True:
            solution = _solve([[gram[i][j] for j in active] for i in active], [moment[i] for i in active])
            negative = [i for i, value in zip(active, solution, strict=True) if value < 0]
            if not negative or len(active) == 1:
                break
            active.remove(negative[-1])
        w = [0.0, 0.0, 0.0]
        for i, value in zip(active, solution, strict=True):
            w[i] = max(value, 0.0)
        error = squares - 2 * sum(w[i] * self.moment[i] for i in range(3))
        error += sum(w[i] * self.gram[i][j] * w[j] for i in range(3) for j in range(3))
        return error, w


class DecodeModel:
    """Seconds per decode step of an average slice."""

    def __init__(self) -> None:
        self._fits = [_Fit(knee) for knee in KNEES]
        self._weight = self._n = self._kv = self._seconds = self._squares = 0.0
        self._best: tuple[float, list[float]] | None = None
        self._unsolved = 0  # observations since the coefficients were last worked out

    @property
    def known(self) -> bool:
        return self._weight > 0

    def observe(self, *, n: float, kv: float, seconds_per_token: float, tokens: int) -> None:
        """A request of ``tokens`` ran beside ``n - 1`` others over ``kv`` tokens of context in all."""
        weight = min(tokens, 256) / 256  # a longer request is a better average, up to a point
        for fit in self._fits:
            fit.add(n, kv, seconds_per_token, weight)
        for name, value in (
            ("_weight", 1.0),
            ("_n", n),
            ("_kv", kv),
            ("_seconds", seconds_per_token),
            ("_squares", seconds_per_token**2),
        ):
            setattr(self, name, _DISCOUNT * getattr(self, name) + weight * value)
        self._unsolved += 1

    def step_s(self, n: float, kv: float = 0.0) -> float:
        """Predicted seconds of a step; raises ValueError before the first observation."""
        knee, (a, k, c) = self._solved()
        return max(a + k * max(n, knee) + c * kv, 1e-9)

    def _solved(self) -> tuple[float, list[float]]:
        if not self.known:
            raise ValueError("no request was observed yet")
        if self._best is None or self._unsolved > min(0.1 * self._weight, 32):
            self._unsolved = 0
            n, kv, seconds = (total / self._weight for total in (self._n, self._kv, self._seconds))
            solved = [(fit.solve(n, kv, seconds, self._squares), fit.knee) for fit in self._fits]
            (_, w), knee = min(solved, key=lambda item: item[0][0])
            self._best = (knee, w)
        return self._best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination with pivots for up to three unknowns; a singular direction gets 0."""
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
