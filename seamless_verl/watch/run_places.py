"""Which folders can be watched, and how each stands: told from their files alone.

A place is a run of the trainer (``flight/``, ``steps.jsonl``, ``rows/``), a recording of the stand-alone proxy
(``journal.sqlite``, ``rows/``), or a run of the simulator (``flight/``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from seamless_verl.observe.page.words import ended
from seamless_verl.observe.recording import FLIGHT
from seamless_verl.observe.reporter import STEPS, json_of
from seamless_verl.observe.run_folder import CONFIG, is_run_folder

JOURNALS = ("journal.sqlite", "shard-*/journal.sqlite", "proxy/*/journal.sqlite")
KEPT_FILES = ("proxy/*/kept.sqlite",)
ROW_FOLDERS = ("rows", "shard-*/rows")
ROW_FILES = ("rows/*.jsonl", "shard-*/rows/*.jsonl")
_PART_BYTES = 1 << 16
_MOST_FOLDERS = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One folder to watch.

    Attributes:
        id: stable name for addresses, made of the path.
        name: the path below the folder that was asked for.
    """

    id: str
    name: str
    path: Path


def is_place(folder: Path) -> bool:
    """Whether a run or a recording lies in this folder; never where this user may not enter.

    `os.path` says no there, `Path.is_dir` raises.
    """
    if os.path.isdir(folder / FLIGHT) or os.path.isfile(folder / STEPS) or is_run_folder(folder):
        return True
    return any(next(folder.glob(pattern), None) is not None for pattern in (*JOURNALS, *KEPT_FILES))


def places(root: Path) -> list[Place]:
    """``root`` itself where it is one; else the folders below it that are, points of sweeps included."""
    if is_place(root):
        return [_place(root, root)]
    found: list[Place] = []
    for folder in _folders(root):
        if is_place(folder):
            found.append(_place(root, folder))
        else:
            found += [_place(root, point) for point in _folders(folder) if is_place(point)]
    return found


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if os.path.isdir(path))[:_MOST_FOLDERS]
    except OSError:
        return []


def _place(root: Path, folder: Path) -> Place:
    name = folder.name if folder == root else str(folder.relative_to(root))
    digest = blake2b(str(folder.absolute()).encode("utf-8", "surrogateescape"), digest_size=6)
    return Place(id=digest.hexdigest(), name=name, path=folder)


def files_of(place: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(file for pattern in patterns for file in place.glob(pattern))


def content_of(place: Path, patterns: tuple[str, ...]) -> str:
    """Changes when one of these files does; none is read."""
    states = ((file.name, file.stat()) for file in files_of(place, patterns))
    return " ".join(f"{name}:{state.st_size}:{state.st_mtime_ns}" for name, state in states)


def run_summary(place: Path, *, alive: bool) -> dict[str, Any]:
    """What a list of runs shows of one: ``state`` in words, ``style``, ``step``, ``total_steps``, ``reward``,
    ``changed`` (seconds since 1970); ``None`` where nothing says.

    Args:
        alive: the process of the run lives.
    """
    last = _last_record(place / STEPS)
    state, style = _state(place, alive=alive)
    files = [*files_of(place / FLIGHT, ("*.jsonl",)), *files_of(place, JOURNALS), place / STEPS, place / CONFIG]
    return {
        "state": state,
        "style": style,
        "step": last.get("step"),
        "total_steps": last.get("total_steps"),
        "reward": last.get("reward"),
        "step_s": last.get("step_s"),
        "changed": max((file.stat().st_mtime for file in files if file.exists()), default=None),
    }


def _state(place: Path, *, alive: bool) -> tuple[str, str]:
    """In words, and its style: as the report's badge."""
    if alive:
        return "running", "open"
    if not (place / FLIGHT).is_dir():
        recorded = next(iter(files_of(place, JOURNALS)), None)
        return ("recording of a proxy", "open") if recorded is not None else ("nothing recorded", "bad")
    return ended(_outcome(place / FLIGHT))


def _outcome(folder: Path) -> str | None:
    """How the last run in the folder ended; a continued run has a file of its own, whose head says `RunStarted`."""
    starts: list[tuple[float, Path]] = []
    for file in files_of(folder, ("*.jsonl",)):
        records = _records(file, first=True)
        header = next(records, {})
        if any(record.get("event") == "RunStarted" for record in records):
            starts.append((float(header.get("wall_s", 0.0)), file))
    if not starts:
        return None
    last = _records(max(starts)[1], first=False, having=b'"RunEnded"')
    ends = [record for record in last if record.get("event") == "RunEnded"]
    return str(ends[-1].get("outcome")) if ends else None


def _last_record(file: Path) -> dict[str, Any]:
    return next(_records(file, first=False, step=-1), {})


def _records(file: Path, *, first: bool, having: bytes = b"", step: int = 1) -> Iterator[dict[str, Any]]:
    """Whole JSON records in the first or last 64 KiB of a file, with these bytes; what is cut or broken is left out.

    Args:
        step: -1: the last one comes first.
    """
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            start = 0 if first else max(0, size - _PART_BYTES)
            stream.seek(start)
            lines = stream.read(_PART_BYTES).split(b"\n")
    except OSError:
        return
    for line in lines[1 if start else 0 :][::step]:
        if having in line and (record := json_of(line)) is not None:
            yield record
