"""Recordings on disk: ``RUN/flight/*.jsonl``, one append-only file per process, read as one stream in order of time.

    {"format": "seamless_verl.flight", "version": 1, "writer": "trainer-1234", "clock_s": …}      the header
    {"event": "PhaseBegan", "at": 12.345678, "phase": "update_actor", "step": 3}                  one line per event

A reader of version 1 leaves out kinds and fields that it does not know: a later 1.x writer may add some. A process that
was killed leaves a last line cut short: it is left out and counted. A broken line elsewhere is an error. A file that
holds no complete header yet is left out.

A live run writes beside its work and never waits for it:

    record() ──► bounded queue ──► one thread per process ──► RUN/flight/<writer>.jsonl

`FlightRecorder.record` appends to a queue and returns: no encoding, no lock, no system call. A disk that is slow or
hangs holds up the thread only; when the queue is full, events are dropped and counted (`EventsLost`). An error (disk
full, folder gone) ends the recording with one complaint; the run goes on.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

import msgspec
import psutil

from seamless_verl.errors import MachineError, SeamlessError
from seamless_verl.observe import flight
from seamless_verl.observe.flight import EventsLost, FlightEvent

FLIGHT = "flight"
_MEMORY = 6  # bytes of memory per byte of the files: 4.0 were measured (96 MB), and runs differ
FORMAT, VERSION = "seamless_verl.flight", 1
KINDS: dict[str, type[FlightEvent]] = {
    name: kind for name, kind in vars(flight).items() if isinstance(kind, type) and issubclass(kind, FlightEvent)
}
_FIELDS = {kind: [spec.name for spec in fields(kind) if spec.name != "at"] for kind in KINDS.values()}


class FlightFormatError(SeamlessError):
    """A line is not what the format says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightHeader:
    """First line of a recording.

    Attributes:
        writer: process that wrote it; one file has one writer.
        clock_s: reading of the clock that stamps ``at``, taken together with ``wall_s``.
        wall_s: seconds since 1970.
        clock_domain: clocks of the same domain agree (the boot id of a machine); empty: compare by ``wall_s``.
        virtual: time was simulated.
    """

    writer: str
    clock_s: float
    wall_s: float
    clock_domain: str = ""
    virtual: bool = False


def encode_header(header: FlightHeader) -> str:
    return json.dumps({"format": FORMAT, "version": VERSION, **asdict(header)})


def decode_header(line: str) -> FlightHeader:
    """Read the first line of a recording's file.

    Raises:
        FlightFormatError: not a recording, or of a later version.
    """
    try:
        plain = json.loads(line)
    except json.JSONDecodeError:
        plain = None
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise FlightFormatError("is not a flight recording: its first line is no header")
    if plain.get("version") != VERSION:
        raise FlightFormatError(f"is of version {plain.get('version')}; this installation reads version {VERSION}")
    try:
        header: FlightHeader = msgspec.convert(plain, FlightHeader)
    except msgspec.ValidationError as error:
        raise FlightFormatError(f"has a broken header: {error}") from error
    return header


def encode_event(event: FlightEvent) -> str:
    """One line without its end. Times are kept to the microsecond; numbers that are not finite are refused."""
    kind = type(event)
    plain = {"event": kind.__name__, "at": round(event.at, 6)}
    return _ENCODE(plain | {name: getattr(event, name) for name in _FIELDS[kind]})


def decode_event(line: str) -> FlightEvent | str:
    """The event, or the name of a kind that is not known here.

    Raises:
        json.JSONDecodeError: the line was cut.
        FlightFormatError: a known kind without a field that it needs, or with an impossible value.
    """
    plain = json.loads(line)
    name = plain.get("event") if isinstance(plain, dict) else None
    if not isinstance(name, str):
        raise FlightFormatError(f"no event: {line[:80]}")
    if name not in KINDS:
        return name
    try:
        event: FlightEvent = msgspec.convert(plain, KINDS[name])
    except msgspec.ValidationError as error:
        raise FlightFormatError(f"{name}: {error}: {line[:80]}") from error
    return event


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} has no place in a recording")


_ENCODE = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False, default=_plain).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The events of a run, merged from the files of its processes.

    Attributes:
        events: in order of time; ``at`` is in seconds since the first of them.
        origin_s: wall time of the first event, in seconds since 1970.
        virtual: time was simulated.
        writers: events by the process that wrote them.
        torn: files whose last line was cut short.
        unknown: kinds that this installation does not know, and how many of each were left out.
    """

    events: tuple[FlightEvent, ...]
    origin_s: float = 0.0
    virtual: bool = False
    writers: Mapping[str, int] = field(default_factory=dict)
    torn: tuple[str, ...] = ()
    unknown: Mapping[str, int] = field(default_factory=dict)


def write_recording(file: Path, header: FlightHeader, events: Iterable[FlightEvent]) -> None:
    """Write a whole recording at once, as the simulator does; a live run uses `FlightRecorder`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as stream:
        stream.write(encode_header(header) + "\n")
        stream.writelines(encode_event(event) + "\n" for event in events)


def read_recording(folder: Path) -> Recording:
    """Read ``folder/*.jsonl`` and put all of them on one clock.

    Writers of one clock domain share one clock: their difference to the wall clock is taken from the header that was
    written first, so that a wall clock set meanwhile moves nobody. Writers of different domains are as far apart as
    their wall clocks say. Requests that a rollout worker had not ended when it died end with its death.

    Raises:
        FlightFormatError: names the file and the line.
        MachineError: it would not fit into this machine's memory.
    """
    files = sorted(folder.glob("*.jsonl"))
    _check_memory(folder, sum(file.stat().st_size for file in files))
    streams: list[tuple[FlightHeader, list[FlightEvent]]] = []
    torn: list[str] = []
    unknown: Counter[str] = Counter()
    for file in files:
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
        if lines.pop():
            torn.append(file.name)
        if not lines:
            continue
        try:
            header = decode_header(lines[0])
        except FlightFormatError as error:
            raise FlightFormatError(f"{file} {error}") from None
        streams.append((header, _events(file, lines[1:], unknown)))
    streams.sort(key=lambda stream: stream[0].wall_s)
    offsets: dict[str, float] = {}
    merged: list[FlightEvent] = []
    for header, events in streams:
        offset = header.wall_s - header.clock_s
        if header.clock_domain:
            offset = offsets.setdefault(header.clock_domain, offset)
        merged += [replace(event, at=event.at + offset) for event in events]
    merged += _ended_by_death([event for event in merged if isinstance(event, flight.WorkerDied)], streams)
    merged.sort(key=lambda event: event.at)  # stable: one writer's events of the same moment keep their order
    origin = merged[0].at if merged else 0.0
    return Recording(
        events=tuple(replace(event, at=event.at - origin) for event in merged),
        origin_s=origin,
        virtual=any(header.virtual for header, _ in streams),
        writers={header.writer: len(events) for header, events in streams},
        torn=tuple(torn),
        unknown=dict(unknown),
    )


def _check_memory(folder: Path, size: int) -> None:
    free = psutil.virtual_memory().available
    if size * _MEMORY > free:
        raise MachineError(
            f"memory for {folder}",
            f"all of it is read at once and may take {size * _MEMORY >> 20} MiB; {free >> 20} MiB are free",
            "end what else runs here, or copy the run to a machine with more; seamless-verl watch shows its steps, "
            "groups and attempts with little",
        )


def _ended_by_death(
    deaths: Iterable[flight.WorkerDied], streams: Iterable[tuple[FlightHeader, list[FlightEvent]]]
) -> Iterator[FlightEvent]:
    for death in deaths:
        for header, events in streams:
            if not header.writer.startswith(death.writer):
                continue
            begun = {event.request: event.slice for event in events if isinstance(event, flight.RequestStarted)}
            ended = {event.request for event in events if isinstance(event, flight.RequestEnded)}
            for request in begun.keys() - ended:
                yield flight.RequestEnded(
                    at=death.at, request=request, slice=begun[request], tokens=0, finish=flight.WORKER_DIED
                )


def _events(file: Path, lines: list[str], unknown: Counter[str]) -> list[FlightEvent]:
    events: list[FlightEvent] = []
    for number, line in enumerate(lines, start=2):
        try:
            event = decode_event(line)
        except (json.JSONDecodeError, FlightFormatError) as error:
            raise FlightFormatError(f"{file}, line {number}: {error}") from None
        if isinstance(event, str):
            unknown[event] += 1
        else:
            events.append(event)
    return events


# ---------------------------------------------------------------- while a run goes on


_PERIOD_S = 0.2
_MOST_WAITING = 200_000
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class FlightRecorder:
    """Writes the events of its process to a file of the run folder, in a thread.

    Args:
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
