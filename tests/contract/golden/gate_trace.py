"""Writes what verl's own trainer puts into its lending rule and what comes out, step by step.

How `verl_gate.jsonl` was made (verl 0.9.1, two cores, 24 steps of the skewed workload of `benchmarks.multiplexing`, two
local updates a step): its `verl enable_switch` with ``parameter_sync_step=2`` and
``VERL_USE_EXTERNAL_MODULES=tests.contract.golden.gate_trace GATE_TRACE=FILE``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt


def _trace(module: ModuleType) -> None:
    trainer = module.PPOTrainerSeparateAsync
    decide = trainer.on_step_end
    trainer.on_step_end = lambda self: _traced(self, decide)


def _traced(self: Any, decide: Callable[[Any], None]) -> None:
    given = {
        "step": self.global_steps,
        "last": self.global_steps >= self.total_training_steps,
        "waited_s": self._step_sample_wait_seconds,
        "waited_groups": self._step_wait_samples,
        "to_rollout": list(self._to_rollout_costs),
        "to_train": list(self._to_trainer_costs),
    }
    decide(self)
    shown = self._pending_sync_metrics
    decided = {
        "ready": shown["separate_async/decision/sampleable_count"],
        "ratio": shown["separate_async/switch/threshold_ratio"],
        "remaining": shown["separate_async/decision/remaining"],
        "lends": bool(shown["separate_async/decision/should_switch_to_rollout"]),
        "per_group_s": shown.get("separate_async/decision/per_sample_time_seconds"),
        "cost_s": shown.get("separate_async/decision/effective_switch_cost_seconds"),
    }
    with Path(os.environ["GATE_TRACE"]).open("a") as file:
        file.write(json.dumps({**given, **decided}, sort_keys=True) + "\n")


wrapt.register_post_import_hook(_trace, "verl.trainer.ppo.v1.trainer_separate_async")
