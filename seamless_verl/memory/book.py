"""Who holds how much of a device's memory for what, how much it has, and what does not fit any more.

A device has a capacity that is given, or follows from what its users say they need, phase by phase: training and
rollout take turns, so no phase holds everything. Nothing but the needs of the largest phase fits.

              parameters  gradients  optimizer  engine's weights  cache
    train         x           x          x
    sync          x                                    x
    rollout                                            x            x        (what is not offloaded stays, too)

`MemoryBook` is the arithmetic. `SharedBook` keeps it in one file that several processes of a machine write, a line per
entry. A lock of the system guards the file; the system takes it back from a process that dies. What dead processes
held is released by whoever looks next, so ``kill -9`` leaves nothing booked.
"""

from __future__ import annotations

import enum
import fcntl
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from seamless_verl.errors import SeamlessError
from seamless_verl.machine import started_ticks

BOOK = "SEAMLESS_MEMORY_BOOK"
"""In the environment of a run's processes: the file."""
CAPACITY = "SEAMLESS_DEVICE_BYTES"
"""In the environment: bytes of every device; unset: what its largest phase needs."""


class Phase(enum.Enum):
    """What a device is used for; users of a device take turns."""

    TRAIN = "train"
    SYNC = "sync"
    ROLLOUT = "rollout"


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory.

    Attributes:
        name: for messages, e.g. ``trainer``.
        process: its identity; numbers of processes come again.
    """

    name: str
    process: str


class Needed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``owner`` will hold up to ``nbytes`` of ``device`` for ``what``, in these phases and in no other."""

    at: float
    device: str
    owner: Owner
    what: str
    nbytes: int
    phases: frozenset[Phase]


class Held(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Since ``at`` (seconds, wall time), ``owner`` holds ``nbytes`` of ``device`` for ``what``; 0: none any more."""

    at: float
    device: str
    owner: Owner
    what: str
    nbytes: int


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The process holds nothing any more, and needs nothing."""

    at: float
    process: str


Entry = Needed | Held | Ended
_DECODER: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


class OutOfMemory(SeamlessError):
    """As CUDA would say it, with everybody's bytes."""


class MemoryBook:
    """See the module.

    Args:
        capacity: bytes of every device; None: what the largest phase needs.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._held: dict[tuple[str, Owner, str], int] = {}
        self._needs: dict[tuple[str, Owner, str], Needed] = {}

    def capacity(self, device: str) -> int | None:
        """Bytes; None where none is given and nobody has said what it needs.

        Between what the largest phase needs and that plus half of the smallest need: rounding fits, but nothing that
        belongs to another phase.
        """
        if self._capacity is not None:
            return self._capacity
        needs = [need for need in self._needs.values() if need.device == device and need.nbytes]
        if not needs:
            return None
        phases = [sum(need.nbytes for need in needs if phase in need.phases) for phase in Phase]
        return max(phases) + min(need.nbytes for need in needs) // 2

    def used(self, device: str) -> int:
        return sum(held.nbytes for held in self.holdings(device))

    def holdings(self, device: str | None = None) -> Iterator[Held]:
        """What is held, by device, owner and purpose; the time of an entry is not kept."""
        for (place, owner, what), nbytes in sorted(self._held.items(), key=lambda item: (item[0][0], item[0][2])):
            if device in (None, place):
                yield Held(at=0.0, device=place, owner=owner, what=what, nbytes=nbytes)

    def processes(self) -> frozenset[str]:
        return frozenset(owner.process for _, owner, _ in (*self._held, *self._needs))

    def check(self, entry: Held) -> None:
        """Refuse what does not fit.

        Raises:
            OutOfMemory: there is too little room beside what is held. Holding less than before always fits.
        """
        capacity = self.capacity(entry.device)
        before = self._held.get((entry.device, entry.owner, entry.what), 0)
        used = self.used(entry.device)
        if capacity is None or entry.nbytes <= before or used - before + entry.nbytes <= capacity:
            return
        others = "; ".join(
            f"{held.what} of {held.owner.name} (process {held.owner.process.split()[0]}) {size(held.nbytes)}"
            for held in self.holdings(entry.device)
        )
        raise OutOfMemory(
            f"out of memory on device {entry.device}: {entry.owner.name} wants {size(entry.nbytes - before)} for "
            f"{entry.what}, and {size(max(capacity - used, 0))} of {size(capacity)} are free. "
            f"Held: {others or 'nothing'}"
        )

    def enter(self, entry: Entry) -> None:
        """Take an entry in, whether it fits or not: it has happened."""
        if isinstance(entry, Ended):
            self._held = {key: nbytes for key, nbytes in self._held.items() if key[1].process != entry.process}
            self._needs = {key: need for key, need in self._needs.items() if key[1].process != entry.process}
            return
        key = (entry.device, entry.owner, entry.what)
        if isinstance(entry, Needed):
            self._needs[key] = entry
        elif entry.nbytes:
            self._held[key] = entry.nbytes
        else:
            self._held.pop(key, None)


def size(nbytes: float) -> str:
    """A number of bytes for people: 1536 -> ``1.5 KiB``."""
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


class SharedBook:
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
        """Book ``nbytes`` for ``what``, in place of what was booked for it.

        Raises:
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
        self._read += os.write(self._file, msgspec.json.encode(entry) + b"\n")
        self._book.enter(entry)


def entries(text: bytes) -> Iterator[Entry]:
    """The entries of whole lines; half a line, of a writer that died, is none."""
    for line in text.splitlines():
        try:
            yield _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue


def this_process() -> str:
    """Number and start of this process."""
    return f"{os.getpid()} {started_ticks(os.getpid())}"


def is_alive(process: str) -> bool:
    """Whether the process of a `this_process` still runs here; one that was killed and not yet waited for does not."""
    number, _, start = process.partition(" ")
    return started_ticks(int(number)) == start
