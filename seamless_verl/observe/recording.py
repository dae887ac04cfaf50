"""Recordings on disk: ``RUN/flight/*.jsonl``, one append-only file per process, read as one stream in order of time.

A process that was killed leaves a last line cut short: it is left out and counted. A broken line elsewhere is an
error. A file that holds no complete header yet is left out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from seamless_verl.observe.flight import FlightEvent
from seamless_verl.observe.flight_codec import (
    FlightFormatError,
    FlightHeader,
    decode_event,
    decode_header,
    encode_event,
    encode_header,
)

FLIGHT = "flight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Attributes:
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
    their wall clocks say.

    Raises:
        FlightFormatError: names the file and the line.
    """
    streams: list[tuple[FlightHeader, list[FlightEvent]]] = []
    torn: list[str] = []
    unknown: Counter[str] = Counter()
    for file in sorted(folder.glob("*.jsonl")):
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
