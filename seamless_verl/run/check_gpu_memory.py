"""Refuses shares of a GPU that cannot hold trainer and engine together, before either is loaded, and shared memory that
cannot hold the weights which ``seamless.weights.sync=rolling`` publishes.

The arithmetic is `memory.gpu_memory`; here are the keys, the model's ``config.json`` and the card. Where one of
them is not known (another engine or trainer than vLLM and FSDP, no ``nvidia-smi``) nothing is said; where the model is
not on this machine yet, that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from seamless_verl.checked import asked_devices, value_of, whole_number
from seamless_verl.config import TRAINER_MODE
from seamless_verl.errors import ConfigError
from seamless_verl.machine import Machine
from seamless_verl.memory.gpu_memory import (
    COMFORT,
    GIB,
    PROCESS,
    Engine,
    ModelShape,
    Trained,
    beyond,
    highest_utilization,
)
from seamless_verl.run.check_combinations import uses_critic
from seamless_verl.run.check_machine import ADDRESS, SHARED_MEMORY, cluster_address, model_configs

_ROLLOUT = "actor_rollout_ref.rollout"
SHARE = f"{_ROLLOUT}.gpu_memory_utilization"
ALONE = f"{_ROLLOUT}.standalone_gpu_memory_utilization"
_MODEL = "actor_rollout_ref.model.path"
_SYNC = "seamless.weights.sync"
_BUCKET = f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
_BYTES = {"fp32": 4, "float32": 4, "float": 4}  # all others: 2
# With one of these vLLM's cache is not what its share leaves, or its numbers are not two bytes each.
_OWN_SIZES = ("num_gpu_blocks_override", "kv_cache_memory_bytes", "kv_cache_dtype", "quantization")


def check_memory(config: Mapping[str, Any], machine: Machine) -> list[str]:
    """Compare what a GPU has with what trainer and engines want of it.

    Args:
        config: the whole configuration as a plain mapping, interpolations resolved.
        machine: its cards stand for those of the cluster; one that is joined may have others, so there the findings
            are warnings only.

    Returns:
        Warnings: what is tight, or does not fit here.

    Raises:
        ConfigError: it cannot fit.
    """
    card = machine.accelerator_memory
    engine = value_of(config, f"{_ROLLOUT}.name", "vllm")
    on_gpus = card and value_of(config, "trainer.device") == "cuda" and engine == "vllm"
    rolls = value_of(config, _SYNC, None) == "rolling"
    if not on_gpus and not rolls:
        return []
    path = value_of(config, _MODEL, None)
    shape = model_shape(path)
    if shape is None:
        unseen = f"{_MODEL}={path} is not on this machine yet, so whether it fits into its GPUs was not checked"
        builds = value_of(config, "seamless.assets.module", None) is not None  # the recipe, after these checks
        seen = not on_gpus or builds or any(True for _ in model_configs(path))
        return [] if seen else [f"{unseen}. To be told: hf download {path}"]
    found = _published(config, machine.shared_memory_free, model_shape(path, tied=False) or shape) if rolls else []
    if on_gpus:
        found += _beside_the_trainer(config, card, shape) + _one_row_each(config, card, shape)
    warnings = [problem for problem in found if isinstance(problem, str)]
    for problem in found:
        if isinstance(problem, ConfigError):
            if cluster_address(value_of(config, ADDRESS, None)) is None:
                raise problem
            warnings.append(f"if the cluster's machines are as this one: {problem}")
    return warnings


def model_shape(path: str | None, *, tied: bool | None = None) -> ModelShape | None:
    """From the ``config.json`` of a local folder, or of a hub model that was downloaded before.

    Args:
        tied: whether the matrix that makes logits is that of the embeddings; None: as the model says.
    """
    for found in model_configs(path):
        with suppress(ValueError, KeyError):  # not what it is for the families that are known
            return ModelShape.from_config(found if tied is None else found | {"tie_word_embeddings": tied})
    return None


def _published(config: Mapping[str, Any], free: int, shape: ModelShape) -> list[ConfigError | str]:
    """Two versions of the weights, each in the narrower of the trainer's and the engine's types, beside what else lies
    there. ``shape`` is not tied: verl sends a tied matrix under both names, and the engine skips one."""
    keys = ("actor_rollout_ref.actor.fsdp_config.model_dtype", f"{_ROLLOUT}.dtype")
    types = [str(value_of(config, key, "bf16")) for key in keys]  # the first is FSDP's; others train in bf16
    each = min(_BYTES.get(name, 2) for name in types if name != "auto")  # which casts nothing (`SharedMemoryEngine`)
    needed = 2 * shape.parameters * each + SHARED_MEMORY
    if free >= needed:
        return []
    problem = f"publishes into /dev/shm, which has {_gib(free)} free"
    problem += f"; two versions of the weights and all else take {_gib(needed)}"
    fix = f"give the container more (docker run --shm-size={math.ceil(needed / GIB)}g), or write {_SYNC}=together"
    return [ConfigError(_SYNC, "rolling", problem, fix)]


def _beside_the_trainer(config: Mapping[str, Any], card: int, shape: ModelShape) -> list[ConfigError | str]:
    """Replicas on the trainer's GPUs."""
    if not value_of(config, "actor_rollout_ref.hybrid_engine", True):
        return []
    trained = [_trained(config, "actor_rollout_ref.actor", "fsdp_config", shape)]
    if uses_critic(config):
        critic = model_shape(value_of(config, "critic.model.path", None), tied=True)  # it makes none
        trained += [_trained(config, "critic", "fsdp", critic)] if critic else []
    resident = sum(part.at_rest for part in trained)
    share = float(value_of(config, SHARE))
    sent = _sent(config, shape.largest * trained[0].bytes_each)
    highest = highest_utilization(card, resident + sent)
    parts = " + ".join(
        f"{_gib(part.at_rest)} of the trainer's ({part.parameters / 1e9:.1f}e9 parameters over {part.shards} GPUs)"
        for part in trained
    )
    total = f"{_gib(share * card)} for the engine + {parts} + {_gib(PROCESS)} that its process takes anyway"
    if beyond(card, resident, share) > 0:
        fix = f"write {highest:.2f}" if highest else "train on more GPUs"
        if value_of(config, f"{_ROLLOUT}.nnodes", 0) and value_of(config, ALONE, None) is None:
            fix += f" and +{ALONE}={share} for replicas on GPUs of their own"
        fix += ", or move more to the host (actor_rollout_ref.actor.fsdp_config.optimizer_offload=true)"
        return [ConfigError(SHARE, share, f"does not fit beside the trainer: {total} > {_gib(card)} of a card", fix)]
    warnings: list[ConfigError | str] = []
    if beyond(card, resident + sent, share, COMFORT) > 0:
        tight = f"{SHARE}={share} is tight: {total} of {_gib(card)}"
        more = f", of which a replica that comes back takes {_gib(sent)} for its weights ({_BUCKET})" if sent else ""
        warnings.append(f"{tight}; {highest:.2f} would leave {_gib(COMFORT + sent)} free{more}")
    if not value_of(config, f"{_ROLLOUT}.free_cache_engine", True):
        warnings.append(
            f"{_ROLLOUT}.free_cache_engine=false: engines on the trainer's GPUs keep {_gib(share * card)} of each "
            "while it trains"
        )
    return warnings


def _sent(config: Mapping[str, Any], largest: int) -> int:
    """Bytes on a trainer's GPU while weights go to a replica on another one, which may be in the midst of a loan.

    verl 0.9.1: ``nccl_checkpoint_engine.prepare`` takes two buckets, ``get_per_tensor_param`` one tensor as a whole.
    """
    is_ours = value_of(config, "trainer.v1.trainer_mode", "") == TRAINER_MODE
    alone = is_ours and value_of(config, f"{_ROLLOUT}.nnodes", 0)
    in_buckets = value_of(config, _SYNC, None) != "rolling"
    buckets = 2 * int(value_of(config, _BUCKET, 2048)) << 20
    return (largest + buckets * in_buckets) if alone else 0


def _trained(config: Mapping[str, Any], section: str, engine: str, shape: ModelShape) -> Trained:
    """A lower bound: what is not known to stay on the GPU counts as gone."""

    def of(key: str, default: Any = None) -> Any:
        return value_of(config, f"{section}.{key}", default)

    gpus, _ = asked_devices(config)
    size = of(f"{engine}.fsdp_size", -1)
    fsdp = str(of("strategy", "fsdp")).startswith("fsdp") and not of(f"{engine}.offload_policy", False)
    adapter = value_of(config, "actor_rollout_ref.model.lora_rank", 0) and section != "critic"
    adam = "adam" in str(of("optim.optimizer", "AdamW")).lower() and of("optim.optimizer_impl", "") in (
        "",
        "torch.optim",
    )
    return Trained(
        parameters=shape.parameters,
        shards=size if isinstance(size, int) and 0 < size < gpus else gpus,
        bytes_each=_BYTES.get(str(of(f"{engine}.model_dtype", "fp32")), 2),
        parameters_stay=fsdp and not of(f"{engine}.param_offload", False),
        moments_stay=bool(fsdp and adam and not adapter and not of(f"{engine}.optimizer_offload", False)),
    )


def _one_row_each(config: Mapping[str, Any], card: int, shape: ModelShape) -> list[ConfigError | str]:
    """Whether every engine holds its weights and the cache of one row; vLLM says so itself, minutes later."""
    own = value_of(config, f"{_ROLLOUT}.engine_kwargs.vllm", None) or {}
    if any(own.get(key) is not None for key in _OWN_SIZES) or value_of(config, f"{_ROLLOUT}.quantization", None):
        return []
    ranks = whole_number(config, f"{_ROLLOUT}.tensor_model_parallel_size") * whole_number(
        config, f"{_ROLLOUT}.pipeline_model_parallel_size", default=1
    )
    each = _BYTES.get(str(value_of(config, f"{_ROLLOUT}.dtype", "bfloat16")), 2)
    length = value_of(config, f"{_ROLLOUT}.max_model_len", None) or (
        whole_number(config, "data.max_prompt_length") + whole_number(config, "data.max_response_length")
    )
    weights, row = each * shape.parameters, each * shape.cache_per_token * int(length)  # of a whole replica
    problems: list[ConfigError | str] = []
    for key in _shares_in_use(config):
        share = float(value_of(config, key))
        if not _lacks(card, share, weights, row, ranks):
            continue
        problem = (
            f"is {_gib(share * card)} of a card, less than {_gib(weights / ranks)} of weights and {_gib(row / ranks)} "
            f"for the keys and values of one row of {length} tokens"
        )
        more = next((n for n in (ranks * 2, ranks * 4, ranks * 8) if not _lacks(card, share, weights, row, n)), None)
        spread = f"{_ROLLOUT}.tensor_model_parallel_size={more}, " if more else ""
        problems.append(
            ConfigError(key, share, problem, f"{spread}a larger share or a shorter {_ROLLOUT}.max_model_len")
        )
    return problems


def _lacks(card: int, share: float, weights: int, row: int, ranks: int) -> bool:
    return Engine(utilization=share, weights=weights // ranks, one_row=row // ranks).lacks(card) > 0


def _shares_in_use(config: Mapping[str, Any]) -> list[str]:
    hybrid = value_of(config, "actor_rollout_ref.hybrid_engine", True)
    alone = value_of(config, f"{_ROLLOUT}.nnodes", 0)
    apart = value_of(config, ALONE, None) is not None and value_of(config, "trainer.v1.trainer_mode") == TRAINER_MODE
    return ([SHARE] if hybrid or (alone and not apart) else []) + ([ALONE] if alone and apart else [])


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
