"""Settings of verl that compose, start and then train on the wrong thing under trainer mode seamless.

Each is refused before anything starts: by `seamless_verl.run.preflight` for our command, and by the trainer itself for
``python -m verl.trainer.main_ppo trainer.v1.trainer_mode=seamless``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.run.devices import value_of

_MODEL = "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"
_MERGE = f"{_MODEL}.lora.merge"


def check_settings_of_verl(config: Mapping[str, Any], seamless: SeamlessConfig) -> None:
    """Refuse what trainer mode seamless cannot serve.

    Args:
        config: the whole configuration as a plain mapping, interpolations resolved.
        seamless: its ``seamless`` section, validated.

    Raises:
        ConfigError: key, value and what to write instead.
    """
    _check_lora(config, seamless)


def _check_lora(config: Mapping[str, Any], seamless: SeamlessConfig) -> None:
    """An adapter that is not merged reaches the trainer's own replicas only.

    verl 0.9.1 drops the adapter where weights are broadcast (``ActorRolloutRefWorker.update_weights``, verl #7495):
    standalone replicas would sample the base model under fresh version numbers. Remove when it carries the adapter.
    A replica that is started anew after its death gets the adapter only, on whatever its weights are then.
    """
    ranks = [f"{_MODEL}.lora_rank", f"{_MODEL}.lora.rank"]
    if not any(value_of(config, key, 0) for key in ranks) or value_of(config, _MERGE, False):
        return
    if value_of(config, f"{_ROLLOUT}.nnodes", 0):
        problem = "replicas on GPUs of their own would sample the base model, since verl broadcasts no adapter"
        raise ConfigError(_MERGE, False, problem, f"write {_MERGE}=true, or let the trainer's GPUs generate alone")
    load_format = str(value_of(config, f"{_ROLLOUT}.load_format", "dummy"))
    if seamless.scheduler.policy is not None and "dummy" in load_format:
        problem = "a replica that is started anew would put the adapter on random weights, unless it reads the model"
        raise ConfigError(_MERGE, False, problem, f"write {_MERGE}=true or {_ROLLOUT}.load_format=safetensors")
