"""Alarms about what is trained: rows per rollout, groups without a signal, rows computed once. Pure.

Rules as those of `findings`, which puts them into its table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import fmean, median
from typing import Any

from seamless_verl.observe.digest import RunDigest
from seamless_verl.observe.page.words import FORKS, share
from seamless_verl.observe.reporter import MOST_NORM_OFF, MOST_OFF

Told = Iterator[tuple[str, str]]
"""Titles and advice."""
_LATEST = 5  # steps that an alarm looks at
_MOST_ROWS, _MOST_GROWTH = 3.0, 1.5  # rows per rollout; of the latest steps, over what it was before
_FEWEST_GROUPS, _MOST_SILENT = 8, 0.5


def rows_per_rollout(run: RunDigest) -> Told:
    """The mean of the latest steps is above `_MOST_ROWS`, or above `_MOST_GROWTH` times the median of those before."""
    ratios = list(dict(run.rows.per_rollout).values())
    if not ratios:
        return
    latest, before = fmean(ratios[-_LATEST:]), ratios[:-_LATEST]
    usual = median(before) if len(before) >= _LATEST else None
    grown = usual is not None and latest > _MOST_GROWTH * usual
    if latest <= _MOST_ROWS and not grown:
        return
    was = f"; before it was {usual:.1f}" if usual is not None and grown else ""
    forks = Counter({name: n for name, n in run.sessions.drift.items() if name in FORKS}).most_common(1)
    why = f" Most often: {forks[0][0].replace('_', ' ')} ({forks[0][1]} turns)." if forks else ""
    yield (
        f"A rollout became {latest:.1f} rows in the latest steps{was}",
        f"Sessions fork: a request that does not continue what was recorded begins another row.{why} Each row is "
        "prefilled and trained by itself, so steps grow in proportion. Sub-agents and parallel calls do it by design; "
        "an agent that rewrites its history should send back what it was given. The reasons are below, the texts in "
        "seamless-verl watch, mark drifted.",
    )


def groups_without_signal(run: RunDigest) -> Told:
    """More than `_MOST_SILENT` of the groups that ended in the latest steps have one reward for all attempts."""
    since = run.step_spans[-_LATEST].start if len(run.step_spans) >= _LATEST else 0.0
    groups = [group for group in run.sessions.groups.values() if group.attempts > 1 and not group.validation]
    recent = [group for group in groups if group.at >= since]
    silent = [group for group in recent if group.low == group.high]
    if len(recent) < _FEWEST_GROUPS or len(silent) <= _MOST_SILENT * len(recent):
        return
    best = max(group.high for group in groups)
    solved = sum(group.high == best for group in silent)
    yield (
        f"{share(len(silent) / len(recent))} of the latest {len(recent)} groups have the same reward for every attempt",
        f"Their advantage is zero: GRPO learns nothing from them, and their device time is lost. {solved} have the "
        f"best reward that was seen ({best:g}): they are too easy; seamless.curriculum.history_resampling=true takes "
        f"such prompts out. {len(silent) - solved} have a lower one: they are too hard, or the reward or the agent "
        "does not work; read one of them (seamless-verl watch, mark zero variance). A larger rollout.n finds "
        "differences more often.",
    )


def computed_twice(run: RunDigest) -> Told:
    """Rows computed with ``seamless.shared_prefix`` and without it differ by more than bfloat16 explains."""
    for role in ("actor", "critic"):
        bad = [record for record in run.guard if _is_off(record, role)]
        if bad:
            last = bad[-1]
            off, norm = (_told(last.get(f"{role}/shared_prefix/{name}", 0.0)) for name in ("off", "grad_norm_off"))
            yield (
                f"The {role} computes otherwise with seamless.shared_prefix than without, in step {last['step']}",
                f"Two rows computed both ways differ by {off} in the mean (at most {MOST_OFF}), the gradient's norm by "
                f"{norm} of its length (at most {MOST_NORM_OFF}). What was trained since is in doubt: stop the run, "
                "write seamless.shared_prefix=off, and go on from a checkpoint before that step. Please report it.",
            )


def _is_off(record: Mapping[str, Any], role: str) -> bool:
    limits = {f"{role}/shared_prefix/off": MOST_OFF, f"{role}/shared_prefix/grad_norm_off": MOST_NORM_OFF}
    # What was not finite is null in the record.
    return any(key in record and (record[key] is None or record[key] > most) for key, most in limits.items())


def _told(value: float | None) -> str:
    return "what is no number" if value is None else f"{value:.2g}"
