"""verl on a machine without accelerators: platform ``cpu``, chosen with ``VERL_PLATFORM=cpu``, never by detection.

The device surface that verl calls is torch.cuda's; ``torch.cpu`` lacks most of it, so the gaps are filled with the
CPU's truth (a counted memory, nothing to synchronise). "GPUs" stay Ray's slot count: verl hard-codes that name.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from seamless_verl.verl_adapter.cpu.cpu_device import device_memory

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
