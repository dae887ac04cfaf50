"""What was made of texts that come again, bounded by bytes: how long a text is, its sender decides."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound="str | tuple[str, ...]")
_Value = TypeVar("_Value")
_OVERHEAD = 200  # bytes of an entry beside its texts


class TextCache(Generic[_Key, _Value]):
    """The most recently used results of a function of texts. Threads may share one.

    Invariant: ``num_bytes``, of keys and values, is at most ``max_bytes``.

    Args:
        make: the function.
        factor: how many times the memory of its texts a result takes, at most.
        max_bytes: of all; a result with more than a quarter of it is not kept.
    """

    def __init__(self, make: Callable[[_Key], _Value], *, factor: int, max_bytes: int) -> None:
        self.num_bytes = 0
        self._make = make
        self._factor = factor
        self._max_bytes = max_bytes
        self._entries: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: _Key) -> _Value:
        with self._lock:
            known = self._entries.get(key)
            if known is not None:
                self._entries.move_to_end(key)
                return known[0]
        value = self._make(key)
        texts = (key,) if isinstance(key, str) else key
        size = _OVERHEAD + (1 + self._factor) * sum(map(sys.getsizeof, texts))
        if size <= self._max_bytes // 4:
            self._keep(key, value, size)
        return value

    def _keep(self, key: _Key, value: _Value, size: int) -> None:
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = (value, size)
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= self._entries.popitem(last=False)[1][1]
