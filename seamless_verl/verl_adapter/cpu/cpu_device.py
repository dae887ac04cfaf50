"""The memory of the device that this process computes on, on the CPU platform: a slot of Ray's with a book.

    SEAMLESS_DEVICE   trainer/0   a worker of the trainer, by rank, and the engine of a replica on its device
                      standing/0  the engine of a replica with a device of its own

An engine of several workers has as many devices, from this one on. Counted are parameters, gradients, optimizer state,
the engine's weights and its cache; not what a computation needs for the while (activations, gathered shards). Without
a run's book (`seamless_verl.memory.ledger.BOOK`) memory moves all the same, and nothing is counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

from seamless_verl.memory.book import OutOfMemory, Owner, Phase
from seamless_verl.memory.ledger import BOOK, CAPACITY, MemoryLedger, this_process

DEVICE = "SEAMLESS_DEVICE"


class DeviceMemory:
    """What this process holds of one device.

    Args:
        ledger: the run's book.
        device: name of the device.
        user: ``trainer`` or ``engine``.
    """

    def __init__(self, ledger: MemoryLedger, device: str, user: str) -> None:
        self._ledger = ledger
        self._device = device
        self._owner = Owner(name=user, process=this_process())
        self._own: dict[str, int] = {}
        self.peak = 0

    def need(self, what: str, nbytes: int, phases: Iterable[Phase]) -> None:
        """It will hold up to ``nbytes`` for ``what``, in these phases only."""
        self._ledger.need(self._owner, self._device, what, nbytes, phases)

    def hold(self, what: str, nbytes: int) -> None:
        """From now on; to be called before memory is taken, and after it was given back.

        Raises:
            torch.OutOfMemoryError: it does not fit; the message has everybody's bytes.
        """
        try:
            self._ledger.hold(self._owner, self._device, what, nbytes)
        except OutOfMemory as error:
            raise torch.OutOfMemoryError(str(error)) from error
        self._own[what] = nbytes
        self.peak = max(self.peak, self.own)

    @property
    def own(self) -> int:
        """Bytes that this process holds."""
        return sum(self._own.values())

    @property
    def free_and_total(self) -> tuple[int, int]:
        """As ``mem_get_info`` of a GPU, whoever holds the rest."""
        book = self._ledger.look()
        used = book.used(self._device)
        total = book.capacity(self._device) or used
        return max(total - used, 0), total


def name_device(kind: str, number: int) -> None:
    """What this process and those it starts compute on; ``kind`` is ``trainer`` or ``standing``."""
    os.environ[DEVICE] = f"{kind}/{number}"


def device_memory(user: str, worker: int = 0) -> DeviceMemory | None:
    """That of this process; None where nothing is counted.

    Args:
        user: ``trainer`` or ``engine``.
        worker: rank among the workers of an engine, each on a device of its own.
    """
    return _device_memory(os.getpid(), user, worker)  # a forked process is another owner


@cache
def _device_memory(_: int, user: str, worker: int) -> DeviceMemory | None:
    if BOOK not in os.environ or DEVICE not in os.environ:
        return None
    kind, _, number = os.environ[DEVICE].partition("/")
    capacity = os.environ.get(CAPACITY)
    ledger = MemoryLedger(Path(os.environ[BOOK]), int(capacity) if capacity else None)
    return DeviceMemory(ledger, f"{kind}/{int(number) + worker}", user)
