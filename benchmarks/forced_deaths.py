"""Kills replicas of a run at chosen moments, from within its trainer's process; for `benchmarks.replica_deaths`.

Loaded by verl in every process (``VERL_USE_EXTERNAL_MODULES``). Every line of ``BENCHMARK_DEATHS`` is one kill: moment,
whose replica (``lent`` or ``standing``), which process (``server`` or ``engine``) and a delay in seconds. One after the
other: the next is due when the one before is back. What was done goes to the file ``BENCHMARK_DEATHS_LOG``.

    idle        the trainer trains (a lent replica sleeps then)
    generating  the trainer waits for groups
    before      a transfer to the standing replicas is about to begin
    in          it is under way
    after       it has just ended
    waking      a lent replica takes weights
    draining    one is interrupted to give its memory back
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

_STEPS_APART = 2  # of waits for groups, after a replica is back


class Killer:
    """Knows what is to be killed next, and kills it when its moment comes."""

    def __init__(self, plan: str) -> None:
        self._plan = [json.loads(line) for line in plan.splitlines()]
        self.replicas: dict[str, Any] = {}  # lent and standing ones, as verl's managers know them
        self._awaited: str | None = None
        self._rest = _STEPS_APART
        self._lock = threading.Lock()

    def is_back(self) -> None:
        self._awaited, self._rest = None, _STEPS_APART

    def moment(self, name: str) -> None:
        with self._lock:
            if name == "generating":
                self._rest -= 1
            if (
                not self._plan
                or self._awaited
                or self._rest > 0
                or not self.replicas
                or self._plan[0]["moment"] != name
            ):
                return
            kill = self._plan.pop(0)
            self._awaited = kill["whose"]
        pid = self._process(kill)
        if name in ("before", "after"):
            self._kill(kill, pid)
        else:
            threading.Timer(kill["delay_s"], self._kill, (kill, pid)).start()

    def _process(self, kill: dict[str, Any]) -> int:
        import ray

        replica = self.replicas[kill["whose"]][0]
        server = int(ray.get(replica.servers[0].__ray_call__.remote(_pid)))
        if kill["part"] == "server":
            return server
        return int(engine_file(server).read_text())

    def _kill(self, kill: dict[str, Any], pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        with Path(os.environ["BENCHMARK_DEATHS_LOG"]).open("a", encoding="utf-8") as log:
            log.write(json.dumps({**kill, "at": time.time()}) + "\n")


def _pid(_: Any) -> int:
    return os.getpid()


def engine_file(server: int) -> Path:
    return Path(f"{os.environ['BENCHMARK_DEATHS_LOG']}.engine-of-{server}")


_killer = Killer(os.environ.get("BENCHMARK_DEATHS", ""))


def _around(owner: Any, method: str, before: str = "", after: str = "") -> None:
    original: Callable[..., Any] = getattr(owner, method)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before:
            _killer.moment(before)
        result = original(self, *args, **kwargs)
        if after:
            _killer.moment(after)
        return result

    setattr(owner, method, called)


def _watch_slices(module: ModuleType) -> None:
    _around(module.ReplicaSlices, "wake", "waking")
    _around(module.ReplicaSlices, "interrupt", "draining")


def _watch_driver(module: ModuleType) -> None:
    tell = module.SliceDriver.tell_restarts

    def tell_restarts(self: Any) -> None:
        before = self.restarting
        tell(self)
        if before and not self.restarting:
            _killer.is_back()

    module.SliceDriver.tell_restarts = tell_restarts


def _watch_transfer(module: ModuleType) -> None:
    manager, transfer = module.GuardedCheckpointManager, module._Transfer
    update, send, finish = manager.update_weights, manager._send_through_group, transfer.finish

    def updated(self: Any, version: Any = None) -> Any:
        if self.backend == "naive":
            _killer.replicas["lent"] = self.replicas
            return update(self, version)
        _killer.replicas["standing"] = self.replicas
        _killer.moment("before")
        result = update(self, version)
        _killer.moment("after")
        return result

    def sent(self: Any, this: Any, version: Any) -> Any:
        this.through_group = True
        return send(self, this, version)

    def looked_after(self: Any, calls: Any, **settings: Any) -> Any:
        if getattr(self, "through_group", False):
            _killer.moment("in")
        return finish(self, calls, **settings)

    manager.update_weights, manager._send_through_group = updated, sent
    transfer.finish = looked_after


def _watch_lending(module: ModuleType) -> None:
    _around(module.Lending, "_wait", "generating")


def _watch_trainer(module: ModuleType) -> None:
    begin = module.SeamlessTrainer.on_sample_begin

    def on_sample_begin(self: Any) -> None:
        begin(self)
        _killer.moment("generating" if self.lending is None else "idle")

    module.SeamlessTrainer.on_sample_begin = on_sample_begin


def watch_engines(module: ModuleType) -> None:
    """An engine's process has no name that shows from outside: the nursery forked it."""
    end_with_server = module.end_with_server

    def told() -> None:
        end_with_server()
        if multiprocessing.current_process().name.startswith("EngineCore"):
            engine_file(int(os.environ[module.SERVER])).write_text(str(os.getpid()))

    module.end_with_server = told


if _killer._plan:
    wrapt.register_post_import_hook(_watch_slices, "seamless_verl.verl_adapter.slices.replica_slices")
    wrapt.register_post_import_hook(_watch_driver, "seamless_verl.verl_adapter.slices.slice_driver")
    wrapt.register_post_import_hook(_watch_transfer, "seamless_verl.verl_adapter.weights.weight_transfer")
    wrapt.register_post_import_hook(_watch_lending, "seamless_verl.verl_adapter.trainer.lending")
    wrapt.register_post_import_hook(_watch_trainer, "seamless_verl.verl_adapter.trainer.trainer")
    wrapt.register_post_import_hook(watch_engines, "seamless_verl.verl_adapter.vllm.vllm_plugin")
