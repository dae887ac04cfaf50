"""Starts runs of ``seamless_verl.main`` for a check: one device that trains and rolls out, at a size that fits."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_checks.models import arithmetic_data, model_folder
from benchmarks.gpu_checks.registry import Context
from benchmarks.records import Record

ROOT = Path(__file__).parents[2]
ONE_DEVICE = "seamless.resources=[{name: all, nodes: 1, gpus_per_node: 1, capabilities: [train, rollout]}]"
_END_S = 60.0  # what a run may take to clean up after itself


class RunFailed(Exception):
    """A run that had to succeed did not; the message ends with what it said last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a run ended.

    Attributes:
        code: its exit code.
        said: what it printed.
        folder: the run folder.
    """

    code: int
    said: str
    folder: Path
    seconds: float

    def summary(self) -> dict[str, Any]:
        """The summary that the run left.

        Raises:
            RunFailed: it has none.
        """
        file = self.folder / "summary.json"
        if self.code or not file.exists():
            raise RunFailed(f"exit code {self.code} after {self.seconds:.0f} s: {last_words(self.said)}")
        return dict(json.loads(file.read_text()))


def last_words(said: str, most: int = 3) -> str:
    return " | ".join(said.strip().splitlines()[-most:])


def settings(context: Context, model: str = "small") -> list[str]:
    """Overrides of a run that trains and rolls out on one device, weights over shared memory or CUDA IPC.

    The checkpoint engine serves replicas that only roll out, of which there are none here; naming one that needs no
    further package spares the nccl engine's cupy.
    """
    data = arithmetic_data(context)
    shared = [
        "+recipe=arithmetic",
        f"+platform={context.platform}",
        ONE_DEVICE,
        "seamless.scheduler.policy=greedy",
        f"actor_rollout_ref.model.path={model_folder(context, model)}",
        f"data.train_files={data}",
        f"data.val_files={data}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=cpu_zmq",
        "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=seamless_verl.verl_adapter.cpu.cpu_weights",
    ]
    return shared + (_gpu_settings(context.beside) if context.on_gpu else [])


def _gpu_settings(beside: int) -> list[str]:
    flash = importlib.util.find_spec("flash_attn") is not None
    attention = "flash_attention_2" if flash else "sdpa"
    return [
        "trainer.device=cuda",
        "++ray_kwargs.ray_init.address=local",
        "++ray_kwargs.ray_init.include_dashboard=false",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.ref.strategy=fsdp2",
        f"actor_rollout_ref.model.use_remove_padding={str(flash).lower()}",
        f"++actor_rollout_ref.model.override_config.attn_implementation={attention}",
        "actor_rollout_ref.actor.use_torch_compile=false",
        "++actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.enforce_eager=true",  # graphs take minutes to capture, and no check is about them
        f"actor_rollout_ref.rollout.gpu_memory_utilization={0.8 / max(beside, 2):.2g}",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1",
        "data.dataloader_num_workers=0",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",  # verl's eight import torch, each by itself
        "trainer.logger=[console]",
        # vLLM measures what is free while others take and give: told, it does not look.
        *([f"++actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes={2 << 30}"] if beside > 1 else []),
    ]


def run(context: Context, overrides: Sequence[str], *, name: str = "run", modules: str = "", **environment: str) -> Run:
    """One run to its end; whoever ends this process ends the run, too.

    Args:
        modules: what every process of the run imports first (verl's ``VERL_USE_EXTERNAL_MODULES``).
        environment: further variables.
    """
    folder = context.folder / name
    output = context.folder / f"{name}.log"
    values = {**os.environ, **environment, "VERL_USE_EXTERNAL_MODULES": modules}
    values["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    values["SEAMLESS_RUNS"] = str(context.folder)
    command = [sys.executable, "-m", "seamless_verl.main", *overrides, f"hydra.run.dir={folder}"]
    began = time.monotonic()
    with output.open("wb") as log:
        process = subprocess.Popen(command, cwd=context.folder, env=values, stdout=log, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        finally:
            _end(process)
    return Run(code=code, said=output.read_text(errors="replace"), folder=folder, seconds=time.monotonic() - began)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def on_stage(
    context: Context, body: str, overrides: Sequence[str], *, name: str = "run", **arguments: Any
) -> list[Record]:
    """A run that does ``body`` in place of training, and what it returned; see `stage`.

    Args:
        body: ``module:function`` below this package; an ``async`` function of a `stage.Stage` and ``arguments``.

    Raises:
        RunFailed: the body raised, or never began.
    """
    result = context.folder / f"{name}.json"
    done = run(
        context,
        overrides,
        name=name,
        modules="benchmarks.gpu_checks.stage",
        BENCHMARK_BODY=body,
        BENCHMARK_ARGUMENTS=json.dumps(arguments),
        BENCHMARK_RESULT=str(result),
    )
    if not result.exists():
        raise RunFailed(f"exit code {done.code} after {done.seconds:.0f} s: {last_words(done.said)}")
    return [Record(**record) for record in json.loads(result.read_text())]
