"""Means with honest error bars. Rollouts of one task are not independent, so the task is the unit of resampling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

_Z95 = 1.959964


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over tasks with its task-clustered 95 % interval (normal approximation)."""

    mean: float
    low: float
    high: float
    tasks: int
    rollouts: int


def clustered_mean(values_by_task: Mapping[str, Sequence[float]]) -> Estimate:
    """Mean of the task means; the spread *between* tasks gives the interval.

    Raises:
        ValueError: no task, or a task without a value.
    """
    if not values_by_task or any(not values for values in values_by_task.values()):
        raise ValueError("a mean needs at least one task, and each task at least one value")
    task_means = [fmean(values) for values in values_by_task.values()]
    low, high = _interval(task_means)
    return Estimate(
        mean=fmean(task_means),
        low=low,
        high=high,
        tasks=len(task_means),
        rollouts=sum(len(values) for values in values_by_task.values()),
    )


def paired_difference(before: Mapping[str, float], after: Mapping[str, float]) -> Estimate:
    """Mean of ``after - before`` over the tasks that both hold, with the interval of the paired differences."""
    shared = sorted(before.keys() & after.keys())
    if not shared:
        raise ValueError("no task is in both measurements")
    differences = [after[task] - before[task] for task in shared]
    low, high = _interval(differences)
    return Estimate(mean=fmean(differences), low=low, high=high, tasks=len(shared), rollouts=len(shared))


def difference(before: Estimate, after: Estimate) -> Estimate:
    """``after - before`` of two measurements on different tasks: their errors add in squares."""
    half = math.hypot(before.high - before.mean, after.high - after.mean)
    mean = after.mean - before.mean
    return Estimate(
        mean=mean,
        low=mean - half,
        high=mean + half,
        tasks=min(before.tasks, after.tasks),
        rollouts=min(before.rollouts, after.rollouts),
    )


def _interval(means: Sequence[float]) -> tuple[float, float]:
    if len(means) < 2:
        return -math.inf, math.inf
    center, half = fmean(means), _Z95 * stdev(means) / math.sqrt(len(means))
    return center - half, center + half
