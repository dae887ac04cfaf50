"""Small stand-ins for the parts of a transfer around verl's own code: `Trainer` for the worker that trains, `Engine`
for a vLLM server with its engine process, `Worker` for the one beside a replica, `Replica` for verl's handle of all.

What is between them is real: verl's manager, its nccl engine (over gloo), its sender and receiver of buckets.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ray
import torch

BUCKET_MB = 1
LAYERS = 12
SIZE = 1 << 18  # fp32, 1 MiB: each layer is a bucket of its own


def layers(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    for number in range(LAYERS):
        yield f"layer-{number}", torch.full((SIZE,), float(100 * version + number))


def bucket_transfer() -> Any:
    """verl's module, hooks of our plug-in included, without its package: that one brings in all of vLLM."""
    name = "verl.workers.rollout.vllm_rollout"
    import verl.workers.rollout

    package = sys.modules.setdefault(name, types.ModuleType(name))
    package.__path__ = [f"{verl.workers.rollout.__path__[0]}/vllm_rollout"]
    return importlib.import_module(f"{name}.bucketed_weight_transfer")


def _checkpoint_engine(rank: int | None) -> Any:
    from benchmarks.nccl_over_gloo import NcclOverGlooEngine

    return NcclOverGlooEngine(bucket_size=BUCKET_MB << 20, is_master=rank == 0)


def _slow_line(address: tuple[str, int], delay_s: float) -> int:
    """The port of a relay that takes connections at once and passes on their first byte after ``delay_s``."""
    listening = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(1 << 16):
            sink.sendall(data)

    def relay() -> None:
        caller, _ = listening.accept()
        time.sleep(delay_s)
        ends = caller, socket.create_connection(address)
        for source, sink in (ends, ends[::-1]):
            threading.Thread(target=pump, args=(source, sink), daemon=True).start()

    threading.Thread(target=relay, daemon=True).start()
    return listening.getsockname()[1]


class Trainer:
    def __init__(self, rank: int) -> None:
        self.checkpoint_engine = _checkpoint_engine(rank)

    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    async def update_weights(self, global_steps: int, mode: str) -> dict[str, Any]:
        await self.checkpoint_engine.send_weights(layers(global_steps))
        return {}


class Engine:
    """A server whose engine takes weights; it may be told to die, or to stop, when it has taken some."""

    def __init__(self, handle: str) -> None:
        self._handle = handle
        self._threads: list[threading.Thread] = []
        self.engine = SimpleNamespace(errored=False)
        self.loaded: dict[str, float] = {}
        self.fails_at: int | None = None
        self.stops_at: int | None = None
        self.failures: list[str] = []

    def set(self, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self, name, value)

    def pid(self) -> int:
        return os.getpid()

    def state(self) -> tuple[dict[str, float], list[str]]:
        return self.loaded, self.failures

    async def take(self) -> None:
        await asyncio.to_thread(self._take)

    def _take(self) -> None:
        def load(weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            for name, weight in weights:
                if len(self.loaded) == self.fails_at:
                    os._exit(1)
                if len(self.loaded) == self.stops_at:  # its process died, the server lives
                    self.engine.errored = True
                    threading.Event().wait()
                assert torch.all(weight == weight[0])
                self.loaded[name] = float(weight[0])

        self.loaded = {}
        try:
            bucket_transfer().BucketedWeightReceiver(self._handle, torch.device("cpu"), use_shm=True).receive_weights(
                load
            )
        except Exception as error:
            self.failures.append(type(error).__name__)
            raise


class Worker:
    """As verl's `CheckpointEngineWorker` with its `ServerAdapter`; dies when it has received ``dies_at`` weights.

    It hears of buckets only ``connects_after_s`` later than it believes.
    """

    def __init__(self, handle: str, engine: Any) -> None:
        self.checkpoint_engine = _checkpoint_engine(None)
        self._handle = handle
        self._engine = engine
        self.dies_at: int | None = None
        self.connects_after_s = 0.0

    def set(self, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self, name, value)

    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        master = kwargs.get("master_metadata")
        if master is not None and self.connects_after_s:
            port = _slow_line((master.zmq_ip, master.zmq_port), self.connects_after_s)
            kwargs["master_metadata"] = replace(master, zmq_ip="127.0.0.1", zmq_port=port)
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    async def update_weights(self, global_steps: int | None = None) -> None:
        taken = self._engine.take.remote()
        sender = bucket_transfer().BucketedWeightSender(self._handle, BUCKET_MB, use_shm=True)
        await sender.async_send_weights(self._received())
        await taken

    async def _received(self) -> Any:
        number = 0
        async for named in self.checkpoint_engine.receive_weights():
            if number == self.dies_at:
                os._exit(1)
            number += 1
            yield named


class Replica:
    def __init__(self, rank: int, handle: str) -> None:
        from verl.workers.rollout.replica import RolloutMode

        self.replica_rank = rank
        self.rollout_mode = RolloutMode.STANDALONE
        self.handle = handle
        self.start_engine()
        self.start_worker()

    def start_engine(self) -> None:
        self.engine = ray.remote(num_cpus=0)(Engine).options(max_concurrency=10).remote(self.handle)
        self.servers = [self.engine]

    def start_worker(self) -> None:
        self.workers = [ray.remote(num_cpus=0)(Worker).remote(self.handle, self.engine)]

    async def _nothing(self, **_: Any) -> None:
        await asyncio.gather(*[server.pid.remote() for server in self.servers])

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = _nothing


class Trainers:
    """As verl's worker group of the trainer."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.sending: list[Any] = []
        self.workers = [ray.remote(num_cpus=0)(Trainer).remote(rank) for rank in range(world_size)]

    def execute_checkpoint_engine(self, method: list[str], **kwargs: list[Any]) -> list[Any]:
        own = [dict(zip(kwargs, values, strict=True)) for values in zip(*kwargs.values(), strict=True)]
        each = own or [{}] * len(method)
        return [
            worker.execute_checkpoint_engine.remote(name, **arguments)
            for worker, name, arguments in zip(self.workers, method, each, strict=True)
        ]

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        self.sending = [worker.update_weights.remote(global_steps, mode) for worker in self.workers]
        return self.sending
