"""What rollout workers tell the scheduler of requests, also on behalf of those that died.

take_request_events ─► open requests and sessions per worker ─► scheduler
                               └─ its worker is no longer there ─► they failed
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError

from seamless_verl.scheduling import events as ev

_ANSWER_S = 1.0  # for a worker whose event loop turns


@dataclass(slots=True)
class OpenWork:
    """What a worker has begun and not ended."""

    requests: set[str] = field(default_factory=set)
    sessions: dict[str, str] = field(default_factory=dict)  # -> group

    def note(self, event: ev.Event) -> None:
        if isinstance(event, ev.RequestStarted):
            self.requests.add(event.request)
            self.sessions[event.session] = event.group
        elif isinstance(event, ev.RequestFinished):
            self.requests.discard(event.request)
        elif isinstance(event, ev.SessionFinished):
            self.sessions.pop(event.session, None)

    def failed(self, at: float) -> list[ev.Event]:
        """The ends of all of it, now that nobody works on it any more."""
        requests = sorted(self.requests)
        return [
            *(ev.RequestFinished(at=at, request=name, tokens=0, ending=ev.Ending.FAILED) for name in requests),
            *(ev.SessionFinished(at=at, session=name, group=group, cut=True) for name, group in self.sessions.items()),
        ]


class RequestReports:
    """Workers of the user's own tell nothing.

    Args:
        workers: grows no longer, but a worker that died is replaced in it.
    """

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = workers if all(hasattr(worker, "take_request_events") for worker in workers) else ()
        self._open: dict[Any, OpenWork] = {}
        self._calls: dict[Any, Any] = {}  # those that have not been answered yet

    def fetch(self) -> list[ev.Event]:
        """What happened since the last call, but for workers that do not answer: theirs comes with a later one."""
        events: list[ev.Event] = []
        for worker in [known for known in self._open if known not in self._workers]:
            self._calls.pop(worker, None)
            events += self._open.pop(worker).failed(time.time())
        asked = {worker: worker.take_request_events.remote() for worker in self._workers if worker not in self._calls}
        self._calls |= asked
        if asked:
            ray.wait([*asked.values()], num_returns=len(asked), timeout=_ANSWER_S)
        for worker, call in list(self._calls.items()):
            work = self._open.setdefault(worker, OpenWork())
            if not ray.wait([call], timeout=0)[0]:
                continue
            del self._calls[worker]
            try:
                told = ray.get(call)
            except RayActorError:  # whoever waits for its groups has it replaced
                continue
            for event in told:
                work.note(event)
            events += told
        return events
