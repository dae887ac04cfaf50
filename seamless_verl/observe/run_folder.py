"""What a run folder holds for its report: the recording, the steps, the validations."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from seamless_verl.errors import SeamlessError
from seamless_verl.observe.digest import RunDigest, digest
from seamless_verl.observe.page.html import render
from seamless_verl.observe.recording import FLIGHT, Recording, read_recording
from seamless_verl.observe.reporter import METRICS, STEPS, VALIDATION, read_records

REPORT, CONFIG, SUMMARY, LOGS = "report.html", "config.yaml", "summary.json", "logs"


class NoRunFolder(SeamlessError):
    """The folder is not one that a run has written."""


def load_recording(run: Path) -> Recording:
    """Read the events that a run has recorded.

    Raises:
        NoRunFolder: there is no recording.
        FlightFormatError: the recording is broken, or of a later version.
    """
    if not (run / FLIGHT).is_dir():
        steps = (run / STEPS).exists()
        raise NoRunFolder(f"{run} has no {FLIGHT}/ with a recording" if steps else _why_nothing(run, running=False))
    return read_recording(run / FLIGHT)


def load_digest(run: Path, *, running: bool = False) -> RunDigest:
    """Read a run folder and work out what its report shows.

    Args:
        running: whether the process of the run lives.

    Raises:
        NoRunFolder: neither an event nor a step was recorded.
        FlightFormatError: as `load_recording`.
    """
    recording, steps = read_recording(run / FLIGHT), read_records(run / STEPS)
    if not recording.events and not steps:
        raise NoRunFolder(_why_nothing(run, running=running))
    return digest(
        recording, steps, read_records(run / VALIDATION), start_up_s=_start_up(run), running=running, guard=_guard(run)
    )


def write_report(run: Path, *, running: bool = False) -> Path:
    """Write ``RUN/report.html``; also while the run goes on.

    Raises:
        NoRunFolder, FlightFormatError: as `load_digest`.
    """
    page = render(load_digest(run, running=running))
    file = run / REPORT
    part = run / f"{REPORT}.part"
    part.write_text(page, encoding="utf-8")
    part.replace(file)
    return file


def newest_run(runs: Path) -> Path:
    """The run under ``runs`` that was started (or continued) last; the points of a sweep count one by one.

    Raises:
        NoRunFolder: there is none.
    """
    found = [*_points(runs), *(point for sweep in _folders(runs) for point in _points(sweep))]
    if not found:
        raise NoRunFolder(f"there is no run under {runs.absolute()}; name a run folder, or start where the runs are")
    return max(found, key=lambda run: (run / CONFIG).stat().st_mtime)


def _points(folder: Path) -> list[Path]:
    return [run for run in _folders(folder) if is_run_folder(run)]


def is_run_folder(folder: Path) -> bool:
    """Every run begins by making these. Where this user may not enter, `os.path` says no and `Path.is_file` raises."""
    return os.path.isfile(folder / CONFIG) and os.path.isdir(folder / LOGS)


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if os.path.isdir(path)) if folder.is_dir() else []


def _why_nothing(run: Path, *, running: bool) -> str:
    if not run.is_dir():
        return f"{run} {'is a file; name a run folder' if run.exists() else 'does not exist'}"
    if running:
        return f"{run} has recorded nothing yet: its first step has not begun; try again in a minute"
    if is_run_folder(run):
        return f"{run} has recorded nothing: the run ended before its first step; {run / LOGS} has the reason"
    points = _points(run)
    if points:
        return f"{run} is a sweep; choose one of its points: {' '.join(str(point) for point in points)}"
    return f"{run} is no run folder: it has neither {FLIGHT}/ nor {STEPS}"


def _guard(run: Path) -> list[dict[str, Any]]:
    """What ``metrics.jsonl`` tells of rows computed both ways."""
    records = read_records(run / METRICS)
    kept = ({k: v for k, v in record.items() if k == "step" or "/shared_prefix/" in k} for record in records)
    return [record for record in kept if len(record) > 1 and "step" in record]


def _start_up(run: Path) -> dict[str, float]:
    """Seconds by part, which a run writes down when it ends well."""
    file = run / SUMMARY
    found: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))["start_up_s"] if file.is_file() else {}
    return found
