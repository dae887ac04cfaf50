"""A book per device: who holds how much of its memory for what, how much it has, and what does not fit any more.

A device has a capacity that is given, or follows from what its users say they need, phase by phase: training and
rollout take turns, so no phase holds everything. Nothing but the needs of the largest phase fits.

              parameters  gradients  optimizer  engine's weights  cache
    train         x           x          x
    sync          x                                    x
    rollout                                            x            x        (what is not offloaded stays, too)
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from seamless_verl.errors import SeamlessError


class Phase(enum.Enum):
    """What a device is used for; users of a device take turns."""

    TRAIN = "train"
    SYNC = "sync"
    ROLLOUT = "rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that holds memory.

    Attributes:
        name: for messages, e.g. ``trainer``.
        process: its identity; numbers of processes come again.
    """

    name: str
    process: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """``owner`` will hold up to ``nbytes`` of ``device`` for ``what``, in these phases and in no other."""

    at: float
    device: str
    owner: Owner
    what: str
    nbytes: int
    phases: frozenset[Phase]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Since ``at`` (seconds, wall time), ``owner`` holds ``nbytes`` of ``device`` for ``what``; 0: none any more."""

    at: float
    device: str
    owner: Owner
    what: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The process holds nothing any more, and needs nothing."""

    at: float
    process: str


Entry = Needed | Held | Ended


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
        """Raises:
        OutOfMemory: it does not fit beside what is held. Holding less than before always fits.
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
    """For people: 1536 -> ``1.5 KiB``."""
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def by_purpose(holdings: Iterable[Held]) -> Mapping[str, int]:
    """Bytes per purpose."""
    found: dict[str, int] = {}
    for held in holdings:
        found[held.what] = found.get(held.what, 0) + held.nbytes
    return found
