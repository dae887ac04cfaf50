"""Memory behind tensors that can be given back and taken again, while the tensors stay where they are.

What CUDA's virtual memory does for vLLM's sleep mode, done with the storages of CPU tensors: views, tied parameters and
whoever holds a tensor see the same memory before and after. Pages go back to the system whatever malloc would keep.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

import torch

RUBBISH = 0xFF
"""Every byte of memory whose content was given up: not a number in each floating-point format, -1 in integers."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Storages:
    """The distinct storages behind ``tensors``, given back and taken together.

    Args:
        tensors: as many views of one storage as there are.
        besides: storages that belong to others and are left alone.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], besides: Storages | None = None) -> None:
        taken = set() if besides is None else {storage._cdata for storage in besides._storages}
        found = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._storages = [storage for key, storage in found.items() if key not in taken]
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
                storage.fill_(RUBBISH)
        self._kept = None
        self.resident = True


def _forget(storage: torch.UntypedStorage) -> None:
    """Zeros, and no page of the system's behind them until they are written to."""
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if storage.is_shared() or last <= first or _libc.madvise(first, last - first, mmap.MADV_DONTNEED):
        storage.fill_(0)
        return
    ctypes.memset(begin, 0, first - begin)
    ctypes.memset(last, 0, end - last)
