"""vLLM's sleep mode on the CPU: weights and cache are really given back and taken again, as on a GPU.

    level 1   weights wait on the host, cache dropped     wake: as before
    level 2   weights and cache dropped                   wake: weights are not numbers until new ones arrive

Buffers survive both, and the cache comes back empty. The two tags ("weights", "kv_cache") wake separately, as verl's
transfer into a replica on the trainer's device does it: weights, transfer, the trainer's memory back, cache.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from seamless_verl.memory.book import Phase
from seamless_verl.verl_adapter.cpu.cpu_device import Storages, device_memory

WEIGHTS, KV_CACHE = "weights", "kv_cache"


class SleepingCPUWorker(CPUWorker):
    """vLLM 0.24 to 0.27 only warns on the CPU and keeps the memory. Remove when its CPU backend has a sleep mode."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asleep: dict[str, tuple[Storages, ...]] = {}  # by tag
        self._memory = device_memory("engine", worker=self.rank)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self._count(WEIGHTS, _nbytes(self._weights()), (Phase.SYNC, Phase.ROLLOUT))

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        self._count(KV_CACHE, _nbytes(self._cache()), (Phase.ROLLOUT,))

    def _count(self, tag: str, nbytes: int, phases: tuple[Phase, ...]) -> None:
        if self._memory is not None:
            self._memory.need(tag, nbytes, phases)
            self._memory.hold(tag, nbytes)

    def _weights(self) -> tuple[Storages, ...]:
        model = self.model_runner.get_model()
        weights = Storages(model.parameters())
        return weights, Storages(model.buffers(), besides=weights)

    def _cache(self) -> tuple[Storages, ...]:
        return (Storages(_cache_tensors(self.model_runner.kv_caches)),)

    def sleep(self, level: int = 1) -> None:
        self._asleep = {WEIGHTS: self._weights(), KV_CACHE: self._cache()}
        weights, buffers = self._asleep[WEIGHTS]
        weights.give_back(keep=level == 1)
        buffers.give_back(keep=True)
        for cache in self._asleep[KV_CACHE]:
            cache.give_back(keep=False)
        if self._memory is not None:
            for tag in self._asleep:
                self._memory.hold(tag, 0)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory again for these tags, for all that sleep where none are given.

        Raises:
            torch.OutOfMemoryError: somebody else holds the memory; that tag and those after it sleep on.
        """
        for tag in [tag for tag in self._asleep if tags is None or tag in tags]:
            if self._memory is not None:
                self._memory.hold(tag, _nbytes(self._asleep[tag]))
            for storages in self._asleep[tag]:
                storages.take(empty=tag == KV_CACHE)
            del self._asleep[tag]
        if KV_CACHE not in self._asleep:
            self.model_runner.post_kv_cache_wake_up()


def _nbytes(parts: tuple[Storages, ...]) -> int:
    return sum(part.nbytes for part in parts)


def _cache_tensors(caches: list[Any]) -> list[Any]:
    """Layers with a state of several tensors (Mamba) keep a list of them."""
    return [tensor for cache in caches for tensor in (cache if isinstance(cache, (list, tuple)) else [cache])]


def install(cpu: Any) -> None:
    """``cpu`` is ``vllm.platforms.cpu``, whose ``CpuPlatform`` names the worker and refuses sleep mode."""
    platform = cpu.CpuPlatform
    if platform.__dict__.get("is_sleep_mode_available") is _available:
        return
    check = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = f"{__name__}.{SleepingCPUWorker.__name__}"
        check(cls, vllm_config)

    platform.check_and_update_config = classmethod(check_and_update_config)
    platform.is_sleep_mode_available = _available


def _available(_: Any) -> bool:
    return True
