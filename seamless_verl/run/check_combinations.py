"""Refuses settings that do not go together: keys of verl's and of ours, before anything starts.

Only the composed configuration is looked at. `run.preflight` calls all of it for our command. The trainer calls
`check_engine` again, for those who start verl's own entry point.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seamless_verl.checked import asked_devices, value_of, whole_number
from seamless_verl.config import TRAINER_MODE, ResourceConfig, SeamlessConfig, StalenessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.scheduling.declaration import slices_of

TIMELINE = "ray_kwargs.timeline_json_file"
AGENT_LOOP = "seamless_agent"
MANAGER = "seamless_verl.verl_adapter.dataloader.rollout_workers.NotifyingManager"
"""Rollout workers of ours: they say when a group has ended."""
_VERLS_MODES = ("sync", "colocate_async", "separate_async")
_MODE = "trainer.v1.trainer_mode"
_SAMPLER = "trainer.v1.sampler.custom_sampler"
_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_CORRECTION = "algorithm.rollout_correction"
_ROLLOUT = "actor_rollout_ref.rollout"
_PROFILER = "global_profiler"
_JUDGE = "reward.reward_model"
_SAVED = ("fsdp", "fsdp2", "veomni", "megatron")
_SWITCH = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
_SPLIT = (
    "split the devices between trainer.* and actor_rollout_ref.rollout.*, for example trainer.n_gpus_per_node=4 "
    "actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=4"
)


def unused_by_verls_trainer(config: Mapping[str, Any], seamless: SeamlessConfig) -> Sequence[str]:
    """Keys of ours that differ from their defaults and that verl's own trainer modes do not read.

    Raises:
        ConfigError: the trainer mode is misspelt, or GPUs are declared or lent under a mode that would not do so.
    """
    mode = str(value_of(config, _MODE))
    if mode == TRAINER_MODE:
        return ()
    modes = (*_VERLS_MODES, TRAINER_MODE)
    near = difflib.get_close_matches(mode, modes, n=1, cutoff=0.75)
    if near and mode not in modes:  # others may come from a plug-in of the user's
        raise ConfigError(_MODE, mode, f"is none of {', '.join(modes)}", f"did you mean {near[0]}?")
    for key, value in (
        ("seamless.scheduler.policy", seamless.scheduler.policy),
        ("seamless.resources", [entry.name for entry in seamless.resources] or None),
    ):
        if value is not None:
            fix = f"leave {_MODE} out, or write seamless.scheduler.policy=null seamless.resources=[]"
            raise ConfigError(key, value, f"has no effect under {_MODE}={mode}", fix)
    plain = SeamlessConfig.from_mapping({})
    sections = ("staleness", "curriculum", "router", "weights", "scheduler")
    return [f"seamless.{name}" for name in sections if getattr(seamless, name) != getattr(plain, name)]


def check_resources(config: Mapping[str, Any], seamless: SeamlessConfig) -> None:
    """Refuse a declaration that no slices can be cut from, before it is written into verl's keys.

    Raises:
        ConfigError: see `slices_of`; accelerators that verl cannot place, verl's switch beside our scheduler.
    """
    _check_accelerators(seamless.resources)
    if seamless.resources:
        slices_of(seamless.resources, replica_gpus=replica_size(config))
    if seamless.scheduler.policy is not None and value_of(config, _SWITCH, False):
        fix = "leave one of them out (policy verl_gate is verl's rule under our scheduler)"
        raise ConfigError(_SWITCH, True, "verl would lend GPUs beside seamless.scheduler.policy", fix)


def _check_accelerators(resources: Sequence[ResourceConfig]) -> None:
    """Only the trainer's pool can be asked for: verl 0.9.1 makes those of standalone replicas itself (replica.py,
    `init_standalone`) and asks for any GPU."""
    kinds = {entry.accelerator for entry in resources if "train" in entry.capabilities}
    for entry in resources:
        problem = ""
        if entry.accelerator is not None and "train" not in entry.capabilities:
            problem = "verl places replicas that only roll out on any GPU of the Ray cluster"
        elif entry.accelerator is not None and len(kinds) > 1:
            problem = "the trainer's GPUs are one pool to verl, and the entries that train name more than one kind"
        if problem:
            fix = "leave it out, and let the cluster have only GPUs that will do"
            raise ConfigError(f"seamless.resources[{entry.name}].accelerator", entry.accelerator, problem, fix)


def check_generators(policy: str | None) -> None:
    """Where every slice can train, some policies leave all of them to the trainer until its first step has ended.

    Raises:
        ConfigError: nobody would generate the first batch.
    """
    reasons = {
        None: "without a policy nobody lends them to rollout",
        "disaggregated": "it never lends them to rollout",
        "verl_gate": "it lends them at the end of a step only, so nobody would generate the first batch",
    }
    if policy in reasons:
        entry = "add an entry with capabilities: [rollout] to seamless.resources"
        fix = f"{entry}, or write colocated (all generate, then all train), greedy or predictive"
        raise ConfigError("seamless.scheduler.policy", policy, f"all GPUs can train, and {reasons[policy]}", fix)


def check_layout(config: Mapping[str, Any], seamless: SeamlessConfig) -> None:
    """Under trainer mode seamless; declared resources stand in verl's keys by now.

    Raises:
        ConfigError: nobody generates, a policy has nothing to lend, or a replica does not fit.
    """
    policy = seamless.scheduler.policy
    standing = whole_number(config, f"{_ROLLOUT}.nnodes", least=0, default=0)
    hybrid = bool(value_of(config, "actor_rollout_ref.hybrid_engine", True))
    if policy not in (None, "disaggregated") and not hybrid:
        raise ConfigError(
            "seamless.scheduler.policy",
            policy,
            "has nothing to lend: no slice may both train and roll out (actor_rollout_ref.hybrid_engine=false)",
            "declare slices with capabilities: [train, rollout] in seamless.resources (docs/scheduling.md), or set "
            "actor_rollout_ref.hybrid_engine=true",
        )
    if not standing and policy is not None:
        check_generators(policy)
        return  # the trainer's own replicas generate
    for key in ("nnodes", "n_gpus_per_node"):
        if not whole_number(config, f"{_ROLLOUT}.{key}", least=0, default=0):
            problem = "without a scheduler trainer mode 'seamless' needs rollout replicas on devices of their own"
            colocated = "let all generate, then train: seamless.scheduler.policy=colocated"
            fix = f"{_SPLIT}; or {colocated}; or stay with {_MODE}=sync"
            raise ConfigError(f"{_ROLLOUT}.{key}", 0, problem, fix)
    replica = replica_size(config)
    devices = standing * whole_number(config, f"{_ROLLOUT}.n_gpus_per_node")
    if devices % replica:
        key = f"{_ROLLOUT}.tensor_model_parallel_size"
        problem = f"a replica takes {replica} devices and {devices} are not a multiple of that"
        raise ConfigError(key, value_of(config, key), problem, f"use a replica size that divides {devices}")
    if hybrid:
        _check_nodes(config, replica)


def _check_nodes(config: Mapping[str, Any], replica: int) -> None:
    """verl 0.9.1 lays out replicas on the trainer's GPUs as on nodes of rollout's (llm_server.py: `gpus_per_node`)."""
    key = f"{_ROLLOUT}.n_gpus_per_node"
    train, apart = whole_number(config, "trainer.n_gpus_per_node"), whole_number(config, key)
    if min(train, replica) != min(apart, replica):
        problem = f"a replica of {replica} GPUs would be cut so on the trainer's nodes, too, which have {train} each"
        raise ConfigError(key, apart, problem, f"write {train}, or replicas of at most {min(train, apart)} GPUs")


def check_shared_prefix(config: Mapping[str, Any], seamless: SeamlessConfig) -> None:
    """Under any trainer mode; what only the model tells is refused by the engine, when it builds it.

    Raises:
        ConfigError: nothing would come of it here.
    """
    asked, device = seamless.shared_prefix, value_of(config, "trainer.device", "cuda")
    strategy = str(value_of(config, "actor_rollout_ref.actor.strategy", "fsdp"))
    problem = "" if device in ("cpu", "cuda") else f"knows CPUs and CUDA only (trainer.device={device})"
    if not strategy.startswith("fsdp"):
        problem = f"works with FSDP only (actor_rollout_ref.actor.strategy={strategy})"
    if asked != "off" and problem:
        raise ConfigError("seamless.shared_prefix", asked, problem, "write off")


def told_of_layout(config: Mapping[str, Any], seamless: SeamlessConfig) -> str:
    """What the GPUs will do, and what another layout would bring; empty where resources are declared.

    Args:
        seamless: as `with_policy` gives it.
    """
    if seamless.resources or value_of(config, _SWITCH, False):
        return ""
    train, apart = asked_devices(config)
    if seamless.scheduler.policy == "colocated" and not apart:
        return (
            f"layout: devices that generate and then train, in turns: {train} (seamless.scheduler.policy=colocated); "
            "with actor_rollout_ref.rollout.nnodes and n_gpus_per_node some of them only roll out, and both go on at "
            "once: docs/scheduling.md"
        )
    if seamless.scheduler.policy is None and apart:
        return (
            f"layout: devices that train: {train}, that roll out: {apart}; those that train could roll out "
            "while they wait for rows: declare them [train, rollout] in seamless.resources, with a policy "
            "(docs/scheduling.md)"
        )
    return ""


def replica_size(config: Mapping[str, Any]) -> int:
    """Devices of one rollout replica."""
    size = whole_number(config, f"{_ROLLOUT}.tensor_model_parallel_size")
    for name in ("data_parallel_size", "pipeline_model_parallel_size"):
        size *= whole_number(config, f"{_ROLLOUT}.{name}", default=1)
    return size


def uses_critic(config: Mapping[str, Any]) -> bool:
    """As verl's `need_critic`."""
    enabled = value_of(config, "critic.enable", None)
    return value_of(config, "algorithm.adv_estimator", None) == "gae" if enabled is None else bool(enabled)


def uses_adapter(config: Mapping[str, Any]) -> bool:
    return any(value_of(config, f"{_MODEL}.{key}", 0) for key in ("lora_rank", "lora.rank"))


def check_entry(config: Mapping[str, Any]) -> None:
    """Refuse keys that our command cannot honour.

    Raises:
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


def check_engine(config: Mapping[str, Any], seamless: SeamlessConfig) -> None:
    """What engines, rollout workers and verl's asynchronous trainer cannot do under verl 0.9.1.

    Raises:
        ConfigError: naming the key that asks.
    """
    _check_trainer(config)
    _check_single_requests(config, seamless)
    _check_staleness(config, seamless.staleness)
    _check_recorded_routes(config, seamless.staleness)
    if seamless.scheduler.policy is not None:
        _check_lending(config, seamless)
    if value_of(config, f"{_ROLLOUT}.agent.default_agent_loop", None) == AGENT_LOOP:
        check_routing_replay(config)


def has_own_sampler(config: Mapping[str, Any]) -> bool:
    """As verl's `_build_replay_buffer`: a class of the user's own keeps the rows."""
    return bool(value_of(config, f"{_SAMPLER}.path", None) and value_of(config, f"{_SAMPLER}.name", None))


def told_of_sampler(config: Mapping[str, Any], staleness: StalenessConfig) -> list[str]:
    """A warning, where a sampler of the user's own does not do what is asked of ours."""
    plain = StalenessConfig()
    keys = ("eta", "in_flight", "redundancy", "stuck", "stuck_patience_s")
    asked = [f"seamless.staleness.{key}" for key in keys if getattr(staleness, key) != getattr(plain, key)]
    if not asked or not has_own_sampler(config):
        return []
    told = f"{_SAMPLER} decides instead of our buffer what is under way and taken"
    return [f"{', '.join(asked)}: not kept, since {told}, from trainer.v1.separate_async.num_warmup_batches on"]


def _check_trainer(config: Mapping[str, Any]) -> None:
    """Until ``PPOTrainerSeparateAsync`` and ``DetachActorWorker`` can; they say so after Ray has started, or later."""
    pool = f"{_JUDGE}.enable_resource_pool"
    if value_of(config, f"{_JUDGE}.enable", False) and not value_of(config, pool, False):
        problem = "verl's asynchronous trainer, which ours extends, has no place for a reward model on its GPUs"
        fix = f"write true, with {_JUDGE}.nnodes and n_gpus_per_node, or {_MODE}=sync"
        raise ConfigError(pool, False, problem, fix)
    key = f"{_ACTOR}.strategy"
    strategy = value_of(config, key, "fsdp")
    if strategy not in _SAVED:
        problem = "verl's asynchronous trainer, which ours extends, cannot save its weights"
        raise ConfigError(key, strategy, problem, f"write model_engine=dp (FSDP) or megatron, or {_MODE}=sync")


def _check_single_requests(config: Mapping[str, Any], seamless: SeamlessConfig) -> None:
    """Only our own vLLM server ends a single request; verl's others do not, its servers of split replicas neither."""
    engine = value_of(config, f"{_ROLLOUT}.name", None)
    is_split = bool(value_of(config, f"{_ROLLOUT}.disaggregation.enabled", False))
    if engine == "vllm" and not is_split:
        return
    what = f"{engine} with disaggregation.enabled" if is_split else engine
    problem = f"{what} under verl cannot end a single request"
    if seamless.staleness.stuck == "truncate":
        raise ConfigError("seamless.staleness.stuck", "truncate", problem, "write retry or wait")
    if seamless.router.policy == "marginal_gain" and seamless.router.migrate:
        raise ConfigError("seamless.router.migrate", True, problem, "write false")


def _check_lending(config: Mapping[str, Any], seamless: SeamlessConfig) -> None:
    name, otherwise = f"{_ROLLOUT}.name", _without_lending(config, seamless)
    engine = value_of(config, name, "vllm")
    if engine != "vllm":
        # Until verl's SGLang server refuses requests while it is paused (its SGLangReplica.abort_all_requests says so).
        raise ConfigError(
            name,
            engine,
            "cannot be lent: a request that reaches a replica on its way back to the trainer would wait there until "
            "the next loan, and no single request can be moved to a replica that joins",
            f"write vllm, or {otherwise}",
        )
    split = f"{_ROLLOUT}.disaggregation.enabled"
    if value_of(config, split, False):
        problem = "such replicas cannot be lent: verl starts servers of its own for them"
        raise ConfigError(split, True, problem, f"write false, or {otherwise}")
    for key in (f"{_ROLLOUT}.data_parallel_size", f"{_ROLLOUT}.engine_kwargs.vllm.data_parallel_size"):
        size = value_of(config, key, None)
        if isinstance(size, int) and size > 1:
            # Until loans of a replica with two engine cores have gone through on two GPUs (docs/gpu.md, row 12).
            problem = "replicas of several engine cores were never lent: how they sleep and wake together is untried"
            raise ConfigError(key, size, problem, f"write 1 and more replicas, or {otherwise}")
    key = f"{_ROLLOUT}.checkpoint_engine.backend"
    if (backend := value_of(config, key, None)) in ("kimi_ckpt_engine", "delta_sharded"):
        problem = "counts on the replicas of the last transfer, which may have died or come back since"
        raise ConfigError(key, backend, problem, f"write nccl, or {otherwise}")


def _without_lending(config: Mapping[str, Any], seamless: SeamlessConfig) -> str:
    """How nothing is lent. Where rollout has no GPUs of its own, to leave the policy out does not help (`with_policy`).

    Declared resources need not stand in verl's keys yet.
    """
    if value_of(config, f"{_ROLLOUT}.nnodes", 0) or any("train" not in one.capabilities for one in seamless.resources):
        return "leave seamless.scheduler.policy out"
    return f"give rollout GPUs of its own ({_ROLLOUT}.nnodes) and no policy, or keep verl's trainer ({_MODE}=sync)"


def check_routing_replay(config: Mapping[str, Any]) -> None:
    """Agents' sessions carry no routed experts, and a trainer that replays them raises after a whole rollout.

    Raises:
        ConfigError: R3 is asked for; R2 records its routes in the trainer and is fine.
    """
    problem = f"rows of {AGENT_LOOP} do not tell which experts made a token"
    key = f"{_ROLLOUT}.enable_rollout_routing_replay"
    if value_of(config, key, False):
        raise ConfigError(key, True, problem, "write false, and R2 or disabled as router_replay.mode")
    key = _replay_mode(config)
    if value_of(config, key, None) == "R3":
        raise ConfigError(key, "R3", problem, "write R2 or disabled")


def _replay_mode(config: Mapping[str, Any]) -> str:
    return f"{_ACTOR}.{value_of(config, f'{_ACTOR}.strategy', None)}.router_replay.mode"


def _check_recorded_routes(config: Mapping[str, Any], staleness: StalenessConfig) -> None:
    """R2 replays what the pass over old log-probs recorded; verl's engines raise without it, after a whole rollout."""
    key, bypass = _replay_mode(config), f"{_CORRECTION}.bypass_mode"
    is_left_out = staleness.correction == "a3po" or value_of(config, bypass, False)
    if is_left_out and value_of(config, key, None) == "R2":
        problem = f"replays routes of a pass over old log-probs, which {bypass} leaves out (a3po sets it)"
        fix = f"write disabled, or {bypass}=false and another seamless.staleness.correction than a3po"
        raise ConfigError(key, "R2", problem, fix)


def _check_staleness(config: Mapping[str, Any], staleness: StalenessConfig) -> None:
    """What needs our own rollout workers, what needs the engine's log-probs, and what would be set aside."""
    key = f"{_ROLLOUT}.agent.agent_loop_manager_class"
    manager = value_of(config, key, None)
    if staleness.manages_groups and manager not in (None, MANAGER):
        problem = "its workers do not know group_redundancy and stuck of seamless.staleness"
        raise ConfigError(key, manager, problem, "leave it out, or leave those two at 1 and wait")
    key = f"{_ROLLOUT}.calculate_log_probs"
    recorded = value_of(config, key, False)
    correction, loss = _CORRECTION, f"{_ACTOR}.policy_loss"
    if staleness.correction == "a3po" and not (recorded and value_of(config, correction, None) is not None):
        raise ConfigError(key, recorded, "a3po needs the log-probs of the rollout", "write true")
    replaced: dict[str, tuple[Any, str]] = {
        f"{loss}.loss_mode": (("vanilla", "a3po"), "vanilla"),
        f"{correction}.rollout_is": ((None,), "null"),
        f"{correction}.rollout_rs": ((None,), "null"),
    }
    if value_of(config, "distillation.enabled", False):  # what takes the weights for its own, or no other loss
        replaced["distillation.distillation_loss.use_policy_gradient"] = ((False,), "false")
        replaced["distillation.distillation_loss.use_task_rewards"] = ((True,), "true")
    for key, (fitting, word) in replaced.items():
        value = value_of(config, key, fitting[0])
        if staleness.correction == "a3po" and value not in fitting:
            problem = "does not go with seamless.staleness.correction=a3po, which brings its own loss and weights"
            raise ConfigError(key, value, problem, f"write {word}, or seamless.staleness.correction=verl")
    if staleness.correction == "a3po" or not value_of(config, f"{correction}.bypass_mode", False):
        return
    told = value_of(config, f"{loss}.loss_mode", None) == "bypass_mode"
    for name, default in (("rollout_is", None), ("rollout_rs", None), ("loss_type", "ppo_clip")):
        key, of_loss = f"{correction}.{name}", f"{loss}.rollout_correction.{name}"
        value = value_of(config, key, default)
        if value != default and not (told and value_of(config, of_loss, default) == value):
            problem = "does nothing beside bypass_mode: verl's V1 trainer hands it to no loss"
            fix = f"write {default or 'null'}, {correction}.bypass_mode=false, or {loss}.loss_mode=bypass_mode and "
            raise ConfigError(key, value, problem, f"{fix}+{of_loss}={value}")
