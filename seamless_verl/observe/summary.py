"""``summary.json``: the figures of a whole run, computed from its records, so that a resumed run counts in full.

Means have honest error bars: rollouts of one task are not independent, so the task is the unit of resampling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from seamless_verl.observe.reporter import finite

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


# ---------------------------------------------------------------- the figures of a run


def summarize(
    steps: Sequence[Mapping[str, Any]],
    validations: Sequence[Mapping[str, Any]],
    *,
    wall_s: float,
    time_to_first_step_s: float | None,
    start_up_s: Mapping[str, float],
) -> dict[str, Any]:
    """Figures of a run.

    Args:
        steps: records of ``steps.jsonl``; where a resumed run repeated a step, the last record counts, but
            violations of all do: a step that an audit ended is repeated when the run is resumed.
        validations: records of ``validation.jsonl``.
        wall_s: seconds from the command to now, with its restarts (of the last command, if the run was resumed).
        time_to_first_step_s: seconds from the command, or the last restart, to the beginning of the first step after;
            ``None``: none began.
        start_up_s: the parts of the start, in seconds.
    """
    latest = list({record["step"]: record for record in steps}.values())
    diffs = [record["max_logprob_diff"] for record in latest if record["max_logprob_diff"] is not None]
    summary: dict[str, Any] = {
        "steps": len(latest),
        "rows": sum(record["rows"] for record in latest),
        "rollouts": sum(record["rollouts"] for record in latest),
        "rows_audited": sum(record["rows_audited"] for record in latest),
        "audit_violations": sum(record["audit_violations"] for record in steps),
        "attempts": sum(record.get("attempts", 0) for record in latest),
        "attempts_failed": sum(record.get("attempts_failed", 0) for record in latest),
        "max_logprob_diff": max(diffs) if diffs else None,
        "max_logprob_diff_steps": len(diffs),
        "staleness_max": max((record["staleness_max"] for record in latest), default=None),
        "wall_s": wall_s,
        "time_to_first_step_s": time_to_first_step_s,
        "start_up_s": dict(start_up_s),
        "idle_share": _idle_share(latest),
        "curriculum": latest[-1].get("curriculum") if latest else None,
        "validation_sets": list(_by_set(validations)),
    }
    for name, records in _by_set(validations).items():
        before = {"before": records[0]} if records[0]["step"] != records[-1]["step"] else {}
        for when, record in (before | {"after": records[-1]}).items():
            summary[f"{name}_{when}"] = record["mean"]
            summary[f"{name}_{when}_ci"] = [record["low"], record["high"]]
            summary[f"{name}_{when}_rollouts"] = record["rollouts"]
        if before:
            gain = _gain(records[0], records[-1])
            summary[f"{name}_gain"] = gain.mean
            summary[f"{name}_gain_ci"] = [finite(gain.low), finite(gain.high)]
    return summary


def _idle_share(steps: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Per pool, the idle seconds of all steps over their length; ``None`` if one step could not tell."""
    pools = dict.fromkeys(pool for record in steps for pool in record["idle_share"])
    shares: dict[str, float | None] = {}
    for pool in pools:
        known = [(r["idle_share"].get(pool), r["step_s"]) for r in steps]
        total = sum(seconds for _, seconds in known)
        if total <= 0 or any(share is None for share, _ in known):
            shares[pool] = None
        else:
            shares[pool] = sum(share * seconds for share, seconds in known) / total
    return shares


def _gain(before: Mapping[str, Any], after: Mapping[str, Any]) -> Estimate:
    """Paired by task where the tasks have names that last from one validation to the next."""
    if before["task_means"].keys() & after["task_means"].keys():
        return paired_difference(before["task_means"], after["task_means"])
    return difference(_estimate(before), _estimate(after))


def _estimate(record: Mapping[str, Any]) -> Estimate:
    low = -math.inf if record["low"] is None else record["low"]
    high = math.inf if record["high"] is None else record["high"]
    return Estimate(mean=record["mean"], low=low, high=high, tasks=record["tasks"], rollouts=record["rollouts"])


def _by_set(validations: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Records by ``<set>_pass_rate`` (or ``<set>_<metric>``), ordered by step."""
    sets: dict[str, list[Mapping[str, Any]]] = {}
    for record in validations:
        metric = "pass_rate" if record["metric"] == "passed" else record["metric"]
        sets.setdefault(f"{record['name']}_{metric}", []).append(record)
    return {name: sorted(records, key=lambda record: record["step"]) for name, records in sets.items()}
