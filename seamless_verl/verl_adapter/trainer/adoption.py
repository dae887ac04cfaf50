"""The ``seamless`` section in the keys that verl's ``separate_async`` trainer reads."""

from __future__ import annotations

import logging
import os
import uuid
from pathlib import Path

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from transfer_queue import interface as transfer_queue

from seamless_verl.config import TRAINER_MODE, SeamlessConfig, StalenessConfig
from seamless_verl.errors import ConfigError, MachineError
from seamless_verl.machine import WEIGHTS, survey
from seamless_verl.run import check_batches
from seamless_verl.run.check_combinations import MANAGER, check_engine, has_own_sampler, told_of_sampler
from seamless_verl.run.check_gpu_memory import check_memory
from seamless_verl.run.check_machine import ADDRESS, check_packages
from seamless_verl.run.check_weights import check_adapter, check_weights
from seamless_verl.run.recipe_assets import plain
from seamless_verl.run.supervisor import RUN_ID
from seamless_verl.scheduling.declaration import with_policy
from seamless_verl.verl_adapter.trainer.a3po import LOSS_MODE
from seamless_verl.verl_adapter.weights.weight_store import SHARED

_log = logging.getLogger(__name__)


def adopt_config(config: DictConfig) -> SeamlessConfig:
    """Translate the ``seamless`` section into what ``separate_async`` reads; changes ``config`` in place.

    * ``trainer.v1.separate_async.parameter_sync_step`` = batch / mini-batch: one weight version per batch.
    * ``num_warmup_batches`` = 0: the streaming dataloader admits (eta + 1) batches by itself; a sampler of the user's
      own does not.
    * ``rollout.agent.agent_loop_manager_class``, unless set: rollout workers that say when a group has ended.
    * `with_policy`: GPUs that do both, where rollout is given none of its own. That and ``tokens_at_risk`` go back into
      the section for `VersionedLLMClient`: under verl's own entry point nobody has filled it in.
    * ``rollout.scheduling_policy`` = priority with vLLM, unless ``seamless.router.oldest_first`` is off.
    * `_correct_lag`: what is done about log-probs of older weights.
    * ``loss_scale_factor`` of Dr. GRPO's mean, unless set: ``data.max_response_length``, as in verl's old trainer. Its
      V1 trainer would divide by the longest answer of each micro-batch: the bias by length that this mode is against.
    * with ``seamless.weights.sync=rolling`` the checkpoint engine that publishes into shared memory; else
      a checkpoint engine ``naive`` (verl's default, refused in asynchronous modes) becomes the platform's own.
    """
    section = OmegaConf.select(config, "seamless")
    seamless = with_policy(SeamlessConfig.from_mapping(plain(section) if section else None), config)
    read_elsewhere = {
        "scheduler.policy": seamless.scheduler.policy,
        "supervise.tokens_at_risk": seamless.supervise.tokens_at_risk,
    }
    with open_dict(config):
        for key, value in read_elsewhere.items():
            OmegaConf.update(config, f"seamless.{key}", value, force_add=True)
        modes = config.trainer.v1
        sync_step = config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size
        modes.separate_async.parameter_sync_step = sync_step
        if seamless.staleness.policy == "reserve" and not has_own_sampler(config):
            modes.separate_async.num_warmup_batches = 0
        modes[TRAINER_MODE] = OmegaConf.merge(modes.get(TRAINER_MODE) or {}, modes.separate_async)  # a sampler gets it
        agent = config.actor_rollout_ref.rollout.get("agent")
        if agent is not None and agent.get("agent_loop_manager_class") is None:
            agent.agent_loop_manager_class = MANAGER
        check_engine(config, seamless)
        if seamless.router.oldest_first and OmegaConf.select(config.actor_rollout_ref.rollout, "name") == "vllm":
            config.actor_rollout_ref.rollout.scheduling_policy = "priority"
        _choose_carrier(config, rolls=seamless.weights.sync == "rolling")
        _correct_lag(config, seamless.staleness)
        for losses in (config.actor_rollout_ref.actor, config.get("critic", {})):
            if losses.get("loss_agg_mode") == "seq-mean-token-sum-norm" and losses.get("loss_scale_factor") is None:
                losses["loss_scale_factor"] = config.data.max_response_length
    return seamless


def _choose_carrier(config: DictConfig, *, rolls: bool) -> None:
    """What brings weights to replicas: verl's checkpoint engine."""
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    if rolls and engine.backend in (None, "naive", SHARED):  # `refuse_early` is about to refuse any other
        run = os.environ.get(RUN_ID) or uuid.uuid4().hex
        engine.backend = SHARED
        engine.custom_backend_module = "seamless_verl.verl_adapter.weights.shared_engine"
        dtype = str(config.actor_rollout_ref.rollout.dtype)
        engine.engine_kwargs = {SHARED: {"folder": f"{WEIGHTS}{run}", "dtype": dtype}}
    elif engine.backend == "naive":
        if config.trainer.device == "cpu":
            engine.backend = "cpu_zmq"
            engine.custom_backend_module = "seamless_verl.verl_adapter.cpu.cpu_weights"
        else:
            engine.backend = "nccl"


def refuse_early(config: DictConfig, seamless: SeamlessConfig) -> None:
    """The checks of `seamless_verl.run` that `adopt_config` cannot make before resources are adopted.

    For verl's own entry point; our command has made them by now.

    Raises:
        ConfigError: key, value and fix, before a worker has been started.
        MachineError: see `refuse_joined_queue`.
    """
    refuse_joined_queue()
    settings, machine = plain(config), survey(Path.cwd())
    check_batches.check_sequences(settings)
    check_batches.check_batches(settings)
    check_weights(settings, seamless)
    check_adapter(settings, seamless)
    check_packages(settings, seamless, machine)
    warnings = check_batches.check_lengths(settings) + check_batches.check_estimator(settings, seamless)
    warnings += check_batches.check_schedules(settings) + told_of_sampler(settings, seamless.staleness)
    warnings += check_memory(settings, machine)
    for warning in warnings:
        _log.warning("%s", warning)


def another_run() -> MachineError:
    found = "another verl run is on it, and TransferQueue is one per cluster: each would train the other's rows"
    return MachineError("Ray cluster", found, f"wait for its end, or start your own: ++{ADDRESS}=local")


def refuse_joined_queue() -> None:
    """Where ``tq.init`` has joined the TransferQueue of another run, which it does without a word.

    Raises:
        MachineError: it did. It is let go before, since ``tq.close``, which verl then calls, would end it.
    """
    controller = transfer_queue._TQ_CONTROLLER
    if controller is not None and controller._actor_id.job_id.hex() != ray.get_runtime_context().get_job_id():
        transfer_queue._TQ_CONTROLLER = None
        raise another_run()


def refuse_no_batch(config: DictConfig, prompts: int) -> None:
    """Where too few prompts are left, perhaps as verl has dropped those that are too long: it divides by the steps of
    an epoch only when all has been started and validated."""
    data = config.data
    if prompts < data.train_batch_size and not config.trainer.val_only:
        is_filtered = data.get("filter_overlong_prompts", True)  # verl's default
        left = f"that data.max_prompt_length={data.max_prompt_length} leaves" if is_filtered else "of data.train_files"
        fixes = [f"write {prompts} or less"] * bool(prompts) + ["raise that limit"] * is_filtered + ["give more data"]
        problem, fix = f"is more than the {prompts} prompts {left}", ", or ".join(fixes)
        raise ConfigError("data.train_batch_size", data.train_batch_size, problem, fix)


def _correct_lag(config: DictConfig, staleness: StalenessConfig) -> None:
    correction = config.algorithm.get("rollout_correction")
    has_log_probs = config.actor_rollout_ref.rollout.calculate_log_probs
    if staleness.correction == "a3po":
        correction.bypass_mode = True
        config.actor_rollout_ref.actor.policy_loss.loss_mode = LOSS_MODE
        return
    if staleness.correction != "token" or not staleness.eta or not has_log_probs or correction is None:
        return
    if correction.rollout_is is None and correction.rollout_rs is None and not correction.bypass_mode:
        correction.rollout_is = "token"
