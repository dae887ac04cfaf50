"""The checkpoint engine that publishes weights to replicas of their own: what it takes of the device, it gives back.

One rank sends to nobody, since NCCL takes no two ranks on one GPU; the buckets, the group and what is freed are those
of a real transfer.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from typing import Any

from benchmarks.gpu_checks.registry import CannotRun, Context
from benchmarks.records import Record

_MIB = 1 << 20
_TRANSFERS = 3
_BUCKET_MIB = {"gpu": 512, "cpu": 16}


def run(context: Context) -> list[Record]:
    if context.on_gpu:
        try:
            import cupy  # noqa: F401
        except ImportError as error:
            raise CannotRun(f"verl's nccl engine needs cupy: {error}") from error
    else:
        if importlib.util.find_spec("benchmarks.nccl_over_gloo") is None:
            raise CannotRun("verl's nccl engine over gloo is not here")
        from seamless_verl.run.environment import CPU_ENVIRONMENT

        os.environ.update(CPU_ENVIRONMENT)
    import ray

    # The worker imports what this process imports.
    variables = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    gpus = {} if context.on_gpu else {"num_gpus": 1}
    ray.init(address="local", include_dashboard=False, runtime_env={"env_vars": variables}, **gpus)
    try:
        sender: Any = ray.remote(num_gpus=1)(_Sender).remote(context.platform, _BUCKET_MIB[context.platform])
        told = ray.get([sender.transfer.remote() for _ in range(_TRANSFERS)])
    finally:
        ray.shutdown()
    return _records(told, _BUCKET_MIB[context.platform])


def _records(told: list[dict[str, float]], bucket_mib: int) -> list[Record]:
    group = told[0]["group"]
    kept, grown = told[-1]["after"] - told[0]["before"] - group, told[-1]["after"] - told[0]["after"]
    most = bucket_mib / 2
    during = max(transfer["during"] - transfer["before"] for transfer in told)
    return [
        Record(name="tensors sent", value=told[-1]["sent"], unit="", bar="> 0", holds=told[-1]["sent"] > 0),
        Record(name="device memory during a transfer", value=during, unit="MiB"),
        Record(name="device memory of NCCL's group, which stays", value=group, unit="MiB"),
        # Two buckets before `transfer_members.give_back`: cupy kept them in a pool, where vLLM cannot have them.
        Record(name="device memory kept of buckets", value=kept, unit="MiB", bar=f"<= {most:g}", holds=kept <= most),
        Record(name="device memory that grows by transfer", value=grown, unit="MiB", bar="<= 1", holds=grown <= 1),
        Record(name="seconds of a transfer, last", value=told[-1]["seconds"], unit="s"),
    ]


class _Sender:
    """In a worker of its own, as verl has it: rank 0 of a group of one."""

    def __init__(self, platform: str, bucket_mib: int) -> None:
        import torch
        from verl.checkpoint_engine import CheckpointEngineRegistry

        self._on_gpu = platform == "gpu"
        self._device = "cuda" if self._on_gpu else "cpu"
        name = _engine(self._on_gpu)
        self._class: Any = CheckpointEngineRegistry.get(name)
        self.checkpoint_engine: Any = CheckpointEngineRegistry.new(name, bucket_size=bucket_mib * _MIB, is_master=True)
        size = bucket_mib * _MIB // 8  # bytes of fp32: three tensors to a bucket and a half
        self._weights = [
            (str(n), torch.full((size,), float(n), dtype=torch.float32, device=self._device)) for n in range(3)
        ]

    def transfer(self) -> dict[str, float]:
        import time

        from seamless_verl.verl_adapter.weights.transfer_members import give_back

        before, began = self._used(), time.monotonic()
        metadata = [self.checkpoint_engine.prepare()]
        prepared = self._used()
        actor, _ = self._class.build_topology(1, 0, metadata)
        self.checkpoint_engine.init_process_group(**{key: values[0] for key, values in actor.items()})
        during = self._used()
        asyncio.run(self.checkpoint_engine.send_weights(iter(self._weights)))
        self._synchronize()
        self.checkpoint_engine.finalize()
        give_back(self)
        seconds = time.monotonic() - began
        told = {"before": before, "group": during - prepared, "during": during, "after": self._used()}
        return {**told, "seconds": seconds, "sent": 3.0}

    def _used(self) -> float:
        """MiB of the device; on the CPU of the tensors that are alive."""
        if self._on_gpu:
            import torch

            free, total = torch.cuda.mem_get_info()
            return (total - free) / _MIB
        import gc

        import torch

        gc.collect()
        tensors = [found for found in gc.get_objects() if type(found) is torch.Tensor]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values()) / _MIB

    def _synchronize(self) -> None:
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()


def _engine(on_gpu: bool) -> str:
    """The one of a live run; on the CPU verl's nccl engine over gloo."""
    if on_gpu:
        return "nccl"
    import benchmarks.nccl_over_gloo as over_gloo  # registers itself

    return str(over_gloo.BACKEND)
