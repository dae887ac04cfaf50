"""What the processes of a run find in their environment, beside what the user has set.

Variables count from a process's start, hence the environment of the trainer's process and not the process itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seamless_verl.checked import value_of
from seamless_verl.config import ResourceConfig
from seamless_verl.machine import JOURNAL_DIR
from seamless_verl.memory.book import BOOK
from seamless_verl.run.check_combinations import uses_critic
from seamless_verl.run.check_machine import snapshots
from seamless_verl.run.supervisor import JOURNALS

_ROLLOUT = "actor_rollout_ref.rollout"
_REWARD = "reward.reward_model"
CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Without OMP_NUM_THREADS=1, unbound vLLM threads spin and throughput falls fifty-fold.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # TransferQueue raises the number of torch threads for a while; threads that spin would take the cores from others.
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    "TORCHDYNAMO_DISABLE": "1",
    # glibc otherwise hands each large buffer back to the kernel and faults it in again, every training step.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    # Ray makes its workers nice; next to vLLM's engine process, which is none, the trainer would starve.
    "RAY_worker_niceness": "0",
    # vLLM keeps the in-process executor on the CPU only under this setting; the engine itself stays a process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}

# What the processes of a CPU run spend their start on. On machines with GPUs each process still imports for itself:
# forking next to device drivers has not been tried yet.
IMPORTED = (
    "torch",
    "ray",
    "transformers",
    "verl.trainer.ppo.v1",
    "verl.experimental.separation.engine_workers",
    "verl.experimental.reward_loop",
    "verl.workers.engine.fsdp.transformer_impl",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "verl.workers.rollout.vllm_rollout.vllm_rollout",
    "seamless_verl.verl_adapter.rollout.agent_loop",
    "seamless_verl.verl_adapter.cpu.cpu_weights",
    "transformers.models.qwen3.modeling_qwen3",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.models.qwen3",
)


def trainer_environment(config: Mapping[str, Any]) -> dict[str, str]:
    """Variables that verl sets before it starts Ray, which hands them to all workers, and one of the sweep's."""
    environment = {}
    deciding = [_ROLLOUT, *([f"{_REWARD}.rollout"] if value_of(config, f"{_REWARD}.enable", False) else [])]
    if any(value_of(config, f"{section}.full_determinism", False) for section in deciding):
        environment["VERL_FULL_DETERMINISM"] = "1"
        environment["VLLM_BATCH_INVARIANT"] = "1"
        environment["PYTHONHASHSEED"] = str(value_of(config, f"{_ROLLOUT}.seed", 0))
    loggers = value_of(config, "trainer.logger", None) or []
    if "rl_insight" in ([loggers] if isinstance(loggers, str) else loggers):
        environment["VERL_RL_INSIGHT_ENABLE"] = "1"
    if journals := value_of(config, JOURNAL_DIR, None):
        environment[JOURNALS] = journals
    return environment


def cpu_settings(*models: str | None) -> dict[str, str]:
    """`CPU_ENVIRONMENT` for processes that load these models; the hub may be asked for one that is not here yet."""
    to_fetch = any(model and not _is_here(model) for model in models)
    return {name: value for name, value in CPU_ENVIRONMENT.items() if not (to_fetch and name.endswith("_OFFLINE"))}


def _is_here(model: str) -> bool:
    """Whether its weights are; a fetch that broke off, or was for a tokenizer, leaves a ``config.json`` as well."""
    if Path(model).expanduser().is_dir():
        return True
    for snapshot in snapshots(model):
        index = snapshot / "model.safetensors.index.json"
        parts = json.loads(index.read_text())["weight_map"].values() if index.exists() else ("model.safetensors",)
        if all((snapshot / part).exists() for part in parts):
            return True
    return False


def cpu_environment(
    config: Mapping[str, Any], resources: Sequence[ResourceConfig], cores: int, book: Path
) -> dict[str, str | None]:
    """What the user has set stays; the book of an earlier run in this folder goes."""
    keys = ["actor_rollout_ref.model.path", *(["critic.model.path"] if uses_critic(config) else [])]
    wanted = cpu_settings(*(value_of(config, key, None) for key in keys)) | _cores(resources, cores)
    book.unlink(missing_ok=True)
    environment: dict[str, str | None] = {key: os.environ.get(key, value) for key, value in wanted.items()}
    environment[BOOK] = str(book)
    environment["CUDA_VISIBLE_DEVICES"] = None  # Ray would count slots against it, and here "GPU" means slots only
    return environment


def _cores(resources: Sequence[ResourceConfig], cores: int) -> dict[str, str]:
    """Without accelerators, a declared device is a core, if there are enough (`verl_adapter.cpu.cpu_device`)."""
    trainers = [r for r in resources if "train" in r.capabilities]
    trainer = sum(r.nodes * r.gpus_per_node for r in trainers)
    devices = sum(r.nodes * r.gpus_per_node for r in resources)
    if not resources or devices > cores:
        return {}
    hybrid = any("rollout" in r.capabilities for r in trainers)
    replica = range(devices) if hybrid else range(trainer, devices)
    return {"SEAMLESS_CORES": json.dumps({"trainer": list(range(trainer)), "replica": list(replica)})}
