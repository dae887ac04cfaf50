"""What of a run is laid over another run: curves by step, where device time went, and figures of the whole. Pure.

The same figures for live runs and for those of the simulator; what a run has not recorded is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from seamless_verl.observe.digest import RunDigest
from seamless_verl.observe.page.words import duration, quantile, share, si, spent
from seamless_verl.observe.time_ledger import IDLE

_CURVES: Mapping[str, tuple[str, str]] = {
    "reward": ("reward", "mean reward over the rollouts of a step"),
    "pass_rate": ("pass rate", "share that passed every test, of the rollouts whose reward tells"),
    "tokens_per_s": ("trained tokens per second", "policy tokens of a step, over its length"),
    "staleness_mean": ("staleness", "versions between the weights of a first token and those that its step changed"),
    "max_logprob_diff": (
        "largest log-prob difference",
        "between trainer and engine, over tokens of the current version",
    ),
    "attempts_failed": ("attempts that failed", "of those that ended since the step before"),
}
Points = list[tuple[int, float]]


def figures(run: RunDigest) -> dict[str, Any]:
    """``curves`` (name, what it is, points), ``pools`` (device-seconds in steps by category), ``facts`` (name, value
    as people read it, what it is)."""
    return {
        "curves": [{"name": name, "about": about, "points": points} for name, about, points in _curves(run) if points],
        "pools": {pool: spent(seconds) for pool, seconds in run.pools_in_steps().items()},
        "facts": list(_facts(run)),
    }


def _curves(run: RunDigest) -> Iterator[tuple[str, str, Points]]:
    lengths = {span.step: span.stop - span.start for span in run.whole_steps}
    lengths |= {record["step"]: record["step_s"] for record in run.steps}
    yield "step time in seconds", "from one step's beginning to its end", sorted(lengths.items())
    for key, (name, about) in _CURVES.items():
        known = [(record["step"], record[key]) for record in run.steps if record.get(key) is not None]
        yield name, about, sorted(known)
    for name, records in run.validation_sets().items():
        yield f"validation: {name}", "mean over its tasks", [(record["step"], record["mean"]) for record in records]


def _facts(run: RunDigest) -> Iterator[tuple[str, str, str]]:
    pools = run.pools_in_steps()
    total = sum(sum(seconds.values()) for seconds in pools.values())
    if steps := run.whole_steps:
        mean = sum(span.stop - span.start for span in steps) / len(steps)
        yield "steps", str(len(steps)), "that were recorded to their end"
        yield "mean step", duration(mean), "without what lies between steps"
    if total:
        idle = sum(seconds[category] for seconds in pools.values() for category in IDLE)
        yield "idle", share(idle / total), "of the device time in steps: waiting for data, work or stragglers"
    if (cost := run.device_s_per_token()) is not None:
        time = duration(cost * 1000)
        yield "device time per 1,000 trained tokens", time, "device time in steps, over tokens that carried a gradient"
    for name, values, about in (
        ("answer tokens of a row", run.tallies.rows.response_tokens, "of what was trained, observations included"),
        ("seconds of an attempt", run.tallies.sessions.seconds, "of agents' attempts that ended"),
    ):
        if values:
            yield f"{name}, median", si(quantile(values, 0.5)), about
            yield f"{name}, 90 %", si(quantile(values, 0.9)), about
    if run.tallies.sessions.ended:
        yield "turns of an attempt", f"{run.tallies.sessions.turns / run.tallies.sessions.ended:.2f}", "mean"
