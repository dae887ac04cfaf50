"""Checkpoint engine ``cpu_zmq``: the trainer's rank 0 pushes weight buckets over TCP to every rollout worker.

verl's own engines need CUDA (nccl, nixl, delta) or a shared process (naive). One PUSH socket per receiver keeps the
order; a receiver that hears nothing for ``timeout_s`` fails instead of hanging the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Generator
from typing import Any

import ray
import torch
import zmq
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineRegistry,
    merge_weight_chunks,
    split_weight_chunks,
)


@CheckpointEngineRegistry.register("cpu_zmq")
class ZmqCheckpointEngine(CheckpointEngine):
    """Sends a state dict as buckets of at most ``bucket_size`` bytes, fp32 or cast to ``rollout_dtype``."""

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        rollout_dtype: torch.dtype | None = None,
        timeout_s: float = 300.0,
        **_: Any,
    ) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.rollout_dtype = rollout_dtype
        self.timeout_ms = int(timeout_s * 1000)
        self.rank = -1
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._pull: zmq.Socket[bytes] | None = None
        self._push: list[zmq.Socket[bytes]] = []

    def prepare(self) -> dict[str, Any]:
        """``{"address": where this rollout worker listens}``; None on the master."""
        # Called on actors and rollout workers alike; who is who is known only in init_process_group, so everybody
        # but the master offers an endpoint and actors with rank > 0 close theirs again.
        if self.is_master:
            return {"address": None}
        self._pull = self._context.socket(zmq.PULL)
        self._pull.setsockopt(zmq.RCVTIMEO, self.timeout_ms)
        host = ray.util.get_node_ip_address().strip("[]")
        port = self._pull.bind_to_random_port(f"tcp://{host}")
        return {"address": f"tcp://{host}:{port}"}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        receivers: Any = [told["address"] for told in metadata[actor_wg_world_size:]]
        actors: dict[str, list[Any]] = {
            "rank": list(range(actor_wg_world_size)),
            "receivers": [receivers] * actor_wg_world_size,
        }
        rollouts: dict[str, list[Any]] = {"rank": [-1] * rollout_world_size, "receivers": [None] * rollout_world_size}
        return actors, rollouts

    def init_process_group(  # type: ignore[override]  # called with what `build_topology` names
        self, rank: int, receivers: list[str] | None
    ) -> None:
        self.rank = rank
        if rank == 0:
            for address in receivers or []:
                socket = self._context.socket(zmq.PUSH)
                socket.setsockopt(zmq.SNDTIMEO, self.timeout_ms)
                socket.connect(address)
                self._push.append(socket)
        elif rank > 0 and self._pull is not None:
            self._pull.close(0)
            self._pull = None

    def finalize(self) -> None:
        for socket in self._push:
            socket.close(0)  # everybody else has what was sent; a dead receiver never will
        self._push = []
        if self._pull is not None:
            self._pull.close(0)
            self._pull = None

    def _send(self, metas: list[Any], chunks: list[torch.Tensor], is_last: bool) -> None:
        payload = torch.cat(chunks).numpy().data if chunks else b""
        for socket in self._push:
            socket.send_pyobj((metas, is_last), flags=zmq.SNDMORE)
            socket.send(payload, copy=False)

    def _cast(self, weights: Any) -> Generator[tuple[str, torch.Tensor], None, None]:
        for name, weight in weights:
            weight = weight.detach().cpu()
            if self.rollout_dtype is not None:
                weight = weight.to(self.rollout_dtype)
            yield name, weight.contiguous()

    @torch.no_grad()
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float] | None:
        if self.rank != 0:  # producing a weight is collective over the actor group
            for _ in weights:
                pass
            return None
        started, sent, offset = time.monotonic(), 0, 0
        metas: list[Any] = []
        chunks: list[torch.Tensor] = []
        async for meta, chunk in split_weight_chunks(self._cast(weights), self.bucket_size):
            if offset + meta.chunk_size > self.bucket_size:
                await asyncio.to_thread(self._send, metas, chunks, False)
                metas, chunks, offset = [], [], 0
            meta.offset = offset
            metas.append(meta)
            assert chunk is not None  # it is for tensors that are sent by reference, which none is here
            chunks.append(chunk)
            offset += meta.chunk_size
            sent += meta.chunk_size
        await asyncio.to_thread(self._send, metas, chunks, True)
        return {"weight_sync/bytes": float(sent), "weight_sync/send_s": time.monotonic() - started}

    async def _received_chunks(self) -> AsyncIterator[tuple[Any, torch.Tensor]]:
        assert self._pull is not None, "receive_weights before prepare"
        is_last = False
        while not is_last:
            metas, is_last = await asyncio.to_thread(self._pull.recv_pyobj)
            payload = await asyncio.to_thread(self._pull.recv)
            if not metas:
                continue
            bucket = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            for meta in metas:
                yield meta, bucket[meta.offset : meta.offset + meta.chunk_size]

    @torch.no_grad()
    async def receive_weights(  # type: ignore[override]  # verl iterates over it with `async for`, whatever it declares
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        chunks: Any = self._received_chunks()  # verl declares a generator and takes an asynchronous one
        async for name, weight in merge_weight_chunks(chunks, self.bucket_size):
            yield name, weight
