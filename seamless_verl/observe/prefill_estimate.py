"""Estimates when the prefill of a resumed request ended, so that the ledger can say what interruptions cost. Pure.

verl 0.9.1 returns an answer as a whole, without the time of its first token. What it does tell of every request is how
many prompt tokens it had, how many of them the prefix cache held, and how many tokens were generated. So the run's own
requests say what a prefilled and a generated token cost (least squares), and the time of a resumed request is split in
that proportion. Remove when verl passes vLLM's request timings on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from seamless_verl.observe.flight import FirstToken, FlightEvent, RequestEnded, RequestStarted

# Fewer requests say nothing about two costs.
_LEAST = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCosts:
    """Seconds per prompt token that was not cached, and per generated token, as a single request sees them."""

    prefill_s: float
    decode_s: float


def with_first_tokens(events: Sequence[FlightEvent]) -> tuple[FlightEvent, ...]:
    """``events`` (in order of time) and, for every resumed request that ended, an estimated `FirstToken`.

    Nothing is added where the engine tells nothing about its cache, or the requests do not determine the costs.
    """
    pairs = list(_pairs(events))
    costs = fit((_uncached(*pair), pair[1].tokens, pair[1].at - pair[0].at) for pair in pairs)
    if costs is None:
        return tuple(events)
    first: dict[int, FirstToken] = {}  # by the identity of the start that it belongs to
    for start, end in pairs:
        prefill, decode = costs.prefill_s * _uncached(start, end), costs.decode_s * end.tokens
        if start.resumed and not start.first_token_follows and prefill > 0:
            share = prefill / (prefill + decode)
            at = start.at + share * (end.at - start.at)
            first[id(start)] = FirstToken(at=at, request=start.request, slice=start.slice)
    told: list[FlightEvent] = [
        replace(event, first_token_follows=True) if isinstance(event, RequestStarted) and id(event) in first else event
        for event in events
    ]
    return tuple(sorted([*told, *first.values()], key=lambda event: event.at))


def fit(requests: Iterable[tuple[int, int, float]]) -> TokenCosts | None:
    """Costs that explain ``(prompt tokens not cached, tokens generated, seconds)`` best in least squares.

    Returns:
        ``None`` if there are too few requests, all alike, or explained best by a cost that is not positive.
    """
    measured = np.array(list(requests), dtype=float).reshape(-1, 3)
    counts, seconds = measured[:, :2], measured[:, 2]
    normal = counts.T @ counts
    if len(measured) < _LEAST or np.linalg.det(normal) <= 1e-9 * normal[0, 0] * normal[1, 1]:
        return None
    prefill_s, decode_s = map(float, np.linalg.solve(normal, counts.T @ seconds))
    return TokenCosts(prefill_s=prefill_s, decode_s=decode_s) if prefill_s > 0 and decode_s > 0 else None


def _pairs(events: Iterable[FlightEvent]) -> Iterator[tuple[RequestStarted, RequestEnded]]:
    """Requests that ended, with a known number of cached tokens."""
    out: dict[str, RequestStarted] = {}
    for event in events:
        if isinstance(event, RequestStarted):
            out[event.request] = event
        elif isinstance(event, RequestEnded):
            start = out.pop(event.request, None)
            if start is not None and event.cached_tokens is not None and event.tokens:
                yield start, event


def _uncached(start: RequestStarted, end: RequestEnded) -> int:
    return max(0, start.prompt_tokens - (end.cached_tokens or 0))
