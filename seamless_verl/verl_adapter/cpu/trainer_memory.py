"""What verl's FSDP engine holds of the CPU platform's device: parameters, gradients, optimizer state.

Gradients and optimizer state are booked before they come into being, where CUDA would refuse them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from seamless_verl.memory.book import Phase
from seamless_verl.verl_adapter.cpu.cpu_device import DeviceMemory, device_memory

Placing = Callable[[Any, Callable[[int], None], Callable[[], int]], None]
_EVERYWHERE = (Phase.TRAIN, Phase.SYNC, Phase.ROLLOUT)


class TrainerMemory:
    """The books of one engine; a critic's stand beside an actor's.

    Args:
        engine: verl's, whose module and optimizer are made.
    """

    def __init__(self, memory: DeviceMemory, engine: Any) -> None:
        self._memory = memory
        self._engine = engine
        self._kind = "critic's " if "ValueHead" in type(engine).__name__ else ""
        parameters = list(engine.module.parameters())
        trained = local_bytes(parameter for parameter in parameters if parameter.requires_grad)
        self.parameters = local_bytes([*parameters, *engine.module.buffers()])
        self._gradients = trained if engine.optimizer is not None else 0
        # Adam and its kin keep two moments.
        self._moments = self._gradients * (2 if "betas" in getattr(engine.optimizer, "defaults", {}) else 1)
        resting = (Phase.TRAIN, Phase.SYNC) if engine.is_param_offload_enabled else _EVERYWHERE
        self._need("parameters", self.parameters, resting)
        self._need("gradients", self._gradients, (Phase.TRAIN,))
        self._need("optimizer", self._moments, (Phase.TRAIN,) if engine.is_optimizer_offload_enabled else _EVERYWHERE)

    def _need(self, what: str, nbytes: int, phases: Iterable[Phase]) -> None:
        self._memory.need(self._kind + what, nbytes, phases)

    def hold(self, what: str, nbytes: int) -> None:
        self._memory.hold(self._kind + what, nbytes)

    @property
    def optimizer(self) -> int:
        """Bytes of its state, as it is."""
        states = self._engine.optimizer.state.values()
        return local_bytes(value for state in states for value in state.values() if isinstance(value, torch.Tensor))

    def before_backward(self) -> None:
        self.hold("gradients", self._gradients)

    def after_zero_grad(self) -> None:
        gradients = (parameter.grad for parameter in self._engine.module.parameters())
        self.hold("gradients", local_bytes(gradient for gradient in gradients if gradient is not None))

    def before_step(self) -> None:
        self.hold("optimizer", max(self.optimizer, self._moments))

    def after_step(self) -> None:
        self.hold("optimizer", self.optimizer)


def local_bytes(tensors: Iterable[Any]) -> int:
    """Of this rank's shards; memory that several tensors share counts once."""
    local = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}.values())


def install(engine_class: Any, place: Placing) -> None:
    """``engine_class`` is verl's ``FSDPEngine``; ``place`` is told how to book a module or an optimizer that moves."""
    build = engine_class._build_model_optimizer
    compute = engine_class.forward_backward_batch
    step, zero_grad = engine_class.optimizer_step, engine_class.optimizer_zero_grad
    books: dict[int, TrainerMemory] = {}  # by engine; they live as long as their process

    @functools.wraps(build)
    def build_model_optimizer(self: Any) -> None:
        build(self)
        memory = device_memory("trainer")
        if memory is None or self.engine_config.forward_only:  # verl keeps the latter's shards on the host
            return
        own = books[id(self)] = TrainerMemory(memory, self)
        own.hold("parameters", own.parameters)
        place(self.module, functools.partial(own.hold, "parameters"), lambda: own.parameters)
        if self.optimizer is not None:
            place(self.optimizer, functools.partial(own.hold, "optimizer"), lambda: own.optimizer)

    @functools.wraps(compute)
    def forward_backward_batch(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        if id(self) in books and not forward_only:
            books[id(self)].before_backward()
        return compute(self, data, loss_function, forward_only=forward_only)

    @functools.wraps(step)
    def optimizer_step(self: Any) -> Any:
        if id(self) not in books:
            return step(self)
        books[id(self)].before_step()
        try:
            return step(self)
        finally:
            books[id(self)].after_step()

    @functools.wraps(zero_grad)
    def optimizer_zero_grad(self: Any) -> None:
        zero_grad(self)
        if id(self) in books:
            books[id(self)].after_zero_grad()

    engine_class._build_model_optimizer = build_model_optimizer
    engine_class.forward_backward_batch = forward_backward_batch
    engine_class.optimizer_step = optimizer_step
    engine_class.optimizer_zero_grad = optimizer_zero_grad
