"""How long a decode step takes (cost model of StaleFlow, arXiv 2601.12784), and its fit to what was measured.

    t(n, kv) = attention_base + attention_per_token * kv + max(floor, base + per_request * n)      seconds

with n running requests over kv cached tokens; an instance then yields n / t tokens per second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCost:
    """Coefficients in seconds: of a step, of a step per request, of a step per cached token."""

    floor_s: float
    base_s: float
    per_request_s: float
    attention_base_s: float
    attention_per_token_s: float

    def step_s(self, running: float, kv_tokens: float) -> float:
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


TURN_TOKENS = 256.0
"""Of a turn of an agent, where nobody has measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePace:
    """What a replica takes: for a decode step, and in seconds for each token that it prefills.

    Attributes:
        turn_tokens: that it generates for a request, on average.
    """

    decode: DecodeCost
    prefill_s_per_token: float
    turn_tokens: float = TURN_TOKENS


# Published by StaleFlow for H20 GPUs. Columns in the order of the fields.
PUBLISHED: Mapping[str, DecodeCost] = MappingProxyType(
    {
        name: DecodeCost(**dict(zip(DecodeCost.__slots__, coefficients, strict=True)))
        for name, *coefficients in (
            ("7b-tp1", 6.40e-3, 2.70e-3, 1.231e-4, 2.80e-3, 3.35e-8),
            ("14b-tp1", 1.230e-2, 4.91e-3, 2.441e-4, 1.966e-3, 1.165e-7),
            ("32b-tp2", 2.502e-2, 1.838e-2, 2.446e-4, 2e-10, 6.3e-8),
            ("30b-a3b-tp1", 1.151e-2, 9.79e-3, 1.249e-4, 8.67e-4, 7.28e-8),
        )
    }
)


def fit_decode_cost(
    running: Sequence[int], kv_tokens: Sequence[float], step_s: Sequence[float], steps: Sequence[int]
) -> DecodeCost | None:
    """The coefficients that explain measured decode steps best by least squares, none negative.

    Given the number of requests n0 at which the linear part leaves the floor, the model is linear in 1, kv and
    max(0, n - n0); of all n0 that were measured the best one wins. The floor and the attention's base cannot be told
    apart from step times; their sum is reported as ``floor_s``.

    Args:
        running: of each measurement, the requests that ran.
        kv_tokens: the cached tokens they had.
        step_s: seconds that a step took.
        steps: how many steps were measured so.

    Returns:
        None where all measurements have the same number of requests.
    """
    n, kv, seconds = np.array(running), np.array(kv_tokens, float), np.array(step_s)
    levels = sorted(set(running))
    if len(levels) < 2:
        return None
    root = np.sqrt(np.array(steps, float))  # the error of a measurement counts once for each of its steps
    best, error, knee = np.zeros(3), math.inf, 0
    for candidate in levels[:-1]:
        features = np.column_stack([np.ones(len(n)), kv, np.maximum(0, n - candidate)])
        coefficients = _least_squares(features * root[:, None], seconds * root)
        residual = (features @ coefficients - seconds) * root
        if residual @ residual < error:
            best, error, knee = coefficients, residual @ residual, candidate
    constant, per_token, per_request = map(float, best)
    constant = max(constant, 0.1 * min(step_s))  # what small caches take must not be extrapolated to nothing
    return DecodeCost(
        floor_s=constant,
        base_s=constant - per_request * knee,
        per_request_s=per_request,
        attention_base_s=0.0,
        attention_per_token_s=per_token,
    )


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One step as it was measured: seconds, requests that got a token, how many of these got their first one, prompt
    tokens that were computed for these, tokens that all of them had in the cache."""

    seconds: float
    running: int
    first_tokens: int
    prefilled: int
    cached: int = 0


_FEWEST_STEPS = 64
_FEWEST_HALVED = 16  # fewer steps with the same number of requests have one median, whatever was cached
_TELLING_PREFILL = 32  # tokens; fewer drown in the rest of a step


def measured_pace(steps: Sequence[EngineStep]) -> EnginePace | None:
    """What an engine's own steps say. By medians: a step may have waited for new weights, or prefilled a part of a
    prompt whose first token came later. A step tells the more of prefilling the more it prefilled (least absolute
    deviations).

    Returns:
        None while there are too few, or all with the same number of requests.
    """
    plain: dict[int, list[EngineStep]] = {}
    for step in steps:
        if not step.first_tokens:
            plain.setdefault(step.running, []).append(step)
    parts = [part for alike in plain.values() for part in _halves(alike)]
    counts = [len(part) for part in parts]
    decode = fit_decode_cost(
        [part[0].running for part in parts],
        [float(np.mean([step.cached for step in part])) for part in parts],
        [float(np.median([step.seconds for step in part])) for part in parts],
        counts,
    )
    prefilling = [step for step in steps if step.prefilled >= _TELLING_PREFILL]
    if decode is None or sum(counts) < _FEWEST_STEPS or not prefilling:
        return None
    tokens = np.array([step.prefilled for step in prefilling])
    each = np.array([step.seconds - decode.step_s(step.running, step.cached) for step in prefilling]) / tokens
    order = np.argsort(each)
    middle = order[np.searchsorted(np.cumsum(tokens[order]), tokens.sum() / 2)]
    return EnginePace(
        decode=decode,
        prefill_s_per_token=max(0.0, float(each[middle])),
        turn_tokens=sum(step.running for step in steps) / sum(step.first_tokens for step in steps),
    )


def _halves(steps: list[EngineStep]) -> list[list[EngineStep]]:
    """Those with the less and those with the more in the cache; all, where halves would be too few for a median."""
    ordered = sorted(steps, key=lambda step: step.cached)
    middle = len(steps) // 2
    return [ordered[:middle], ordered[middle:]] if len(steps) >= _FEWEST_HALVED else [steps]


def _least_squares(features: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coefficients of the features; the second and third are left out where they would be negative.

    A feature that follows from those before it gets 0, too.
    """
    scale = np.linalg.norm(features, axis=0)
    scale[scale == 0] = 1.0
    used = [0, 1, 2]
    while True:
        kept: list[int] = []
        for index in used:
            if np.linalg.matrix_rank(features[:, [*kept, index]] / scale[[*kept, index]], tol=1e-5) > len(kept):
                kept.append(index)
        solution = np.zeros(3)
        solution[kept] = np.linalg.lstsq(features[:, kept] / scale[kept], target, rcond=None)[0]
        negative = [index for index in kept if index and solution[index] < 0]
        if not negative:
            solution /= scale
            return solution
        used.remove(min(negative, key=lambda index: solution[index]))
