"""Kills a process of a run in the middle of a publication or of a pull, and looks at what comes after; a part of
`benchmarks.kill_instants`.

    the stage is there ─► a random while ─► SIGSTOP ─► is it still there? ─ yes ─► SIGKILL ─► aftermath ─► the next
                                                             └─ no ─► SIGCONT, and once more at the next one

Publications show in the folder where they are published, pulls in what `benchmarks.pull_stages` has servers tell. The
kernel tells when either changes. A process that is stopped does nothing between the look and its death.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.crash_run import find, find_all
from benchmarks.forced_deaths import engine_file
from seamless_verl.machine import WEIGHTS
from seamless_verl.run.supervisor import RUN_ID
from seamless_verl.verl_adapter.weights import weight_store
from seamless_verl.verl_adapter.weights.weight_store import Manifest, WeightsRefused

WRITER, TRAINER, SERVER, ENGINE = "a rank of the trainer", "trainer", "replica's server", "replica's engine"
WRITING, UNLISTED = "writing", "unlisted"
STANDING = 2
_SPANS_S = {
    WRITING: 0.2,
    UNLISTED: 0.001,
    "pull resuming": 0.002,
}  # a guess at how long a stage lasts, mended by misses
_SPAN_S = 0.03
_SHORTER, _LEAST_S = 0.7, 0.0002
_STOPPED_S = 5.0
_SETTLED_S = 240.0
_LOOK_S = 0.5
_PULL_S = 5.0  # no pull takes as long, on a busy machine either
_CREATED, _MODIFIED, _MOVED = 0x100, 0x2, 0x80  # inotify's IN_CREATE, IN_MODIFY, IN_MOVED_TO


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """Who is to die, and at which stage of a publication or a pull.

    Attributes:
        first: also before the first step, when a run cannot go on without a replica.
    """

    victim: str
    stage: str
    first: bool = False


def publication_stage(names: list[str]) -> str:
    """Of the version that is being published, by what is in its folder: its stage and number; empty: none is."""
    version = max((int(name.split(".")[0]) for name in names if "." in name), default=0)
    if f"{version}.weights.part" in names:
        return f"{WRITING} {version}"
    return f"{UNLISTED} {version}" if f"{version}.weights" in names and f"{version}.json" not in names else ""


class Notices:
    """Tells that something has changed in one of some folders."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.inotify_init1(os.O_NONBLOCK)
        self._watched: set[Path] = set()

    def watch(self, folder: Path, changes: int) -> None:
        if folder not in self._watched and folder.is_dir():
            self._libc.inotify_add_watch(self._file, os.fsencode(folder), changes)
            self._watched.add(folder)

    def wait(self, seconds: float) -> None:
        if select.select([self._file], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(self._file, 1 << 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSeen:
    """A line of a trainer's recording; ``life`` is its file, ``at`` in seconds since 1970."""

    life: str
    began: bool
    at: float
    slice: str
    version: int | None
    failure: str


@dataclass(slots=True)
class Pulls:
    """What the trainers' recordings tell of pulls, read as they grow."""

    folder: Path
    seen: list[PullSeen] = field(default_factory=list)
    _read: dict[Path, tuple[int, float]] = field(default_factory=dict)  # bytes, and what makes its clock wall time

    def look(self) -> None:
        for file in sorted(self.folder.glob("trainer-*.jsonl")):
            read, offset = self._read.get(file, (0, 0.0))
            with file.open("rb") as stream:
                stream.seek(read)
                whole, _, _ = stream.read().rpartition(b"\n")
            for line in whole.splitlines():
                if b'"PullBegan"' in line or b'"PullEnded"' in line:
                    self._take(json.loads(line), file.name, offset)
                elif b'"clock_s"' in line:
                    header = json.loads(line)
                    offset = header["wall_s"] - header["clock_s"]
            self._read[file] = (read + len(whole) + bool(whole), offset)

    def _take(self, event: dict[str, Any], life: str, offset: float) -> None:
        self.seen.append(
            PullSeen(
                life=life,
                began=event["event"] == "PullBegan",
                at=event["at"] + offset,
                slice=event["slice"],
                version=event.get("version"),
                failure=event.get("failure", ""),
            )
        )

    def lives(self) -> set[str]:
        return {file.name for file in self._read}

    def under_way(self, at: float) -> int:
        """How many had begun a little before, and not ended; those of replicas that died need not end ever."""
        last = {one.slice: one for one in self.seen if one.at <= at}
        return sum(one.began and at - one.at < _PULL_S for one in last.values())

    def by_all(self, after: float, above: int, but: frozenset[str]) -> int | None:
        """The first version above this that every standing replica has pulled, in other lives than these; or None."""
        by_version: dict[int, set[str]] = {}
        for one in self.seen:
            is_meant = not one.began and not one.failure and one.at > after and one.life not in but
            if is_meant and one.version is not None and one.version > above:
                by_version.setdefault(one.version, set()).add(one.slice)
        return min((v for v, slices in by_version.items() if len(slices) >= STANDING), default=None)


class InstantKiller(threading.Thread):
    """Kills at one instant after the other, each when what follows from the one before is over.

    Args:
        scratch: with the run's folder ``run``, its ``console`` and its ``stages``.
    """

    def __init__(self, mark: str, scratch: Path, instants: list[Instant], seed: int) -> None:
        super().__init__(daemon=True)
        self.kills: list[dict[str, Any]] = []
        self.over = threading.Event()
        self.stores: set[Path] = set()  # where its lives published
        self.engines: set[psutil.Process] = set()
        self.misses = 0
        self._mark, self._scratch, self._instants = mark, scratch, instants
        self._rng = random.Random(seed)
        self._notices, self._pulls = Notices(), Pulls(scratch / "run" / "flight")
        self._spans: dict[Instant, float] = {}
        self._trainer: psutil.Process | None = None
        self._writer: psutil.Process | None = None
        self._store = Path()
        self._first: dict[Path, int] = {}  # version that was published there

    def run(self) -> None:
        with contextlib.suppress(PermissionError):  # on a busy machine stages are over before it is its turn
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        for instant in self._instants:
            while not self.over.is_set():
                self._notices.wait(0.2)
                if not self._knows_life():
                    self.over.wait(_LOOK_S)  # all processes are looked through
                elif (kill := self._attempt(instant)) is not None:
                    kill |= self._aftermath(instant, kill)
                    if self.over.is_set() and kill["pulled"] is None:  # the run has ended well before the next version
                        return
                    self.kills.append({**asdict(instant), **kill})
                    print(f"{len(self.kills)}. {json.dumps(self.kills[-1])}", flush=True)
                    break

    # ---------------------------------------------------------------- the instant

    def _knows_life(self) -> bool:
        """Whether the trainer lives and has published; finds its processes anew after it was started again."""
        if self._trainer is None or not self._trainer.is_running():
            self._trainer, self._writer = find(self._mark, "trainer"), None
        try:
            if self._trainer is not None and self._writer is None:
                self._store = Path(f"{WEIGHTS}{self._trainer.environ()[RUN_ID]}")
                ranks = list(find_all(self._mark, "trainer worker"))  # the first one writes what all of them gather
                self._writer = self._rng.choice(ranks) if ranks else None
        except psutil.Error:  # it has just ended
            self._trainer = None
        if self._writer is None or not self._store.is_dir():
            return False
        self.stores.add(self._store)
        self._has_stepped()  # notes the first version
        self._notices.watch(self._store, _CREATED | _MOVED)
        self._notices.watch(self._scratch / "stages", _CREATED | _MODIFIED)
        return True

    def _attempt(self, instant: Instant) -> dict[str, Any] | None:
        """Kill if the stage is there now, and still is there after a random part of it."""
        for held, look in self._places(instant):
            seen = look()
            if not seen.startswith(instant.stage):
                continue
            span = self._spans.get(instant, _SPANS_S.get(instant.stage, _SPAN_S))
            time.sleep(self._rng.uniform(0, span))
            with stopped(held.values()) as are_stopped:
                if are_stopped and look() == seen and (told := self._told(instant, held)) is not None:
                    os.kill(held[instant.victim], signal.SIGKILL)
                    return told | {"at": time.time(), "after_s": round(span, 4)}
            self.misses += 1
            self._spans[instant] = max(_LEAST_S, span * _SHORTER)
        return None

    def _places(self, instant: Instant) -> Iterator[tuple[dict[str, int], Callable[[], str]]]:
        """Where it can be: process ids by who they are, all of which are stopped for the look; and the look."""
        assert self._trainer is not None
        assert self._writer is not None
        trainers = {WRITER: self._writer.pid, TRAINER: self._trainer.pid}
        if instant.stage in (WRITING, UNLISTED):
            store = self._store
            yield trainers, lambda: publication_stage(os.listdir(store) if store.is_dir() else [])
            return
        if instant.victim in (SERVER, ENGINE) and not instant.first and not self._has_stepped():
            return
        for file in (self._scratch / "stages").iterdir():
            engine = engine_file(int(file.name))
            if engine.exists() and psutil.pid_exists(int(file.name)):
                held = {SERVER: int(file.name), ENGINE: int(engine.read_text())}
                with contextlib.suppress(psutil.Error):
                    self.engines.add(psutil.Process(held[ENGINE]))
                    yield held | (trainers if instant.victim in trainers else {}), file.read_text

    def _has_stepped(self) -> bool:
        """Whether this life has published a second version."""
        versions = [int(file.stem) for file in self._store.glob("*.json")]
        return bool(versions) and max(versions) > self._first.setdefault(self._store, min(versions))

    def _told(self, instant: Instant, held: dict[str, int]) -> dict[str, Any] | None:
        """What is noted of the instant while its processes are stopped; None: it is none.

        ``whole``: what is listed is. ``read``: share of the version that the engine which has mapped it has read.
        ``cut``: share of the next one's bytes that are there.
        """
        newest = weight_store.newest(self._store)
        version = -1 if newest is None else newest.version
        told: dict[str, Any] = {"version": version, "store": self._store.name, "whole": is_whole(newest)}
        if ENGINE in held:
            told["read"] = mapped(held[ENGINE], self._store)
            told["first"] = instant.victim in (SERVER, ENGINE) and not self._has_stepped()
            return None if instant.victim == ENGINE and told["read"] is None else told
        files = sum(file.stat().st_size for file in self._store.glob("*.weights*"))
        told["cut"] = None if newest is None else round(files / newest.nbytes - 1, 4)
        return told

    # ---------------------------------------------------------------- what follows

    def _aftermath(self, instant: Instant, kill: dict[str, Any]) -> dict[str, Any]:
        """Wait until everybody has newer weights, and whoever died is back."""
        self._pulls.look()
        (starts, backs), lives = self._said(), frozenset(self._pulls.lives())
        following, pulled, again, back = dict[str, Any](), None, 0, 0
        may_go_on = instant.victim in (SERVER, ENGINE) and not kill["first"]
        until = time.monotonic() + _SETTLED_S
        while time.monotonic() < until and not self.over.wait(_LOOK_S):
            if self._knows_life() and not following:
                newest = weight_store.newest(self._store)
                if newest is not None and (self._store.name != kill["store"] or newest.version > kill["version"]):
                    following = {"next": newest.version, "next_whole": is_whole(newest)}
            said = self._said()
            again, back = said[0] - starts, said[1] - backs
            self._pulls.look()
            after = (0.0, -1, lives) if again else (kill["at"], kill["version"], frozenset[str]())
            pulled = self._pulls.by_all(*after)
            if following and pulled is not None and (again or (back and may_go_on)):
                break
        return {
            **following,
            "pulled": pulled,
            "restarts": again,
            "under_way": self._pulls.under_way(kill["at"]),
            "settled_s": round(time.time() - kill["at"], 1),
        }

    def _said(self) -> tuple[int, int]:
        """How often the run said that it starts again, and that a replica is back."""
        console = self._scratch / "console"
        lines = console.read_text(errors="replace").splitlines() if console.exists() else []
        back = sum(line.startswith("slice ") and line.endswith(" is back") for line in lines)
        return sum("within an hour, from" in line for line in lines), back


def is_whole(manifest: Manifest | None) -> bool:
    """Whether a reader would find all that was published, by its checksums; nothing at all and what is superseded
    meanwhile count as whole."""
    try:
        if manifest is not None:
            manifest.check(None)
            manifest.verify()
    except WeightsRefused:
        return False
    except FileNotFoundError:
        pass
    return True


def mapped(pid: int, folder: Path) -> float | None:
    """How much of a file in ``folder`` that a process has mapped it has read; None: it has mapped none."""
    size = 0.0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if f"{folder}/" in line:
            size = -1.0
        elif size and line.startswith("Size:"):
            size = float(line.split()[1])
        elif size and line.startswith("Rss:"):
            return float(line.split()[1]) / size
    return None


@contextlib.contextmanager
def stopped(pids: Any) -> Iterator[bool]:
    """Within, these processes do nothing; False: one of them is gone or does not stop."""
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        until = time.monotonic() + _STOPPED_S
        while not (done := all(map(_is_stopped, pids))) and time.monotonic() < until:
            time.sleep(0.0005)
        yield done
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    """All of its threads."""
    try:
        states = [file.read_text().rpartition(")")[2].split()[0] for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # one has ended meanwhile
        return False
    return set(states) == {"T"}
