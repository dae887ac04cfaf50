"""Makes every change of hands take longer, in verl's own trainer and in ours: a negative control of `multiplexing`.

Loaded by verl in every process of a run (``VERL_USE_EXTERNAL_MODULES``); half of the cost falls on each direction.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

_HALF_S = float(os.environ.get("BENCHMARK_SWITCH_COST_S", "0")) / 2


def _slower(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def slower(*args: Any, **kwargs: Any) -> Any:
        time.sleep(_HALF_S)
        return method(*args, **kwargs)

    return slower


def _slow_verl(module: ModuleType) -> None:
    trainer = module.PPOTrainerSeparateAsync
    trainer.switch_to_rollout = _slower(trainer.switch_to_rollout)
    trainer.switch_to_trainer = _slower(trainer.switch_to_trainer)


def _slow_ours(module: ModuleType) -> None:
    module.ReplicaSlices.wake = _slower(module.ReplicaSlices.wake)
    module.ReplicaSlices.interrupt = _slower(module.ReplicaSlices.interrupt)


wrapt.register_post_import_hook(_slow_verl, "verl.trainer.ppo.v1.trainer_separate_async")
wrapt.register_post_import_hook(_slow_ours, "seamless_verl.verl_adapter.slices.replica_slices")
