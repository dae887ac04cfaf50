"""``summary.json``: the figures of a whole run, computed from its records, so that a resumed run counts in full."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from seamless_verl.observe.report import finite
from seamless_verl.observe.statistics import Estimate, difference, paired_difference


def summarize(
    steps: Sequence[Mapping[str, Any]],
    validations: Sequence[Mapping[str, Any]],
    *,
    wall_s: float,
    time_to_first_step_s: float,
    start_up_s: Mapping[str, float],
) -> dict[str, Any]:
    """Figures of a run.

    Args:
        steps: records of ``steps.jsonl``; where a resumed run repeated a step, the last record counts, but
            violations of all do: a step that an audit ended is repeated when the run is resumed.
        validations: records of ``validation.jsonl``.
        wall_s: seconds from the command to now (of this process, if the run was resumed).
        time_to_first_step_s: seconds from the command to the beginning of the first training step.
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
        "max_logprob_diff": max(diffs) if diffs else None,
        "max_logprob_diff_steps": len(diffs),
        "staleness_max": max((record["staleness_max"] for record in latest), default=None),
        "wall_s": wall_s,
        "time_to_first_step_s": time_to_first_step_s,
        "start_up_s": dict(start_up_s),
        "idle_share": _idle_share(latest),
        "curriculum": latest[-1].get("curriculum") if latest else None,
        "validation_sets": [],
    }
    for name, records in _by_set(validations).items():
        if records[0]["step"] == records[-1]["step"]:
            continue
        summary["validation_sets"].append(name)
        for when, record in (("before", records[0]), ("after", records[-1])):
            summary[f"{name}_{when}"] = record["mean"]
            summary[f"{name}_{when}_ci"] = [record["low"], record["high"]]
            summary[f"{name}_{when}_rollouts"] = record["rollouts"]
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
