"""A recording and the records of its run, boiled down to what the report shows. Pure: events in, figures out.

verl 0.9.1 returns an answer as a whole, without the time of its first token; `with_first_tokens` estimates when the
prefill of a resumed request ended, so that the ledger can say what interruptions cost. What verl does tell of every
request is how many prompt tokens it had, how many of them the prefix cache held, and how many tokens were generated. So
the run's own requests say what a prefilled and a generated token cost (least squares), and the time of a resumed
request is split in that proportion. Remove when verl passes vLLM's request timings on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from seamless_verl.observe.flight import (
    FirstToken,
    FlightEvent,
    PullEnded,
    RequestEnded,
    RequestStarted,
    SliceAdded,
    SliceMoved,
    SliceState,
)
from seamless_verl.observe.intervals import overlap, union
from seamless_verl.observe.memory import SliceMemory
from seamless_verl.observe.recording import Recording
from seamless_verl.observe.tallies import DecisionRow, Tallies
from seamless_verl.observe.time_ledger import IDLE, AccountKey, Category, Ledger, SliceSeconds, Stretch

Seconds = Mapping[Category, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One slice, as long as it had that size.

    Attributes:
        stretches: in order of time, disjoint; gaps are times in which the slice did not exist.
        load: ``(time, requests out on it from then on)``, in order of time.
    """

    slice: str
    pool: str
    devices: int
    stretches: tuple[Stretch, ...]
    load: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpan:
    """A training step: when, and the device-seconds of each pool by category."""

    step: int
    start: float
    stop: float
    pools: Mapping[str, Seconds]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDigest:
    """Everything that the report shows.

    Attributes:
        tallies: what was counted in the recording.
        running: its process lives.
        span_s: seconds from the first to the last event.
        start_up_s: seconds from the command to the recording, by part; empty where nobody wrote them down.
        lanes, books: one entry per slice (two, if its size changed).
        memory: one entry per slice whose memory was counted.
        steps, validations: records of the run folder.
        guard: by step, how far rows computed with ``seamless.shared_prefix`` and without it were apart.
    """

    recording: Recording
    tallies: Tallies
    running: bool
    span_s: float
    start_up_s: Mapping[str, float]
    lanes: tuple[Lane, ...]
    books: tuple[SliceSeconds, ...]
    step_spans: tuple[StepSpan, ...]
    decisions: tuple[DecisionRow, ...]
    memory: tuple[SliceMemory, ...]
    steps: tuple[Mapping[str, Any], ...]
    validations: tuple[Mapping[str, Any], ...]
    guard: tuple[Mapping[str, Any], ...]

    @property
    def outcome(self) -> str | None:
        return self.tallies.end.outcome if self.tallies.end is not None else None

    @property
    def bound(self) -> int | None:
        """On staleness; ``None``: nothing keeps one."""
        return self.tallies.start.bound if self.tallies.start is not None else None

    @property
    def whole_steps(self) -> tuple[StepSpan, ...]:
        """Steps that were recorded to their end; of one repeated after a resumption the last."""
        spans = self.step_spans[:-1] if self.tallies.cut_off else self.step_spans
        return tuple({span.step: span for span in spans}.values())

    def pools(self) -> dict[str, dict[Category, float]]:
        """Device-seconds of the whole recording by pool and category."""
        return _by_pool((entry.pool, entry.devices, entry.seconds) for entry in self.books)

    def validation_sets(self) -> dict[str, list[Mapping[str, Any]]]:
        """Validations by their set, in order of steps."""
        sets: dict[str, list[Mapping[str, Any]]] = {}
        for record in sorted(self.validations, key=lambda record: record["step"]):
            sets.setdefault(record["name"], []).append(record)
        return sets

    def idle_with_agents(self, pool: str) -> float:
        """Share of the pool's idle time in which some attempt of an agent was under way; 0 if it never idled."""
        busy = union(self.tallies.sessions.spans)
        idle = [
            (stretch.start, stretch.stop)
            for lane in self.lanes
            for stretch in (lane.stretches if lane.pool == pool else ())
            if stretch.category in IDLE
        ]
        total = sum(stop - start for start, stop in idle)
        return sum(overlap(busy, start, stop) for start, stop in idle) / total if total else 0.0

    def device_s_per_token(self) -> float | None:
        """Device-seconds in steps per token that carried a gradient, over steps with both known; ``None``: none has."""
        spans = {span.step: sum(sum(seconds.values()) for seconds in span.pools.values()) for span in self.whole_steps}
        known = [record for record in self.steps if spans.get(record["step"])]
        tokens = sum(record["tokens_per_s"] * record["step_s"] for record in known)
        return sum(spans[record["step"]] for record in known) / tokens if tokens else None

    def pools_in_steps(self) -> dict[str, dict[Category, float]]:
        """Device-seconds inside of training steps; validation and what lies between steps is left out."""
        return _by_pool((pool, 1, seconds) for span in self.step_spans for pool, seconds in span.pools.items())


def _by_pool(spent: Iterable[tuple[str, int, Seconds]]) -> dict[str, dict[Category, float]]:
    """Device-seconds by pool and category, of ``(pool, devices, seconds of each)``."""
    found: dict[str, dict[Category, float]] = {}
    for pool, devices, seconds in spent:
        sums = found.setdefault(pool, dict.fromkeys(Category, 0.0))
        for category, value in seconds.items():
            sums[category] += devices * value
    return found


def digest(
    recording: Recording,
    steps: Sequence[Mapping[str, Any]],
    validations: Sequence[Mapping[str, Any]],
    *,
    start_up_s: Mapping[str, float] | None = None,
    running: bool = False,
    guard: Sequence[Mapping[str, Any]] = (),
) -> RunDigest:
    """Work out what the report shows of a run.

    Args:
        steps, validations: records of ``steps.jsonl`` and ``validation.jsonl``; of a step repeated after a resumption
            the last counts, but violations of all do: what an audit ended is repeated.
        start_up_s: of ``summary.json``.
        running: whether the process of the run lives.
        guard: of ``metrics.jsonl``, with ``step`` and ``*/shared_prefix/*``.
    """
    stretches: defaultdict[AccountKey, list[Stretch]] = defaultdict(list)
    ledger = Ledger(lambda stretch: stretches[stretch.account].append(stretch))
    tallies = Tallies()
    for event in with_first_tokens(with_pulls(recording.events)):
        ledger.handle(event)
        tallies.handle(event)
    span_s = recording.events[-1].at if recording.events else 0.0
    tallies.finish(span_s)
    books = ledger.books(span_s)
    keys = [(entry.slice, entry.pool, entry.devices) for entry in books]
    lanes = tuple(_lane(key, stretches[key], tallies.load[key]) for key in keys)
    violations: Counter[int] = Counter()
    for record in steps:
        violations[record["step"]] += record.get("audit_violations", 0)
    return RunDigest(
        recording=recording,
        tallies=tallies,
        running=running,
        span_s=span_s,
        start_up_s=start_up_s or {},
        lanes=lanes,
        books=books,
        step_spans=_by_step(tallies.step_spans, lanes),
        decisions=tallies.decided(),
        memory=tallies.memory.of_slices(),
        steps=tuple({r["step"]: {**r, "audit_violations": violations[r["step"]]} for r in steps}.values()),
        validations=tuple(validations),
        guard=tuple({record["step"]: record for record in guard}.values()),
    )


def _lane(key: AccountKey, stretches: Sequence[Stretch], load: Sequence[tuple[float, int]]) -> Lane:
    return Lane(slice=key[0], pool=key[1], devices=key[2], stretches=tuple(stretches), load=tuple(load))


def _by_step(spans: Sequence[tuple[int, float, float]], lanes: Sequence[Lane]) -> tuple[StepSpan, ...]:
    """Cut all stretches at the bounds of the steps; ``spans`` are disjoint and in order of time."""
    starts = [start for _, start, _ in spans]
    sums: list[dict[str, dict[Category, float]]] = [{} for _ in spans]
    for lane in lanes:
        for stretch in lane.stretches:
            index = max(0, bisect_right(starts, stretch.start) - 1)
            while index < len(spans) and spans[index][1] < stretch.stop:
                _, start, stop = spans[index]
                overlap = min(stop, stretch.stop) - max(start, stretch.start)
                if overlap > 0:
                    pool = sums[index].setdefault(lane.pool, dict.fromkeys(Category, 0.0))
                    pool[stretch.category] += lane.devices * overlap
                index += 1
    return tuple(
        StepSpan(step=step, start=start, stop=stop, pools=pools)
        for (step, start, stop), pools in zip(spans, sums, strict=True)
    )


# ---------------------------------------------------------------- when replicas took weights

_PULLED = "pulled"  # why a slice moved


def with_pulls(events: Sequence[FlightEvent]) -> tuple[FlightEvent, ...]:
    """``events`` (in order of time), in which a slice that pulls weights loads for as long as its pull held it up.

    That it was in the state of loading says of such a slice only that the trainer handed weights over: it generated on.
    """
    servers: dict[str, str] = {}
    pulls: list[SliceMoved] = []
    for event in events:
        if isinstance(event, SliceAdded):
            servers[event.address or event.slice] = event.slice
        elif isinstance(event, PullEnded) and event.stood_s:
            name = servers.get(event.slice, event.slice)
            for at, state in ((event.at - event.stood_s, SliceState.SYNCING), (event.at, SliceState.ROLLOUT)):
                pulls.append(SliceMoved(at=at, slice=name, state=state, reason=_PULLED))
    pulled = {move.slice for move in pulls}
    states: dict[str, SliceState] = {}
    kept: list[FlightEvent] = []
    for event in sorted([*events, *pulls], key=lambda event: event.at):
        if isinstance(event, SliceMoved) and event.slice in pulled:
            loads = {states.get(event.slice), event.state} == {SliceState.ROLLOUT, SliceState.SYNCING}
            if loads is not (event.reason == _PULLED):  # a hand-over, or a pull of a replica that died meanwhile
                continue
        if isinstance(event, (SliceAdded, SliceMoved)):
            states[event.slice] = event.state
        kept.append(event)
    return tuple(kept)


# ---------------------------------------------------------------- where prefill ended


_FEWEST_REQUESTS = 20  # that say something about two costs


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
    costs = token_costs((_uncached(*pair), pair[1].tokens, pair[1].at - pair[0].at) for pair in pairs)
    if costs is None:
        return tuple(events)
    first: dict[int, FirstToken] = {}  # by the identity of the start that it belongs to
    for start, end in pairs:
        prefill, decode = costs.prefill_s * _uncached(start, end), costs.decode_s * end.tokens
        if start.resumed and not start.first_token_follows and prefill > 0:
            share = prefill / (prefill + decode)
            at = start.at + share * (end.at - start.at)
            first[id(start)] = FirstToken(at=at, request=start.request, slice=start.slice)
    announced: list[FlightEvent] = [
        replace(event, first_token_follows=True) if isinstance(event, RequestStarted) and id(event) in first else event
        for event in events
    ]
    return tuple(sorted([*announced, *first.values()], key=lambda event: event.at))


def token_costs(requests: Iterable[tuple[int, int, float]]) -> TokenCosts | None:
    """Costs that explain ``(prompt tokens not cached, tokens generated, seconds)`` best in least squares.

    Returns:
        ``None`` if there are too few requests, all alike, or explained best by a cost that is not positive.
    """
    measured = np.array(list(requests), dtype=float).reshape(-1, 3)
    counts, seconds = measured[:, :2], measured[:, 2]
    normal = counts.T @ counts
    if len(measured) < _FEWEST_REQUESTS or np.linalg.det(normal) <= 1e-9 * normal[0, 0] * normal[1, 1]:
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
