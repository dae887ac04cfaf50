"""What a whole run is watched with, in its own processes: weights at each publication and loan, memory by phase, kills.

Loaded by verl in every process of the run (``VERL_USE_EXTERNAL_MODULES``); writes lines of JSON to ``BENCHMARK_PROBE``.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import ray
import wrapt

from benchmarks.gpu_checks import stage  # (lets server and engine measure)
from benchmarks.gpu_checks.checksums import Sums, add

_FILE = os.environ["BENCHMARK_PROBE"]
_WATCHES = set(os.environ.get("BENCHMARK_WATCHES", "").split(","))
_DTYPE = os.environ.get("BENCHMARK_DTYPE", "float32")
_KILLS: list[dict[str, Any]] = json.loads(os.environ.get("BENCHMARK_KILLS", "[]"))
_SAMPLE_S = 0.02
_ORPHAN_S = 30.0


def _note(kind: str, **values: Any) -> None:
    with Path(_FILE).open("a") as file:
        file.write(json.dumps({"kind": kind, "at": time.time(), **values}) + "\n")


# ---------------------------------------------------------------- weights


def _trainer_sums(group: Any) -> Sums:
    return add(ray.get([worker.__ray_call__.remote(stage.sums_of_worker, _DTYPE) for worker in group.workers]))


def _watch_publications(module: ModuleType) -> None:
    """A version's weights are those that the trainer has when its step ends."""
    lending: Any = module.Lending  # type: ignore[attr-defined]
    introduce, close_batch = lending.introduce, lending.close_batch

    @functools.wraps(introduce)
    def introduced(self: Any, *args: Any) -> None:
        _note("published", version=self.step, sums=_trainer_sums(self.weights.workers))
        introduce(self, *args)

    @functools.wraps(close_batch)
    def closed(self: Any) -> None:
        _note("published", version=self.step, sums=_trainer_sums(self.weights.workers))
        close_batch(self)

    lending.introduce, lending.close_batch = introduced, closed


def _watch_updates(module: ModuleType) -> None:
    """Old log-probs are of the weights that the step began with; what the trainer has learned since stays."""
    trainer: Any = module.SeamlessTrainer  # type: ignore[attr-defined]
    original = trainer._compute_old_log_prob

    @functools.wraps(original)
    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _trainer_sums(self.actor_rollout_wg)
        made = original(self, *args, **kwargs)
        _note("old_log_probs", kept=_trainer_sums(self.actor_rollout_wg) == before)
        return made

    trainer._compute_old_log_prob = compute


def _watch_loans(module: ModuleType) -> None:
    """What a lent replica has, and what the trainer gave it, while it gave it."""
    slices: Any = module.ReplicaSlices  # type: ignore[attr-defined]
    wake = slices.wake

    @functools.wraps(wake)
    def woken(self: Any, lent: Any, version: int, serving: Any) -> None:
        weights = self._published_weights.__self__
        within_step = bool(weights.newer)
        before = _trainer_sums(weights.workers)
        wake(self, lent, version, serving)
        with self._published_weights():
            given = _trainer_sums(weights.workers)
        kept = _trainer_sums(weights.workers) == before
        for slice_id in lent:
            server = self._replicas[slice_id].servers[0]
            engine = add(ray.get(server.measured.remote("parameter_sums")))
            _note("loan", version=version, within_step=within_step, engine=engine, given=given, kept=kept)

    slices.wake = woken


# ---------------------------------------------------------------- memory


def _watch_phases(module: ModuleType) -> None:
    flight: Any = module.TrainerFlight  # type: ignore[attr-defined]
    flight.began, flight.ended = _noted(flight.began, "began"), _noted(flight.ended, "ended")


def _noted(original: Any, edge: str) -> Any:
    def noted(self: Any, phase: Any) -> None:
        _note("phase", phase=phase.value, edge=edge)
        original(self, phase)

    return noted


def _watch_memory(module: ModuleType) -> None:
    """A thread of the trainer's worker, which has the device open by then."""
    worker: Any = module.DetachActorWorker  # type: ignore[attr-defined]
    original = worker.init_model

    @functools.wraps(original)
    def init_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        threading.Thread(target=_sample, name="memory probe", daemon=True).start()
        return made

    worker.init_model = init_model


def _sample() -> None:
    last = -1
    while True:
        used, total = stage.device_memory()
        if used != last:
            _note("memory", used=used, total=total)
            last = used
        time.sleep(_SAMPLE_S)


# ---------------------------------------------------------------- kills


def _kill(lending: Any, moment: str) -> None:
    """Each of `_KILLS` once, in its step or later: ``{"step": 2, "while": "training", "what": "server"}``."""
    for plan in [plan for plan in _KILLS if plan["step"] <= lending.step and plan["while"] == moment][:1]:
        _KILLS.remove(plan)
        server = next(iter(lending.replicas._replicas.values())).servers[0]
        engine = ray.get(server.measured.remote("engine_process"))[0]
        target = engine if plan["what"] == "engine" else ray.get(server.__ray_call__.remote(stage.pid_of))
        _note("kill", **plan)
        os.kill(target, signal.SIGKILL)
        threading.Thread(target=_watch_end, args=(plan, engine), daemon=True).start()


def _kill_while_training(module: ModuleType) -> None:
    trainer: Any = module.SeamlessTrainer  # type: ignore[attr-defined]
    update = trainer._update_actor

    @functools.wraps(update)
    def update_actor(self: Any, *args: Any, **kwargs: Any) -> Any:
        _kill(self.lending, "training")
        return update(self, *args, **kwargs)

    trainer._update_actor = update_actor


def _kill_while_generating(module: ModuleType) -> None:
    lending: Any = module.Lending  # type: ignore[attr-defined]
    wait = lending._wait

    @functools.wraps(wait)
    def waiting(self: Any, timeout_s: float) -> None:
        if self.driver.lending:
            _kill(self, "generating")
        wait(self, timeout_s)

    lending._wait = waiting


def _watch_end(plan: dict[str, Any], engine: int) -> None:
    """An engine that outlives its server keeps the memory of its device."""
    began = time.time()
    while psutil.pid_exists(engine) and time.time() - began < _ORPHAN_S:
        time.sleep(0.1)
    _note("engine_gone", **plan, seconds=time.time() - began)


if "weights" in _WATCHES:
    wrapt.register_post_import_hook(_watch_publications, "seamless_verl.verl_adapter.trainer.lending")
    wrapt.register_post_import_hook(_watch_updates, "seamless_verl.verl_adapter.trainer.trainer")
    wrapt.register_post_import_hook(_watch_loans, "seamless_verl.verl_adapter.slices.replica_slices")
if "memory" in _WATCHES:
    wrapt.register_post_import_hook(_watch_phases, "seamless_verl.verl_adapter.trainer.trainer_flight")
    wrapt.register_post_import_hook(_watch_memory, "verl.experimental.separation.engine_workers")
if _KILLS:
    wrapt.register_post_import_hook(_kill_while_training, "seamless_verl.verl_adapter.trainer.trainer")
    wrapt.register_post_import_hook(_kill_while_generating, "seamless_verl.verl_adapter.trainer.lending")
