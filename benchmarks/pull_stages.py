"""Each replica's server tells at which stage of a pull it is, so that it can be killed there; for
`benchmarks.kill_instants`.

Loaded by verl in every process (``VERL_USE_EXTERNAL_MODULES``). The file ``BENCHMARK_STAGES/PID`` says what the server
with that process id does, in as many bytes each time; nothing is waited for.

    pull checking   a standing one looks at the newest version, and has its engine open it
    pull pausing    its gate is closed, its engine comes to a halt, tokens are counted
    pull loading    its engine loads what it has mapped
    pull resuming   loaded: the router is told, requests go on
    wake loading    a lent one, on the trainer's GPUs, loads; its other stages are told as well
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from functools import cache
from types import ModuleType
from typing import Any

import wrapt

from benchmarks.forced_deaths import watch_engines

STAGES = "BENCHMARK_STAGES"
_WIDTH = 24
_doing = {"what": ""}


def _say(stage: str) -> None:
    os.pwrite(_file_of(os.getpid()), stage.ljust(_WIDTH).encode(), 0)


@cache
def _file_of(pid: int) -> int:  # processes are forked
    return os.open(os.path.join(os.environ[STAGES], str(pid)), os.O_WRONLY | os.O_CREAT)


def _wholly(owner: Any, method: str, what: str) -> None:
    original: Callable[..., Awaitable[Any]] = getattr(owner, method)

    async def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        _doing["what"] = what
        try:
            return await original(self, *args, **kwargs)
        finally:
            _say("")

    setattr(owner, method, called)


def _stage(owner: Any, method: str, stage: str, after: str = "") -> None:
    original: Callable[..., Awaitable[Any]] = getattr(owner, method)

    async def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        _say(f"{_doing['what']} {stage}")
        result = await original(self, *args, **kwargs)
        if after:
            _say(f"{_doing['what']} {after}")
        return result

    setattr(owner, method, called)


def _watch_server(module: ModuleType) -> None:
    server = module.PullingServer
    _wholly(server, "pull", "pull")
    _wholly(server, "wake_with", "wake")
    _stage(server, "_opened", "checking")
    _stage(server, "_hold_up", "pausing")
    _stage(server, "_load", "loading", after="resuming")


if STAGES in os.environ:
    wrapt.register_post_import_hook(_watch_server, "seamless_verl.verl_adapter.vllm.pulling_server")
    wrapt.register_post_import_hook(watch_engines, "seamless_verl.verl_adapter.vllm.vllm_plugin")
