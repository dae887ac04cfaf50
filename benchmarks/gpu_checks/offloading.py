"""Parameters go to the host and come back, and weights that verl saves meanwhile are copies of them.

verl's decoupled old log-probs and our loans within a step do what `_two_mini_batches` does, with ``param_offload`` on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_checks.registry import Context
from benchmarks.records import Record

_WIDTH, _DEPTH = {"gpu": 4096, "cpu": 64}, 4
Save = Callable[[Any], tuple[Any, Any]]


def run(context: Context) -> list[Record]:
    if not context.on_gpu:
        os.environ["VERL_PLATFORM"] = "cpu"
    import verl  # noqa: F401  (loads the platform, and our plug-in)
    from verl.utils import fsdp_utils

    model = _sharded(context)
    plain = _innermost(fsdp_utils.fsdp2_sharded_save_to_cpu)
    lost_by_verl = _two_mini_batches(model, plain)
    lost = _two_mini_batches(model, fsdp_utils.fsdp2_sharded_save_to_cpu)
    changed = _round_trips(model)
    return [
        Record(name="values that three round trips change", value=changed, unit="", bar="= 0", holds=changed == 0),
        Record(name="updates lost, weights saved by us", value=lost, unit="of 1", bar="= 0", holds=lost == 0),
        # 0 here would say that verl has mended it, and that ours can go (`verl_adapter.weights.saved_weights`).
        Record(name="updates lost, weights saved by verl", value=lost_by_verl, unit="of 1"),
    ]


def _sharded(context: Context) -> Any:
    """A small FSDP2 model of one rank on the device."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = "cuda" if context.on_gpu else "cpu"
    backends = "cpu:gloo,cuda:nccl" if context.on_gpu else "gloo"
    torch.distributed.init_process_group(backends, store=torch.distributed.HashStore(), rank=0, world_size=1)
    if context.on_gpu:
        torch.cuda.set_device(0)
    width = _WIDTH[context.platform]
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(_DEPTH))).to(device)
    fully_shard(model, mesh=init_device_mesh(device, (1,)))
    return model


def _two_mini_batches(model: Any, save: Save) -> int:
    """1 where the first mini-batch's update is gone once the second one's old log-probs are known, else 0."""
    from verl.utils import fsdp_utils

    load = fsdp_utils.fsdp2_sharded_load_from_cpu
    _on_device(model, lambda: _set(model, 0.0))
    began = save(model)
    _on_device(model)  # old log-probs of the first mini-batch
    _on_device(model, lambda: _set(model, 1.0))  # its update
    newest = save(model)
    load(model, *began)
    _on_device(model)  # old log-probs of the second one, with the weights that the step began with
    load(model, *newest)
    return int(_value(model) != 1.0)


def _round_trips(model: Any) -> int:
    import torch

    torch.manual_seed(0)
    parts = [torch.randn_like(parameter._local_tensor) for parameter in model.parameters()]
    _on_device(model, lambda: [p._local_tensor.copy_(v) for p, v in zip(model.parameters(), parts, strict=True)])
    for _ in range(3):
        _on_device(model)
    there = [parameter._local_tensor.to(part.device) for parameter, part in zip(model.parameters(), parts, strict=True)]
    return sum(int((a != b).sum()) for a, b in zip(there, parts, strict=True))


def _on_device(model: Any, work: Callable[[], Any] = lambda: None) -> None:
    """Load, work, offload: what verl's engine does around each phase. On the CPU, too, offloading is to new memory."""
    import torch
    from verl.utils import fsdp_utils
    from verl.utils.device import get_torch_device

    fsdp_utils.load_fsdp2_model_to_gpu(model)
    with torch.no_grad():
        work()
    fsdp_utils.offload_fsdp2_model_to_cpu(model)
    get_torch_device().synchronize()


def _set(model: Any, value: float) -> None:
    for parameter in model.parameters():
        parameter._local_tensor.fill_(value)


def _value(model: Any) -> float:
    (value,) = {float(parameter._local_tensor.flatten()[0]) for parameter in model.parameters()}
    return value


def _innermost(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function
