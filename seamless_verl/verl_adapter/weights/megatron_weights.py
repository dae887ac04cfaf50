"""Megatron's weights saved beside the live ones with one copy each, and brought back without a second set on the GPU.

verl 0.9.1's ``copy_megatron_model_to_cpu`` goes ``.cpu().clone().pin_memory()``: three copies on the host, two of them
alive at a time. ``restore_megatron_model_from_cpu`` puts a whole second buffer on the GPU before it copies it over the
first, which a loan within a step does while an engine lies beside it. Both happen twice in such a loan
(`LendingTrainer._published_weights`). What is saved has verl's layout, so either half works with verl's other one.
Remove when verl copies once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch


def install(megatron_utils: ModuleType) -> None:
    """``megatron_utils`` is ``verl.utils.megatron_utils``."""
    wrapped = megatron_utils.DDP
    megatron_utils.copy_megatron_model_to_cpu = lambda models: save(models, wrapped)
    megatron_utils.restore_megatron_model_from_cpu = lambda models, state: restore(models, state, wrapped)


@torch.no_grad()
def save(models: Sequence[Any], wrapped: type) -> dict[str, Any]:
    """The parameters of all model chunks on the host, in verl's layout; ``wrapped`` is Megatron's DDP."""
    state: dict[str, Any] = {}
    for index, chunk in enumerate(models):
        if isinstance(chunk, wrapped):
            saved = [[{"param_data": _on_host(_live(buffer))} for buffer in buffers] for buffers in _buffers(chunk)]
            state[f"model_chunk_{index}"] = {"buffer_states": saved, "is_ddp": True}
        else:
            parameters = {name: {"data": _on_host(parameter.data)} for name, parameter in chunk.named_parameters()}
            state[f"model_chunk_{index}"] = {"model_state": parameters, "is_ddp": False}
    return state


@torch.no_grad()
def restore(models: Sequence[Any], state: dict[str, Any], wrapped: type) -> None:
    """What `save` or verl saved, into the live parameters."""
    for index, chunk in enumerate(models):
        saved = state.get(f"model_chunk_{index}")
        if saved is None:
            continue
        if saved["is_ddp"] != isinstance(chunk, wrapped):
            raise TypeError(f"model chunk {index} was saved {'' if saved['is_ddp'] else 'un'}wrapped and is not so now")
        if saved["is_ddp"]:
            for buffers, kept in zip(_buffers(chunk), saved["buffer_states"], strict=True):
                for buffer, one in zip(buffers, kept, strict=True):
                    _live(buffer).copy_(one["param_data"])
        else:
            for name, parameter in chunk.named_parameters():
                if name in saved["model_state"]:
                    parameter.data.copy_(saved["model_state"][name]["data"])


def _buffers(chunk: Any) -> Iterator[Sequence[Any]]:
    yield from (chunk.buffers, chunk.expert_parallel_buffers)


def _live(buffer: Any) -> Any:
    """Where the values are: verl offloads a buffer by emptying its storage and keeping a copy in ``cpu_data``."""
    data = buffer.param_data
    return data.data if data.untyped_storage().size() else data.cpu_data


def _on_host(tensor: Any) -> Any:
    """A copy in pinned memory, of which torch keeps what is given back for the next one."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=torch.cuda.is_available())
    return copy.copy_(tensor)
