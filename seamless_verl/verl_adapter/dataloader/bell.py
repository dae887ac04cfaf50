"""The trainer's end of `arrivals`: sleeps until a prompt group has ended in one of the rollout workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray

# A blocked `ray.wait` does not see Ctrl-C; nothing else depends on this.
_SIGNALS_S = 1.0


class Bell:
    """The trainer's end: one open call per worker."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self._calls = {worker.news.remote(0): worker for worker in workers}

    def wait(self, timeout_s: float) -> None:
        """Return when a group ended since the last call that returned for one, or after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            answered, _ = ray.wait(list(self._calls), num_returns=1, timeout=min(left, _SIGNALS_S))
            if not answered:
                continue
            # Others may have rung meanwhile; one look at the metadata serves them all.
            answered, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
            for call in answered:
                worker = self._calls.pop(call)
                self._calls[worker.news.remote(ray.get(call))] = worker
            return
