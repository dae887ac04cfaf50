"""Checkpoint engine ``seamless_shared``: the trainer publishes into its node's shared memory (`weight_store`).

verl's other engines are collective: all workers send and receive at once. Here no worker waits for another, so
`prepare`, `build_topology`, `init_process_group` and `finalize` have nothing to do. Replicas pull through their servers
(`vllm.pulling_server`); verl's own manager, which stops them all, gets the same weights by `receive_weights`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWithCache
from verl.utils.device import get_torch_device

from seamless_verl.errors import SeamlessError
from seamless_verl.verl_adapter.weights import weight_store
from seamless_verl.verl_adapter.weights.transfer_members import walk_through
from seamless_verl.verl_adapter.weights.weight_checks import actor_engine


class NotPublished(SeamlessError):
    """Weights that the trainer could not publish."""


@CheckpointEngineRegistry.register(weight_store.SHARED)
class SharedMemoryEngine(CheckpointEngineWithCache):
    """``folder``: of the run, in shared memory; ``dtype``: ``rollout.dtype``, in which engines have their weights."""

    def __init__(self, bucket_size: int, is_master: bool = False, *, folder: str, dtype: str, **_: Any) -> None:
        self._is_master = is_master
        self._folder = Path(folder)
        found = getattr(torch, dtype, None)
        self._dtype = found if isinstance(found, torch.dtype) else None  # "auto": of the model's own file

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {}, {}

    def init_process_group(self, **_: Any) -> None:
        return None

    def finalize(self) -> None:
        return None

    @torch.no_grad()
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publish; all ranks take part in gathering, the first one writes.

        Raises:
            NotPublished: there is no room, or no version.
        """
        began = time.perf_counter()
        if not self._is_master:
            await walk_through(weights)
            return {}
        try:
            if global_steps is None:
                raise NotPublished("weights without a version cannot be published")
            manifest = weight_store.publish(self._folder, global_steps, weights, self._dtype)
        except OSError as error:
            await walk_through(weights)  # producing one is a collective call, in which the other ranks wait
            raise NotPublished(
                f"version {global_steps} does not fit into {self._folder} ({error}). Fix: more shared memory (two "
                "versions at least; containers: --shm-size), or seamless.weights.sync=together."
            ) from error
        return {"weights/publish_s": time.perf_counter() - began, "weights/bytes": float(manifest.nbytes)}

    async def get_weights(self) -> AsyncIterator[tuple[str, torch.Tensor]]:  # type: ignore[override]
        """The newest; verl declares a generator and takes an asynchronous one."""
        manifest = weight_store.newest(self._folder)
        if manifest is None:
            raise NotPublished(f"nothing is published in {self._folder} yet")
        for named in manifest.tensors_of(weight_store.map_file(manifest.file)):
            yield named

    async def receive_weights(  # type: ignore[override]
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        async for named in self.get_weights():
            yield named


def make_room(worker: Any) -> None:
    """Runs in a worker of the trainer whose GPU is lent: what verl does between its own hand-over's two wakes."""
    engine = actor_engine(worker)
    if engine.is_param_offload_enabled:
        engine.to("cpu", model=True, optimizer=False, grad=False)
    get_torch_device().synchronize()
    get_torch_device().empty_cache()
