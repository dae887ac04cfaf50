"""What a run folder holds for its report: the recording, the steps, the validations."""

from __future__ import annotations

from pathlib import Path

from seamless_verl.errors import SeamlessError
from seamless_verl.observe.digest import RunDigest, digest
from seamless_verl.observe.page.html import render
from seamless_verl.observe.recording import FLIGHT, Recording, read_recording
from seamless_verl.observe.reporter import STEPS, VALIDATION, read_records

REPORT = "report.html"


class NoRunFolder(SeamlessError):
    """The folder is not one that a run has written."""


def load_recording(run: Path) -> Recording:
    """Raises:
    NoRunFolder: there is no recording.
    FlightFormatError: the recording is broken, or of a later version.
    """
    if not (run / FLIGHT).is_dir():
        raise NoRunFolder(f"{run} has no {FLIGHT}/ with a recording")
    return read_recording(run / FLIGHT)


def load_digest(run: Path) -> RunDigest:
    """Raises:
    NoRunFolder: neither a recording nor a step is there.
    FlightFormatError: as `load_recording`.
    """
    if not any((run / name).exists() for name in (FLIGHT, STEPS)):
        raise NoRunFolder(f"{run} is no run folder: it has neither {FLIGHT}/ nor {STEPS}")
    recording = read_recording(run / FLIGHT)
    return digest(recording, read_records(run / STEPS), read_records(run / VALIDATION))


def write_report(run: Path) -> Path:
    """Write ``RUN/report.html``; also while the run goes on.

    Raises:
        NoRunFolder, FlightFormatError: as `load_digest`.
    """
    page = render(load_digest(run))
    file = run / REPORT
    part = run / f"{REPORT}.part"
    part.write_text(page, encoding="utf-8")
    part.replace(file)
    return file
