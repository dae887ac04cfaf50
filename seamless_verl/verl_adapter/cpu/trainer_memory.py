"""The trainer's half of the CPU platform's device: offloading and loading copy, and what is held is booked.

verl 0.9.1 moves with ``.to("cpu")`` and ``.to(device)``. On a CPU both are the same place, and nothing would move: an
alias that a GPU exposes would stay hidden. Parameters are booked where they move, gradients and optimizer state before
they come into being, where CUDA would refuse them. Remove when a CPU backend of torch has a second device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from seamless_verl.memory.book import Phase
from seamless_verl.verl_adapter.cpu.cpu_device import DeviceMemory, device_memory

DEVICE = "device"
"""What engines are told for "to the device": verl calls the host ``cpu``, which is the device's name here, too."""
_EVERYWHERE = (Phase.TRAIN, Phase.SYNC, Phase.ROLLOUT)


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


class TrainerMemory:
    """Books what one engine holds; an actor and a critic have one each.

    Args:
        engine: verl's, whose module and optimizer are made.
    """

    def __init__(self, memory: DeviceMemory, engine: Any) -> None:
        self._memory = memory
        self._engine = engine
        self._kind = "critic's " if "ValueHead" in type(engine).__name__ else ""
        parameters = list(engine.module.parameters())
        trained = local_bytes(parameter for parameter in parameters if parameter.requires_grad)
        self._parameters = local_bytes([*parameters, *engine.module.buffers()])
        self._gradients = trained if engine.optimizer is not None else 0
        # Adam and its kin keep two moments.
        self._moments = self._gradients * (2 if "betas" in getattr(engine.optimizer, "defaults", {}) else 1)
        resting = (Phase.TRAIN, Phase.SYNC) if engine.is_param_offload_enabled else _EVERYWHERE
        self._need("parameters", self._parameters, resting)
        self._need("gradients", self._gradients, (Phase.TRAIN,))
        self._need("optimizer", self._moments, (Phase.TRAIN,) if engine.is_optimizer_offload_enabled else _EVERYWHERE)
        self._hold("parameters", self._parameters)
        _places[engine.module] = Place(functools.partial(self._hold, "parameters"), lambda: self._parameters)
        if engine.optimizer is not None:
            _places[engine.optimizer] = Place(functools.partial(self._hold, "optimizer"), self._optimizer)

    def _need(self, what: str, nbytes: int, phases: Iterable[Phase]) -> None:
        self._memory.need(self._kind + what, nbytes, phases)

    def _hold(self, what: str, nbytes: int) -> None:
        self._memory.hold(self._kind + what, nbytes)

    def _optimizer(self) -> int:
        """Bytes of its state, as it is."""
        states = self._engine.optimizer.state.values()
        return local_bytes(value for state in states for value in state.values() if isinstance(value, torch.Tensor))

    def before_backward(self) -> None:
        self._hold("gradients", self._gradients)

    def after_zero_grad(self) -> None:
        gradients = (parameter.grad for parameter in self._engine.module.parameters())
        self._hold("gradients", local_bytes(gradient for gradient in gradients if gradient is not None))

    def before_step(self) -> None:
        self._hold("optimizer", max(self._optimizer(), self._moments))

    def after_step(self) -> None:
        self._hold("optimizer", self._optimizer())


_places: WeakKeyDictionary[Any, Place] = WeakKeyDictionary()  # of modules and optimizers
_books: dict[Any, TrainerMemory] = {}  # by verl's engine; they live as long as their process


def local_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of this rank's shards; memory that several tensors share counts once."""
    local = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}.values())


def _place(thing: Any) -> Place:
    """Where a module or optimizer is; one that nobody counts begins on the device."""
    return _places.setdefault(thing, Place(lambda nbytes: None, lambda: 0))


@torch.no_grad()
def _copy_model(model: torch.nn.Module) -> None:
    model._apply(torch.clone)


@torch.no_grad()
def _copy_optimizer(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = value.clone()


def offload_model(model: torch.nn.Module, empty_cache: bool = True) -> None:
    _place(model).leave(lambda: _copy_model(model))


def load_model(model: torch.nn.Module) -> None:
    """Bring a model back to the device.

    Raises:
        torch.OutOfMemoryError: somebody else holds the memory.
    """
    _place(model).enter(lambda: _copy_model(model))


def offload_optimizer(optimizer: torch.optim.Optimizer) -> None:
    _place(optimizer).leave(lambda: _copy_optimizer(optimizer))


def load_optimizer(optimizer: torch.optim.Optimizer, device_id: Any) -> None:
    """As `load_model`."""
    _place(optimizer).enter(lambda: _copy_optimizer(optimizer))


def install_moves(fsdp_utils: Any) -> None:
    """``fsdp_utils`` is ``verl.utils.fsdp_utils``; before others import these names from it."""
    fsdp_utils.offload_fsdp2_model_to_cpu = offload_model
    fsdp_utils.load_fsdp2_model_to_gpu = load_model
    fsdp_utils.offload_fsdp_optimizer = offload_optimizer
    fsdp_utils.load_fsdp_optimizer = load_optimizer


def install_switch(base: Any) -> None:
    """``base`` is ``verl.workers.engine.base``: its context loads at the begin and offloads at the end."""

    def enter(self: Any) -> None:
        self.engine.mode = self.mode
        self._context_switch(DEVICE)

    base.BaseEngineCtx.__enter__ = enter


def install_engine(fsdp: Any) -> None:
    """``fsdp`` is ``verl.workers.engine.fsdp.transformer_impl``."""
    engine_class, policy = fsdp.FSDPEngine, fsdp.CPUOffloadPolicy
    build, compute = engine_class._build_model_optimizer, engine_class.forward_backward_batch

    def to(self: Any, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        super(engine_class, self).to(device=device, model=model, optimizer=optimizer, grad=grad)
        if self.engine_config.forward_only:
            return
        arrives = device == DEVICE
        if model:
            load_model(self.module) if arrives else offload_model(self.module)
        if optimizer and self.optimizer is not None:
            load_optimizer(self.optimizer, device) if arrives else offload_optimizer(self.optimizer)

    def unpinned(**_: Any) -> Any:
        """Of a reference model, which verl keeps on the host: pinned memory asks for a driver of CUDA."""
        return policy(pin_memory=False)

    @functools.wraps(build)
    def build_model_optimizer(self: Any) -> None:
        build(self)
        memory = device_memory("trainer")
        if memory is not None and not self.engine_config.forward_only:  # verl keeps the latter's shards on the host
            _books[self] = TrainerMemory(memory, self)

    @functools.wraps(compute)
    def forward_backward_batch(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        if self in _books and not forward_only:
            _books[self].before_backward()
        return compute(self, data, loss_function, forward_only=forward_only)

    fsdp.CPUOffloadPolicy = unpinned
    engine_class.to = to
    engine_class._build_model_optimizer = build_model_optimizer
    engine_class.forward_backward_batch = forward_backward_batch
    engine_class.optimizer_step = _booked(
        engine_class.optimizer_step, before=TrainerMemory.before_step, after=TrainerMemory.after_step
    )
    engine_class.optimizer_zero_grad = _booked(engine_class.optimizer_zero_grad, after=TrainerMemory.after_zero_grad)


def _booked(
    method: Callable[[Any], Any],
    *,
    before: Callable[[TrainerMemory], None] = lambda book: None,
    after: Callable[[TrainerMemory], None],
) -> Callable[[Any], Any]:
    """``method`` of an engine, with these two called on its book before and after."""

    @functools.wraps(method)
    def booked(self: Any) -> Any:
        if self not in _books:
            return method(self)
        before(_books[self])
        try:
            return method(self)
        finally:
            after(_books[self])

    return booked
