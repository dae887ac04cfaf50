"""Makes our trainer lend and reclaim its slices again and again before each step, whatever a policy would do.

Loaded by verl in every process of a run (``VERL_USE_EXTERNAL_MODULES``); for `benchmarks.lend_cycles`.
"""

from __future__ import annotations

import os
import time
from types import ModuleType
from typing import Any

import wrapt

_CYCLES = int(os.environ.get("BENCHMARK_CYCLES_PER_STEP", "0"))
_APART_S = 0.3  # time for requests to begin on the lent slice


def _force(module: ModuleType) -> None:
    lending = module.Lending
    original = lending.acquire_gang

    def acquire_gang(self: Any) -> None:
        for _ in range(_CYCLES):
            self._acquire(module.Tag.TRAIN, self._gang)  # needs no data, so it is granted at once
            self._release()
            time.sleep(_APART_S)
        original(self)

    lending.acquire_gang = acquire_gang


wrapt.register_post_import_hook(_force, "seamless_verl.verl_adapter.trainer.lending")
