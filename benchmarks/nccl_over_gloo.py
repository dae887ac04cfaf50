"""Checkpoint engine ``nccl_over_gloo``: verl's own nccl engine, line for line, on a machine without accelerators.

    actor_rollout_ref.rollout.checkpoint_engine.backend=nccl_over_gloo
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=benchmarks.nccl_over_gloo

What verl's ``nccl_checkpoint_engine.py`` does (ranks fixed when the group is first made, ``rebuild_group=False``,
metadata of buckets over PUB/SUB, broadcasts that are only enqueued) is not imitated: a second copy of that module is
loaded, with tensors on the CPU for cupy's and with `GlooGroup` in the place of Ray's NCCL group. That group keeps
NCCL's behaviour towards a peer that dies: whoever waits for it waits for ever, until its own process aborts the
communicator.

For tests and benchmarks of what happens when a replica dies; the engine of the CPU platform (`cpu_zmq`) forgives it.
"""

from __future__ import annotations

import datetime
import importlib.util
import queue
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import ray.experimental.internal_kv as internal_kv
import torch
import torch.distributed
from ray.util.collective import collective
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from verl.checkpoint_engine.base import CheckpointEngineRegistry

BACKEND = "nccl_over_gloo"
_FOR_EVER = datetime.timedelta(days=1)
_RENDEZVOUS_S = 180.0  # as long as Ray's NCCL group looks for its peers
_KEY = "default"
_COPY = "verls_nccl_checkpoint_engine"  # pickle looks up what workers tell each other by this name


class Aborted(RuntimeError):
    """The communicator was aborted; NCCL reports an invalid one."""


class Communicator:
    """One rank's end, with the face of ``cupy.cuda.nccl.NcclCommunicator``: work is enqueued, `abort` ends the wait."""

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        self._group = group
        self._work: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._aborted = threading.Event()
        self._idle = threading.Condition()
        self._open = 0
        threading.Thread(target=self._run, name="nccl over gloo", daemon=True).start()

    def enqueue(self, work: Callable[[torch.distributed.ProcessGroup], Any]) -> None:
        if self._aborted.is_set():
            raise Aborted("NCCL_ERROR_INVALID_ARGUMENT: the communicator was aborted")
        with self._idle:
            self._open += 1
        self._work.put(lambda: work(self._group).wait())

    def synchronize(self) -> None:
        """Until all that was enqueued is done, or until `abort`: a CUDA stream's synchronize."""
        with self._idle:
            self._idle.wait_for(lambda: not self._open or self._aborted.is_set())

    def abort(self) -> None:
        self._aborted.set()
        with self._idle:
            self._idle.notify_all()

    destroy = abort

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                work()
            except RuntimeError:  # gloo notices that a peer died; NCCL does not
                self._aborted.wait()
            del work  # or its bucket would stay until the next one comes
            with self._idle:
                self._open -= 1
                self._idle.notify_all()


class GlooGroup(BaseGroup):
    """In the place of Ray's ``NCCLGroup``: connected by its first collective, known to all by its name."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._dev_comm_map: dict[str, list[Communicator] | None] = {}

    @classmethod
    def backend(cls) -> str:
        return "NCCL"

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    def destroy_group(self) -> None:
        for key, communicators in self._dev_comm_map.items():
            for communicator in communicators or ():
                communicator.destroy()
            self._dev_comm_map[key] = None
        if self.rank == 0:
            internal_kv._internal_kv_del(self._rendezvous())
        super().destroy_group()

    def synchronize(self) -> None:
        for communicators in self._dev_comm_map.values():
            for communicator in communicators or ():
                communicator.synchronize()

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> None:
        how = torch.distributed.BroadcastOptions()
        how.rootRank, how.rootTensor = getattr(options, "root_rank", 0), 0
        self._communicator().enqueue(lambda group: group.broadcast([tensors[0]], how))

    def barrier(self, options: Any = None) -> None:
        token = torch.ones(1)
        self._communicator().enqueue(lambda group: group.allreduce([token]))

    def _rendezvous(self) -> str:
        return f"nccl-over-gloo@{self.group_name}"

    def _communicator(self) -> Communicator:
        """As with ``ncclCommInitRank``, whoever comes waits for all ranks."""
        if _KEY not in self._dev_comm_map:
            key = self._rendezvous()
            if self.rank == 0:
                store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                internal_kv._internal_kv_put(key, str(store.port), overwrite=True)
            else:
                until = time.monotonic() + _RENDEZVOUS_S
                while (port := internal_kv._internal_kv_get(key)) is None:
                    if time.monotonic() > until:
                        raise RuntimeError("Unable to meet other processes at the rendezvous store")
                    time.sleep(0.02)
                store = torch.distributed.TCPStore("127.0.0.1", int(port), is_master=False)
            options = torch.distributed.ProcessGroupGloo._Options()
            options._devices = [torch.distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = _FOR_EVER
            group = torch.distributed.ProcessGroupGloo(store, self.rank, self.world_size, options)
            self._dev_comm_map[_KEY] = [Communicator(group)]
        communicators = self._dev_comm_map[_KEY]
        assert communicators, "the group was destroyed"
        return communicators[0]

    def _missing(self, *_: Any) -> None:
        raise NotImplementedError("verl's nccl engine needs broadcast and barrier only")

    allreduce = reduce = allgather = reducescatter = send = recv = _missing


def _synchronize() -> None:
    """``torch.cuda.synchronize``: blocks the calling thread, and with it an actor's event loop."""
    groups = collective._group_mgr._name_group_map
    for group in list(groups.values()):
        if isinstance(group, GlooGroup):
            group.synchronize()


class _TorchWithoutCuda:
    """What the module takes from torch, on the CPU."""

    cuda = types.SimpleNamespace(synchronize=_synchronize, empty_cache=lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: int, device: str = "cpu", **options: Any) -> torch.Tensor:
        return torch.zeros(*size, **options)


class _Pool:
    """cupy's: what is freed stays there until it is emptied."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []

    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        self._blocks.append(torch.zeros(size, dtype=dtype))
        return self._blocks[-1]

    def free_all_blocks(self) -> None:
        self._blocks.clear()

    def total_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)


def _cupy() -> types.ModuleType:
    module = types.ModuleType("cupy")
    pool = _Pool()
    module.ndarray, module.uint8 = torch.Tensor, torch.uint8
    module.zeros, module.get_default_memory_pool = pool.zeros, lambda: pool
    module.asarray = lambda tensor: tensor.cpu()
    return module


cupy: Any = _cupy()


def _verls_engine() -> types.ModuleType:
    """A copy of verl's module; the registry keeps whatever ``nccl`` is on this machine."""
    found = importlib.util.find_spec("verl.checkpoint_engine.nccl_checkpoint_engine")
    assert found is not None
    spec = importlib.util.spec_from_file_location(_COPY, found.origin or "")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[_COPY] = importlib.util.module_from_spec(spec)
    registry = CheckpointEngineRegistry._registry
    before = registry.get("nccl")
    # Not by `mock.patch.dict`, which empties `sys.modules` for an instant: whatever another thread pickled then failed.
    real = sys.modules.get("cupy")
    sys.modules["cupy"] = cupy
    try:
        spec.loader.exec_module(module)
    finally:
        if real is None:
            del sys.modules["cupy"]
        else:
            sys.modules["cupy"] = real
    if before is None:
        registry.pop("nccl")
    else:
        registry["nccl"] = before
    module.torch = _TorchWithoutCuda()
    return module


_module = _verls_engine()
VerlsEngine: Any = _module.NCCLCheckpointEngine


@CheckpointEngineRegistry.register(BACKEND)
class NcclOverGlooEngine(VerlsEngine):
    """verl's engine; only what it is called differs."""


if not collective.is_backend_available("NCCL"):
    collective.register_collective_backend("NCCL", GlooGroup)
