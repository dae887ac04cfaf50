"""The trainer's half of the CPU platform's device: offloading and loading copy, as between host and GPU.

verl 0.9.1 moves with ``.to("cpu")`` and ``.to(device)``. On a CPU both are the same place, and nothing would move: an
alias that a GPU exposes would stay hidden. Remove when a CPU backend of torch has a second device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from seamless_verl.verl_adapter.cpu import trainer_memory

DEVICE = "device"
"""The device, where verl names the host ``cpu``; on this platform the device's own name is that, too."""


class Place:
    """Where the tensors of a module or an optimizer are.

    Args:
        hold: books so many bytes, before they are taken and after they are given back; may refuse.
        nbytes: what is on the device while it is there.
    """

    def __init__(self, hold: Callable[[int], None], nbytes: Callable[[], int]) -> None:
        self.on_device = True
        self._hold = hold
        self._nbytes = nbytes

    def leave(self, move: Callable[[], None]) -> None:
        if self.on_device:
            move()
            self.on_device = False
            self._hold(0)

    def enter(self, move: Callable[[], None]) -> None:
        if not self.on_device:
            self._hold(self._nbytes())
            move()
            self.on_device = True


_places: weakref.WeakKeyDictionary[Any, Place] = weakref.WeakKeyDictionary()  # of modules and optimizers


def _place(thing: Any) -> Place:
    """Where nothing is counted: on the device until it is moved."""
    return _places.setdefault(thing, Place(lambda nbytes: None, lambda: 0))


@torch.no_grad()
def _move_model(model: torch.nn.Module) -> None:
    model._apply(torch.clone)


@torch.no_grad()
def _move_optimizer(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = value.clone()


def offload_model(model: torch.nn.Module, empty_cache: bool = True) -> None:
    _place(model).leave(lambda: _move_model(model))


def load_model(model: torch.nn.Module) -> None:
    """Raises:
    torch.OutOfMemoryError: somebody else holds the memory.
    """
    _place(model).enter(lambda: _move_model(model))


def offload_optimizer(optimizer: torch.optim.Optimizer) -> None:
    _place(optimizer).leave(lambda: _move_optimizer(optimizer))


def load_optimizer(optimizer: torch.optim.Optimizer, device_id: Any) -> None:
    """As `load_model`."""
    _place(optimizer).enter(lambda: _move_optimizer(optimizer))


def install_moves(fsdp_utils: ModuleType) -> None:
    """``fsdp_utils`` is ``verl.utils.fsdp_utils``; before others import these names from it."""
    fsdp_utils.offload_fsdp2_model_to_cpu = offload_model
    fsdp_utils.load_fsdp2_model_to_gpu = load_model
    fsdp_utils.offload_fsdp_optimizer = offload_optimizer
    fsdp_utils.load_fsdp_optimizer = load_optimizer


def install_switch(base: ModuleType) -> None:
    """``base`` is ``verl.workers.engine.base``: its context loads at the begin and offloads at the end."""

    def enter(self: Any) -> None:
        self.engine.mode = self.mode
        self._context_switch(DEVICE)

    base.BaseEngineCtx.__enter__ = enter


def install_engine(fsdp: ModuleType) -> None:
    """``fsdp`` is ``verl.workers.engine.fsdp.transformer_impl``."""

    def to(self: Any, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        super(fsdp.FSDPEngine, self).to(device=device, model=model, optimizer=optimizer, grad=grad)
        if self.engine_config.forward_only:
            return
        has_optimizer = optimizer and self.optimizer is not None
        if device == DEVICE:
            if model:
                load_model(self.module)
            if has_optimizer:
                load_optimizer(self.optimizer, device)
        else:
            if model:
                offload_model(self.module)
            if has_optimizer:
                offload_optimizer(self.optimizer)

    fsdp.FSDPEngine.to = to
    trainer_memory.install(fsdp.FSDPEngine, lambda thing, hold, nbytes: _places.update({thing: Place(hold, nbytes)}))
