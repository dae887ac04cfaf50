"""Virtual time: callbacks in a heap, and processes (generators) that wait for seconds or for a signal.

Callbacks at the same time run in the order in which they were asked for, so a run is a function of its inputs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from typing import Any, TypeAlias


class Signal:
    """Something a process can wait for. `fire` wakes everybody who waits now."""

    __slots__ = ("_clock", "_waiting")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: list[Process] = []

    def fire(self) -> None:
        waiting, self._waiting = self._waiting, []
        for process in waiting:
            self._clock.after(0.0, self._clock.resume, process)

    def add(self, process: Process) -> None:
        self._waiting.append(process)


Process: TypeAlias = Generator[float | Signal, None, Any]


class Clock:
    """Virtual time: callbacks and processes run in the order of their times.

    Attributes:
        now: seconds since the start of the run.
        events: callbacks run so far.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call ``action`` at ``time``; a time that has passed means now."""
        self._order += 1
        heapq.heappush(self._heap, (max(time, self.now), self._order, action, arguments))

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + seconds, action, *arguments)

    def start(self, process: Process) -> None:
        """Run a process; it yields the seconds or the `Signal` it waits for."""
        self.after(0.0, self.resume, process)

    def resume(self, process: Process) -> None:
        try:
            wait = next(process)
        except StopIteration:
            return
        if isinstance(wait, Signal):
            wait.add(process)
        else:
            self.after(wait, self.resume, process)

    def run(self, until: Callable[[], bool]) -> bool:
        """Go on until ``until`` holds (asked after every callback); False when nothing is left to happen."""
        heap = self._heap
        while heap:
            self.now, _, action, arguments = heapq.heappop(heap)
            self.events += 1
            action(*arguments)
            if until():
                return True
        return False
