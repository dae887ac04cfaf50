"""How long a decode step takes (StaleFlow, section 2.3 of the specification), and the fit of it to what was measured.

    t(n, kv) = attention_base + attention_per_token * kv + max(floor, base + per_request * n)      seconds

with n running requests over kv cached tokens; an instance then yields n / t tokens per second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from seamless_verl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCost:
    """Coefficients in seconds: of a step, of a step per request, of a step per cached token."""

    floor_s: float
    base_s: float
    per_request_s: float
    attention_base_s: float
    attention_per_token_s: float

    def step_s(self, running: int, kv_tokens: int) -> float:
        """Seconds of one decode step: one token for each of ``running`` requests over ``kv_tokens`` cached tokens."""
        attention = self.attention_base_s + self.attention_per_token_s * kv_tokens
        return attention + max(self.floor_s, self.base_s + self.per_request_s * running)

    def throughput(self, running: int, kv_tokens: int) -> float:
        """Tokens per second of an instance; 0 when nothing runs."""
        return running / self.step_s(running, kv_tokens) if running else 0.0

    def gain(self, running: int, kv_tokens: int, request_tokens: int) -> float:
        """Tokens per second that an instance gains by one more request with ``request_tokens`` of context."""
        more = self.throughput(running + 1, kv_tokens + request_tokens)
        return more - self.throughput(running, kv_tokens)


# Published with the paper, H20; error about 10 % by secondary sources.
PUBLISHED: Mapping[str, DecodeCost] = MappingProxyType(
    {
        "7b-tp1": DecodeCost(
            floor_s=6.40e-3,
            base_s=2.70e-3,
            per_request_s=1.231e-4,
            attention_base_s=2.80e-3,
            attention_per_token_s=3.35e-8,
        ),
        "14b-tp1": DecodeCost(
            floor_s=1.230e-2,
            base_s=4.91e-3,
            per_request_s=2.441e-4,
            attention_base_s=1.966e-3,
            attention_per_token_s=1.165e-7,
        ),
        "32b-tp2": DecodeCost(
            floor_s=2.502e-2,
            base_s=1.838e-2,
            per_request_s=2.446e-4,
            attention_base_s=2e-10,
            attention_per_token_s=6.3e-8,
        ),
        "30b-a3b-tp1": DecodeCost(
            floor_s=1.151e-2,
            base_s=9.79e-3,
            per_request_s=1.249e-4,
            attention_base_s=8.67e-4,
            attention_per_token_s=7.28e-8,
        ),
    }
)


@dataclass(slots=True)
class _Sums:
    """Weighted sums of the measurements with one number of running requests."""

    weight: float = 0.0
    kv: float = 0.0
    kv2: float = 0.0
    t: float = 0.0
    kvt: float = 0.0
    t2: float = 0.0


class DecodeCostFit:
    """Fits `DecodeCost` to measured decode steps by least squares, in memory that does not grow with their number.

    Given the number of requests n0 at which the linear part leaves the floor, the model is linear in 1, kv and
    max(0, n - n0). Sums per n suffice to solve that for every n0, and the best one wins. The floor and the attention's
    base cannot be told apart from step times; their sum is reported as ``floor_s``.

    Args:
        memory: weight that a measurement keeps when another one arrives, in (0, 1]; 1 weighs all alike.
    """

    def __init__(self, *, memory: float = 0.999) -> None:
        if not 0 < memory <= 1:
            raise ConfigError("seamless.router.fit_memory", memory, "must be in (0, 1]", "write 0.999")
        self._memory = memory
        self._scale = 1.0  # newest weight; grows instead of shrinking all the others
        self._sums: dict[int, _Sums] = {}

    def observe(self, running: int, kv_tokens: int, step_s: float, *, steps: int = 1) -> None:
        """Add one measurement: so many decode steps that took ``step_s`` each."""
        self._scale /= self._memory
        if self._scale > 1e100:
            self._rescale()
        sums = self._sums.setdefault(running, _Sums())
        weight = self._scale * steps
        sums.weight += weight
        sums.kv += weight * kv_tokens
        sums.kv2 += weight * kv_tokens * kv_tokens
        sums.t += weight * step_s
        sums.kvt += weight * kv_tokens * step_s
        sums.t2 += weight * step_s * step_s

    def fit(self) -> DecodeCost | None:
        """The coefficients that explain the measurements best, none negative; ``None`` before the second load level."""
        if len(self._sums) < 2:
            return None
        levels = sorted(self._sums)
        best: tuple[float, int, Sequence[float]] | None = None
        for knee in levels[:-1]:
            error, coefficients = self._solve(knee)
            if best is None or error < best[0]:
                best = (error, knee, coefficients)
        assert best is not None
        _, knee, (constant, per_token, per_request) = best
        return DecodeCost(
            floor_s=constant,
            base_s=constant - per_request * knee,
            per_request_s=per_request,
            attention_base_s=0.0,
            attention_per_token_s=per_token,
        )

    def _rescale(self) -> None:
        for sums in self._sums.values():
            for name in _Sums.__slots__:
                setattr(sums, name, getattr(sums, name) / self._scale)
        self._scale = 1.0

    def _solve(self, knee: int) -> tuple[float, Sequence[float]]:
        """Squared error and (constant, per token, per request) for one knee, by dropping what would be negative."""
        gram = [[0.0] * 3 for _ in range(3)]
        right = [0.0] * 3
        total = 0.0
        for running, sums in self._sums.items():
            weight = 1.0 / self._scale
            rise = weight * max(0, running - knee)
            gram[0][0] += weight * sums.weight
            gram[0][1] += weight * sums.kv
            gram[0][2] += rise * sums.weight
            gram[1][1] += weight * sums.kv2
            gram[1][2] += rise * sums.kv
            gram[2][2] += rise * sums.weight * max(0, running - knee)
            right[0] += weight * sums.t
            right[1] += weight * sums.kvt
            right[2] += rise * sums.t
            total += weight * sums.t2
        gram[1][0], gram[2][0], gram[2][1] = gram[0][1], gram[0][2], gram[1][2]
        used = [0, 1, 2]
        while True:
            solution = _least_squares(gram, right, used)
            negative = [index for index in used[1:] if solution[index] < 0]
            if not negative:
                break
            used.remove(min(negative, key=lambda index: solution[index] * gram[index][index] ** 0.5))
        error = total - 2 * sum(a * b for a, b in zip(solution, right, strict=True))
        error += sum(solution[i] * solution[j] * gram[i][j] for i in range(3) for j in range(3))
        return max(0.0, error), solution


def _least_squares(gram: Sequence[Sequence[float]], right: Sequence[float], used: Sequence[int]) -> list[float]:
    """Normal equations over the features ``used`` by Gaussian elimination; a feature that says nothing gets 0."""
    scale = {i: (gram[i][i] or 1.0) ** 0.5 for i in used}
    rows = {i: [gram[i][j] / (scale[i] * scale[j]) for j in used] + [right[i] / scale[i]] for i in used}
    pivots: list[int] = []
    for position, i in enumerate(used):
        if abs(rows[i][position]) < 1e-9:
            continue
        pivots.append(i)
        for j in used:
            if j != i:
                factor = rows[j][position] / rows[i][position]
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    solution = [0.0] * len(gram)
    for position, i in enumerate(used):
        if i in pivots:
            solution[i] = rows[i][-1] / rows[i][position] / scale[i]
    return solution
