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


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _allocated(*_: Any, **__: Any) -> int:
    memory = device_memory("trainer")
    return 0 if memory is None else memory.own


def _most_allocated(*_: Any, **__: Any) -> int:
    memory = device_memory("trainer")
    return 0 if memory is None else memory.peak


def _free_and_total(*_: Any, **__: Any) -> tuple[int, int]:
    memory = device_memory("trainer")
    return (0, 0) if memory is None else memory.free_and_total


class _DeviceModule(types.ModuleType):
    """What verl calls of ``torch.cuda``."""

    empty_cache = ipc_collect = synchronize = set_device = manual_seed_all = staticmethod(_nothing)
    reset_peak_memory_stats = reset_accumulated_memory_stats = staticmethod(_nothing)
    set_per_process_memory_fraction = staticmethod(_nothing)
    memory_allocated = memory_reserved = staticmethod(_allocated)
    max_memory_allocated = max_memory_reserved = staticmethod(_most_allocated)
    mem_get_info = staticmethod(_free_and_total)
    is_available = staticmethod(lambda: False)  # "is an accelerator visible": turns verl's memory helpers off
    current_device = staticmethod(lambda: "cpu")
    device_count = staticmethod(lambda: 1)
    get_device_name = staticmethod(lambda *_, **__: "CPU")
    manual_seed = staticmethod(torch.manual_seed)
    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)
    Stream = torch.cpu.Stream
    stream = staticmethod(torch.cpu.stream)
    current_stream = staticmethod(torch.cpu.current_stream)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The embedded default of seamless_verl. FSDP2 over gloo, weights over ZMQ, vLLM's CPU build."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DeviceModule("seamless_verl.cpu_device")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return os.environ.get("VERL_PLATFORM", "").lower() == "cpu"

    def current_device(self) -> str:  # type: ignore[override]  # verl passes it to tensor.to()
        return "cpu"

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
