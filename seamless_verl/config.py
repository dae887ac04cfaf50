"""The ``seamless`` section of the configuration as frozen, validated dataclasses. No torch, no verl, no Hydra.

An unknown key is refused with the nearest known one; a value that cannot work is refused with its key, the value and
what to write instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from seamless_verl.checked import build, check_bound, check_redundancy, is_number, one_of, positive, switch, whole
from seamless_verl.curriculum_config import CurriculumConfig
from seamless_verl.errors import ConfigError

TRAINER_MODE = "seamless"  # of ``trainer.v1.trainer_mode``


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessConfig:
    """How old the weights may be that a trained trajectory started with (docs/staleness.md).

    Attributes:
        eta: bound in weight versions, which are training steps. 0 is synchronous, 1 the one-step lag of SeamlessFlow;
            from 2 or 3 on throughput hardly grows (StaleFlow).
        in_flight: batches of prompts under way at a time, from 1 to eta + 1; None: eta + 1. With fewer, samples are
            younger on average (by Little's law in_flight - 1 versions) and only the longest grow as old as ``eta``.
        policy: ``reserve`` keeps the bound by admission and drops nothing (StaleFlow). ``verl`` is verl's own replay
            buffer with ``trainer.v1.sampler.max_off_policy_*`` and ``trainer.v1.separate_async.num_warmup_batches``.
        redundancy: prompts in flight per prompt trained, at least 1. Above 1 the slowest groups of a step are given up,
            which favours short answers.
        group_redundancy: rollouts started per rollout that a group needs (``rollout.n``), at least 1. Above 1 the first
            to finish are the group, which favours short answers, and a failed rollout does not fail its group.
        stuck: what to do when a step has waited ``stuck_patience_s`` for its last groups and none came. ``wait`` goes
            on waiting. ``retry`` starts them anew, where a finished group can take their place. ``truncate`` ends their
            answers where they are. The last two favour short answers.
        stuck_patience_s: seconds.
        correction: what to do about the lag, where the engine's log-probs are kept
            (``rollout.calculate_log_probs``). ``token`` sets verl's token-level truncated importance weights, unless
            ``algorithm.rollout_correction`` says otherwise or ``eta`` is 0. ``a3po`` interpolates the proximal policy
            instead of computing it. ``verl`` leaves everything to verl's keys.
        mask_older_than: tokens made by weights more than so many versions older than those being trained do not count
            in the losses; the row's newer tokens do. Means are still over all tokens, as with verl's own rejection.
            Rows of verl's own agent loops do not say which version made a token: their oldest stands for all. None: all
            count. Values of ``eta`` or more have no effect. A batch of which nothing would be left counts as it is.
    """

    eta: int = 1
    in_flight: float | None = None
    policy: str = "reserve"
    redundancy: float = 1.0
    group_redundancy: float = 1.0
    stuck: str = "wait"
    stuck_patience_s: float = 60.0
    correction: str = "token"
    mask_older_than: int | None = None

    def __post_init__(self) -> None:
        check_bound(self.eta, self.in_flight)
        if self.mask_older_than is not None:
            whole("seamless.staleness.mask_older_than", self.mask_older_than, 0, "write 0 or more, or null")
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
class RouterConfig:
    """Which rollout replica a request goes to. verl's own ``rollout.router_config_path`` takes precedence.

    Attributes:
        policy: ``least_requests`` is verl's rule. ``marginal_gain`` is StaleFlow's: a request goes where a model of the
            decode step says that throughput gains most, and waits while no replica gains enough. ``cache_aware`` is for
            agents of many turns whose contexts do not fit into the caches together: sessions keep their cache, new ones
            go where their prompt's prefix is, and wait where they would only push others out.
        mu: share of the gain on an empty replica that a placement must bring (``marginal_gain``).
        migrate: ``marginal_gain`` also moves requests from overloaded to starving replicas, with their tokens (vLLM
            only). Off, since what it is worth has not been measured live.
        oldest_first: requests that wait for an engine are served in the order in which their sessions began, also after
            they were interrupted (vLLM; sets ``rollout.scheduling_policy=priority``). Off: the last to come waits last.
        cost: published coefficients of the model of the decode step (H20): 7b-tp1, 14b-tp1, 32b-tp2 or 30b-a3b-tp1.
            Used until a replica's own steps have told (``marginal_gain``, ``cache_aware``; vLLM).
    """

    policy: str = "least_requests"
    mu: float = 0.3
    migrate: bool = False
    oldest_first: bool = True
    cost: str = "7b-tp1"

    def __post_init__(self) -> None:
        one_of("seamless.router.policy", self.policy, ("least_requests", "marginal_gain", "cache_aware"))
        one_of("seamless.router.cost", self.cost, ("7b-tp1", "14b-tp1", "32b-tp2", "30b-a3b-tp1"))
        if not is_number(self.mu) or not 0 <= self.mu <= 1:
            raise ConfigError("seamless.router.mu", self.mu, "must be between 0 and 1", "write 0.3")
        for key in ("migrate", "oldest_first"):
            switch(f"seamless.router.{key}", getattr(self, key))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsConfig:
    """How new weights reach the rollout replicas (docs/weights.md).

    Attributes:
        sync: ``together`` stops all replicas, gives the new weights to all, and goes on; the trainer waits meanwhile.
            ``rolling`` has the trainer publish them once; each replica fetches them when its turn comes, and the others
            generate meanwhile.
        cache: what becomes of requests that a replica runs when it takes new weights (``rolling``). ``refill`` computes
            their context again, so that each token is wholly of one version. ``keep`` goes on with the cache of the old
            weights, which costs nothing and leaves tokens that no single version explains.
        at_once: replicas that take new weights at a time (``rolling``).
        max_lag: a busy replica takes new weights once it is this many versions behind; before that it waits until it is
            idle, or nearly, or until a request needs newer weights (``rolling``).
    """

    sync: str = "together"
    cache: str = "refill"
    at_once: int = 1
    max_lag: int = 1

    def __post_init__(self) -> None:
        one_of("seamless.weights.sync", self.sync, ("together", "rolling"))
        one_of("seamless.weights.cache", self.cache, ("refill", "keep"))
        whole("seamless.weights.at_once", self.at_once, 1, "write 1")
        whole("seamless.weights.max_lag", self.max_lag, 1, "write 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceConfig:
    """GPUs of one kind and what they may do (docs/scheduling.md). No entry: verl's keys say it (``trainer.nnodes``, …).

    Attributes:
        name: of the pool, unique.
        nodes: machines; an entry with 0, as a recipe's has after ``rollout.nnodes=0``, counts as not written.
        gpus_per_node: devices of each.
        capabilities: ``[train, rollout]`` trains, and rolls out while the trainer does not need it. ``[train]`` and
            ``[rollout]`` do only that.
        accelerator: Ray's accelerator type that the trainer's nodes must have, for example ``H100``; None: any.
        tflops: dense peak per GPU in the training precision. With the next two it ranks unlike pools (roofline).
        bandwidth_gbs: memory bandwidth per GPU, GB/s.
        memory_gb: memory per GPU, GB.
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
        fix = "write how many there are (a recipe takes the numbers from trainer.* and actor_rollout_ref.rollout.*)"
        whole(f"{where}.nodes", self.nodes, 0, fix)
        whole(f"{where}.gpus_per_node", self.gpus_per_node, min(self.nodes, 1), fix)
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
    """When training slices that idle roll out (docs/scheduling.md).

    Attributes:
        policy: ``predictive`` lends what pays by its forecast. ``greedy`` is SeamlessFlow's rule, where slices idle for
            longer than two switches take; ``verl_gate`` verl's rule under our scheduler. ``colocated`` lends everything
            between steps, ``disaggregated`` nothing. None: verl's own keys decide
            (``trainer.v1.separate_async.hybrid_rollout``); where they give rollout no GPUs, ``colocated``.
        margin: what a loan must save beyond its measured switch cost, as a share of that cost (``predictive``).
        max_loans_per_step: most loans within a training step (``predictive``).
        check_weights: compare a checksum of the weights of every lent slice with those published; a difference ends
            the run. None: on the CPU platform only, where it costs next to nothing.
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
        if not is_number(self.margin) or self.margin < 0:
            raise ConfigError("seamless.scheduler.margin", self.margin, "must be a number >= 0", "write 0 or 0.25")
        whole("seamless.scheduler.max_loans_per_step", self.max_loans_per_step, 1, "write 3")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """The agents that roll out rows with ``agent_name: seamless_agent``.

    Attributes:
        runner: full name of an `AgentRunner` class; None when no row needs one.
        kwargs: arguments of the runner.
        deadline_s: seconds that one attempt may take, test runs included.
        max_turns: model calls that one attempt may make.
        max_tokens_per_turn: tokens that one model call may generate; None: the rest of the budget.
        max_concurrent: attempts under way at a time in each rollout worker; fewer where the runner takes fewer. Others
            wait, and their deadline starts when they do. None: (the larger of: ``rollout.max_num_seqs`` summed
            over replicas; attempts that the staleness bound admits) divided by the number of rollout workers.
    """

    runner: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float = 600.0
    max_turns: int = 64
    max_tokens_per_turn: int | None = None
    max_concurrent: int | None = None

    def __post_init__(self) -> None:
        positive("seamless.agent.deadline_s", self.deadline_s, "600")
        whole("seamless.agent.max_turns", self.max_turns, 1, "write 64")
        if self.max_concurrent is not None:
            whole("seamless.agent.max_concurrent", self.max_concurrent, 1, "write 256")
        if self.max_tokens_per_turn is not None:
            whole("seamless.agent.max_tokens_per_turn", self.max_tokens_per_turn, 1, "write 1024")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """The proxy that agents talk to and that records their tokens (docs/proxy.md).

    Attributes:
        host: address that every rollout worker's proxy binds. The default serves agents on the worker's own machine.
            For agents in containers or on other machines write ``0.0.0.0`` (IPv6: ``::``): each worker then tells them
            the address of its node, as Ray knows it. There is no TLS.
        port: 0 lets the system choose. With several rollout workers on a machine it must be 0.
        on_unsupported: preferences in requests that nobody here can honour (penalties, reasoning effort, verbosity):
            ``accept`` ignores them and says so in a header, ``refuse`` answers 400.
        tool_parser: name of vLLM's parser of the model's tool calls (``vllm serve --tool-call-parser``), for example
            hermes; None: Hermes-style tool calls.
        reasoning_parser: name of vLLM's parser of reasoning (``vllm serve --reasoning-parser``), for example qwen3;
            None: reasoning is not told from content.
        journal: the proxy is a process beside its rollout worker and writes every answer to a journal (``RUN/proxy``)
            before the agent has it. Killed at any instant, it goes on where it was. Without it, and in runs without a
            folder, the proxy is part of the worker and keeps sessions in memory.
        journal_dir: folder for those journals on a disk that every node has itself (SQLite's write-ahead log does not
            work on NFS, Lustre and the like). None: ``RUN/proxy`` where that is on the node's disk, else the node's
            temporary folder.
        keep_mib: MiB per rollout worker of attempts that are over, kept beside the journal with all their tokens
            for ``seamless-verl watch`` (docs/watch.md), and for the worker in the place of one that dies; the oldest
            leave first. 0 keeps none.
    """

    host: str = "127.0.0.1"
    port: int = 0
    on_unsupported: str = "accept"
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    journal: bool = True
    journal_dir: str | None = None
    keep_mib: int = 256

    def __post_init__(self) -> None:
        whole("seamless.proxy.keep_mib", self.keep_mib, 0, "write 256")
        if self.journal_dir is not None and (not isinstance(self.journal_dir, str) or self.journal_dir[:1] != "/"):
            raise ConfigError("seamless.proxy.journal_dir", self.journal_dir, "is no absolute path", "write /scratch")
        one_of("seamless.proxy.on_unsupported", self.on_unsupported, ("accept", "refuse"))
        switch("seamless.proxy.journal", self.journal)
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError("seamless.proxy.host", self.host, "is not an address", "write 127.0.0.1 or 0.0.0.0")
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port < 65536:
            raise ConfigError("seamless.proxy.port", self.port, "is not a TCP port", "write 0 to let the system choose")


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperviseConfig:
    """What the command does when a process of its run dies (docs/running.md).

    Attributes:
        restarts: how often within an hour, and in a row without a new step, a run that lost a process which cannot be
            replaced is started again from its last checkpoint. 0: it ends. Errors, refused settings and Ctrl-C end it
            in any case.
        tokens_at_risk: an answer under way leaves its replica after every so many tokens, and is written to the
            proxy's journal: that many are generated again at most when the replica or the proxy dies. 0: only where
            weights change or its slice goes. vLLM only.
    """

    restarts: int = 3
    tokens_at_risk: int = 256

    def __post_init__(self) -> None:
        whole("seamless.supervise.restarts", self.restarts, 0, "write 3, or 0 for none")
        whole("seamless.supervise.tokens_at_risk", self.tokens_at_risk, 0, "write 256")


@dataclass(frozen=True, slots=True, kw_only=True)
class AssetsConfig:
    """A model and data that a recipe builds itself, once, and caches.

    Attributes:
        module: module with ``folder(cache) -> Path`` and a command line that builds it; None: nothing to build.
        cache: folder of the cache; None: ``$SEAMLESS_CACHE`` or ``~/.cache/seamless_verl``.
        dir: filled in when the assets exist; recipes refer to it as ``${seamless.assets.dir}``.
    """

    module: str | None = None
    cache: str | None = None
    dir: str | None = None

    def __post_init__(self) -> None:
        for name in ("module", "cache", "dir"):
            if not isinstance(value := getattr(self, name), str | None):
                raise ConfigError(f"seamless.assets.{name}", value, "is no text", "write a text, or null")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeamlessConfig:
    """Everything under ``seamless``.

    Attributes:
        recipe: name of the recipe, for messages and folder names.
        run_dir: folder of this run, filled in from ``hydra.run.dir``. None (verl's own entry point): none is written.
        notes: lines printed beside the results at the end, for example what a recipe's figures mean.
        resources: which GPUs there are, entries of `ResourceConfig`; [] takes verl's keys.
        shared_prefix: tokens that the rows of a micro-batch share are computed once (docs/shared-prefixes.md): ``on``,
            ``auto`` where that is sooner done, ``off``.
        watch: serve pages of this run while it goes on, on loopback, and print their address (docs/watch.md).
    """

    recipe: str | None = None
    run_dir: str | None = None
    notes: tuple[str, ...] = ()
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    resources: tuple[ResourceConfig, ...] = ()
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    supervise: SuperviseConfig = field(default_factory=SuperviseConfig)
    assets: AssetsConfig = field(default_factory=AssetsConfig)
    shared_prefix: str = "off"
    watch: bool = False

    def __post_init__(self) -> None:
        switch("seamless.watch", self.watch)
        one_of("seamless.shared_prefix", self.shared_prefix, ("off", "auto", "on"))

    @classmethod
    def from_mapping(cls, section: Mapping[str, Any] | None) -> SeamlessConfig:
        """Build from the plain mapping that the ``seamless`` section resolves to.

        Raises:
            ConfigError: an unknown key, a wrong type or an impossible value.
        """
        section = dict(section or {})
        if isinstance(section.get("shared_prefix"), bool):  # what on and off without quotes are in YAML
            section["shared_prefix"] = "on" if section["shared_prefix"] else "off"
        made = build(cls, section, "seamless")
        return replace(made, resources=tuple(entry for entry in made.resources if entry.nodes))
