"""The ``seamless`` section of the configuration as frozen, validated dataclasses. No torch, no verl, no Hydra.

An unknown key is refused with the nearest known one; a value that cannot work is refused with its key, the value and
what to write instead.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from seamless_verl.checked import build, check_bound, check_redundancy, one_of, positive, switch, whole
from seamless_verl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessConfig:
    """How old the weights may be that a trained trajectory started with.

    Attributes:
        eta: bound in weight versions (training steps). 0 is synchronous, 1 the one-step lag of SeamlessFlow; from 2 or
            3 on throughput hardly grows (StaleFlow).
        in_flight: batches of prompts under way at a time, from 1 to eta + 1; None: eta + 1. With fewer, samples are
            younger on average (by Little's law in_flight - 1 versions) and only the longest grow as old as ``eta``.
        policy: ``reserve`` holds the bound by admission and drops nothing (StaleFlow). ``verl`` is verl's own replay
            buffer with ``trainer.v1.sampler.max_off_policy_*`` and ``trainer.v1.separate_async.num_warmup_batches``.
        redundancy: prompts in flight per prompt trained, at least 1. Above 1 the slowest groups of a step are given up,
            which favours short answers.
        group_redundancy: rollouts started per rollout that a group needs (``rollout.n``), at least 1. Above 1 the first
            to finish are the group, which favours short answers, and a failed rollout does not fail its group.
        stuck: what is done when a step has waited ``stuck_patience_s`` for its last groups and nothing came: ``wait``,
            ``retry`` (start them anew, where a finished group can take their place) or ``truncate`` (end their answers
            where they are). Both favour short answers.
        stuck_patience_s: seconds.
        correction: what is done about the lag, where the engine's log-probs are kept
            (``rollout.calculate_log_probs``). ``token`` sets verl's token-level truncated importance weights, unless
            ``algorithm.rollout_correction`` says otherwise or ``eta`` is 0. ``a3po`` interpolates the proximal policy
            instead of computing it. ``verl`` leaves everything to verl's keys.
    """

    eta: int = 1
    in_flight: float | None = None
    policy: str = "reserve"
    redundancy: float = 1.0
    group_redundancy: float = 1.0
    stuck: str = "wait"
    stuck_patience_s: float = 60.0
    correction: str = "token"

    def __post_init__(self) -> None:
        check_bound(self.eta, self.in_flight)
        one_of("seamless.staleness.policy", self.policy, ("reserve", "verl"))
        if self.in_flight is not None and self.policy != "reserve":
            problem = "verl's own buffer counts its batches by trainer.v1.separate_async.num_warmup_batches"
            raise ConfigError("seamless.staleness.in_flight", self.in_flight, problem, "write null, or policy=reserve")
        one_of("seamless.staleness.correction", self.correction, ("token", "a3po", "verl"))
        one_of("seamless.staleness.stuck", self.stuck, ("wait", "retry", "truncate"))
        check_redundancy("redundancy", self.redundancy)
        check_redundancy("group_redundancy", self.group_redundancy)
        positive("seamless.staleness.stuck_patience_s", self.stuck_patience_s, "60")
        if self.stuck != "wait" and self.policy != "reserve":
            problem = "only the streaming dataloader knows what a step waits for"
            raise ConfigError("seamless.staleness.stuck", self.stuck, problem, "write wait, or policy=reserve")

    @property
    def manages_groups(self) -> bool:
        """Whether rollout workers run groups in our way, instead of in verl's."""
        return self.group_redundancy > 1 or self.stuck != "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlateauConfig:
    """Accuracy has stopped rising.

    Attributes:
        epochs: how many epochs without a gain.
        min_gain: what counts as one, in accuracy.
    """

    epochs: int
    min_gain: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """A stage of the curriculum; the first ``until_*`` rule that applies ends it, the last stage never ends.

    Attributes:
        name: for messages and checkpoints.
        sources: values of the data's ``data_source`` column that it draws from.
        until_step: last training step of the stage.
        until_epoch: epochs, counted by consumed prompts, that it lasts.
        until_plateau: ends it when the accuracy per epoch stops rising.
    """

    name: str
    sources: tuple[str, ...]
    until_step: int | None = None
    until_epoch: int | None = None
    until_plateau: PlateauConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumConfig:
    """Which prompts are worth their rollouts (SRPO). Without resampling and stages, verl's dataloader chooses.

    Attributes:
        history_resampling: take prompts that every rollout solved out of the pool at the end of an epoch.
        accuracy_key: what the reward function returns beside ``score`` that is 1 for a correct answer.
        pool_floor: prompts that always stay; ``None`` means ``data.train_batch_size``.
        readmit_after_epochs: when a prompt that left comes back; ``None``: never.
        stages: named stages over data sources, in order; none: all data from the start.
        zero_overlong_advantage: rows with an answer that was cut off teach nothing; works by itself, too.
    """

    history_resampling: bool = False
    accuracy_key: str | None = None
    pool_floor: int | None = None
    readmit_after_epochs: int | None = None
    stages: tuple[StageConfig, ...] = ()
    zero_overlong_advantage: bool = False

    def __post_init__(self) -> None:
        for name in ("history_resampling", "zero_overlong_advantage"):
            switch(f"seamless.curriculum.{name}", getattr(self, name))
        for name in ("pool_floor", "readmit_after_epochs"):
            if (value := getattr(self, name)) is not None:
                whole(f"seamless.curriculum.{name}", value, 1, "write 1 or more")
        if self.enabled and not self.accuracy_key:
            raise ConfigError(
                "seamless.curriculum.accuracy_key",
                self.accuracy_key,
                "is not set, and only accuracy decides what is solved",
                "name what the reward function returns beside its score, for example acc",
            )

    @property
    def enabled(self) -> bool:
        return self.history_resampling or bool(self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Which rollout replica a request goes to; ``rollout.router_config_path`` of verl's own takes precedence.

    Attributes:
        policy: ``least_requests`` is verl's rule. ``marginal_gain`` is StaleFlow's: where throughput gains most by a
            model of the decode step, and held back while no replica gains enough.
        mu: share of the gain on an empty replica that a placement must bring.
        migrate: ``marginal_gain`` also moves requests from overloaded to starving replicas, with their tokens (vLLM);
            off, since what it is worth has not been measured live.
        oldest_first: where requests wait for an engine, those of the oldest session are served first, also after they
            were interrupted (vLLM's ``scheduling_policy=priority``); else who came last queues last.
        cost: coefficients of the model: 7b-tp1, 14b-tp1, 32b-tp2 or 30b-a3b-tp1 (published, H20).
    """

    policy: str = "least_requests"
    mu: float = 0.3
    migrate: bool = False
    oldest_first: bool = True
    cost: str = "7b-tp1"

    def __post_init__(self) -> None:
        one_of("seamless.router.policy", self.policy, ("least_requests", "marginal_gain"))
        one_of("seamless.router.cost", self.cost, ("7b-tp1", "14b-tp1", "32b-tp2", "30b-a3b-tp1"))
        if isinstance(self.mu, bool) or not isinstance(self.mu, (int, float)) or not 0 <= self.mu <= 1:
            raise ConfigError("seamless.router.mu", self.mu, "must be between 0 and 1", "write 0.3")
        for key in ("migrate", "oldest_first"):
            switch(f"seamless.router.{key}", getattr(self, key))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceConfig:
    """GPUs of one kind and what they may be used for; one entry of ``seamless.resources``.

    Attributes:
        name: of the pool, unique.
        nodes: machines.
        gpus_per_node: devices of each.
        capabilities: ``[train, rollout]``: trains, and rolls out while the trainer does not need it. ``[train]`` and
            ``[rollout]`` do only that.
        accelerator: Ray's accelerator type that the trainer's nodes must have, e.g. ``H100``; None: any.
        tflops: dense peak per GPU in the training precision; with ``bandwidth_gbs`` it ranks unlike pools (roofline).
        bandwidth_gbs: memory bandwidth per GPU, GB/s.
        memory_gb: memory per GPU.
    """

    name: str
    nodes: int
    gpus_per_node: int
    capabilities: tuple[str, ...]
    accelerator: str | None = None
    tflops: float | None = None
    bandwidth_gbs: float | None = None
    memory_gb: float | None = None

    def __post_init__(self) -> None:
        where = f"seamless.resources[{self.name}]"
        for key, value in (("nodes", self.nodes), ("gpus_per_node", self.gpus_per_node)):
            whole(f"{where}.{key}", value, 1, "write how many there are")
        if not self.capabilities:
            raise ConfigError(f"{where}.capabilities", [], "is empty", "write [train, rollout], [train] or [rollout]")
        for tag in self.capabilities:
            one_of(f"{where}.capabilities", tag, ("train", "rollout"))
        facts = {"tflops": self.tflops, "bandwidth_gbs": self.bandwidth_gbs, "memory_gb": self.memory_gb}
        for key, fact in facts.items():
            if fact is not None:
                positive(f"{where}.{key}", fact, "989")
        if 0 < sum(fact is not None for fact in facts.values()) < 3:
            missing = next(key for key, fact in facts.items() if fact is None)
            raise ConfigError(f"{where}.{missing}", "(nothing)", "the roofline needs all three facts", "give it too")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """When training slices that idle roll out.

    Attributes:
        policy: None leaves it to verl's own keys (``trainer.v1.separate_async.hybrid_rollout``). ``greedy`` is
            SeamlessFlow's rule, ``predictive`` lends what pays, ``verl_gate`` is verl's rule under our scheduler,
            ``colocated`` and ``disaggregated`` are the two ends.
        margin: a loan must be worth this share of its measured switch cost beyond the cost (``predictive``).
        max_loans_per_step: bound on lending within a training step (``predictive``).
        check_weights: compare a checksum of the weights of every lent slice with those published; one that differs ends
            the run. None: on the CPU platform, where it costs nothing to speak of.
    """

    policy: str | None = None
    margin: float = 0.0
    max_loans_per_step: int = 3
    check_weights: bool | None = None

    def __post_init__(self) -> None:
        if self.check_weights is not None:
            switch("seamless.scheduler.check_weights", self.check_weights)
        if self.policy is not None:
            known = ("predictive", "greedy", "verl_gate", "colocated", "disaggregated")
            one_of("seamless.scheduler.policy", self.policy, known)
        if isinstance(self.margin, bool) or not isinstance(self.margin, (int, float)) or self.margin < 0:
            raise ConfigError("seamless.scheduler.margin", self.margin, "must be a number >= 0", "write 0 or 0.25")
        whole("seamless.scheduler.max_loans_per_step", self.max_loans_per_step, 1, "write 3")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """The agents that rows named ``agent_name: seamless_agent`` are rolled out with.

    Attributes:
        runner: fully qualified name of an `AgentRunner`; ``None`` when no row needs one.
        kwargs: arguments of the runner.
        deadline_s: seconds one attempt may take, test runs included.
        max_turns: model calls one attempt may make.
        max_tokens_per_turn: tokens one model call may generate.
        max_concurrent: attempts under way at a time in each rollout worker, or fewer where the runner takes fewer;
            others wait, and their deadline with them. None: its share of what all replicas decode or of what
            `StalenessConfig` admits, whichever is more (`seamless_verl.run.capacity`).
    """

    runner: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float = 600.0
    max_turns: int = 64
    max_tokens_per_turn: int | None = None
    max_concurrent: int | None = None

    def __post_init__(self) -> None:
        positive("seamless.agent.deadline_s", self.deadline_s, "600")
        positive("seamless.agent.max_turns", self.max_turns, "64")
        if self.max_concurrent is not None:
            positive("seamless.agent.max_concurrent", self.max_concurrent, "256")
        if self.max_tokens_per_turn is not None:
            positive("seamless.agent.max_tokens_per_turn", self.max_tokens_per_turn, "1024")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """The trajectory proxy that agents talk to.

    Attributes:
        host: address to bind in every rollout worker. With ``0.0.0.0`` or ``::`` agents, also those on other machines,
            are told the IP of the worker's node.
        port: 0 lets the system choose. With several rollout workers on a machine it must be 0.
        tool_parser, reasoning_parser: names as of ``vllm serve --tool-call-parser`` and ``--reasoning-parser``;
            ``None``: Hermes-style tool calls, and no reasoning told from content.
        journal: the proxy is a process beside its rollout worker, and writes every answer to the run's folder before
            the agent has it: killed at any instant, it goes on where it was. Without it, and in runs without a folder,
            it is part of the worker.
        journal_dir: folder on a disk that every node has itself, for those journals; None: the run's folder where that
            is on the node's disk, else the node's temporary folder (`seamless_verl.machine`).
    """

    host: str = "127.0.0.1"
    port: int = 0
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    journal: bool = True
    journal_dir: str | None = None

    def __post_init__(self) -> None:
        if self.journal_dir is not None and (not isinstance(self.journal_dir, str) or self.journal_dir[:1] != "/"):
            raise ConfigError("seamless.proxy.journal_dir", self.journal_dir, "is no absolute path", "write /scratch")
        if not isinstance(self.journal, bool):
            raise ConfigError("seamless.proxy.journal", self.journal, "is neither true nor false", "write true")
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError("seamless.proxy.host", self.host, "is not an address", "write 127.0.0.1 or 0.0.0.0")
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port < 65536:
            raise ConfigError("seamless.proxy.port", self.port, "is not a TCP port", "write 0 to let the system choose")


@dataclass(frozen=True, slots=True, kw_only=True)
class AssetsConfig:
    """A model and data that a recipe builds by itself, once, and caches.

    Attributes:
        module: module with ``folder(cache) -> Path`` and a command line that builds it; ``None``: nothing to build.
        cache: folder of the cache; ``None`` means ``$SEAMLESS_CACHE`` or ``~/.cache/seamless_verl``.
        dir: filled in when the assets exist; recipes refer to it as ``${seamless.assets.dir}``.
    """

    module: str | None = None
    cache: str | None = None
    dir: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeamlessConfig:
    """Everything under ``seamless:``.

    Attributes:
        recipe: name of the recipe, for messages and folder names.
        run_dir: folder of this run; ``None`` (verl's own entry point) writes no run folder.
        notes: lines printed beside the results at the end, e.g. what a recipe's figures mean.
    """

    recipe: str | None = None
    run_dir: str | None = None
    notes: tuple[str, ...] = ()
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    resources: tuple[ResourceConfig, ...] = ()
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    assets: AssetsConfig = field(default_factory=AssetsConfig)

    @classmethod
    def from_mapping(cls, section: Mapping[str, Any] | None) -> SeamlessConfig:
        """Build from the plain mapping that the ``seamless`` section resolves to.

        Raises:
            ConfigError: an unknown key, a wrong type or an impossible value.
        """
        return typing.cast(SeamlessConfig, build(cls, section or {}, "seamless"))
