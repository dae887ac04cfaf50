"""Memory of slices over time: from the books of devices to events, and from events to levels. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from seamless_verl.memory.book import Ended, Entry, Held, MemoryBook
from seamless_verl.observe.flight import MemoryHeld

Part = tuple[str, str]
"""User and purpose, e.g. ``("trainer", "optimizer")``."""


class MemoryTrack:
    """Turns the entries of a run's book into events.

    Args:
        slice_of: the slice that a device is part of; None: of no slice.
    """

    def __init__(self, slice_of: Callable[[str], str | None]) -> None:
        self._slice_of = slice_of
        self._book = MemoryBook()

    def take(self, entry: Entry) -> Iterator[MemoryHeld]:
        """``at`` stays the entry's."""
        changed: list[Held] = []
        if isinstance(entry, Held):
            changed = [entry]
        elif isinstance(entry, Ended):
            gone = [held for held in self._book.holdings() if held.owner.process == entry.process]
            changed = [msgspec.structs.replace(held, at=entry.at, nbytes=0) for held in gone]
        capacities = {held.device: self._book.capacity(held.device) for held in changed}
        self._book.enter(entry)
        for held in changed:
            slice_ = self._slice_of(held.device)
            if slice_ is not None:
                yield MemoryHeld(
                    at=held.at,
                    slice=slice_,
                    device=held.device,
                    user=held.owner.name,
                    what=held.what,
                    nbytes=held.nbytes,
                    capacity=capacities[held.device],
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceMemory:
    """Of all devices of a slice together.

    Attributes:
        levels: ``(time, bytes by part from then on)``, in order of time.
        capacity: bytes; None where nobody knows it.
        wakes, sleeps: how often its engine took its weights, and gave them back.
    """

    slice: str
    levels: tuple[tuple[float, Mapping[Part, int]], ...]
    capacity: int | None
    wakes: int
    sleeps: int

    @property
    def peak(self) -> int:
        return max((sum(parts.values()) for _, parts in self.levels), default=0)

    @property
    def parts(self) -> tuple[Part, ...]:
        """All that was ever held; the trainer's first."""
        found = {part for _, parts in self.levels for part in parts}
        return tuple(sorted(found, key=lambda part: (part[0] != "trainer", part)))


class MemoryLevels:
    """Adds events up to levels per slice."""

    def __init__(self) -> None:
        self._held: dict[str, dict[tuple[str, Part], int]] = {}  # by slice; device and part
        self._levels: dict[str, list[tuple[float, Mapping[Part, int]]]] = {}
        self._capacities: dict[str, dict[str, int]] = {}
        self._wakes: dict[str, int] = {}
        self._sleeps: dict[str, int] = {}

    def hold(self, event: MemoryHeld) -> None:
        part = event.user, event.what
        held = self._held.setdefault(event.slice, {})
        before = held.pop((event.device, part), 0)
        if event.nbytes:
            held[event.device, part] = event.nbytes
        if event.capacity is not None:
            self._capacities.setdefault(event.slice, {})[event.device] = event.capacity
        if part == ("engine", "weights"):
            count = self._wakes if event.nbytes > before else self._sleeps
            count[event.slice] = count.get(event.slice, 0) + 1
        self._note(event.slice, event.at)

    def clear(self, at: float) -> None:
        """A run is over: whatever it held is gone."""
        for name, held in self._held.items():
            held.clear()
            self._note(name, at)

    def of_slices(self) -> tuple[SliceMemory, ...]:
        return tuple(
            SliceMemory(
                slice=name,
                levels=tuple(levels),
                capacity=sum(self._capacities.get(name, {}).values()) or None,
                wakes=self._wakes.get(name, 0),
                sleeps=self._sleeps.get(name, 0),
            )
            for name, levels in self._levels.items()
        )

    def _note(self, name: str, at: float) -> None:
        parts: dict[Part, int] = {}
        for (_, part), nbytes in self._held[name].items():
            parts[part] = parts.get(part, 0) + nbytes
        levels = self._levels.setdefault(name, [])
        if levels and levels[-1][0] == at:
            levels.pop()
        levels.append((at, parts))
