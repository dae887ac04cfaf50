"""Published weights into a vLLM engine: run in its workers, by name (``collective_rpc``).

    open_published    the engine goes on; from here on the version cannot go away
    load_published    the engine is paused; verl's own loading, fed from the mapping instead of a socket

vLLM and verl say nothing of tensors that are missing. So a load into an engine that has no whole version yet begins
with every parameter made NaN; a NaN that is left was not in the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from seamless_verl.errors import SeamlessError
from seamless_verl.verl_adapter.weights import weight_store
from seamless_verl.verl_adapter.weights.weight_store import Manifest


class NotWhole(SeamlessError):
    """Parameters of the engine that the weights do not contain."""


class _Receiver:
    """In the place of verl's `BucketedWeightReceiver`: everything is there, so it is one bucket."""

    def __init__(self, manifest: Manifest, memory: Any, **_: Any) -> None:
        self._manifest = manifest
        self._memory = memory

    def receive_weights(self, on_bucket_received: Callable[[list[tuple[str, torch.Tensor]], bool], None]) -> None:
        on_bucket_received(list(self._manifest.tensors_of(self._memory)), True)


def install(rollout: Any) -> None:
    """``rollout`` is ``verl.workers.rollout.vllm_rollout.utils``, whose extension is part of every engine's worker."""
    rollout.vLLMColocateWorkerExtension.open_published = _open
    rollout.vLLMColocateWorkerExtension.load_published = _load


def _open(worker: Any, encoded: str) -> bool:
    """Map the file of the ``encoded`` manifest; False: the version was superseded meanwhile."""
    manifest = weight_store.decode(encoded)
    try:
        worker.published = manifest, weight_store.map_file(manifest.file)
    except FileNotFoundError:
        return False
    return True


def _load(worker: Any, first: bool) -> None:
    """Load what `_open` opened.

    Args:
        first: the engine has no whole version, which it then must have.

    Raises:
        NotWhole: parameters are left that were not loaded.
    """
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer

    transfer: Any = bucketed_weight_transfer
    parameters = dict(worker.model_runner.model.named_parameters())
    if first:
        _poison(parameters)
    receiver, (manifest, memory) = transfer.BucketedWeightReceiver, worker.published
    # verl 0.9.1 looks the class up when it loads, and offers no other way in. Until its extension takes tensors.
    transfer.BucketedWeightReceiver = functools.partial(_Receiver, manifest, memory)
    try:
        worker.update_weights_from_ipc()
    finally:
        transfer.BucketedWeightReceiver = receiver
        worker.published = None
    left = [name for name, value in worker.model_runner.model.named_parameters() if first and _is_poisoned(value)]
    if left:
        raise NotWhole(f"version {manifest.version} leaves {len(left)} parameters unset ({left[0]}, …)")


@torch.no_grad()
def _poison(parameters: dict[str, torch.Tensor]) -> None:
    for value in parameters.values():
        if value.is_floating_point():
            value.fill_(float("nan"))


def _is_poisoned(value: torch.Tensor) -> bool:
    return value.is_floating_point() and bool(value.isnan().any())
