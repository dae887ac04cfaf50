"""Writes events while a run goes on, and never gets in its way.

    record() ──► bounded queue ──► one thread per process ──► RUN/flight/<writer>.jsonl

`FlightRecorder.record` appends to a queue and returns: no encoding, no lock, no system call. A disk that is slow or
hangs holds up the thread only; when the queue is full, events are dropped and counted (`EventsLost`). An error (disk
full, folder gone) ends the recording with one complaint; the run goes on.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from seamless_verl.observe.flight import EventsLost, FlightEvent
from seamless_verl.observe.recording import FLIGHT, FlightHeader, encode_event, encode_header

_PERIOD_S = 0.2
_MOST_WAITING = 200_000
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class FlightRecorder:
    """Args:
    folder: run folder; ``None`` records nothing.
    role: what this process is, part of the file's name.
    complain: is told, once, why nothing more is recorded.
    most_waiting: events that may wait for the thread.
    """

    def __init__(
        self,
        folder: Path | None,
        role: str,
        *,
        complain: Callable[[str], None] | None = None,
        most_waiting: int = _MOST_WAITING,
    ) -> None:
        self._complain = complain or _to_stderr
        self._most_waiting = most_waiting
        self._waiting: deque[FlightEvent] = deque()
        self._lost = 0
        self._on = folder is not None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if folder is not None:
            thread = threading.Thread(target=self._write, args=(folder / FLIGHT, role), name="flight", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the process may have no more threads
                self._stop(role, error)
                return
            self._thread = thread
            atexit.register(self.close)

    @staticmethod
    def now() -> float:
        """The clock that stamps events."""
        return time.monotonic()

    def record(self, event: FlightEvent) -> None:
        if not self._on:
            return
        if len(self._waiting) >= self._most_waiting:
            self._lost += 1
            return
        self._waiting.append(event)

    def close(self, patience_s: float = 2.0) -> None:
        """Write what waits, for as long as ``patience_s``; nothing is recorded afterwards. May be called again."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(patience_s)
        self._on = False
        atexit.unregister(self.close)

    def _write(self, folder: Path, role: str) -> None:
        try:
            header = _header(role)
            folder.mkdir(parents=True, exist_ok=True)
            # What is no Unicode (half of a surrogate pair) is written as the escape that JSON has for it.
            file = folder / f"{header.writer}.jsonl"
            with file.open("x", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(encode_header(header) + "\n")
                stream.flush()
                while not self._closing.wait(_PERIOD_S):
                    self._drain(stream)
                self._drain(stream)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is said, and the run goes on
            self._stop(role, error)

    def _stop(self, role: str, error: Exception) -> None:
        self._on = False
        self._waiting.clear()
        self._complain(
            f"the flight recorder has stopped, the run goes on; its report lacks what process {os.getpid()} ({role}) "
            f"does from now on: {type(error).__name__}: {error}"
        )

    def _drain(self, stream: TextIO) -> None:
        lines = [encode_event(self._waiting.popleft()) for _ in range(len(self._waiting))]
        if self._lost:
            lost, self._lost = self._lost, 0
            lines.append(encode_event(EventsLost(at=self.now(), count=lost)))
        if lines:
            stream.write("\n".join(lines) + "\n")
            stream.flush()


def _header(role: str) -> FlightHeader:
    wall_s, clock_s = time.time(), time.monotonic()
    domain = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else ""
    writer = f"{role}-{socket.gethostname()}-{os.getpid()}-{int(wall_s)}"
    return FlightHeader(writer=writer, clock_s=clock_s, wall_s=wall_s, clock_domain=domain)


def _to_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)  # noqa: T201 - the last word of a part that has no other voice
