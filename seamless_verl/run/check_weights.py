"""Refuses settings under which replicas must not have unlike weights (``seamless.weights.sync=rolling``), and adapters
that would not reach them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seamless_verl.checked import value_of, whole_number
from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.run.check_combinations import MANAGER, replica_size, uses_adapter

_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_MERGE = f"{_MODEL}.lora.merge"
_KEY = "seamless.weights.sync"
_QUANTISED = "what a quantised engine has cannot be compared with what is published"
_FIX = f"or write {_KEY}=together"


def check_weights(config: Mapping[str, Any], seamless: SeamlessConfig) -> None:
    """A replica that lags must not begin a prompt for which it is too old: reservations say how old it may be, rollout
    workers hand that on, and the router keeps to it.

    Raises:
        ConfigError: one of the three is not ours.
    """
    if seamless.weights.sync == "together":
        return
    if seamless.staleness.policy != "reserve":
        problem = "verl's own buffer takes every prompt to begin with the newest weights"
        raise ConfigError("seamless.staleness.policy", seamless.staleness.policy, problem, f"write reserve, {_FIX}")
    lag, eta = seamless.weights.max_lag, seamless.staleness.eta
    if lag > max(1, eta):
        problem = f"no prompt may begin with weights so old (seamless.staleness.eta={eta}), so who lags would idle"
        raise ConfigError("seamless.weights.max_lag", lag, problem, f"write {max(1, eta)} or less, {_FIX}")
    strangers = (
        (f"{_ROLLOUT}.agent.agent_loop_manager_class", (None, MANAGER), "its workers hand no floors to the router"),
        (f"{_ROLLOUT}.router_config_path", (None,), "it does not know which replica is too old for a prompt"),
        ("trainer.v1.sampler.custom_sampler.path", (None,), "it does not reserve prompts by version"),
        (f"{_ROLLOUT}.full_determinism", (None, False), "who serves a prompt would depend on who has new weights"),
    )
    for key, ours, problem in strangers:
        value = value_of(config, key, None)
        if value not in ours:
            raise ConfigError(key, value, problem, f"leave it out, {_FIX}")
    _check_replicas(config)


def check_adapter(config: Mapping[str, Any], seamless: SeamlessConfig) -> None:
    """An adapter that is not merged reaches the trainer's own replicas only, and one without a rank nobody.

    verl 0.9.1 drops the adapter where weights are broadcast (``ActorRolloutRefWorker.update_weights``, verl #7495):
    standalone replicas would sample the base model under fresh version numbers. Remove when it carries the adapter.
    A replica that is started anew after its death gets the adapter only, on whatever its weights are then.
    """
    key = f"{_MODEL}.lora_adapter_path"
    adapter = value_of(config, key, None)
    if adapter is not None and not uses_adapter(config):
        problem = "is not read without a rank, and verl would take the actor without an adapter for its reference"
        raise ConfigError(key, adapter, problem, f"write {_MODEL}.lora_rank=… as the adapter has it, or leave it out")
    if not uses_adapter(config) or value_of(config, _MERGE, False):
        return
    if value_of(config, f"{_ROLLOUT}.nnodes", 0):
        problem = "replicas on GPUs of their own would sample the base model, since verl broadcasts no adapter"
        raise ConfigError(_MERGE, False, problem, f"write {_MERGE}=true, or let the trainer's GPUs generate alone")
    load_format = str(value_of(config, f"{_ROLLOUT}.load_format", "dummy"))
    if seamless.scheduler.policy is not None and "dummy" in load_format:
        problem = "a replica that is started anew would put the adapter on random weights, unless it reads the model"
        raise ConfigError(_MERGE, False, problem, f"write {_MERGE}=true or {_ROLLOUT}.load_format=safetensors")


def _check_replicas(config: Mapping[str, Any]) -> None:
    """What the replicas must be like to take weights by themselves, under the requests that they run."""
    engine_kwargs = f"{_ROLLOUT}.engine_kwargs.vllm.data_parallel_size"
    needed = (
        (f"{_ROLLOUT}.name", ("vllm",), "only our vLLM server changes weights under its requests"),
        (f"{_ROLLOUT}.disaggregation.enabled", (None, False), "verl starts servers of its own for such replicas"),
        (f"{_ROLLOUT}.data_parallel_size", (None, 1), "replicas of several engine cores are untried"),
        (engine_kwargs, (None, 1), "replicas of several engine cores are untried"),
        *((key, (None, False), _QUANTISED) for key in (f"{_ROLLOUT}.quantization", f"{_ROLLOUT}.qat.enable")),
        (f"{_ROLLOUT}.engine_kwargs.vllm.quantization", (None,), _QUANTISED),
        (f"{_ROLLOUT}.mtp.enable_rollout", (None, False), "speculative drafters are untried"),
        (f"{_ROLLOUT}.engine_kwargs.vllm.speculative_config", (None,), "speculative drafters are untried"),
        (f"{_ROLLOUT}.checkpoint_engine.backend", (None, "naive", "seamless_shared"), "rolling brings one of its own"),
    )
    for key, able, problem in needed:
        value = value_of(config, key, None)
        if value not in able:
            raise ConfigError(key, value, problem, f"write {_told(able)}, {_FIX}")
    if not value_of(config, f"{_ROLLOUT}.nnodes", 0):
        problem = "there are no standing replicas, which take new weights in turn"
        raise ConfigError(f"{_ROLLOUT}.nnodes", 0, problem, f"write 1 or more, {_FIX}")
    size, room = replica_size(config), whole_number(config, f"{_ROLLOUT}.n_gpus_per_node")
    if size > room:
        problem = f"a replica of {size} workers lies on several nodes of {room}, and its server takes weights on one"
        raise ConfigError(f"{_ROLLOUT}.tensor_model_parallel_size", size, problem, f"write {room} or less, {_FIX}")


def _told(able: tuple[Any, ...]) -> str:
    value = able[1] if len(able) > 1 and able[0] is None else able[0]
    return "null" if value is None else str(value).lower()
