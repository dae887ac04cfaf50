"""The device that this process computes on, on the CPU platform: a slot of Ray's with a core and a book of memory.

    SEAMLESS_DEVICE   trainer/0   a worker of the trainer, by rank, and the engine of a replica on its device
                      standing/0  the engine of a replica with a device of its own
    SEAMLESS_CORES    {"trainer": [0], "replica": [0, 1]}   core of each trainer rank and of each rollout replica
                      (hybrid ones first, as verl counts), so that what shares a device competes for it;
                      unset: nothing is pinned

An engine of several workers has as many devices, from this one on. Counted are parameters, gradients, optimizer state,
the engine's weights and its cache; not what a computation needs for the while (activations, gathered shards). Without
a run's book (`seamless_verl.memory.book.BOOK`) memory moves all the same, and nothing is counted.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

from seamless_verl.memory.book import BOOK, CAPACITY, OutOfMemory, Owner, Phase, SharedBook, this_process

DEVICE = "SEAMLESS_DEVICE"
CORES = "SEAMLESS_CORES"
_ENGINE_CORE = "SEAMLESS_CORE_OF_ENGINE"
RUBBISH = 0xFF
"""Every byte of memory whose content was given up: not a number in each floating-point format, -1 in integers."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class DeviceMemory:
    """What this process holds of one device.

    Args:
        ledger: the run's book.
        device: name of the device.
        user: ``trainer`` or ``engine``.
    """

    def __init__(self, ledger: SharedBook, device: str, user: str) -> None:
        self._ledger = ledger
        self._device = device
        self._owner = Owner(name=user, process=this_process())
        self._own: dict[str, int] = {}
        self.peak = 0

    def need(self, what: str, nbytes: int, phases: Iterable[Phase]) -> None:
        """Announce that this process will hold up to ``nbytes`` for ``what``, in these phases only."""
        self._ledger.need(self._owner, self._device, what, nbytes, phases)

    def hold(self, what: str, nbytes: int) -> None:
        """Book ``nbytes`` for ``what`` from now on; call it before memory is taken, and after it was given back.

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
    """This process's part of its device's memory; None where nothing is counted.

    Args:
        user: ``trainer`` or ``engine``.
        worker: rank among the workers of an engine, each on a device of its own.
    """
    return _device_memory(os.getpid(), user, worker)  # a forked process is another owner


@cache
def _device_memory(process: int, user: str, worker: int) -> DeviceMemory | None:
    if BOOK not in os.environ or DEVICE not in os.environ:
        return None
    kind, number = os.environ[DEVICE].split("/")
    capacity = os.environ.get(CAPACITY)
    ledger = SharedBook(Path(os.environ[BOOK]), int(capacity) if capacity else None)
    return DeviceMemory(ledger, f"{kind}/{int(number) + worker}", user)


class Storages:
    """The distinct storages behind ``tensors``, given back and taken together, while the tensors stay where they are.

    What CUDA's virtual memory does for vLLM: views, tied parameters and whoever holds a tensor see the same memory
    before and after. Pages go back to the system whatever malloc would keep.

    Args:
        tensors: as many views of one storage as there are.
        besides: storages that belong to others and are left alone.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], besides: Storages | None = None) -> None:
        taken = set() if besides is None else {storage._cdata for storage in besides._storages}
        found = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._storages: list[torch.UntypedStorage] = [storage for key, storage in found.items() if key not in taken]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._kept: list[torch.UntypedStorage] | None = None
        self.resident = True

    @property
    def nbytes(self) -> int:
        """Bytes while they are resident."""
        return sum(self._sizes)

    def give_back(self, *, keep: bool) -> None:
        """Free the memory; ``keep``: its content waits in memory of the host."""
        if not self.resident:
            return
        self._kept = [storage.clone() for storage in self._storages] if keep else None
        for storage in self._storages:
            _forget(storage)
            storage.resize_(0)
        self.resident = False

    def take(self, *, empty: bool = False) -> None:
        """Allocate it again, with the content that was kept; else it is ``empty`` (zeros), or `RUBBISH`."""
        if self.resident:
            return
        for position, (storage, size) in enumerate(zip(self._storages, self._sizes, strict=True)):
            storage.resize_(size)
            if self._kept is not None:
                storage.copy_(self._kept[position])
            elif empty:
                _forget(storage)
            else:
                _fill(storage, RUBBISH)
        self._kept = None
        self.resident = True


def _fill(storage: torch.UntypedStorage, byte: int) -> None:
    ctypes.memset(storage.data_ptr(), byte, storage.nbytes())


def _forget(storage: torch.UntypedStorage) -> None:
    """Zeros that take no memory until they are written to."""
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if storage.is_shared() or last <= first or _libc.madvise(first, last - first, mmap.MADV_DONTNEED):
        _fill(storage, 0)
        return
    ctypes.memset(begin, 0, first - begin)
    ctypes.memset(last, 0, end - last)


def pin_trainer() -> None:
    """Called in a trainer's worker process."""
    if CORES in os.environ:
        _pin(json.loads(os.environ[CORES])["trainer"][int(os.environ["RANK"])])


def pin_replica() -> None:
    """Called in vLLM's server process, a Ray actor that verl names after its replica, and in its engine process."""
    if CORES not in os.environ:
        return
    if _ENGINE_CORE not in os.environ:
        import ray

        if not ray.is_initialized():
            return
        name = ray.get_runtime_context().get_actor_name() or ""
        if not name.startswith("vllm_server_"):
            return
        rank = int(name.removeprefix("vllm_server_").split("_")[0])
        os.environ[_ENGINE_CORE] = str(json.loads(os.environ[CORES])["replica"][rank])
    _pin(int(os.environ[_ENGINE_CORE]))


def _pin(core: int) -> None:
    for thread in os.listdir("/proc/self/task"):  # threads that exist; later ones inherit
        os.sched_setaffinity(int(thread), {core})
