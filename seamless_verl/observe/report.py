"""The records of a run: one per training step, one per validation set. Plain data; no clock, no I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStanding:
    """Where the curriculum is after a step.

    Attributes:
        epochs_ended: epochs whose prompts were all consumed.
        pool: prompts that the stage still draws from.
        left: prompts of the data that History Resampling has taken out and not brought back.
    """

    stage: str
    epochs_ended: int
    pool: int
    left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport:
    """An epoch of the curriculum that ended with ``step``.

    Attributes:
        groups: prompts that were consumed; ``all_correct``, ``all_wrong`` and ``failed`` of them taught nothing.
            ``failed``: their groups could not be generated, or were surplus, twice.
        removed, readmitted: rows of the training data (counted from 0) that left the pool or came back.
        pool: prompts of the stage that are left.
    """

    step: int
    epoch: int
    stage: str
    groups: int
    all_correct: int
    all_wrong: int
    failed: int
    removed: tuple[int, ...]
    readmitted: tuple[int, ...]
    pool: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One training step.

    Attributes:
        reward: mean reward over rollouts.
        pass_rate: share of rollouts that passed every test; ``None`` when the reward has no such component.
        tokens_per_s: policy tokens trained per second of the step.
        staleness_mean, staleness_max: trained version minus version of a trajectory's first token.
        rows, rollouts: rows trained and the rollouts (sessions) that they came from.
        idle_share: by pool, the share of the step in which it had nothing to do; ``None`` where not measurable.
        rows_audited: rows whose tokens, mask and log-probs were compared with the engine's record.
        audit_violations: rows that the audit refused; above 0 only in the record of the step that the run ended in,
            which then counts as rows what was about to be trained.
        max_logprob_diff: largest |trainer - rollout| log-prob over tokens of the current version; ``None`` if none.
        curriculum: ``None`` where verl's own dataloader chooses the prompts.
    """

    step: int
    total_steps: int
    step_s: float
    reward: float
    pass_rate: float | None
    tokens_per_s: float
    staleness_mean: float
    staleness_max: int
    rows: int
    rollouts: int
    rows_audited: int
    audit_violations: int
    max_logprob_diff: float | None
    idle_share: Mapping[str, float | None] = field(default_factory=dict)
    curriculum: PoolStanding | None = None

    @property
    def rows_per_rollout(self) -> float:
        return self.rows / self.rollouts if self.rollouts else 0.0

    def as_metrics(self) -> dict[str, float]:
        """The report as flat metrics for wandb, tensorboard and the like; unknown values are left out."""
        flat = {f"seamless/{key}": value for key, value in asdict(self).items() if isinstance(value, (int, float))}
        flat["seamless/rows_per_rollout"] = self.rows_per_rollout
        flat.update({f"seamless/idle_share/{k}": v for k, v in self.idle_share.items() if v is not None})
        return flat


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    """One validation set at one step; ``task_means`` allows paired comparison with another step."""

    step: int
    name: str
    metric: str
    mean: float
    low: float
    high: float
    tasks: int
    rollouts: int
    task_means: Mapping[str, float]


def as_record(report: StepReport | ValidationReport | EpochReport) -> dict[str, Any]:
    """A JSON-compatible record; what is not finite (the interval around a single task) becomes null."""
    return {key: dict(value) if isinstance(value, Mapping) else finite(value) for key, value in asdict(report).items()}


def finite(value: Any) -> Any:
    """The value itself, or ``None`` for an infinite or undefined number: JSON has no word for those."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
