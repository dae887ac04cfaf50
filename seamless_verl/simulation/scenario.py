"""A cluster, its work and one system, as data: everything that a run depends on."""

from __future__ import annotations

from dataclasses import dataclass, field

from seamless_verl.checked import check_bound
from seamless_verl.config import RouterConfig, SchedulerConfig, WeightsConfig
from seamless_verl.errors import ConfigError
from seamless_verl.simulation.agents import Workload
from seamless_verl.simulation.regimes import Regime, regime
from seamless_verl.simulation.replica import EnginePhysics


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Equal slices.

    Attributes:
        gpus: per slice.
        trains, rolls_out: its tags, as ``seamless.resources`` declares them; whether slices with both are lent is the
            system's affair.
    """

    name: str
    slices: int
    gpus: int
    trains: bool
    rolls_out: bool = True
    engine: EnginePhysics


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPhysics:
    """Training time by tokens.

    Attributes:
        gpu_s_per_token: GPU-seconds of forward and backward per trained token, prompts included.
        old_log_prob: the extra forward pass, as a share of that; 0 where the rollout's log-probs are used.
        shared_prefix: what is left of that where rows compute once what they share; 1: each by itself.
        update_s: seconds per mini-batch that do not depend on its tokens.
        awaits_load: a recorded run whose trainer waited until every replica had loaded the weights (`Regime`).
    """

    gpu_s_per_token: float
    old_log_prob: float = 0.0
    shared_prefix: float = 1.0
    update_s: float = 1.0
    awaits_load: bool = False

    def seconds(self, tokens: int, gpus: float) -> float:
        each = self.gpu_s_per_token * (1.0 + self.old_log_prob) * self.shared_prefix
        return self.update_s + tokens * each / gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchCosts:
    """Seconds of each transition of a slice.

    Attributes:
        wake: the trainer's state leaves the device, the engine wakes up, weights go in, the router learns of it.
        drain: requests are interrupted, the engine sleeps, the trainer's state comes back.
        load: a serving replica takes newer weights.
        pull: the same where replicas take them one after the other: how long it stands still. None: as ``load``.
        push: the trainer hands its weights to whoever distributes them (the gang is busy).
        repair: from a failure to the return of the slice.
        spread: relative standard deviation of the first three.
    """

    wake: float
    drain: float
    load: float
    push: float
    repair: float = 300.0
    spread: float = 0.0
    pull: float | None = None

    @property
    def pull_s(self) -> float:
        return self.load if self.pull is None else self.pull


def divisor(whole: int, wanted: int) -> int:
    """The largest divisor of ``whole`` that is not larger than ``wanted`` (1 if none is)."""
    return max((part for part in range(1, min(whole, wanted) + 1) if whole % part == 0), default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What real clusters do.

    Attributes:
        slowdown: standard deviation of the logarithm of a replica's speed, drawn anew for each weight version.
        failures_per_hour: of each slice that generates.
    """

    slowdown: float = 0.0
    failures_per_hour: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is simulated: the system, its devices, its work, and what each thing costs.

    Attributes:
        batch, mini_batch: groups per step and per local update.
        attempts: trajectories per group.
        eta: bound on staleness; for systems without a bound, the batches they keep in advance.
        in_flight: batches under way, 1 to eta + 1 (`StalenessProtocol`); None: eta + 1.
        warm: first steps that the figures leave out (the pipeline fills).
        router: ``seamless.router``; None: as the system does by itself. Published systems keep their own rule, and take
            from it only the order in which engines serve.
        scheduler: settings of the policy; its name is that of the system.
        weights: how replicas take new weights (``seamless.weights``).
    """

    system: str
    pools: tuple[Pool, ...]
    workload: Workload
    train: TrainPhysics
    costs: SwitchCosts
    batch: int = 64
    mini_batch: int = 16
    attempts: int = 8
    eta: int = 1
    in_flight: float | None = None
    steps: int = 20
    warm: int = 3
    seed: int = 0
    noise: Noise = field(default_factory=Noise)
    router: RouterConfig | None = None
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)

    def __post_init__(self) -> None:
        self._check_tags()
        check_bound(self.eta, self.in_flight)
        if self.in_flight is not None and not regime(self.system).reserves:
            problem = f"{self.system} admits by its own rule"
            raise ConfigError("staleness.in_flight", self.in_flight, problem, "write null, or choose another policy")
        if self.rolling and not regime(self.system).rolls:
            problem = f"{self.system} gives new weights to all replicas together, or reserves nothing by version"
            raise ConfigError("weights.sync", "rolling", problem, "write together, or choose another policy")
        if self.batch % self.mini_batch:
            problem = f"does not divide data.train_batch_size={self.batch}"
            fix = f"write {divisor(self.batch, self.mini_batch)}"
            raise ConfigError("actor.ppo_mini_batch_size", self.mini_batch, problem, fix)
        if not 0 <= self.warm < self.steps:
            raise ConfigError("warm", self.warm, f"must be below steps={self.steps}", f"write {self.steps // 4}")
        for pool in self.pools:
            if self.workload.max_context > 0.97 * pool.engine.kv_tokens:
                problem = f"a replica of {pool.name} has a cache for {pool.engine.kv_tokens} tokens"
                fix = "write shorter lengths, fewer turns or a larger rollout.tensor_model_parallel_size"
                raise ConfigError("workload", f"up to {self.workload.max_context} tokens", problem, fix)

    def _check_tags(self) -> None:
        rules, told = regime(self.system), ", ".join(pool.name for pool in self.pools)
        both = [pool for pool in self.pools if pool.trains and pool.rolls_out]
        if not self.gang:
            raise ConfigError("resources", told, "no pool can train", "write capabilities: [train, rollout] for one")
        if rules.colocated and len(both) < len(self.pools):
            fix = (
                f"write resources=[{{name: all, nodes: 1, gpus_per_node: {self.gpus}, capabilities: [train, rollout]}}]"
            )
            raise ConfigError("scheduler.policy", self.system, "needs pools that all train and roll out", fix)
        if not self.standing and not (both and (rules.lends or rules.colocated) and not rules.needs_standing):
            fix = "add a pool with capabilities: [rollout]"
            raise ConfigError("scheduler.policy", self.system, "needs slices that only generate", fix)

    @property
    def rolling(self) -> bool:
        return self.weights.sync == "rolling"

    @property
    def load_s(self) -> float:
        """Seconds in which a serving replica stands still for new weights."""
        return self.costs.pull_s if self.rolling else self.costs.load

    @property
    def gpus(self) -> int:
        return sum(pool.slices * pool.gpus for pool in self.pools)

    @property
    def gang(self) -> tuple[Pool, ...]:
        """Pools that train."""
        return tuple(pool for pool in self.pools if pool.trains)

    @property
    def standing(self) -> tuple[Pool, ...]:
        """Pools that only generate."""
        return tuple(pool for pool in self.pools if not pool.trains)

    def push_s(self, rules: Regime) -> float:
        """Seconds in which the gang hands its weights over: where nobody stands by, slices take them when they wake."""
        return 0.0 if rules.stop_the_world or not self.standing else self.costs.push
