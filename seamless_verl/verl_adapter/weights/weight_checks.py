"""Every loan starts with the weights that were published: a checksum of the trainer's against one of the engine's.

A checksum adds up over elements, so it is the same however a model is sharded, fused or ordered, and for tensors that
both sides pad with zeros. It is computed where the weights are, and eight bytes travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
import torch
from omegaconf import DictConfig
from torch.distributed.tensor import DTensor

from seamless_verl.errors import ConfigError, SeamlessError
from seamless_verl.run.check_combinations import replica_size
from seamless_verl.scheduling.slices import SliceId

_IN_CACHE, _AT_A_TIME = 1 << 16, 1 << 24  # elements, on the CPU and elsewhere; each needs 16 bytes for the while
_WHOLE = (1 << 64) - 1


class WeightsDiffer(SeamlessError):
    """A slice was lent with weights that are not the published ones."""


class WeightChecks:
    """Compares checksums; for replicas of one worker, whose engine holds every weight once.

    Args:
        workers: of the trainer's actor, one per rank.
        dtype: of the engine's weights.
        report: called after each comparison with slice, version, published and found checksum.
    """

    def __init__(
        self, workers: Sequence[Any], dtype: torch.dtype, report: Callable[[SliceId, int, str, str], None]
    ) -> None:
        self._workers = workers
        self._dtype = dtype
        self._report = report
        self._published: tuple[int, str] | None = None

    def publish(self, version: int) -> None:
        """Compute the checksum of the weights that the trainer holds; they are this version."""
        parts = ray.get([worker.__ray_call__.remote(_of_trainer, self._dtype) for worker in self._workers])
        self._published = version, _text(sum(parts))

    def compare(self, version: int, replicas: Mapping[SliceId, Any]) -> None:
        """Compare what was published with the engines of these replicas, which are awake and hold ``version``.

        Raises:
            WeightsDiffer: not the same, or another version was published last.
        """
        if self._published is None or self._published[0] != version:
            known = "none" if self._published is None else f"version {self._published[0]}"
            raise WeightsDiffer(f"{', '.join(replicas)} were lent version {version}, but {known} was published last")
        published = self._published[1]
        calls = {slice_id: replica.servers[0].weights_checksum.remote() for slice_id, replica in replicas.items()}
        wrong = []
        for slice_id, call in calls.items():
            found = ray.get(call)
            self._report(slice_id, version, published, found)
            if found != published:
                wrong.append(f"{slice_id} (checksum {found}, published {published})")
        if wrong:
            raise WeightsDiffer(f"lent with weights that are not those of version {version}: {', '.join(wrong)}")


def weight_checks_of(
    config: DictConfig, wanted: bool | None, workers: Sequence[Any], report: Callable[[SliceId, int, str, str], None]
) -> WeightChecks | None:
    """Builds the checks of a run; None where they are not wanted, or cannot be made and were not asked for.

    Args:
        wanted: ``seamless.scheduler.check_weights``; None: on the CPU platform.

    Raises:
        ConfigError: they are asked for and cannot be made.
    """
    if not (config.trainer.device == "cpu" if wanted is None else wanted):
        return None
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    rollout = config.actor_rollout_ref.rollout
    dtype: Any = getattr(torch, str(rollout.dtype), None)
    obstacles = {
        "actor_rollout_ref.actor.strategy": actor.strategy not in ("fsdp", "fsdp2"),
        "actor_rollout_ref.rollout.name": rollout.name != "vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": replica_size(config) > 1,
        "actor_rollout_ref.rollout.quantization": rollout.get("quantization") is not None,
        "actor_rollout_ref.rollout.dtype": not isinstance(dtype, torch.dtype),
        "actor_rollout_ref.model.lora_rank": bool(model.get("lora_rank", 0)),
    }
    found = [key for key, is_one in obstacles.items() if is_one]
    if not found:
        return WeightChecks(workers, dtype, report)
    if wanted:
        problem = f"checksums compare whole FSDP weights with one vLLM worker's, which {found[0]} rules out"
        raise ConfigError("seamless.scheduler.check_weights", True, problem, "write false")
    return None


def checksum(tensors: Iterable[torch.Tensor], dtype: torch.dtype) -> int:
    """Sum of a polynomial of the bits of each element as ``dtype``, modulo 2^64; zeros add nothing."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    total = 0
    for tensor in tensors:
        for part in tensor.detach().reshape(-1).split(_IN_CACHE if tensor.device.type == "cpu" else _AT_A_TIME):
            value = part.to(dtype).view(bits).to(torch.int64)
            total += int((value * value * 31 + value * 17).sum())
    return total & _WHOLE


def _text(total: int) -> str:
    return f"{total & _WHOLE:016x}"


def _of_trainer(worker: Any, dtype: torch.dtype) -> int:
    """Checksum of this rank's shards; runs in a worker of the trainer."""
    return checksum(_own_shards(actor_engine(worker).module), dtype)


def actor_engine(worker: Any) -> Any:
    """verl's training engine in a worker of the trainer, which may be one of several that share a process."""
    parts = (worker, *getattr(worker, "worker_dict", {}).values())
    return next(part.actor.engine for part in parts if hasattr(part, "actor"))


def _own_shards(module: torch.nn.Module) -> Iterable[torch.Tensor]:
    """This rank's shards; what ranks hold in common is counted on the first one only."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
                yield parameter
            continue
        where = parameter.device_mesh.get_coordinate() or ()
        if all(place.is_shard() or at == 0 for place, at in zip(parameter.placements, where, strict=True)):
            yield parameter.to_local()


def install(rollout: Any) -> None:
    """``rollout`` is ``verl.workers.rollout.vllm_rollout.utils``, whose extension is part of every engine's worker."""
    rollout.vLLMColocateWorkerExtension.weights_checksum = _of_worker


def _of_worker(worker: Any) -> str:
    parameters = list(worker.model_runner.model.parameters())
    return _text(checksum(parameters, parameters[0].dtype))
