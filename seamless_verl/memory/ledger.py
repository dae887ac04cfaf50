"""The books of all devices in one file that several processes of a machine write: a line per entry, appended.

A lock of the system guards it, which the system takes back from a process that dies. What dead processes held is
released by whoever looks next, so ``kill -9`` leaves nothing booked.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seamless_verl.memory.book import Ended, Entry, Held, MemoryBook, Needed, Owner, Phase

BOOK = "SEAMLESS_MEMORY_BOOK"
"""In the environment of a run's processes: the file."""
CAPACITY = "SEAMLESS_DEVICE_BYTES"
"""In the environment: bytes of every device; unset: what its largest phase needs."""


class MemoryLedger:
    """This process's view of the file; cheap enough for every move of memory (a lock, new lines, a line).

    Not to be used in a process that was forked from the one that made it: the lock would be one for both.
    """

    def __init__(self, file: Path, capacity: int | None = None) -> None:
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._read = 0
        self._threads = threading.Lock()  # the system's lock is the process's
        self._book = MemoryBook(capacity)

    def need(self, owner: Owner, device: str, what: str, nbytes: int, phases: Iterable[Phase]) -> None:
        with self._current():
            self._write(
                Needed(at=time.time(), device=device, owner=owner, what=what, nbytes=nbytes, phases=frozenset(phases))
            )

    def hold(self, owner: Owner, device: str, what: str, nbytes: int) -> None:
        """Raises:
        OutOfMemory: it does not fit; nothing is booked.
        """
        entry = Held(at=time.time(), device=device, owner=owner, what=what, nbytes=nbytes)
        with self._current():
            if entry.nbytes != self._nbytes(entry):
                self._book.check(entry)
                self._write(entry)

    def look(self) -> MemoryBook:
        """The book as of now; not to be changed."""
        with self._current():
            return self._book

    def close(self) -> None:
        os.close(self._file)

    def _nbytes(self, entry: Held) -> int:
        held = self._book.holdings(entry.device)
        return sum(other.nbytes for other in held if other.owner == entry.owner and other.what == entry.what)

    @contextmanager
    def _current(self) -> Iterator[None]:
        with self._threads:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                for entry in self._new():
                    self._book.enter(entry)
                for process in self._book.processes():
                    if not is_alive(process):
                        self._write(Ended(at=time.time(), process=process))
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _new(self) -> Iterator[Entry]:
        text = os.pread(self._file, os.fstat(self._file).st_size - self._read, self._read)
        self._read += len(text)
        if text and not text.endswith(b"\n"):  # whoever wrote it died meanwhile
            self._read += os.write(self._file, b"\n")
        yield from entries(text)

    def _write(self, entry: Entry) -> None:
        self._read += os.write(self._file, encode(entry))
        self._book.enter(entry)


def entries(text: bytes) -> Iterator[Entry]:
    """The entries of whole lines; half a line, of a writer that died, is none."""
    for line in text.splitlines():
        try:
            yield _decode(json.loads(line))
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError):
            continue


def encode(entry: Entry) -> bytes:
    fields: dict[str, Any]
    if isinstance(entry, Ended):
        fields = {"at": entry.at, "ended": entry.process}
    else:
        fields = {
            "at": entry.at,
            "device": entry.device,
            "owner": entry.owner.name,
            "process": entry.owner.process,
            "what": entry.what,
            "bytes": entry.nbytes,
        }
        if isinstance(entry, Needed):
            fields["phases"] = sorted(phase.value for phase in entry.phases)
    return json.dumps(fields).encode() + b"\n"


def _decode(fields: dict[str, Any]) -> Entry:
    if "ended" in fields:
        return Ended(at=fields["at"], process=fields["ended"])
    owner = Owner(name=fields["owner"], process=fields["process"])
    at, device, what, nbytes = fields["at"], fields["device"], fields["what"], fields["bytes"]
    if "phases" in fields:
        phases = frozenset(Phase(phase) for phase in fields["phases"])
        return Needed(at=at, device=device, owner=owner, what=what, nbytes=nbytes, phases=phases)
    return Held(at=at, device=device, owner=owner, what=what, nbytes=nbytes)


def this_process() -> str:
    """Number and start of this process."""
    return f"{os.getpid()} {_start(os.getpid())}"


def is_alive(process: str) -> bool:
    """Whether the process of a `this_process` still runs here; one that was killed and not yet waited for does not."""
    number, _, start = process.partition(" ")
    return _start(int(number)) == start


def _start(number: int) -> str:
    """Clock ticks between the machine's start and the process's; empty when it has ended."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]
