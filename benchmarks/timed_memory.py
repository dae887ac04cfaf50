"""Writes down how long each process of a run spends on moving and booking device memory, for `memory_price`.

Loaded by verl in every process of a run (``VERL_USE_EXTERNAL_MODULES``). A call within another counts once. Each
call appends a line to ``FOLDER/PROCESS.txt``: what it was, and its seconds.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

FOLDER = "BENCHMARK_MEMORY_TIMES"
_within = threading.local()


def _timed(owner: Any, name: str, what: str) -> None:
    method: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if getattr(_within, "call", False):
            return method(*args, **kwargs)
        _within.call, began = True, time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            took, _within.call = time.perf_counter() - began, False
            with (Path(os.environ[FOLDER]) / f"{os.getpid()}.txt").open("a") as file:
                file.write(f"{what} {took:.6f}\n")

    setattr(owner, name, timed)


def _time_engine(module: ModuleType) -> None:
    _timed(module.SleepingCPUWorker, "sleep", "engine_sleeps")
    _timed(module.SleepingCPUWorker, "wake_up", "engine_wakes")


def _time_trainer(module: ModuleType) -> None:
    _timed(module.Place, "leave", "trainer_leaves")
    _timed(module.Place, "enter", "trainer_enters")


def _time_book(module: ModuleType) -> None:
    _timed(module.DeviceMemory, "hold", "booking")
    _timed(module.DeviceMemory, "need", "booking")


_CPU = "seamless_verl.verl_adapter.cpu"
wrapt.register_post_import_hook(_time_engine, f"{_CPU}.vllm_sleep")
wrapt.register_post_import_hook(_time_trainer, f"{_CPU}.trainer_memory")
wrapt.register_post_import_hook(_time_book, f"{_CPU}.cpu_device")
