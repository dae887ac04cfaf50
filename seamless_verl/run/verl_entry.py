"""What verl's own entry point does with its configuration beside running the trainer (`verl.trainer.main_ppo.run_ppo`).

Our trainer is a process and not a Ray actor, so `run_ppo` is never called. Every key that it reads is honoured here or
in `seamless_verl.verl_adapter.job`, or refused; a contract test compares with the verl that is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seamless_verl.errors import ConfigError
from seamless_verl.run.devices import value_of

TIMELINE = "ray_kwargs.timeline_json_file"
_ROLLOUT = "actor_rollout_ref.rollout"
_REWARD = "reward.reward_model"
_PROFILER = "global_profiler"


def trainer_environment(config: Mapping[str, Any]) -> dict[str, str]:
    """Variables that verl sets before it starts Ray; it hands them on to all workers itself.

    `PYTHONHASHSEED` counts from a process's start, hence the environment of the trainer's process and not the process.
    """
    environment = {}
    deciding = [_ROLLOUT, *([f"{_REWARD}.rollout"] if value_of(config, f"{_REWARD}.enable", False) else [])]
    if any(value_of(config, f"{section}.full_determinism", False) for section in deciding):
        environment["VERL_FULL_DETERMINISM"] = "1"
        environment["VLLM_BATCH_INVARIANT"] = "1"
        environment["PYTHONHASHSEED"] = str(value_of(config, f"{_ROLLOUT}.seed", 0))
    loggers = value_of(config, "trainer.logger", None) or []
    if "rl_insight" in ([loggers] if isinstance(loggers, str) else loggers):
        environment["VERL_RL_INSIGHT_ENABLE"] = "1"
    return environment


def check_entry(config: Mapping[str, Any]) -> None:
    """Raises:
    ConfigError: only verl's own entry point can honour a key, or a file could not be written at the end.
    """
    if not value_of(config, "trainer.use_v1", True):
        problem = "asks for verl's old trainer, which runs under verl's own command only"
        raise ConfigError("trainer.use_v1", False, problem, "leave it out, or use python -m verl.trainer.main_ppo")
    steps = value_of(config, f"{_PROFILER}.steps", None)
    if value_of(config, f"{_PROFILER}.tool", None) == "nsys" and steps and value_of(config, "trainer.device") == "cuda":
        raise ConfigError(
            f"{_PROFILER}.tool",
            "nsys",
            "Ray starts actors under nsys, and the trainer is none here",
            "profile with verl's entry point (python -m verl.trainer.main_ppo trainer.v1.trainer_mode=seamless, and a "
            f"plus before keys of ours), or write {_PROFILER}.tool=torch",
        )
    timeline = value_of(config, TIMELINE, None)
    if timeline and not Path(timeline).absolute().parent.is_dir():
        raise ConfigError(TIMELINE, timeline, "is in a folder that does not exist", "name a file in one that does")
