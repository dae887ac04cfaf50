"""Weights that verl saves beside the live ones: copies of what FSDP computes with, and one copy each under Megatron.

verl's decoupled old log-probs and our loans within a step save the weights, put others in their place, and bring them
back (`PublishedWeights.in_place`). verl 0.9.1's pairs of functions for that are replaced. What is saved
keeps verl's layout, so either half works with verl's other one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel


def copy_fsdp_weights(fsdp_utils: Any) -> None:
    """``fsdp_utils`` is ``verl.utils.fsdp_utils``.

    verl 0.9.1's ``fsdp2_sharded_save_to_cpu`` saves with ``.cpu()``, which is the parameter itself where that is on the
    host: with ``param_offload`` on a GPU, and always on a CPU. Restoring older weights then overwrites the newer ones
    that were saved to come back, and the updates of all mini-batches but the last are lost without a word. Remove when
    verl clones.

    What FSDP2 has gathered for a forward pass, it keeps where ``reshard_after_forward`` is off and no backward pass
    followed (old log-probs); FSDP1 keeps its root in any case, and with SHARD_GRAD_OP all. Saving would then find no
    shards under FSDP2, and restoring change weights that nothing computes with, so all begin with resharding. Remove
    when verl's functions do so.
    """

    def settled(function: Any) -> Any:
        @functools.wraps(function)
        def call(model: Any, *state: Any) -> Any:
            _reshard(model)
            fsdp_utils.get_torch_device().synchronize()  # offloading does not wait for its copies to arrive
            return function(model, *state)

        return call

    saves = fsdp_utils.fsdp2_sharded_save_to_cpu
    for name in ("fsdp2_sharded_load_from_cpu", "fsdp1_sharded_save_to_cpu", "fsdp1_sharded_load_from_cpu"):
        setattr(fsdp_utils, name, settled(getattr(fsdp_utils, name)))

    @functools.wraps(saves)
    def save(model: Any) -> Any:
        state, spec = settled(saves)(model)
        live = {_memory(getattr(parameter, "_local_tensor", parameter)) for parameter in model.parameters()}
        aliases = [name for name, (tensor, _) in state.items() if _memory(tensor) in live]
        return {**state, **{name: (state[name][0].clone(), state[name][1]) for name in aliases}}, spec

    fsdp_utils.fsdp2_sharded_save_to_cpu = save


def _reshard(model: Any) -> None:
    for module in model.modules():
        handle = module._handle if isinstance(module, FullyShardedDataParallel) else None
        if hasattr(module, "reshard"):  # torch's FSDPModule
            module.reshard()
        elif handle is not None and handle.uses_sharded_strategy and hasattr(handle.flat_param, "_full_param_padded"):
            handle.reshard(True)  # of FSDP1; the attribute comes with the first forward pass


def _memory(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def copy_megatron_weights_once(megatron_utils: Any) -> None:
    """``megatron_utils`` is ``verl.utils.megatron_utils``.

    verl 0.9.1's ``copy_megatron_model_to_cpu`` goes ``.cpu().clone().pin_memory()``: three copies on the host, two of
    them alive at a time. ``restore_megatron_model_from_cpu`` puts a whole second buffer on the GPU before it copies it
    over the first, which a loan within a step does while an engine lies beside it. Remove when verl copies once.
    """
    wrapped = megatron_utils.DDP
    megatron_utils.copy_megatron_model_to_cpu = lambda models: save_megatron(models, wrapped)
    megatron_utils.restore_megatron_model_from_cpu = lambda models, state: restore_megatron(models, state, wrapped)


@torch.no_grad()
def save_megatron(models: Sequence[Any], wrapped: type) -> dict[str, Any]:
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
def restore_megatron(models: Sequence[Any], state: dict[str, Any], wrapped: type) -> None:
    """What `save_megatron` or verl saved, into the live parameters."""
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
