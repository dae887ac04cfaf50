"""The ``seamless`` section in the keys that verl's ``separate_async`` trainer reads."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf, open_dict

from seamless_verl.config import SeamlessConfig, StalenessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.verl_adapter.a3po import LOSS_MODE
from seamless_verl.verl_adapter.plugin import TRAINER_MODE

_MANAGER = "seamless_verl.verl_adapter.arrivals.NotifyingManager"


def adopt_config(config: DictConfig) -> SeamlessConfig:
    """Translate the ``seamless`` section into what ``separate_async`` reads; changes ``config`` in place.

    * ``trainer.v1.separate_async.parameter_sync_step`` = batch / mini-batch: one weight version per batch.
    * ``num_warmup_batches`` = 0: the streaming dataloader admits (eta + 1) batches by itself.
    * ``rollout.agent.agent_loop_manager_class``, unless set: rollout workers that say when a group has ended.
    * ``rollout.scheduling_policy`` = priority with vLLM, unless ``seamless.router.oldest_first`` is off.
    * `_correct_lag`: what is done about log-probs of older weights.
    * a checkpoint engine ``naive`` (verl's default, refused in asynchronous modes) becomes the platform's own.
    """
    section = OmegaConf.select(config, "seamless")
    seamless = SeamlessConfig.from_mapping(OmegaConf.to_container(section, resolve=True) if section else None)
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    with open_dict(config):
        modes = config.trainer.v1
        if modes.get(TRAINER_MODE) is None:
            modes[TRAINER_MODE] = {}
        sync_step = config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size
        modes[TRAINER_MODE].parameter_sync_step = sync_step
        modes.separate_async.parameter_sync_step = sync_step
        if seamless.staleness.policy == "reserve":
            modes.separate_async.num_warmup_batches = 0
        agent = config.actor_rollout_ref.rollout.get("agent")
        if agent is not None and agent.get("agent_loop_manager_class") is None:
            agent.agent_loop_manager_class = _MANAGER
        _check_interference(config, seamless)
        if seamless.router.oldest_first and OmegaConf.select(config.actor_rollout_ref.rollout, "name") == "vllm":
            config.actor_rollout_ref.rollout.scheduling_policy = "priority"
        if engine.backend == "naive":
            if config.trainer.device == "cpu":
                engine.backend = "cpu_zmq"
                engine.custom_backend_module = "seamless_verl.verl_adapter.cpu_weights"
            else:
                engine.backend = "nccl"
        _correct_lag(config, seamless.staleness)
    return seamless


def _check_interference(config: DictConfig, seamless: SeamlessConfig) -> None:
    """What needs our rollout workers, or an engine that can end a single request."""
    rollout, staleness = config.actor_rollout_ref.rollout, seamless.staleness
    manager = (rollout.get("agent") or {}).get("agent_loop_manager_class")
    if staleness.manages_groups and manager != _MANAGER:
        key = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
        problem = "its workers do not know group_redundancy and stuck of seamless.staleness"
        raise ConfigError(key, manager, problem, "leave it out, or leave those two at 1 and wait")
    engine = OmegaConf.select(rollout, "name")
    problem = f"{engine} under verl cannot end a single request"
    if staleness.stuck == "truncate" and engine != "vllm":
        raise ConfigError("seamless.staleness.stuck", "truncate", problem, "write retry or wait")
    if seamless.router.policy == "marginal_gain" and seamless.router.migrate and engine != "vllm":
        raise ConfigError("seamless.router.migrate", True, problem, "write false")


def _correct_lag(config: DictConfig, staleness: StalenessConfig) -> None:
    correction = config.algorithm.get("rollout_correction")
    has_log_probs = config.actor_rollout_ref.rollout.calculate_log_probs
    if staleness.correction == "a3po":
        if not has_log_probs or correction is None:
            key = "actor_rollout_ref.rollout.calculate_log_probs"
            raise ConfigError(key, has_log_probs, "a3po needs the log-probs of the rollout", "write true")
        correction.bypass_mode = True
        config.actor_rollout_ref.actor.policy_loss.loss_mode = LOSS_MODE
        return
    if staleness.correction != "token" or not staleness.eta or not has_log_probs or correction is None:
        return
    if correction.rollout_is is None and correction.rollout_rs is None and not correction.bypass_mode:
        correction.rollout_is = "token"
