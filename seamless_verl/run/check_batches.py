"""Refuses sizes of batches and rows, and estimators of advantages, over which verl 0.9.1 falls only in the first step,
after a whole rollout, or never.

Only the composed configuration is looked at. `run.preflight` calls all of it for our command, and the trainer again
for those who start verl's own entry point.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from seamless_verl.checked import asked_devices, value_of, whole_number
from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.run.check_combinations import uses_adapter, uses_critic

# verl 0.9.1: `AdvantageEstimator` of trainer/ppo/core_algos.py (a contract test compares).
ESTIMATORS = (
    "gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opo", "grpo_passk", "gpg",
    "rloo_vectorized", "grpo_vectorized", "optimal_token_baseline", "tir_optimal_token_baseline", "gdpo",
)  # fmt: skip
UNSERVED = frozenset({"remax", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"})
"""They need what verl 0.9.1's V1 trainer neither computes nor fetches, and fall over it after a whole rollout."""
OF_ROWS = frozenset(ESTIMATORS) - UNSERVED - {"gae", "reinforce_plus_plus", "grpo"}
"""They compare the rows of a prompt; for grpo verl takes one of each rollout (v1/utils.py)."""
OF_SEVERAL = frozenset({"rloo_vectorized", "grpo_passk"})
"""Of a prompt's only rollout the first makes 0, and the second an error."""
OF_A_BATCH = frozenset({"gae", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""They scale advantages by those of all rows that verl hands them."""
_ESTIMATOR, _REWEIGHTED = "algorithm.adv_estimator", "algorithm.use_pf_ppo"
_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
_SEQUENCE = "ulysses_sequence_parallel_size"
_CRITICS_TOKENS = 32768  # verl's, which has no such key in its configuration
_SCHEDULED = ("lr_warmup_steps", "lr_decay_steps", "lr_wsd_decay_steps")
_OLDER = {
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.reward_loop_source": "reward.reward_manager.source",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "sandbox_fusion.url": "reward.sandbox_fusion.url",
}
"""Keys of rewards in earlier verl. 0.9.1 still composes them, and moves them (`migrate_legacy_reward_impl`) for its
fully_async trainer only; may go when a contract test fails. An example of its own has the reward manager there, so
that only a function or a model which nobody would ask is refused."""
_ASKED = (
    "custom_reward_function.path", "custom_reward_function.name", "reward_model.enable", "reward_model.model.path",
)  # fmt: skip
# Sections of engines, and where else than in the section itself verl reads how many GPUs share a sequence. It does not
# hand critic.ulysses_sequence_parallel_size on.
_ENGINES: Mapping[str, tuple[str, ...]] = {
    _ACTOR: ("", "fsdp_config."),
    _REF: ("", "fsdp_config."),
    "critic": ("fsdp.",),
}


def check_sequences(config: Mapping[str, Any]) -> None:
    """Sequences that several GPUs share (Ulysses).

    Raises:
        ConfigError: verl would not start with it, or would train on wrong log-probs without a word.
    """
    shared = _gpus_per_sequence(config, _ACTOR)
    if shared is None or shared == 1:
        return
    key, kind = f"{_ACTOR}.{_SEQUENCE}", f"{_MODEL}.override_config.attn_implementation"
    attention = str(value_of(config, kind, "flash_attention_2"))  # verl's default
    if "flash" not in attention:  # verl patches that one only (models/transformers/monkey_patch.py)
        problem = f"is for flash attention only: with {kind}={attention} each GPU would attend to its own part alone"
        raise ConfigError(key, shared, problem, f"write {key}=1, or leave {kind} out and install flash-attn")
    if not value_of(config, f"{_MODEL}.use_remove_padding", True):
        raise ConfigError(key, shared, f"needs {_MODEL}.use_remove_padding", f"write true there, or {key}=1")
    devices = asked_devices(config)[0]
    if devices % shared:
        fix = f"write {math.gcd(shared, devices)}, or train on a multiple of {shared} GPUs"
        raise ConfigError(key, shared, f"does not divide the {devices} GPUs that train", fix)


def check_batches(config: Mapping[str, Any]) -> None:
    key = f"{_ACTOR}.ppo_mini_batch_size"
    batch, mini = whole_number(config, "data.train_batch_size"), whole_number(config, key)
    if batch % mini:
        near = max(size for size in range(1, min(mini, batch) + 1) if batch % size == 0)
        raise ConfigError(key, mini, f"does not divide data.train_batch_size={batch}", f"write {near}")
    group, ranks = whole_number(config, f"{_ROLLOUT}.n"), _ranks(config, _ACTOR)
    updates = [(key, mini, ranks)]
    if uses_critic(config):
        critics = whole_number(config, "critic.ppo_mini_batch_size", default=mini)
        if mini % critics:
            problem = f"does not divide {key}={mini}, so verl would fill up each update with rows that train nothing"
            raise ConfigError("critic.ppo_mini_batch_size", critics, problem, f"write {mini}")
        updates.append(("critic.ppo_mini_batch_size", critics, _ranks(config, "critic")))
    for name, size, among in updates:  # verl asserts in the first step (workers/engine_workers.py: train_mini_batch)
        if among is not None and size * group % among:
            problem = f"{size} prompts x {group} rollouts do not divide evenly over {among} data-parallel ranks"
            raise ConfigError(name, size, problem, f"make ppo_mini_batch_size x rollout.n a multiple of {among}")
    _check_micro_batches(config, mini * group)


def check_schedules(config: Mapping[str, Any]) -> list[str]:
    """Warnings of what verl does once per batch in its sync mode and once per mini-batch here: advantages over rows of
    several prompts, and a step of a learning rate's schedule."""
    batch, key = whole_number(config, "data.train_batch_size"), f"{_ACTOR}.ppo_mini_batch_size"
    mini, told = whole_number(config, key), []
    updates = batch // mini
    kl = "algorithm.kl_ctrl.type" if value_of(config, "algorithm.use_kl_in_reward", False) else None
    for name, concerned in ((_ESTIMATOR, OF_A_BATCH), (kl, {"adaptive"})):
        if updates > 1 and name and (value := value_of(config, name, None)) in concerned:
            where = f"counts over {mini} prompts here, over {batch} under verl's sync mode"
            told.append(f"{name}={value}: {where}; write {key}={batch} for the latter, with one optimizer step of them")
    for section in (_ACTOR, "critic") if uses_critic(config) else (_ACTOR,):
        for key in (f"{section}.optim.{name}" for name in _SCHEDULED):
            steps = value_of(config, key, None)
            if updates > 1 and isinstance(steps, int) and steps > 0:
                counts = f"counts calls to update, of which a step has {updates} here and one under verl's sync mode"
                told.append(f"{key}={steps} {counts}: write {steps * updates} for {steps} steps")
    return told


def _gpus_per_sequence(config: Mapping[str, Any], section: str) -> int | None:
    """None without FSDP: it hangs on more keys than are worth repeating here. By rollout's keys the actor computes."""
    section = _ACTOR if section == _ROLLOUT else section
    if not str(value_of(config, f"{section}.strategy", "fsdp")).startswith("fsdp"):
        return None
    sizes = (whole_number(config, f"{section}.{engine}{_SEQUENCE}", default=1) for engine in _ENGINES[section])
    return next((size for size in sizes if size > 1), 1)


def _ranks(config: Mapping[str, Any], section: str) -> int | None:
    """Data-parallel ranks of the trainer; None as above."""
    shared = _gpus_per_sequence(config, section)
    return None if shared is None else max(1, asked_devices(config)[0] // shared)


def _reference_by(config: Mapping[str, Any]) -> Sequence[str]:
    """The section by whose keys a reference's log-probs are computed; none where there is no reference."""
    asks = ("algorithm.use_kl_in_reward", f"{_ACTOR}.use_kl_loss")  # verl's `need_reference_policy`
    if not any(value_of(config, key, False) for key in asks):
        return ()
    is_actor = uses_adapter(config) or value_of(config, f"{_MODEL}.lora_adapter_path", None) is not None
    return (_ROLLOUT,) if is_actor else (_REF,)


def _check_micro_batches(config: Mapping[str, Any], rows: int) -> None:
    """verl asserts on these only in the first step (workers/engine/utils.py: prepare_micro_batches).

    Args:
        rows: of a mini-batch; our trainer infers over no more at a time.
    """
    is_copied = value_of(config, "algorithm.rollout_correction.bypass_mode", False)  # but for `rows_to_compare`
    log_probs = sorted({*_reference_by(config), *(() if is_copied else (_ROLLOUT,))})
    for section, name, dynamic in (
        (_ACTOR, "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"),
        *((of, "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz") for of in log_probs),
    ):
        key, ranks = f"{section}.{name}", _ranks(config, section)
        if ranks is None or value_of(config, f"{section}.{dynamic}", False) or value_of(config, key, None) is None:
            continue
        micro, share = whole_number(config, key), rows // ranks
        if share % micro == 0:
            continue
        near = max(size for size in range(1, min(micro, share) + 1) if share % size == 0)
        problem = f"does not divide the {share} rows of a mini-batch that one data-parallel rank of the trainer gets"
        raise ConfigError(key, micro, problem, f"write {near}, or {section}.{dynamic}=true")


def check_lengths(config: Mapping[str, Any]) -> list[str]:
    """Rows against the engine and against micro-batches.

    Returns:
        A warning, where the engine ends answers early.

    Raises:
        ConfigError: a prompt fills the engine, or the longest row fits into no micro-batch.
    """
    prompt, warnings = whole_number(config, "data.max_prompt_length"), []
    needed = prompt + whole_number(config, "data.max_response_length")
    key = f"{_ROLLOUT}.max_model_len"
    if value_of(config, key, None) is not None and (room := whole_number(config, key)) < needed:
        if room <= prompt:
            problem = f"leaves no room for an answer to a prompt of data.max_prompt_length={prompt}"
            raise ConfigError(key, room, problem, f"write {needed}, or at least {prompt + 1}")
        told = f"answers to the longest prompts end {needed - room} tokens early"
        warnings.append(f"{key}={room}: {told}, and rollouts of verl's tool_agent whose tools fill it fail")
        needed = room
    keys = [(_ACTOR, "ppo_max_token_len_per_gpu", value_of(config, f"{_ACTOR}.use_dynamic_bsz", False))]
    for section in sorted({_ROLLOUT, *_reference_by(config)}):
        is_dynamic = value_of(config, f"{section}.log_prob_use_dynamic_bsz", False)
        keys.append((section, "log_prob_max_token_len_per_gpu", is_dynamic))
    # Of the critic verl's V1 trainer reads neither use_dynamic_bsz nor ppo_max_token_len_per_gpu.
    keys.append(("critic", "ppo_infer_max_token_len_per_gpu", uses_critic(config)))
    for section, name, is_dynamic in keys:  # verl asserts when such a row is there (utils/seqlen_balancing.py)
        key, default = f"{section}.{name}", _CRITICS_TOKENS if section == "critic" else None
        if not is_dynamic or value_of(config, key, default) is None:
            continue
        if (shared := _gpus_per_sequence(config, section)) is None:
            continue
        if (tokens := whole_number(config, key, default=default)) * shared < needed:
            among = f" on {shared} GPUs" if shared > 1 else ""
            problem = f"{tokens} tokens per GPU{among} are less than the longest row, which has {needed}"
            added = "" if value_of(config, key, None) is not None else f"+{key}="
            raise ConfigError(key, tokens, problem, f"write {added}{-(-needed // shared)}, or shorten rows")
    return warnings


def check_estimator(config: Mapping[str, Any], seamless: SeamlessConfig) -> list[str]:
    """What rewards are made by, and advantages of them.

    verl looks an estimator up after the first rollouts; others than its own may come from a plug-in of the user's.

    Returns:
        Warnings, where rollouts may count more than once, or a detail of rewards stands under a key of an older verl.

    Raises:
        ConfigError: it is misspelt, or verl's trainer would end over it, or learn nothing or something else by it; or a
            reward stands under such a key.
    """
    warnings = []
    for key, newer in _OLDER.items():
        if (value := value_of(config, key, None)) and value_of(config, newer, None) != value:
            unread = ConfigError(key, value, "verl 0.9.1's V1 trainers do not read it", f"write {newer}={value}")
            if key in _ASKED:
                raise unread
            warnings.append(str(unread))
    name = str(value_of(config, _ESTIMATOR, "gae"))
    near = difflib.get_close_matches(name, ESTIMATORS, n=1, cutoff=0.75)
    if near and name not in ESTIMATORS:
        raise ConfigError(_ESTIMATOR, name, "is none of verl's", f"did you mean {near[0]}?")
    if name in UNSERVED:
        fix = "write grpo, or use verl's old trainer: python -m verl.trainer.main_ppo trainer.use_v1=false"
        raise ConfigError(_ESTIMATOR, name, "verl 0.9.1's V1 trainer does not compute what it needs", fix)
    if name == "gae" and value_of(config, "critic.enable", None) is False:
        fix = f"leave it out, or write {_ESTIMATOR}=grpo"
        raise ConfigError("critic.enable", False, "gae needs the critic's values", fix)
    if name == "gae" and value_of(config, _REWEIGHTED, False):
        # Until a contract test fails: verl's `compute_advantage` returns rows that were drawn, in another order.
        problem = "verl 0.9.1's V1 trainer would give rows the advantages of others"
        raise ConfigError(_REWEIGHTED, True, problem, "write false")
    rollouts = whole_number(config, f"{_ROLLOUT}.n", default=1)
    if name in OF_SEVERAL and rollouts < 2:
        problem = f"{_ESTIMATOR}={name} compares rollouts of a prompt, and would learn nothing from one"
        raise ConfigError(f"{_ROLLOUT}.n", rollouts, problem, f"write 2 or more, or {_ESTIMATOR}=rloo")
    if seamless.agent.runner is None or name not in OF_ROWS:
        return warnings
    forks = "that left several (it forked or compacted its context)"
    told = f"compares rows of a prompt: a rollout of seamless.agent.runner {forks}"
    weighs = "ties with itself where it is the best" if name == "grpo_passk" else "weighs more"
    advice = "write grpo, or use agents that do neither"
    return [*warnings, f"{_ESTIMATOR}={name} {told} {weighs} (docs/limits.md); {advice}"]
