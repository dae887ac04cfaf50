"""A body in place of training, in the trainer's process of a real run; and what bodies and probes measure with.

Loaded by verl in every process of such a run (``VERL_USE_EXTERNAL_MODULES``). Everything up to ``fit`` is a user's run:
configuration, supervisor, Ray, workers, replicas, router, first weights. Then a `Stage` is handed to the body.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

from benchmarks.gpu_checks.checksums import Sums, add, sums_of
from seamless_verl.scheduling.slices import SliceId

_BODY = os.environ.get("BENCHMARK_BODY")


class Stage:
    """A trainer that is ready to train, with one replica on its own device, awake, on the router, with its weights."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.slices = trainer.lending.replicas  # lends and reclaims as the scheduler's commands do
        self.slice: SliceId = next(iter(self.slices.addresses))
        self.replica = trainer.llm_server_manager.get_replicas()[0]
        self.server = self.replica.servers[0]
        self.client = trainer.get_llm_client()
        self.version = int(trainer.global_steps)
        self._asked = 0

    async def generate(
        self, prompt_ids: Sequence[int], *, priority: int = 0, shown: Mapping[str, Any] | None = None, **sampling: Any
    ) -> Any:
        """A `TokenOutput` of the client that agents use: interrupted answers go on.

        Args:
            shown: pictures, as verl's client takes them.
        """
        self._asked += 1
        return await self.client.generate(
            f"{id(self)}-{self._asked}",
            prompt_ids=list(prompt_ids),
            sampling_params={"logprobs": True, "repetition_penalty": 1.0, **sampling},
            **({"priority": priority} if priority else {}),
            **(shown or {}),
        )

    async def scores(self, ids: Sequence[int], of_last: int, shown: Mapping[str, Any] | None = None) -> list[float]:
        """What the engine says of the last tokens of a text that it is shown as a whole."""
        self._asked += 1
        output = await self.server.generate.remote(
            prompt_ids=list(ids),
            sampling_params={"max_tokens": 1, "temperature": 1.0, "logprobs": True, "prompt_logprobs": 0},
            request_id=f"scores-{self._asked}",
            **(shown or {}),
        )
        told: list[list[float]] = output.extra_fields["prompt_logprobs"][:-1]  # verl pads one at the end
        return [first for first, *_ in told[len(told) - of_last :]]

    async def take_back(self) -> None:
        """The device is the trainer's: off the router, requests interrupted, the engine asleep."""
        await _aside(self.slices.unregister, [self.slice])
        failed = await _aside(self.slices.interrupt, [self.slice])
        if failed:
            raise next(iter(failed.values()))

    async def lend(self, queue_s: float = 0.0) -> None:
        """Requests queue from now on, for ``queue_s`` at least; weights of a new version, then the cache; then they are
        answered."""
        self.version += 1
        await _aside(self.slices.publish, self.version)
        await _aside(self.slices.hold, [self.slice])
        await _aside(self.slices.register, [self.slice])
        await asyncio.sleep(queue_s)
        await _aside(self.slices.wake, [self.slice], self.version, [])

    async def interrupt(self) -> int:
        """As a weight update does: every answer stops, then goes on; how many did."""
        stopped = await self.replica.abort_all_requests()
        await self.replica.resume_generation()
        return int(stopped["aborted_count"])

    async def counted(self, name: str) -> float:
        """One of vLLM's counters (``disable_log_stats=false``), of all its labels."""
        return float(await self.server.__ray_call__.remote(_counted, name))

    async def engine_sums(self) -> Sums:
        return add(await self.server.measured.remote("parameter_sums"))

    async def trainer_sums(self, dtype: str) -> Sums:
        return add(await asyncio.gather(*self._on_workers(sums_of_worker, dtype)))

    async def parameters(self) -> int:
        return sum(await asyncio.gather(*self._on_workers(_numbers_of_worker)))

    async def move_trainer(self, to: str) -> None:
        """The trainer's state to the ``device`` or to the ``cpu``, as verl's engine moves it around each phase."""
        await asyncio.gather(*self._on_workers(_move_engine, to))

    async def device_memory(self) -> tuple[int, int]:
        """Bytes used and there are, on the first device."""
        return tuple(await self._on_workers(_memory_of_worker)[0])  # type: ignore[return-value]

    def _on_workers(self, function: Any, *arguments: Any) -> list[Any]:
        return [worker.__ray_call__.remote(function, *arguments) for worker in self.trainer.actor_rollout_wg.workers]


async def _aside(function: Callable[..., Any], *arguments: Any) -> Any:
    """In a thread that nobody joins: a call that hangs costs its check a line, not the end of the run."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def work() -> None:
        try:
            answer, tell = function(*arguments), done.set_result
        except Exception as error:  # noqa: BLE001 - it is handed to whoever waits
            answer, tell = error, done.set_exception
        with suppress(RuntimeError):  # nobody waits any more, and the loop is closed
            loop.call_soon_threadsafe(lambda: done.done() or tell(answer))

    threading.Thread(target=work, daemon=True).start()
    return await done


def actor_of(worker: Any) -> Any:
    """The actor among the roles that share a worker's process."""
    roles = [worker, *getattr(worker, "worker_dict", {}).values()]
    return next(role for role in roles if getattr(role, "actor", None) is not None)


def sums_of_worker(worker: Any, dtype: str) -> Sums:
    return sums_of(actor_of(worker).actor.engine.module.named_parameters(), dtype)


def _numbers_of_worker(worker: Any) -> int:
    parameters = actor_of(worker).actor.engine.module.parameters()
    return sum(getattr(parameter, "_local_tensor", parameter).numel() for parameter in parameters)


def _move_engine(worker: Any, to: str) -> None:
    from verl.utils.device import get_device_name, get_torch_device

    actor_of(worker).actor.engine.to(get_device_name() if to == "device" else to)
    get_torch_device().synchronize()


def _counted(server: Any, name: str) -> float:
    from prometheus_client import REGISTRY

    metrics = [metric for metric in REGISTRY.collect() if metric.name == name]
    return sum(sample.value for metric in metrics for sample in metric.samples if sample.name == f"{name}_total")


def pid_of(actor: Any) -> int:
    return os.getpid()


def device_memory() -> tuple[int, int]:
    """Bytes that this run uses of this process's device, and there are; (0, 0) where nobody counts them.

    Of its own processes where the GPU's driver tells them apart, so that checks may share a card.
    """
    from verl.utils.device import get_device_name, get_torch_device

    free, total = get_torch_device().mem_get_info()
    own = _of_own_processes() if get_device_name() == "cuda" else 0
    return own or total - free, total


def _of_own_processes() -> int:
    """Bytes, of all processes with this run's folder in their environment; 0 where the driver does not tell."""
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    found = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    folder = f"SEAMLESS_RUNS={os.environ['SEAMLESS_RUNS']}"
    return sum(process.usedGpuMemory or 0 for process in found if has_variable(process.pid, folder))


def has_variable(pid: int, variable: str) -> bool:
    """Whether a process was started with it, as ``NAME=value``."""
    with suppress(OSError):
        return variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _memory_of_worker(worker: Any) -> tuple[int, int]:
    return device_memory()


def _take_the_place_of_fit(module: ModuleType) -> None:
    assert _BODY is not None
    name, _, function = _BODY.partition(":")

    def fit(trainer: Any, manager: Any) -> None:
        trainer.declare_slices([])
        body = getattr(importlib.import_module(f"{__package__}.{name}"), function)
        arguments = json.loads(os.environ["BENCHMARK_ARGUMENTS"])
        records: Iterable[Any] = asyncio.run(body(Stage(trainer), **arguments))
        file = Path(os.environ["BENCHMARK_RESULT"])
        file.write_text(json.dumps([asdict(record) for record in records]))
        trainer.flight.end("finished")

    module.SeamlessTrainer.fit = fit  # type: ignore[attr-defined]


def _let_the_server_measure(module: ModuleType) -> None:
    """verl's server does not hand on what its workers answer.

    Into verl's class, not ours: an actor imports our module first, which imports verl, which imports this one, and ours
    is half made then (seen on a GPU; on the CPU the platform has imported verl before).
    """

    async def measured(server: Any, method: str, *arguments: Any) -> Any:
        return await server.engine.collective_rpc(method=method, args=arguments)

    module.vLLMHttpServer.measured = measured  # type: ignore[attr-defined]


def _let_the_engine_measure(module: ModuleType) -> None:
    def parameter_sums(worker: Any) -> Sums:
        dtype = str(worker.model_runner.model_config.dtype).removeprefix("torch.")
        return sums_of(worker.model_runner.model.named_parameters(), dtype)

    def engine_process(worker: Any) -> int:
        """The engine core: this process, or the one that started it."""
        own, parent = multiprocessing.current_process(), multiprocessing.parent_process()
        return os.getpid() if own.name.startswith("EngineCore") or parent is None else int(parent.pid or 0)

    extension: Any = module.vLLMColocateWorkerExtension  # type: ignore[attr-defined]
    extension.parameter_sums, extension.engine_process = parameter_sums, engine_process


if _BODY is not None:
    wrapt.register_post_import_hook(_take_the_place_of_fit, "seamless_verl.verl_adapter.trainer.trainer")
wrapt.register_post_import_hook(_let_the_server_measure, "verl.workers.rollout.vllm_rollout.vllm_async_server")
wrapt.register_post_import_hook(_let_the_engine_measure, "verl.workers.rollout.vllm_rollout.utils")
