"""The run's book of memory, followed by the trainer's process for the flight recorder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from seamless_verl.memory.book import BOOK, entries
from seamless_verl.observe.flight import MemoryHeld, SliceAdded
from seamless_verl.observe.memory import MemoryTrack

_TRAINER, _STANDING = "trainer", "standing"


class MemoryFlight:
    """Reads what the processes of the run have booked since it last looked; nothing where no book is kept."""

    def __init__(self) -> None:
        self._file = Path(os.environ[BOOK]) if BOOK in os.environ else None
        self._read = 0
        self._began_at = 0.0
        self._track = MemoryTrack(self._slice_of)
        self._slices: dict[str, list[str]] = {_TRAINER: [], _STANDING: []}  # by kind, one name per device
        self._hybrid = False

    def begin(self, at: float) -> None:
        """The recording begins, on the recorder's clock; what is there already was there from then on."""
        self._began_at = at

    def add(self, added: SliceAdded) -> None:
        """In the order of their devices: the trainer's ranks, and the replicas as verl counts them."""
        kind = _TRAINER if "train" in added.capabilities else _STANDING
        if added.slice not in self._slices[kind]:  # one that returns stays where it was
            self._slices[kind] += [added.slice] * added.devices
            self._hybrid = self._hybrid or (kind == _TRAINER and "rollout" in added.capabilities)

    def news(self, clock_s: float) -> Iterator[MemoryHeld]:
        """Args:
        clock_s: the recorder's clock, now.
        """
        if self._file is None or not self._file.exists():
            return
        with self._file.open("rb") as stream:
            stream.seek(self._read)
            text = stream.read()
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        offset = clock_s - time.time()
        for entry in entries(text):
            for event in self._track.take(entry):
                yield replace(event, at=max(event.at + offset, self._began_at))

    def _slice_of(self, device: str) -> str | None:
        """verl numbers its standalone replicas after those on the trainer's devices."""
        kind, _, number = device.partition("/")
        index = int(number)
        if kind == _STANDING and self._hybrid:
            index -= len(self._slices[_TRAINER])
        names = self._slices[kind]
        return names[index] if 0 <= index < len(names) else None
