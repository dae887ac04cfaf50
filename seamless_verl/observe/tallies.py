"""What a recording says beside the ledger, counted in one pass: requests, rows, attempts, decisions, phases. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from seamless_verl.observe import flight
from seamless_verl.observe.memory import MemoryLevels
from seamless_verl.observe.time_ledger import AccountKey

_ENDED = ("completed", "stop", "length")
INTERRUPTED = ("abort", "aborted")  # how requests end whose tokens are kept
_ABANDONED = ("CancelledError", flight.WORKER_DIED)


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
        prefilled_again: prompt tokens of resumed requests that were not in the prefix cache, of those of which the
            engine told (it tells nothing of what was cancelled, or died with it); ``None``: of none.
        moved: how often a session's interrupted request went on on another slice, by (from, to).
        seconds: duration of each that ended.
    """

    started: int = 0
    tokens: int = 0
    interrupted: int = 0
    abandoned: int = 0
    failed: int = 0
    resumed: int = 0
    prefilled_again: int | None = None
    moved: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Rows:
    """Staleness and lengths of all rows that were trained; one entry per row or per step."""

    staleness: Counter[int] = field(default_factory=Counter)
    prompt_tokens: list[int] = field(default_factory=list)
    response_tokens: list[int] = field(default_factory=list)
    per_rollout: list[tuple[int, float]] = field(default_factory=list)  # (step, rows / rollouts)


@dataclass(slots=True)
class GroupRewards:
    """Attempts of one group that ended.

    Attributes:
        at: when the last of them did.
        validation: one of them ended while the trainer validated.
    """

    at: float
    low: float
    high: float
    attempts: int
    validation: bool


@dataclass(slots=True)
class Sessions:
    """Attempts of agents that ended, validation included.

    Attributes:
        spans: when each was under way.
        groups: rewards by group.
    """

    ended: int = 0
    turns: int = 0
    seconds: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    drift: Counter[str] = field(default_factory=Counter)
    groups: dict[str, GroupRewards] = field(default_factory=dict)


class Tallies:
    """What the digest needs beside the ledger, gathered in one pass.

    Attributes:
        start: the last `RunStarted`; ``None`` without a recording.
        end: ``None`` while the run goes on, or when it was killed.
        phases: seconds of the trainer in each phase, without the phases inside of it.
        load: by slice, pool and devices, ``(time, requests out on it from then on)``.
        decisions, outcomes: with the number of their run in this folder.
        versions: ``(time, weight version)``.
        lost: events that the recorder dropped.
        weights_checked: loans whose weights were the published ones (True), and those whose were not.
        step_spans: ``(step, start, stop)``.
        cut_off: the last of them had not ended with the recording.
    """

    def __init__(self) -> None:
        self.start: flight.RunStarted | None = None
        self.end: flight.RunEnded | None = None
        self.phases: defaultdict[flight.Phase, float] = defaultdict(float)
        self.load: defaultdict[AccountKey, list[tuple[float, int]]] = defaultdict(list)
        self.decisions: list[tuple[int, flight.DecisionMade]] = []
        self.outcomes: dict[tuple[int, str], flight.DecisionRealised] = {}
        self.versions: list[tuple[float, int]] = []
        self.requests = Requests()
        self._left: dict[str, str] = {}  # session -> slice that interrupted it
        self.rows = Rows()
        self.sessions = Sessions()
        self.lost = 0
        self.memory = MemoryLevels()
        self.weights_checked: Counter[bool] = Counter()
        self.step_spans: list[tuple[int, float, float]] = []
        self.cut_off = False
        self._run = 0
        self._open_step: tuple[int, float] | None = None
        self._names: dict[str, str] = {}
        self._keys: dict[str, AccountKey] = {}
        self._out: dict[str, flight.RequestStarted] = {}
        self._levels: Counter[AccountKey] = Counter()
        self._nested: list[flight.Phase] = []
        self._phase_since = 0.0
        self._latest = 0.0

    def finish(self, at: float) -> None:
        """The recording ends; what is open then counts until ``at``."""
        self._charge_phase(at)
        if self._open_step is not None:
            self.step_spans.append((*self._open_step, at))
            self._open_step, self.cut_off = None, True

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
                    self.step_spans.append((*self._open_step, event.at))
                self._open_step = None
            case flight.PhaseBegan():
                self._charge_phase(event.at)
                self._nested.append(event.phase)
            case flight.PhaseEnded():
                self._phase_ended(event)
            case flight.DecisionMade():
                self.decisions.append((self._run, event))
            case flight.DecisionRealised():
                self.outcomes[self._run, event.decision] = event
            case flight.WeightsPublished():
                self.versions.append((event.at, event.version))
            case flight.SliceAdded():
                self._names[event.address or event.slice] = event.slice
                self._keys[event.slice] = event.slice, event.pool, event.devices
            case flight.RunStarted():
                self._run_started(event)
            case flight.RunEnded():
                self.end = event
                self._close(event.at)
            case flight.MemoryHeld():
                self.memory.hold(event)
            case flight.WeightsChecked():
                self.weights_checked[event.published == event.held] += 1
            case flight.EventsLost():
                self.lost += event.count
        self._latest = event.at

    def _run_started(self, event: flight.RunStarted) -> None:
        self.start, self.end = event, None
        self._run += 1
        self._close(self._latest)  # an earlier run in this folder was killed after its last event
        self._open_step = None  # of a run that was killed; what it had done of the step is done again

    def _charge_phase(self, at: float) -> None:
        if self._nested:
            self.phases[self._nested[-1]] += at - self._phase_since
        self._phase_since = at

    def _phase_ended(self, event: flight.PhaseEnded) -> None:
        self._charge_phase(event.at)
        if event.phase in self._nested:  # phases inside it have ended with it
            del self._nested[len(self._nested) - 1 - self._nested[::-1].index(event.phase) :]

    def _close(self, at: float) -> None:
        """A run is over: nothing of it goes on."""
        self.memory.clear(at)
        self._charge_phase(at)
        self._nested.clear()
        self._out.clear()
        for key in self._levels:
            self.load[key].append((at, 0))
        self._levels.clear()

    def _request_started(self, event: flight.RequestStarted) -> None:
        self._out[event.request] = event
        self.requests.started += 1
        self.requests.resumed += event.resumed
        place, left = self._name(event), self._left.pop(event.session, None)
        if event.resumed and left not in (None, place):
            self.requests.moved[left, place] += 1
        self._level(event, 1)

    def _request_ended(self, event: flight.RequestEnded) -> None:
        start = self._out.pop(event.request, None)
        if start is None:
            return
        self._level(event, -1)
        requests = self.requests
        requests.tokens += event.tokens
        requests.seconds.append(event.at - start.at)
        if event.finish in INTERRUPTED:
            requests.interrupted += 1
            if start.session:
                self._left[start.session] = self._name(event)
        requests.abandoned += event.finish in _ABANDONED
        requests.failed += event.finish not in {*INTERRUPTED, *_ABANDONED, *_ENDED}
        if start.resumed and event.cached_tokens is not None:
            requests.prefilled_again = (requests.prefilled_again or 0) + start.prompt_tokens - event.cached_tokens

    def _name(self, event: flight.RequestStarted | flight.RequestEnded) -> str:
        return self._names.get(event.slice, event.slice)

    def _level(self, event: flight.RequestStarted | flight.RequestEnded, change: int) -> None:
        name = self._name(event)
        key = self._keys.get(name, (name, "", 0))
        self._levels[key] += change
        self.load[key].append((event.at, self._levels[key]))

    def _session_ended(self, event: flight.SessionEnded) -> None:
        self.sessions.ended += 1
        self.sessions.turns += event.turns
        self.sessions.seconds.append(event.seconds)
        self.sessions.spans.append((event.at - event.seconds, event.at))
        self.sessions.statuses[event.status] += 1
        self.sessions.drift.update(event.drift)
        validation = flight.Phase.VALIDATE in self._nested
        group = self.sessions.groups.setdefault(
            event.group, GroupRewards(event.at, event.reward, event.reward, 0, validation)
        )
        group.at, group.attempts = event.at, group.attempts + 1
        group.low, group.high = min(group.low, event.reward), max(group.high, event.reward)
        group.validation |= validation

    def _rows_trained(self, event: flight.RowsTrained) -> None:
        self.rows.staleness.update(event.staleness)
        self.rows.prompt_tokens += event.prompt_tokens
        self.rows.response_tokens += event.response_tokens
        if event.rollouts:
            self.rows.per_rollout.append((event.step, len(event.response_tokens) / event.rollouts))
