"""What the flight recorder costs: processor time per event, in place, and the share of a real run that this makes.

In place: a GIL-bound loop does a millisecond of Python between two events, with and without recording, side by side.
An event then costs several times what it does in a loop of nothing else, whose code and data stay in the caches;
other processes on the machine make it dearer still. The recorder's own thread counts in full.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

from benchmarks.records import Record, arguments, report
from seamless_verl.observe.flight import RequestEnded
from seamless_verl.observe.recording import FLIGHT, FlightRecorder
from seamless_verl.observe.run_folder import load_digest

_BLOCK = 50
_SPIN = 40_000  # additions between two events: about a millisecond
_BULK = 200_000
IN_PLACE = "  processor time per event, together"


def spin(count: int) -> int:
    total = 0
    for number in range(count):
        total += number
    return total


def block(recorder: FlightRecorder | None, first: int) -> float:
    """Processor seconds of this thread for ``_BLOCK`` turns of the loop, each with an event unless without recorder."""
    started = time.thread_time()
    for number in range(first, first + _BLOCK):
        spin(_SPIN)
        if recorder is not None:
            recorder.record(event(recorder.now(), number))
    return time.thread_time() - started


def event(at: float, number: int) -> RequestEnded:
    return RequestEnded(
        at=at,
        request=f"{number:032x}",
        slice="192.0.2.2:36497",
        tokens=24,
        finish="completed",
        cached_tokens=96,
        version=7,
    )


def side_by_side(folder: Path, pairs: int) -> list[Record]:
    """Blocks with and without recording take turns, and which of a pair comes first does too: a machine that drifts
    favours neither. The writer's thread is charged in full to the blocks that record."""
    recorder = FlightRecorder(folder, "loop")
    process, main = time.process_time(), time.thread_time()
    with_, without = [], []
    for pair in range(pairs):
        for recording in (False, True) if pair % 2 else (True, False):
            seconds = block(recorder if recording else None, pair * _BLOCK)
            (with_ if recording else without).append(seconds)
    recorder.close(patience_s=60.0)
    writer = (time.process_time() - process) - (time.thread_time() - main)
    caller = statistics.median(on - off for on, off in zip(with_, without, strict=True)) / _BLOCK
    writing = writer / pairs / _BLOCK
    return [
        Record(name="events per second of the loop", value=_BLOCK / statistics.median(without), unit="1/s"),
        Record(name="  processor time per event, calling thread", value=1e6 * caller, unit="us"),
        Record(name="  processor time per event, writing thread", value=1e6 * writing, unit="us"),
        Record(name=IN_PLACE, value=1e6 * (caller + writing), unit="us"),
        Record(name="  events per second that take 1 % of a core", value=0.01 / (caller + writing), unit="1/s"),
    ]


def bulk(folder: Path) -> list[Record]:
    """Record as fast as possible: the price of a call, and what one process can write."""
    recorder = FlightRecorder(folder, "bulk", most_waiting=_BULK)
    events = [event(float(number), number) for number in range(_BULK)]
    started, processor = time.perf_counter(), time.process_time()
    for one in events:
        recorder.record(one)
    recorded = time.perf_counter() - started
    recorder.close(patience_s=120.0)
    total = time.process_time() - processor
    (file,) = (folder / FLIGHT).iterdir()
    return [
        Record(name="record(), per event", value=1e6 * recorded / _BULK, unit="us"),
        Record(name="record(), encode and write, per event", value=1e6 * total / _BULK, unit="us"),
        Record(name="events written per second of processor time", value=_BULK / total, unit="1/s"),
        Record(name="size of an event", value=file.stat().st_size / _BULK, unit="bytes"),
    ]


def of_run(run: Path, event_us: float) -> list[Record]:
    """The share of a real run's wall time that its recording took, as if all of its processes shared one core."""
    digest = load_digest(run)
    rate = len(digest.recording.events) / digest.span_s
    cost = rate * event_us * 1e-6
    return [
        Record(name="events per second of the run", value=rate, unit="1/s"),
        Record(name="share of the run spent recording", value=100 * cost, unit="%", bar="< 1 %", holds=cost < 0.01),
    ]


def extend(parser: ArgumentParser) -> Callable[..., object]:
    return parser.add_argument("--run", type=Path, metavar="RUN", help="folder of a real run to state the share for")


def main() -> int:
    options = arguments("cost of the flight recorder", extend)
    with tempfile.TemporaryDirectory() as folder:
        records = side_by_side(Path(folder) / "pairs", 40 if options.quick else 200)
        records += bulk(Path(folder))
    if options.run is not None:
        records += of_run(options.run, next(record.value for record in records if record.name == IN_PLACE))
    return report(records, options.json)


if __name__ == "__main__":
    sys.exit(main())
