"""vLLM schedules a step before the last one's tokens are known (``async_scheduling``), as it does on GPUs.

Its CPU build switches that off. Loaded by verl in every process of a replica (``VERL_USE_EXTERNAL_MODULES``); see
`tests.live_replica`. A stand-in is here only for CUDA's streams and events, by which tokens get to the host: on a CPU
they are there.
"""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import wrapt


def _switch_on(module: ModuleType) -> None:
    platform: Any = module.CpuPlatform  # type: ignore[attr-defined]
    check = platform.check_and_update_config.__func__

    def checked(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(checked)


def _nothing(*_: Any, **__: Any) -> Any:
    return SimpleNamespace(record=_nothing, synchronize=_nothing, wait_stream=_nothing)


def _without_streams(module: ModuleType) -> None:
    output: Any = module.AsyncGPUModelRunnerOutput  # type: ignore[attr-defined]
    make = output.__init__

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["async_output_copy_stream"] = _nothing()
        streams = {"current_stream": _nothing, "stream": contextlib.nullcontext, "Event": _nothing}
        with patch.multiple(torch.cuda, **streams), patch.object(torch, "Event", _nothing):
            make(self, *args, **kwargs)

    output.__init__ = made


wrapt.register_post_import_hook(_switch_on, "vllm.platforms.cpu")
wrapt.register_post_import_hook(_without_streams, "vllm.v1.worker.gpu_model_runner")
