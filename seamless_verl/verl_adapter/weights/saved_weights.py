"""Weights that verl saves beside the live ones are copies, on every platform.

verl 0.9.1's ``fsdp2_sharded_save_to_cpu`` saves with ``.cpu()``, which is the parameter itself where that is on the
host: with ``param_offload`` on a GPU, and always on a CPU. Restoring older weights then overwrites the newer ones that
were saved to come back, and the updates of all mini-batches but the last are lost without a word. verl's decoupled old
log-probs and our loans within a step both do that. Remove when verl clones.

What FSDP2 has gathered for a forward pass, it keeps where ``reshard_after_forward`` is off and no backward pass
followed (old log-probs). Saving would then find no shards, and restoring change weights that nothing computes with, so
both begin with resharding. Remove when verl's two functions do so.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any


def install(fsdp_utils: ModuleType) -> None:
    """``fsdp_utils`` is ``verl.utils.fsdp_utils``."""
    saves, loads = fsdp_utils.fsdp2_sharded_save_to_cpu, fsdp_utils.fsdp2_sharded_load_from_cpu

    @functools.wraps(saves)
    def save(model: Any) -> Any:
        _reshard(model)
        state, spec = saves(model)
        live = {_memory(getattr(parameter, "_local_tensor", parameter)) for parameter in model.parameters()}
        aliases = [name for name, (tensor, _) in state.items() if _memory(tensor) in live]
        if aliases:
            fsdp_utils.get_torch_device().synchronize()  # offloading does not wait for its copies to arrive
        return {**state, **{name: (state[name][0].clone(), state[name][1]) for name in aliases}}, spec

    @functools.wraps(loads)
    def load(model: Any, state: Any, spec: Any) -> None:
        _reshard(model)
        loads(model, state, spec)

    fsdp_utils.fsdp2_sharded_save_to_cpu = save
    fsdp_utils.fsdp2_sharded_load_from_cpu = load


def _reshard(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "reshard"):  # torch's FSDPModule
            module.reshard()


def _memory(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())
