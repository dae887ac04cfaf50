"""A cluster, its work and one system, as data; and what a run of it tells."""

from __future__ import annotations

from dataclasses import dataclass, field

from seamless_verl.errors import ConfigError
from seamless_verl.simulation.books import Ledger
from seamless_verl.simulation.driver import SwitchCosts
from seamless_verl.simulation.loop import StepRecord, TrainPhysics
from seamless_verl.simulation.regimes import regime
from seamless_verl.simulation.replica import EnginePhysics
from seamless_verl.simulation.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Equal slices. ``gpus`` per slice; ``trains``: the trainer's; ``train_speed``: relative to the model's figure."""

    name: str
    slices: int
    gpus: int
    trains: bool
    engine: EnginePhysics
    train_speed: float = 1.0


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
    steps: int = 20
    warm: int = 3
    seed: int = 0
    noise: Noise = field(default_factory=Noise)
    oldest_first: bool | None = None

    def __post_init__(self) -> None:
        rules = regime(self.system)
        if self.batch % self.mini_batch:
            fix = f"write {self.batch // max(1, self.batch // self.mini_batch)}"
            raise ConfigError("mini_batch", self.mini_batch, f"does not divide batch={self.batch}", fix)
        if not 0 <= self.warm < self.steps:
            raise ConfigError("warm", self.warm, f"must be below steps={self.steps}", f"write {self.steps // 4}")
        if not any(pool.trains for pool in self.pools):
            raise ConfigError("pools", "-", "no slice can train", "give at least one pool trains=true")
        if not rules.colocated and not rules.lends and all(pool.trains for pool in self.pools):
            fix = "add a pool with trains=false, or choose a system that lends"
            raise ConfigError("system", self.system, "needs slices that only generate", fix)
        for pool in self.pools:
            if self.workload.max_context > 0.97 * pool.engine.kv_tokens:
                problem = f"a trajectory may have {self.workload.max_context} tokens, more than the cache of a replica"
                raise ConfigError(f"pools.{pool.name}.kv_tokens", pool.engine.kv_tokens, problem, "use larger slices")

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
