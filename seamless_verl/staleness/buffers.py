"""One staleness buffer: the metadata of the batch that one training step will consume.

A slot is free, reserved (its group is still generated), occupied (its group is finished) or taken (its group was handed
to the trainer). Slots are counted, not numbered: StaleFlow's "first" and "last" free slot only say in which order a
batch is read, and that is the order of occupation here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from heapq import heappop, heappush
from itertools import islice


class BufferState(Enum):
    """What a buffer is waiting for.

    ``OPEN``: reservations may still go there. ``STUCK``: every slot is spoken for and too few groups are finished, so
    neither training nor a new reservation can use it. ``READY``: enough groups are finished to train on.
    """

    OPEN = "open"
    STUCK = "stuck"
    READY = "ready"


class StalenessBuffer:
    """Slots of the training step that updates weights of ``version``.

    Args:
        version: weight version that the step starts from (V_buf).
        slots: groups that may be reserved or finished here at a time; above ``needed`` with batch redundancy.
        needed: groups that the step trains on (B).
    """

    __slots__ = (
        "_arrivals",
        "_longest",
        "_reserved",
        "needed",
        "num_reserved",
        "occupied",
        "slots",
        "taken",
        "version",
    )

    def __init__(self, *, version: int, slots: int, needed: int) -> None:
        self.version = version
        self.slots = slots
        self.needed = needed
        self.taken = 0
        self.num_reserved = 0
        self.occupied: OrderedDict[str, int] = OrderedDict()  # group -> V_traj, in order of occupation
        self._arrivals = 0
        self._longest: list[tuple[int, int, str]] = []  # a heap; what is not in `occupied` any more is skipped
        self._reserved: dict[int, OrderedDict[str, None]] = {}  # V_traj -> groups, in order of reservation

    @property
    def num_free(self) -> int:
        """Slots that a reservation or a finished group can have."""
        return self.slots - self.taken - len(self.occupied) - self.num_reserved

    @property
    def num_missing(self) -> int:
        """Finished groups that the step still lacks."""
        return max(0, self.needed - self.taken - len(self.occupied))

    @property
    def state(self) -> BufferState:
        if not self.num_missing:
            return BufferState.READY
        return BufferState.OPEN if self.num_free else BufferState.STUCK

    def add_occupied(self, group: str, version: int, tokens: int) -> None:
        self.occupied[group] = version
        self._arrivals += 1
        heappush(self._longest, (-tokens, self._arrivals, group))

    def take_longest(self, count: int) -> list[tuple[str, int]]:
        """The longest ``count`` of the finished groups that the step trains on, with V_traj; removed from here.

        Equally long ones in order of occupation. What batch redundancy finished beyond the need of the step stays.
        """
        beyond = len(self.occupied) - (self.needed - self.taken)
        spared = set(islice(reversed(self.occupied), max(0, beyond)))
        chosen: list[tuple[str, int]] = []
        back = []
        while len(chosen) < count:
            longest = heappop(self._longest)
            group = longest[-1]
            if group in spared:
                back.append(longest)
            elif group in self.occupied:
                chosen.append((group, self.occupied.pop(group)))
        for longest in back:
            heappush(self._longest, longest)
        self.taken += count
        return chosen

    def add_reserved(self, group: str, version: int) -> None:
        self._reserved.setdefault(version, OrderedDict())[group] = None
        self.num_reserved += 1

    def remove_reserved(self, group: str, version: int) -> None:
        groups = self._reserved[version]
        del groups[group]
        if not groups:
            del self._reserved[version]
        self.num_reserved -= 1

    def reserved_since(self, version: int) -> str | None:
        """The reservation that may wait for a later step: the oldest V_traj >= ``version``, longest reserved first."""
        fitting = [v for v in self._reserved if v >= version]
        return next(iter(self._reserved[min(fitting)])) if fitting else None

    def reserved(self) -> Iterator[tuple[str, int]]:
        """``(group, V_traj)`` of every reservation; oldest version first, then in order of reservation."""
        for version in sorted(self._reserved):
            for group in self._reserved[version]:
                yield group, version
