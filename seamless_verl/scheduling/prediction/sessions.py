"""Which sessions are out, how far they are, and what finished ones teach about speed and length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from seamless_verl.scheduling.events import (
    Ending,
    Event,
    GroupsSubmitted,
    RequestFinished,
    RequestStarted,
    SessionFinished,
    SliceReady,
)
from seamless_verl.scheduling.prediction.decode import DecodeModel
from seamless_verl.scheduling.prediction.lengths import LengthModel
from seamless_verl.scheduling.roofline import Roofline
from seamless_verl.scheduling.slices import SliceId

_GOLDEN = 0.6180339887498949  # a low-discrepancy sequence: quantiles of successive sessions spread evenly
_MIN_TOKENS = 4  # shorter requests say more about the prompt than about decoding


@dataclass(slots=True, kw_only=True)
class Session:
    """``u`` is the quantile of its length that plans assume, the same in all plans that are compared."""

    group: str
    u: float
    tokens: int = 0
    request: str | None = None
    slice: SliceId | None = None


@dataclass(slots=True, kw_only=True)
class _Request:
    session: str
    at: float
    slice: SliceId
    context: int
    load_before: float
    context_before: float
    age_before: float


@dataclass(slots=True)
class _Load:
    """Integrals over time of what runs on a slice: requests, tokens they began with, seconds since they began."""

    n: int = 0
    context: int = 0
    age: float = 0.0
    at: float = 0.0
    n_s: float = 0.0
    context_s: float = 0.0
    age_s: float = 0.0

    def move_to(self, at: float) -> None:
        elapsed = at - self.at
        self.n_s += self.n * elapsed
        self.context_s += self.context * elapsed
        self.age_s += (self.age + self.n * elapsed / 2) * elapsed
        self.age += self.n * elapsed
        self.at = at


@dataclass(slots=True)
class SessionBook:
    """Fed with every event; knows nothing that no event said."""

    decode: DecodeModel = field(default_factory=DecodeModel)
    lengths: LengthModel = field(default_factory=LengthModel)
    sessions: dict[str, Session] = field(default_factory=dict)
    unstarted: dict[str, int] = field(default_factory=dict)  # group -> sessions that never asked
    open_members: dict[str, int] = field(default_factory=dict)  # group -> sessions that did not finish
    crowd: int = 0  # sessions that were out when prompts were last submitted
    turn_s: float = 0.0  # mean duration of a request, smoothed
    _requests: dict[str, _Request] = field(default_factory=dict)
    _loads: dict[SliceId, _Load] = field(default_factory=dict)
    _seen: int = 0

    def observe(self, event: Event, roofline: Roofline) -> None:
        if isinstance(event, GroupsSubmitted):
            for group in event.groups:
                self.unstarted[group] = event.sessions
                self.open_members[group] = event.sessions
            self.crowd = sum(self.open_members.values())
        elif isinstance(event, RequestStarted):
            self._started(event)
        elif isinstance(event, RequestFinished):
            self._finished(event, roofline)
        elif isinstance(event, SessionFinished):
            self._closed(event)
        elif isinstance(event, SliceReady):
            self._awake(event)

    def lost(self, slice_id: SliceId) -> None:
        """The slice died: its requests end without an event."""
        for name in [name for name, request in self._requests.items() if request.slice == slice_id]:
            self._drop(name)
        self._loads.pop(slice_id, None)

    def progress(self, session: Session, now: float, step_s: float) -> float:
        """Tokens it has by now, those of the running request estimated."""
        if session.request is None:
            return session.tokens
        return session.tokens + (now - self._requests[session.request].at) / step_s

    def running(self) -> int:
        return len(self._requests)

    def next_quantiles(self) -> Iterator[float]:
        """Quantiles for sessions that do not exist yet."""
        index = self._seen
        while True:
            index += 1
            yield (index * _GOLDEN) % 1.0

    def context_per_request(self) -> float:
        """Tokens that a running request began with, on average."""
        contexts = sum(load.context for load in self._loads.values())
        return contexts / len(self._requests) if self._requests else 0.0

    def age_s(self, now: float) -> float:
        """Mean seconds since the running requests began."""
        ages = sum(load.age + load.n * (now - load.at) for load in self._loads.values())
        return ages / len(self._requests) if self._requests else 0.0

    def _started(self, event: RequestStarted) -> None:
        if event.session not in self.sessions:
            self._seen += 1
            self.sessions[event.session] = Session(group=event.group, u=(self._seen * _GOLDEN) % 1.0)
            left = self.unstarted.get(event.group, 0) - 1
            if left > 0:
                self.unstarted[event.group] = left
            else:
                self.unstarted.pop(event.group, None)
        session = self.sessions[event.session]
        session.request, session.slice = event.request, event.slice
        load = self._loads.setdefault(event.slice, _Load(at=event.at))
        load.move_to(event.at)
        load.n += 1
        load.context += event.context_tokens
        self._requests[event.request] = _Request(
            session=event.session,
            at=event.at,
            slice=event.slice,
            context=event.context_tokens,
            load_before=load.n_s,
            context_before=load.context_s,
            age_before=load.age_s,
        )

    def _awake(self, event: SliceReady) -> None:
        """Requests that were routed to a slice before it was awake begin now."""
        load = self._loads.get(event.slice)
        if load is None:
            return
        load.move_to(event.at)
        load.age = 0.0
        for request in self._requests.values():
            if request.slice == event.slice:
                request.at, request.load_before, request.context_before = event.at, load.n_s, load.context_s
                request.age_before = load.age_s

    def _finished(self, event: RequestFinished, roofline: Roofline) -> None:
        request = self._requests.get(event.request)
        if request is None:
            return
        load = self._loads[request.slice]
        load.move_to(event.at)
        took = event.at - request.at
        if event.ending is not Ending.FAILED:
            self.sessions[request.session].tokens += event.tokens
            self.turn_s = took if self.turn_s == 0.0 else 0.9 * self.turn_s + 0.1 * took
            if event.tokens >= _MIN_TOKENS and took > 0:
                n = (load.n_s - request.load_before) / took
                grown = (load.age_s - request.age_before) / took * event.tokens / took  # decoding is in lock-step
                kv = (load.context_s - request.context_before) / took + grown
                self._learn(request.slice, roofline, n=n, kv=kv, seconds=took / event.tokens, tokens=event.tokens)
        load.n -= 1
        load.context -= request.context
        load.age -= took
        self._drop(event.request)

    def _learn(
        self, slice_id: SliceId, roofline: Roofline, *, n: float, kv: float, seconds: float, tokens: int
    ) -> None:
        speed = roofline.speed(slice_id)
        if self.decode.known:
            roofline.measured(slice_id, seconds / self.decode.step_s(n / speed, kv / speed))
        self.decode.observe(n=n / speed, kv=kv / speed, seconds_per_token=seconds, tokens=tokens)

    def _drop(self, name: str) -> None:
        request = self._requests.pop(name)
        session = self.sessions.get(request.session)
        if session is not None and session.request == name:
            session.request = session.slice = None

    def _closed(self, event: SessionFinished) -> None:
        left = self.open_members.get(event.group, 0) - 1
        if left > 0:
            self.open_members[event.group] = left
        else:
            self.open_members.pop(event.group, None)
            self.unstarted.pop(event.group, None)
        session = self.sessions.pop(event.session, None)
        if session is not None:
            self.lengths.observe(session.tokens)
