"""A recording and the records of its run, boiled down to what the report shows. Pure: events in, figures out."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seamless_verl.observe import flight
from seamless_verl.observe.lanes import Lane
from seamless_verl.observe.ledger import Category, Ledger, SliceSeconds, Stretch
from seamless_verl.observe.recording import Recording

Seconds = Mapping[Category, float]

_ENDED = ("completed", "stop", "length")
_INTERRUPTED = ("abort", "aborted")
_ABANDONED = ("CancelledError",)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpan:
    """A training step: when, and the device-seconds of each pool by category."""

    step: int
    start: float
    stop: float
    pools: Mapping[str, Seconds]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRow:
    """A decision, and what came of it as far as that is known."""

    made: flight.DecisionMade
    outcome: flight.DecisionRealised | None


@dataclass(slots=True)
class Requests:
    """Generations by replicas.

    Attributes:
        interrupted: the replica stopped them and their tokens were kept.
        abandoned: whoever asked had gone, e.g. an agent at its deadline.
        prefilled_again: prompt tokens of resumed requests that were not in the prefix cache; ``None`` if the engine
            does not tell.
        seconds: duration of each that ended.
    """

    started: int = 0
    tokens: int = 0
    interrupted: int = 0
    abandoned: int = 0
    failed: int = 0
    resumed: int = 0
    prefilled_again: int | None = 0
    seconds: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Rows:
    """Of everything trained; one entry per row or per step."""

    staleness: Counter[int] = field(default_factory=Counter)
    prompt_tokens: list[int] = field(default_factory=list)
    response_tokens: list[int] = field(default_factory=list)
    per_rollout: list[tuple[int, float]] = field(default_factory=list)  # (step, rows / rollouts)


@dataclass(slots=True)
class Sessions:
    """Attempts of agents that ended, validation included."""

    ended: int = 0
    turns: int = 0
    seconds: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    drift: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDigest:
    """Everything that the report shows.

    Attributes:
        start: the last `RunStarted`, or ``None`` for a folder without a recording.
        outcome: how the run ended, or ``None`` while it goes on (or was killed).
        span_s: seconds from the first to the last event.
        lanes, books: one entry per slice.
        versions: ``(time, weight version)``.
        steps, validations: records of the run folder.
        lost: events that the recorder dropped.
    """

    recording: Recording
    start: flight.RunStarted | None
    outcome: str | None
    span_s: float
    lanes: tuple[Lane, ...]
    books: tuple[SliceSeconds, ...]
    step_spans: tuple[StepSpan, ...]
    decisions: tuple[DecisionRow, ...]
    versions: tuple[tuple[float, int], ...]
    requests: Requests
    rows: Rows
    sessions: Sessions
    lost: int
    steps: tuple[Mapping[str, Any], ...]
    validations: tuple[Mapping[str, Any], ...]

    def pools(self) -> dict[str, dict[Category, float]]:
        """Device-seconds of the whole recording by pool and category."""
        found: dict[str, dict[Category, float]] = {}
        for entry in self.books:
            pool = found.setdefault(entry.pool, dict.fromkeys(Category, 0.0))
            for category, seconds in entry.seconds.items():
                pool[category] += entry.devices * seconds
        return found

    def pools_in_steps(self) -> dict[str, dict[Category, float]]:
        """Device-seconds inside of training steps; validation and what lies between steps is left out."""
        found: dict[str, dict[Category, float]] = {}
        for span in self.step_spans:
            for pool, seconds in span.pools.items():
                sums = found.setdefault(pool, dict.fromkeys(Category, 0.0))
                for category, value in seconds.items():
                    sums[category] += value
        return found


def digest(
    recording: Recording, steps: Sequence[Mapping[str, Any]], validations: Sequence[Mapping[str, Any]]
) -> RunDigest:
    """Args:
    steps, validations: records of ``steps.jsonl`` and ``validation.jsonl``; of a step repeated after a resumption
        the last counts.
    """
    stretches: defaultdict[str, list[Stretch]] = defaultdict(list)
    ledger = Ledger(lambda stretch: stretches[stretch.slice].append(stretch))
    watch = _Watch()
    for event in recording.events:
        ledger.handle(event)
        watch.handle(event)
    span_s = recording.events[-1].at if recording.events else 0.0
    books = ledger.books(span_s)
    lanes = tuple(
        Lane(
            slice=entry.slice,
            pool=entry.pool,
            devices=entry.devices,
            stretches=tuple(stretches[entry.slice]),
            load=tuple(watch.load[entry.slice]),
        )
        for entry in books
    )
    return RunDigest(
        recording=recording,
        start=watch.start,
        outcome=watch.outcome,
        span_s=span_s,
        lanes=lanes,
        books=books,
        step_spans=_by_step(watch.finished_steps(span_s), lanes),
        decisions=watch.decided(),
        versions=tuple(watch.versions),
        requests=watch.requests,
        rows=watch.rows,
        sessions=watch.sessions,
        lost=watch.lost,
        steps=tuple({record["step"]: record for record in steps}.values()),
        validations=tuple(validations),
    )


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


class _Watch:
    """What the digest needs beside the ledger, gathered in one pass."""

    def __init__(self) -> None:
        self.start: flight.RunStarted | None = None
        self.outcome: str | None = None
        self.load: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        self.decisions: list[tuple[int, flight.DecisionMade]] = []  # with the number of its run in this folder
        self.outcomes: dict[tuple[int, str], flight.DecisionRealised] = {}
        self.versions: list[tuple[float, int]] = []
        self.requests = Requests()
        self.rows = Rows()
        self.sessions = Sessions()
        self.lost = 0
        self._run = 0
        self._spans: list[tuple[int, float, float]] = []
        self._open_step: tuple[int, float] | None = None
        self._names: dict[str, str] = {}
        self._out: dict[str, flight.RequestStarted] = {}
        self._levels: Counter[str] = Counter()

    def finished_steps(self, now: float) -> list[tuple[int, float, float]]:
        """Steps, the one that was cut off included."""
        if self._open_step is None:
            return self._spans
        return [*self._spans, (*self._open_step, now)]

    def decided(self) -> tuple[DecisionRow, ...]:
        return tuple(
            DecisionRow(made=made, outcome=self.outcomes.get((run, made.decision))) for run, made in self.decisions
        )

    def handle(self, event: flight.FlightEvent) -> None:
        match event:
            case flight.RequestStarted():
                self._request_started(event)
            case flight.RequestEnded():
                self._request_ended(event)
            case flight.SessionEnded():
                self._session_ended(event)
            case flight.RowsTrained():
                self._rows_trained(event)
            case flight.StepBegan():
                self._open_step = event.step, event.at
            case flight.StepEnded():
                if self._open_step is not None:
                    self._spans.append((*self._open_step, event.at))
                self._open_step = None
            case flight.DecisionMade():
                self.decisions.append((self._run, event))
            case flight.DecisionRealised():
                self.outcomes[self._run, event.decision] = event
            case flight.WeightsPublished():
                self.versions.append((event.at, event.version))
            case flight.SliceAdded():
                self._names[event.address or event.slice] = event.slice
            case flight.RunStarted():
                self._run_started(event)
            case flight.RunEnded():
                self.outcome = event.outcome
                self._close_requests(event.at)
            case flight.EventsLost():
                self.lost += event.count

    def _run_started(self, event: flight.RunStarted) -> None:
        self.start, self.outcome = event, None
        self._run += 1
        self._open_step = None  # of a run that was killed; what it had done of the step is done again
        self._close_requests(event.at)

    def _close_requests(self, at: float) -> None:
        self._out.clear()
        for name in self._levels:
            self.load[name].append((at, 0))
        self._levels.clear()

    def _request_started(self, event: flight.RequestStarted) -> None:
        self._out[event.request] = event
        self.requests.started += 1
        self.requests.resumed += event.resumed
        self._level(event, 1)

    def _request_ended(self, event: flight.RequestEnded) -> None:
        start = self._out.pop(event.request, None)
        if start is None:
            return
        self._level(event, -1)
        requests = self.requests
        requests.tokens += event.tokens
        requests.seconds.append(event.at - start.at)
        requests.interrupted += event.finish in _INTERRUPTED
        requests.abandoned += event.finish in _ABANDONED
        requests.failed += event.finish not in {*_INTERRUPTED, *_ABANDONED, *_ENDED}
        if start.resumed and requests.prefilled_again is not None:
            known = event.cached_tokens is not None
            requests.prefilled_again = (
                requests.prefilled_again + start.prompt_tokens - (event.cached_tokens or 0) if known else None
            )

    def _level(self, event: flight.RequestStarted | flight.RequestEnded, change: int) -> None:
        name = self._names.get(event.slice, event.slice)
        self._levels[name] += change
        self.load[name].append((event.at, self._levels[name]))

    def _session_ended(self, event: flight.SessionEnded) -> None:
        self.sessions.ended += 1
        self.sessions.turns += event.turns
        self.sessions.seconds.append(event.seconds)
        self.sessions.statuses[event.status] += 1
        self.sessions.drift.update(event.drift)

    def _rows_trained(self, event: flight.RowsTrained) -> None:
        self.rows.staleness.update(event.staleness)
        self.rows.prompt_tokens += event.prompt_tokens
        self.rows.response_tokens += event.response_tokens
        if event.rollouts:
            self.rows.per_rollout.append((event.step, len(event.response_tokens) / event.rollouts))
