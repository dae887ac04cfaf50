"""Requests of a rollout worker as events of the scheduling kernel, kept until the trainer's process fetches them.

    _run_agent_loop ─ session ─► attempt routed ─► attempt ended ─►  …  ─► session ended      (in the worker)
                                        └──────────── take() ─► scheduler.handle              (in the trainer)

No call leaves the worker per request. Nothing is kept before somebody has asked for the first time. Times are wall
clock: workers may be on other machines, and the kernel needs durations of requests, not an exact order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from seamless_verl.scheduling.events import (
    Ending,
    Event,
    RequestFinished,
    RequestStarted,
    SessionFinished,
    SliceFailed,
)
from seamless_verl.scheduling.slices import SliceId, Tag

_MOST = 100_000  # a trainer that does not come back costs forecasts, not memory

_session: ContextVar[tuple[str, str] | None] = ContextVar("scheduled_session", default=None)


class RequestLog:
    """One per process; see the module. ``slice`` of an event is the server's address, which the trainer translates.

    Attributes:
        ring: called when the trainer should come and fetch.
    """

    def __init__(self) -> None:
        self.ring: Callable[[], None] = lambda: None
        self._wanted = False
        self._events: deque[Event] = deque(maxlen=_MOST)
        self._names: dict[str, tuple[str, str]] = {}
        self._began: dict[str, int] = {}  # session -> when, in ms
        self._on: dict[str, str] = {}  # running request -> server
        self._watched: frozenset[str] = frozenset()

    @contextmanager
    def session(self, group: str, index: int) -> Iterator[None]:
        """Requests made within (and in tasks started within) belong to this attempt at a prompt."""
        key = (group, f"{group}_{index}")
        token = _session.set(key)
        began_ms = self._began[key[1]] = _now_ms()
        try:
            yield
        finally:
            _session.reset(token)
            if self._began.get(key[1]) == began_ms:  # else it was started anew meanwhile
                del self._began[key[1]]
            self._names = {name: known for name, known in self._names.items() if known != key}
            self._keep(SessionFinished(at=time.time(), session=key[1], group=group))

    def name(self, request_id: str) -> None:
        """Generations asked for under ``request_id`` belong to the session at hand, whoever asks (the proxy does)."""
        key = _session.get()
        if key is not None:
            self._names[request_id] = key

    def group_of(self, request_id: str) -> str:
        """The prompt that ``request_id`` is asked for, ``""`` where nobody said."""
        group, _ = self._names.get(request_id) or _session.get() or ("", "")
        return group

    def began_ms(self, request_id: str) -> int:
        """Unix time at which the session began that ``request_id`` is asked for; now, where nobody said."""
        _, session = self._names.get(request_id) or _session.get() or ("", "")
        return self._began.get(session) or _now_ms()

    def watch(self, servers: Sequence[str]) -> None:
        """Ring when a request on one of these servers ends, instead of those named before."""
        self._watched = frozenset(servers)

    def started(self, request: str, request_id: str, server: str, context_tokens: int) -> None:
        group, session = self._names.get(request_id) or _session.get() or ("", request_id)
        self._on[request] = server
        self._keep(
            RequestStarted(
                at=time.time(),
                request=request,
                session=session,
                group=group,
                slice=SliceId(server),
                context_tokens=context_tokens,
            )
        )

    def finished(self, request: str, tokens: int, ending: Ending) -> None:
        self._keep(RequestFinished(at=time.time(), request=request, tokens=tokens, ending=ending))
        if self._on.pop(request, None) in self._watched:
            self.ring()

    def died(self, server: str, reason: str) -> None:
        """A request found its replica dead."""
        self._keep(SliceFailed(at=time.time(), slice=SliceId(server), reason=reason, lost=frozenset({Tag.ROLLOUT})))
        self.ring()

    def take(self) -> list[Event]:
        """What happened since the last call."""
        self._wanted = True
        events = list(self._events)
        self._events.clear()
        return events

    def _keep(self, event: Event) -> None:
        if self._wanted:
            self._events.append(event)


def _now_ms() -> int:
    return int(time.time() * 1000)


request_log = RequestLog()
