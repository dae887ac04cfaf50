"""Which sessions are out, how far they are, and what finished ones teach about speed and length.

An engine decodes as many requests at once as its slice has seats. The others wait, the oldest session is served first,
and waiting is none of the time that decoding took them.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from seamless_verl.scheduling.cluster import Roofline
from seamless_verl.scheduling.events import (
    Ending,
    Event,
    GroupsSubmitted,
    RequestFinished,
    RequestStarted,
    SessionFinished,
    SliceAdded,
    SliceDrained,
    SliceReady,
    WeightsPublished,
)
from seamless_verl.scheduling.prediction.learned import DecodeModel, LengthModel, Likeness
from seamless_verl.scheduling.slices import SliceId

# Low-discrepancy sequences: quantiles of successive sessions spread evenly, and those of successive groups.
_GOLDEN = 0.6180339887498949
_PLASTIC = 0.7548776662466927
_PROMPTS = 256
_MIN_TOKENS = 4  # shorter requests say more about the prompt than about decoding


@dataclass(slots=True, kw_only=True)
class Session:
    """``u`` is the quantile of its length that plans assume, the same in all plans that are compared; ``context`` is
    what its last request ended with."""

    group: str
    number: int  # in the order in which sessions began
    u: float
    tokens: int = 0
    context: int = 0
    request: str | None = None
    slice: SliceId | None = None  # where its last request ended, and when
    ended_at: float = -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seat:
    """When it was taken, and the integrals of its slice at that time."""

    at: float
    n_s: float
    context_s: float
    age_s: float
    made: float
    prefilled: float


@dataclass(slots=True, kw_only=True)
class _Request:
    """``seat``: None while it waits."""

    session: str
    number: int  # of its session
    slice: SliceId
    context: int
    seat: _Seat | None = None


@dataclass(slots=True)
class _Load:
    """Integrals over time of what has a seat on a slice: requests, tokens they began with, seconds since they began.

    Attributes:
        made: tokens that a request would have made that had always been there, as predicted.
        made_before: sum over its requests of ``made`` when they got their seats.
        prefilled: tokens that it has prefilled, or is about to.
        emptied_at: when its cache was last lost.
    """

    n: int = 0
    context: int = 0
    age: float = 0.0
    at: float = 0.0
    n_s: float = 0.0
    context_s: float = 0.0
    age_s: float = 0.0
    made: float = 0.0
    made_before: float = 0.0
    prefilled: float = 0.0
    emptied_at: float = -math.inf

    def move_to(self, at: float) -> None:
        elapsed = at - self.at
        self.n_s += self.n * elapsed
        self.context_s += self.context * elapsed
        self.age_s += (self.age + self.n * elapsed / 2) * elapsed
        self.age += self.n * elapsed
        self.at = at

    def seat(self) -> _Seat:
        return _Seat(
            at=self.at,
            n_s=self.n_s,
            context_s=self.context_s,
            age_s=self.age_s,
            made=self.made,
            prefilled=self.prefilled,
        )


@dataclass(slots=True)
class SessionBook:
    """Fed with every event; knows nothing that no event said.

    Attributes:
        decode: pace of requests, with prefill spread over their tokens. It says when what will be there.
        bare: the same without prefill. It says how fast a slice is, compared with the others.
    """

    decode: DecodeModel = field(default_factory=DecodeModel)
    bare: DecodeModel = field(default_factory=DecodeModel)
    lengths: LengthModel = field(default_factory=LengthModel)
    likeness: Likeness = field(default_factory=Likeness)
    sessions: dict[str, Session] = field(default_factory=dict)
    unstarted: dict[str, int] = field(default_factory=dict)  # group -> sessions that never asked
    open_members: dict[str, int] = field(default_factory=dict)  # group -> sessions that did not finish
    crowd: int = 0  # sessions that were out when prompts were last submitted
    prompt_tokens: float = 0.0  # context of a session's first request, mean of the last ones
    _requests: dict[str, _Request] = field(default_factory=dict)
    _on_slice: dict[SliceId, dict[str, _Request]] = field(default_factory=dict)  # those with a seat
    _queues: dict[SliceId, list[tuple[int, str]]] = field(default_factory=dict)  # (session's number, request), sorted
    _seats: dict[SliceId, int | None] = field(default_factory=dict)
    _loads: dict[SliceId, _Load] = field(default_factory=dict)
    _seen: int = 0
    _seen_groups: int = 0
    _group_u: dict[str, float] = field(default_factory=dict)  # of each open group, see `Likeness.quantile`
    _closed_members: dict[str, list[int]] = field(default_factory=dict)  # of each open group, tokens
    _published_at: float = -math.inf
    _roofline: Roofline = field(default_factory=Roofline)

    def observe(self, event: Event, roofline: Roofline) -> None:
        """``roofline``: the cluster's; it learns how fast each slice generates."""
        self._roofline = roofline
        if isinstance(event, SliceAdded):
            self._seats[event.slice.id] = event.slice.seats
        elif isinstance(event, GroupsSubmitted):
            for group in event.groups:
                self.unstarted[group] = event.sessions
                self.open_members[group] = event.sessions
                self._group_u[group] = self._spread(self._seen_groups)
                self._closed_members[group] = []
                self._seen_groups += 1
            self.crowd = sum(self.open_members.values())
        elif isinstance(event, RequestStarted):
            self._started(event)
        elif isinstance(event, RequestFinished):
            self._finished(event)
        elif isinstance(event, SessionFinished):
            self._closed(event)
        elif isinstance(event, SliceReady):
            self._awake(event)
        elif isinstance(event, SliceDrained) and event.slice in self._loads:
            self._loads[event.slice].emptied_at = event.at
        elif isinstance(event, WeightsPublished):
            self._published_at = event.at

    def lost(self, slice_id: SliceId) -> None:
        """The slice died: its requests end without an event."""
        for name in [*self._on_slice.get(slice_id, ()), *(name for _, name in self._queues.get(slice_id, ()))]:
            self._drop(name)
        self._loads.pop(slice_id, None)

    def progress(self, session: Session, now: float) -> tuple[float, float]:
        """Tokens it has made and tokens of cache that it holds by now, those of the running request estimated."""
        if session.request is None:
            return session.tokens, session.context
        request = self._requests[session.request]
        if request.seat is None:
            return session.tokens, request.context
        made = self._move(request.slice, now).made - request.seat.made
        return session.tokens + made, request.context + made

    def cached_on(self, slice_id: SliceId, now: float) -> float:
        """Tokens in the cache of a slice: of requests that have a seat there, and of what sessions that wait for their
        tools will go on from."""
        if slice_id not in self._loads:
            return 0.0
        load, seated = self._move(slice_id, now), self._on_slice.get(slice_id, {})
        running = load.context + len(seated) * load.made - load.made_before
        return running + sum(
            session.context
            for session in self.sessions.values()
            if session.request is None and session.slice == slice_id and session.ended_at >= load.emptied_at
        )

    def cached(self, now: float) -> float:
        """The same of all slices."""
        return sum(self.cached_on(slice_id, now) for slice_id in self._loads)

    def asking(self) -> int:
        """Requests that are out, with a seat or without."""
        return len(self._requests)

    def place_of(self, session: Session) -> int:
        """Who has a seat, or needs none at the moment, comes before all that wait."""
        waits = session.request is not None and self._requests[session.request].seat is None
        return session.number if waits else -1

    def slice_of(self, session: Session) -> SliceId | None:
        """Where its request has a seat."""
        request = self._requests[session.request] if session.request is not None else None
        return request.slice if request is not None and request.seat is not None else None

    def next_quantiles(self, groups: Sequence[str], size: int) -> Iterator[list[float]]:
        """Quantiles for sessions that do not exist yet: those that are missing of these groups, then of groups of
        ``size`` that come after all that were submitted."""
        index, order = self._seen, self._seen_groups
        counts = ((self._group_u[group], self.unstarted[group]) for group in groups)
        for group_u, count in itertools.chain(counts, ((self._spread(order + i), size) for i in itertools.count())):
            yield [self.likeness.quantile(group_u, ((index + i) * _GOLDEN) % 1.0) for i in range(1, count + 1)]
            index += count

    @staticmethod
    def _spread(number: int) -> float:
        return (number * _PLASTIC) % 1.0

    def _move(self, slice_id: SliceId, at: float) -> _Load:
        """Bring a slice's integrals to ``at``; its requests gain tokens in lock-step."""
        load = self._loads.setdefault(slice_id, _Load(at=at))
        if at > load.at and load.n and self.decode.known:
            speed = self._roofline.speed(slice_id)
            kv = load.context + load.n * load.made - load.made_before
            load.made += (at - load.at) * speed / self.decode.step_s(load.n, kv)
        load.move_to(at)
        return load

    def _started(self, event: RequestStarted) -> None:
        if event.session not in self.sessions:
            self._seen += 1
            u = self.likeness.quantile(self._group_u.get(event.group, 0.5), (self._seen * _GOLDEN) % 1.0)
            self.sessions[event.session] = Session(group=event.group, number=self._seen, u=u)
            self.prompt_tokens += (event.context_tokens - self.prompt_tokens) / min(self._seen, _PROMPTS)
            left = self.unstarted.get(event.group, 0) - 1
            if left > 0:
                self.unstarted[event.group] = left
            else:
                self.unstarted.pop(event.group, None)
        session = self.sessions[event.session]
        session.request = event.request
        request = _Request(
            session=event.session, number=session.number, slice=event.slice, context=event.context_tokens
        )
        self._requests[event.request] = request
        bisect.insort(self._queues.setdefault(event.slice, []), (session.number, event.request))
        self._fill_seats(event.slice, event.at)

    def _fill_seats(self, slice_id: SliceId, at: float) -> None:
        load = self._move(slice_id, at)
        queue, seats = self._queues.get(slice_id, []), self._seats.get(slice_id)
        while queue and (seats is None or load.n < seats):
            _, name = queue.pop(0)
            request = self._requests[name]
            load.n += 1
            load.context += request.context
            load.made_before += load.made
            request.seat = load.seat()
            load.prefilled += request.context - self._cached(request, load)
            self._on_slice.setdefault(slice_id, {})[name] = request

    def _cached(self, request: _Request, load: _Load) -> int:
        """Tokens of its context that its slice has in the cache, from the session's request before it."""
        session = self.sessions.get(request.session)
        if session is None or session.slice != request.slice or session.ended_at < load.emptied_at:
            return 0
        return min(session.context, request.context)

    def _awake(self, event: SliceReady) -> None:
        """Requests that were routed to a slice before it was awake begin now. Those that it kept while it took newer
        weights go on; the pause is none of their time."""
        load = self._loads.get(event.slice)
        if load is None:
            return
        if load.at < self._published_at:
            self._move(event.slice, self._published_at)
        load.at = load.emptied_at = event.at
        load.age = load.made_before = 0.0
        for request in self._on_slice.get(event.slice, {}).values():
            assert request.seat is not None
            if request.seat.at < self._published_at:
                load.prefilled += request.context + load.made - request.seat.made
                request.seat = replace(request.seat, at=request.seat.at + event.at - self._published_at)
            else:
                request.seat = load.seat()
            load.age += event.at - request.seat.at
            load.made_before += request.seat.made

    def _finished(self, event: RequestFinished) -> None:
        request = self._requests.get(event.request)
        if request is None:
            return
        session = self.sessions.get(request.session)
        if session is not None and session.number != request.number:
            session = None  # it was given up, another attempt of this name has begun
        if event.ending is not Ending.FAILED and session is not None:
            session.tokens += event.tokens
            session.slice, session.ended_at = request.slice, event.at
            session.context = request.context + event.tokens
        if request.seat is None and event.tokens >= _MIN_TOKENS:
            self._change_seats(request, event)
        if request.seat is not None:
            self._leave_seat(request, request.seat, event)
        self._drop(event.request)
        self._fill_seats(request.slice, event.at)

    def _change_seats(self, request: _Request, event: RequestFinished) -> None:
        """It generated, so it had a seat: most likely the one that was taken as long ago as its tokens need. Who seemed
        to sit there still waits."""
        seated, queue = self._on_slice[request.slice], self._queues[request.slice]
        load = self._move(request.slice, event.at)
        speed, kv = self._roofline.speed(request.slice), load.context + load.n * load.made - load.made_before
        step_s = self.bare.step_s(load.n, kv) / speed if self.bare.known else math.inf

        def surprise(name: str) -> float:
            seat = seated[name].seat
            assert seat is not None
            return abs(event.at - seat.at - event.tokens * step_s)

        name = min(seated, key=surprise)
        mistaken = seated.pop(name)
        request.seat, mistaken.seat = mistaken.seat, None
        load.context += request.context - mistaken.context
        seated[event.request] = request
        queue.remove((request.number, event.request))
        bisect.insort(queue, (mistaken.number, name))

    def _leave_seat(self, request: _Request, seat: _Seat, event: RequestFinished) -> None:
        load = self._move(request.slice, event.at)
        took = event.at - seat.at
        if event.ending is not Ending.FAILED and event.tokens >= _MIN_TOKENS and took > 0:
            n = (load.n_s - seat.n_s) / took
            grown = (load.age_s - seat.age_s) / took * event.tokens / took  # decoding is in lock-step
            kv = (load.context_s - seat.context_s) / took + grown
            prefilled = load.prefilled - seat.prefilled
            self._learn(request.slice, n=n, kv=kv, took_s=took, tokens=event.tokens, prefilled=prefilled)
        load.n -= 1
        load.context -= request.context
        load.age -= took
        load.made_before -= seat.made

    def _learn(self, slice_id: SliceId, *, n: float, kv: float, took_s: float, tokens: int, prefilled: float) -> None:
        speed = self._roofline.speed(slice_id)
        if self.bare.known:
            expected_s = tokens * self.bare.step_s(n, kv) + prefilled * self.bare.prefill_s()
            self._roofline.measured(slice_id, expected_s=expected_s, took_s=took_s)
        seconds = took_s * speed / tokens
        self.decode.observe(n=n, kv=kv, seconds_per_token=seconds, tokens=tokens)
        self.bare.observe(n=n, kv=kv, seconds_per_token=seconds, tokens=tokens, prefilled=prefilled)

    def _drop(self, name: str) -> None:
        request = self._requests.pop(name)
        if request.seat is not None:
            del self._on_slice[request.slice][name]
        else:
            self._queues[request.slice].remove((request.number, name))
        session = self.sessions.get(request.session)
        if session is not None and session.request == name:
            session.request = None

    def _closed(self, event: SessionFinished) -> None:
        session = self.sessions.pop(event.session, None)
        if session is not None and not event.cut:
            self.lengths.observe(session.tokens)
            self._closed_members.setdefault(event.group, []).append(session.tokens)
        left = self.open_members.get(event.group, 0) - 1
        if left > 0:
            self.open_members[event.group] = left
        else:
            self.open_members.pop(event.group, None)
            self.unstarted.pop(event.group, None)
            self._group_u.pop(event.group, None)
            self.likeness.observe(self._closed_members.pop(event.group, ()))
