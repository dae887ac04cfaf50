"""Shared prefixes: eight rows with one long prompt, with verl's engine and with ours: the numbers, time, memory."""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.gpu_checks.registry import Context
from benchmarks.records import Record

_ROWS, _TURNS = 8, 3
_PROMPT, _RESPONSE = {"gpu": 8192, "cpu": 96}, {"gpu": 512, "cpu": 24}
_MOST_OFF, _MOST_NORM_OFF = {"gpu": 0.02, "cpu": 1e-5}, {"gpu": 0.05, "cpu": 1e-4}
# Layers are computed again in the backward pass, as verl has it: 80 GB were too few for verl's engine otherwise.
_OPTIONS = {"gpu": ("checkpointing",), "cpu": ()}
# Qwen3-0.6B's, with a small vocabulary: verl's engine makes logits of every position, ours of those that are asked.
# With weights five times as large, bfloat16's rounding was 0.15 nats (on an H200; on a CPU 0.12, and 0.00001 in fp32).
_SHAPE = {
    "gpu": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 8_192}
    | {"initializer_range": 0.02, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "cpu": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}


def run(context: Context) -> list[Record]:
    os.environ |= _alone() | ({} if context.on_gpu else {"VERL_PLATFORM": "cpu"})
    import verl  # noqa: F401  (its plug-ins: the CPU platform, our engines)

    from benchmarks.training_workers import data_of, model_folder, worker_of

    where = context.platform
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, 250, _PROMPT[where])
    rows = [(prompt, rng.integers(1, 250, _RESPONSE[where])) for _ in range(_ROWS)]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    peak, both_ways = {True: 0.0, False: 0.0}, {}
    with tempfile.TemporaryDirectory() as folder:
        model_folder(folder, **_SHAPE[where])
        dtype = "bf16" if context.on_gpu else "fp32"
        workers = {
            ours: worker_of(folder, ours=ours, options=_OPTIONS[where], budget=10**6, dtype=dtype)
            for ours in (False, True)
        }
        for _ in range(_TURNS):
            for ours, worker in workers.items():
                taken, peak[ours], metrics = _update(worker, data_of(rows), context.on_gpu)
                seconds[ours].append(taken)
                if "shared_prefix/off" in metrics:
                    both_ways = metrics
    # The first pass of ours computes two rows both ways, and warms up.
    ratio = statistics.median(seconds[False][1:]) / statistics.median(seconds[True][1:])
    off, norm_off = (both_ways[f"shared_prefix/{name}"][0] for name in ("off", "grad_norm_off"))
    return [
        _bounded("log-probs both ways differ by, in the mean", off, "nats", _MOST_OFF[where]),
        _bounded("norms of the gradients differ by", norm_off, "of it", _MOST_NORM_OFF[where]),
        Record(name="forward and backward: verl's time over ours", value=ratio, unit="x", bar="> 1", holds=ratio > 1),
        Record(name="peak memory, verl's engine", value=peak[False], unit="GB"),
        Record(name="peak memory, ours", value=peak[True], unit="GB"),
    ]


def _bounded(name: str, value: float, unit: str, most: float) -> Record:
    return Record(name=name, value=value, unit=unit, bar=f"<= {most:g}", holds=value <= most)


def _alone() -> dict[str, str]:
    """A process group of one rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {**group, "WG_BACKEND": "ray", "DIST_INIT_METHOD": f"tcp://127.0.0.1:{port}"}


def _update(worker: Any, data: Any, on_gpu: bool) -> tuple[float, float, dict[str, Any]]:
    """Seconds of one forward and backward pass, the most memory that it held (GB; 0 on a CPU), and its metrics."""
    import torch
    from verl.utils import tensordict_utils as tu

    flags = {"use_remove_padding": False, "use_dynamic_bsz": True, "max_token_len_per_gpu": 10**6}
    tu.assign_non_tensor(data, **flags)
    with worker.engine.train_mode(zero_grad_on_exit=True):
        worker.engine.optimizer_zero_grad()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        began = time.perf_counter()
        made = worker.engine.forward_backward_batch(data, worker.loss_fn)
        if on_gpu:
            torch.cuda.synchronize()
        taken = time.perf_counter() - began
    return taken, torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0, made["metrics"]
