"""The checks before anything heavy starts, in their order. Each refusal names the key, the value and what to write.

A value by itself is checked by `seamless_verl.config`, keys that do not go together by `check_combinations` and
`check_batches`, the machine and the cluster that it joins by `check_machine` and `check_gpu_memory`, what keys name by
`check_references`. None of them imports torch, verl or Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seamless_verl.checked import value_of
from seamless_verl.config import TRAINER_MODE, SeamlessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.machine import Machine
from seamless_verl.run import check_batches, check_combinations, check_gpu_memory, check_machine
from seamless_verl.run.check_weights import check_adapter, check_weights


def check_settings(config: Mapping[str, Any], seamless: SeamlessConfig, machine: Machine) -> list[str]:
    """Raise on the first setting that cannot work here; nothing needs to exist yet.

    Args:
        config: the whole composed configuration as a plain mapping, interpolations resolved.
        seamless: its ``seamless`` section, validated.
        machine: where the run would start.

    Returns:
        Warnings: what may be too much for a GPU, or for this machine's shared memory; an estimator that counts rows;
        a sampler of the user's own that keeps no bound of ours; answers that end early;
        a schedule that counts updates.

    Raises:
        ConfigError, MachineError: what is wrong and how to mend it.
    """
    check_machine.check_devices(config, machine)
    check_machine.check_cluster(value_of(config, check_machine.RAY_INIT, None) or {})
    if value_of(config, "actor_rollout_ref.rollout.name", None) is None:
        raise ConfigError("actor_rollout_ref.rollout.name", "null", "is not set", "write vllm")
    warnings = check_batches.check_estimator(config, seamless)
    is_ours = config["trainer"]["v1"]["trainer_mode"] == TRAINER_MODE
    if is_ours or seamless.shared_prefix != "off" or value_of(config, "trainer.device") == "cpu":
        check_machine.check_plugin(check_machine.worker_variables(config))
    if is_ours:
        check_combinations.check_layout(config, seamless)
        check_batches.check_batches(config)
        warnings += check_batches.check_schedules(config)
        check_adapter(config, seamless)
        check_combinations.check_engine(config, seamless)
        check_weights(config, seamless)
        warnings += check_combinations.told_of_sampler(config, seamless.staleness)
    check_batches.check_sequences(config)
    check_combinations.check_shared_prefix(config, seamless)
    check_machine.check_packages(config, seamless, machine)
    check_machine.check_tracker(config)
    warnings += check_batches.check_lengths(config)
    warnings += check_machine.check_room(config, machine)
    check_machine.check_ports(config, seamless)
    warnings += check_gpu_memory.check_memory(config, machine)
    check_combinations.check_entry(config)
    return warnings
