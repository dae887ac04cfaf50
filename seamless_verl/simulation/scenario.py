"""A cluster, its work and one system, as data; and what a run of it tells."""

from __future__ import annotations

from dataclasses import dataclass, field

from seamless_verl.checked import check_bound
from seamless_verl.errors import ConfigError
from seamless_verl.simulation.books import Ledger
from seamless_verl.simulation.driver import SwitchCosts
from seamless_verl.simulation.loop import StepRecord, TrainPhysics
from seamless_verl.simulation.regimes import regime
from seamless_verl.simulation.replica import EnginePhysics
from seamless_verl.simulation.workload import Workload


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
    """Attributes:
    batch, mini_batch: groups per step and per local update.
    attempts: trajectories per group.
    eta: bound on staleness; for systems without a bound, the batches they keep in advance.
    in_flight: batches under way, 1 to eta + 1 (`StalenessProtocol`); None: eta + 1.
    warm: first steps that the figures leave out (the pipeline fills).
    oldest_first: engines serve waiting requests of the oldest session first; None: as the system does by itself.
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
    oldest_first: bool | None = None

    def __post_init__(self) -> None:
        self._check_tags()
        check_bound(self.eta, self.in_flight)
        if self.in_flight is not None and not regime(self.system).reserves:
            problem = f"{self.system} admits by its own rule"
            raise ConfigError("staleness.in_flight", self.in_flight, problem, "leave it out, or choose another policy")
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
        if not any(pool.trains for pool in self.pools):
            raise ConfigError("resources", told, "no pool can train", "write capabilities: [train, rollout] for one")
        if rules.colocated and len(both) < len(self.pools):
            fix = (
                f"write resources=[{{name: all, nodes: 1, gpus_per_node: {self.gpus}, capabilities: [train, rollout]}}]"
            )
            raise ConfigError("scheduler.policy", self.system, "needs pools that all train and roll out", fix)
        standing = any(not pool.trains for pool in self.pools)
        if not standing and not (both and (rules.lends or rules.colocated) and not rules.needs_standing):
            fix = "add a pool with capabilities: [rollout]"
            raise ConfigError("scheduler.policy", self.system, "needs slices that only generate", fix)

    @property
    def gpus(self) -> int:
        return sum(pool.slices * pool.gpus for pool in self.pools)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Figures of the steps after the warm ones. ``events``: callbacks of the whole run."""

    scenario: Scenario
    steps: tuple[StepRecord, ...]
    books: Ledger
    events: int
    lends: int
    preemptions: int
    migrated: int
    stalls: int

    @property
    def step_s(self) -> float:
        return self.books.wall_s / len(self.steps)

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens, prompts included, per second (as verl counts them)."""
        return sum(step.tokens for step in self.steps) / self.books.wall_s

    @property
    def max_staleness(self) -> int:
        return max(max(step.staleness) for step in self.steps)

    @property
    def mean_staleness(self) -> float:
        values = [value for step in self.steps for value in step.staleness]
        return sum(values) / len(values)
