"""A recording as a trace in the Chrome JSON format, which ui.perfetto.dev and chrome://tracing open.

One process per pool with a thread per slice (what it was doing) and counters (requests on each slice), one process
for the trainer's phases and steps, one for the scheduler's decisions. Times are in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seamless_verl.observe import flight
from seamless_verl.observe.digest import Lane, digest
from seamless_verl.observe.recording import Recording

_TRAINER, _SCHEDULER, _FIRST_POOL = 1, 2, 10
_STEPS, _PHASES = 1, 2

Entry = dict[str, Any]


def write_trace(recording: Recording, file: Path) -> None:
    """Write the trace, one event per line."""
    lines = ",\n".join(json.dumps(entry, separators=(",", ":"), allow_nan=False) for entry in trace(recording))
    file.write_text(f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n', encoding="utf-8")


def trace(recording: Recording) -> Iterator[Entry]:
    """The entries of ``traceEvents``."""
    run = digest(recording, (), ())
    yield from _names(_TRAINER, "trainer", {_STEPS: "steps", _PHASES: "phases"})
    yield from _names(_SCHEDULER, "scheduler", {1: "decisions"})
    for span in run.step_spans:
        yield _span(_TRAINER, _STEPS, f"step {span.step}", span.start, span.stop, {})
    for event in recording.events:
        yield from _of_event(event)
    pools: dict[str, list[Lane]] = {}
    for lane in run.lanes:
        pools.setdefault(lane.pool, []).append(lane)
    for process, (pool, lanes) in enumerate(pools.items(), start=_FIRST_POOL):
        yield from _names(process, f"pool {pool}", {thread: lane.slice for thread, lane in enumerate(lanes, start=1)})
        for thread, lane in enumerate(lanes, start=1):
            for stretch in lane.stretches:
                details = {"state": stretch.state.value}
                yield _span(process, thread, stretch.category.value, stretch.start, stretch.stop, details)
            for at, level in lane.load:
                name = f"requests on {lane.slice}"
                yield {"ph": "C", "pid": process, "name": name, "ts": _micro(at), "args": {"requests": level}}


def _of_event(event: flight.FlightEvent) -> Iterator[Entry]:
    at = _micro(event.at)
    match event:
        case flight.PhaseBegan():
            yield {"ph": "B", "pid": _TRAINER, "tid": _PHASES, "name": event.phase.value, "ts": at}
        case flight.PhaseEnded():
            yield {"ph": "E", "pid": _TRAINER, "tid": _PHASES, "name": event.phase.value, "ts": at}
        case flight.WeightsPublished():
            name = f"weights {event.version}"
            yield {"ph": "i", "s": "p", "pid": _TRAINER, "tid": _STEPS, "name": name, "ts": at}
        case flight.DecisionMade():
            details = {"reason": event.reason, "slices": list(event.slices), "predicted_s": event.predicted_s}
            yield {"ph": "i", "s": "t", "pid": _SCHEDULER, "tid": 1, "name": event.action, "ts": at, "args": details}
        case flight.BatchProgress():
            counts = {"ready": event.ready, "needed": event.needed}
            yield {"ph": "C", "pid": _TRAINER, "name": "groups of the batch", "ts": at, "args": counts}


def _names(process: int, name: str, threads: dict[int, str]) -> Iterator[Entry]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for thread, label in threads.items():
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": label}}


def _span(process: int, thread: int, name: str, start: float, stop: float, details: Entry) -> Entry:
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": name,
        "ts": _micro(start),
        "dur": round(_micro(stop) - _micro(start), 3),
        "args": details,
    }


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)
