"""What a person should look at next: rules that read the figures of a run and say what they mean and what to try.

Each rule has a threshold that stands beside it, and yields what it found (the fact, with its figure) with what it means
and what to do; a rule that does not apply yields nothing. How urgent that is, and which section shows it, stands in the
table at the end. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, median
from typing import Any

from seamless_verl.observe.digest import RunDigest
from seamless_verl.observe.page.words import FORKS, LABELS, REALIGNED, duration, quantile, share
from seamless_verl.observe.reporter import MOST_NORM_OFF, MOST_OFF
from seamless_verl.observe.time_ledger import IDLE, Category
from seamless_verl.trajectory.tokens import DriftReason

Findings = Iterator[tuple[str, str]]
"""What a rule yields: titles, each with its advice."""
_LATEST = 5  # steps that an alarm looks at
_MOST_ROWS, _MOST_GROWTH = 3.0, 1.5  # rows per rollout; of the latest steps, over what it was before
_FEWEST_GROUPS, _MOST_SILENT = 8, 0.5


class Severity(Enum):
    """How urgent a finding is, the most urgent first."""

    BROKEN = "broken"
    COSTLY = "costly"
    NOTE = "note"
    GOOD = "good"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fact about a run that its user should act on.

    Attributes:
        title: the fact, with its figure.
        advice: what it means and what to do.
        anchor: section of the page that shows it.
    """

    severity: Severity
    title: str
    advice: str
    anchor: str


def findings(digest: RunDigest, also: Sequence[Finding] = ()) -> list[Finding]:
    """All that apply, the most urgent first; the order of the rules breaks ties, and ``also`` comes before them."""
    found = [*also] + [
        Finding(severity=severity, title=title, advice=advice, anchor=anchor)
        for rule, severity, anchor in _RULES
        for title, advice in rule(digest)
    ]
    return sorted(found, key=lambda finding: list(Severity).index(finding.severity))


def silent_attempts(sessions: Sequence[str]) -> list[Finding]:
    """Tell of sessions under way without an answer for five minutes; journals know them, not the recording."""
    if not sessions:
        return []
    named = ", ".join(session[:8] for session in sessions[:5])
    return [
        Finding(
            severity=Severity.COSTLY,
            title=f"Attempts under way that got no answer for five minutes: {len(sessions)} ({named})",
            advice="Their agent or a tool hangs, or their request waits that long; the batch may wait for them. Their "
            "latest turn says what they were at (steps, not trained, mark silent). A limit on tools ends them sooner, "
            "seamless.agent.deadline_s ends the whole attempt.",
            anchor="lanes",
        )
    ]


_LIVE = (
    "seamless-verl watch shows it as it grows, and reads it again by itself. A report is of the moment in which it was "
    "written: seamless-verl report writes it anew."
)
_AGAIN = "The same command with hydra.run.dir set to the folder continues from the last checkpoint."


def _where(run: RunDigest) -> str:
    return f"in step {run.step_spans[-1].step}" if run.step_spans else "before the first step"


def _ended_badly(run: RunDigest) -> Findings:
    if run.tallies.start is None or run.running or run.outcome in ("finished", "KeyboardInterrupt"):
        return
    if run.tallies.end is None:
        yield (
            f"The recording stops {_where(run)}: the run was killed, or its machine went away",
            f"Up to a fifth of a second is missing at its end; the rest is complete. {_AGAIN}",
        )
    else:
        detail = f": {run.tallies.end.detail}" if run.tallies.end.detail else ""
        yield (
            f"The run ended {_where(run)} with {run.outcome}{detail}",
            f"logs/trainer.log has the whole story, the right end of the lanes what each slice did. {_AGAIN}",
        )


def _not_ended(run: RunDigest) -> Findings:
    if run.tallies.start is None or run.outcome == "finished":
        return
    if run.running:
        yield f"The run goes on; the recording is {_where(run)}", _LIVE
    elif run.outcome == "KeyboardInterrupt":
        yield f"The run was interrupted {_where(run)}", _AGAIN


def _audit(run: RunDigest) -> Findings:
    bad = sum(record.get("audit_violations", 0) for record in run.steps)
    if bad:
        yield (
            f"{bad} rows are not what the engine returned",
            "The run ended before it trained on them. This is a defect: logs/trainer.log names the first row.",
        )


def _staleness(run: RunDigest) -> Findings:
    worst = max(run.tallies.rows.staleness, default=0)
    if run.bound is not None and worst > run.bound:
        yield (
            f"A row was {worst} versions old; the bound is {run.bound}",
            "seamless.staleness.eta is a promise, so this is a defect: please report it with this recording.",
        )


def _failed(run: RunDigest) -> Findings:
    lost = sum(pool[Category.FAILED] for pool in run.pools().values())
    if lost:
        names = [entry.slice for entry in run.books if entry.seconds[Category.FAILED]]
        yield (
            f"{duration(lost)} of device time went by on failed slices",
            f"Failed at some time: {', '.join(names[:5])}{' and others' if len(names) > 5 else ''}.",
        )


def _idle(run: RunDigest) -> Findings:
    """A fifth of a pool's time in steps is worth a second look."""
    for pool, seconds in run.pools_in_steps().items():
        total = sum(seconds.values())
        idle = sum(seconds[category] for category in IDLE)
        if total <= 0 or idle / total < 0.2:
            continue
        yield (
            f"Pool {pool} was idle for {share(idle / total)} of its time in steps ({duration(idle)})",
            _idle_trainer(run, seconds)
            if seconds[Category.TRAIN] > seconds[Category.GENERATE]
            else _idle_rollout(run, pool),
        )


def _idle_trainer(run: RunDigest, seconds: Mapping[Category, float]) -> str:
    if seconds[Category.WAIT_STRAGGLER] > seconds[Category.WAIT_DATA]:
        return (
            "It waits for the last rollouts of each batch. Shorter limits for agents (seamless.agent.deadline_s, "
            "max_turns) or a larger seamless.staleness.eta let the batch close earlier."
        )
    if run.decisions:
        return (
            "Rollout is the bottleneck: more rollout devices help. The decisions say when these were lent, and why not."
        )
    return (
        "Rollout is the bottleneck: more rollout devices, or lending these slices to rollout while they wait "
        "(seamless.scheduler.policy). What that would bring: seamless-verl simulate --from RUN --set "
        "scheduler.policy=predictive"
    )


def _idle_rollout(run: RunDigest, pool: str) -> str:
    """No requests to serve: agents do something else, or there are none because the bound admits no more prompts."""
    shrink = sum(entry.devices for entry in run.books if entry.pool == pool) > 1
    if not run.tallies.sessions.ended:
        return "It had no requests to serve: prompts are held back by the staleness bound while the trainer works."
    busy = run.idle_with_agents(pool)
    if busy > 0.5:
        return (
            f"In {share(busy)} of that time agents were at work, but not with the model: they ran tools and tests, or "
            "started. Faster tools, or more attempts at a time (a larger batch or rollout.n), keep replicas busy."
        )
    return (
        f"In {share(1 - busy)} of that time no attempt was under way: the staleness bound holds prompts back until the "
        "trainer has caught up. Training is the bottleneck; "
        + ("devices taken from rollout and given to it" if shrink else "more devices for it")
        + " would shorten the steps."
    )


def _overheads(run: RunDigest) -> Findings:
    """Sync, switches and prefilling again above a twentieth; what nobody accounts for above a tenth."""
    pools = run.pools_in_steps()
    total = sum(sum(seconds.values()) for seconds in pools.values())
    if total <= 0:
        return
    for category, limit, advice in (
        (Category.SYNC, 0.05, "Weights travel too often or too slowly for this step time: larger batches help."),
        (Category.SWITCH, 0.05, "Slices change hands too often: the decisions below say why."),
        (
            Category.PREFILL_AGAIN,
            0.05,
            "An estimate. Requests that new weights or a reclaim interrupt are prefilled once more: fewer loans "
            "(seamless.scheduler.max_loans_per_step) and larger batches interrupt less often.",
        ),
        (Category.OTHER, 0.10, "Time between phases of the trainer: metrics, logging and moving data around."),
    ):
        spent = sum(seconds[category] for seconds in pools.values())
        if spent / total > limit:
            yield (f"{share(spent / total)} of the device time in steps went into {LABELS[category]}", advice)


def _validation(run: RunDigest) -> Findings:
    """Validation takes more than a quarter of the trainer's whole time."""
    for pool, seconds in run.pools().items():
        total = sum(seconds.values())
        if total > 0 and seconds[Category.VALIDATION] / total > 0.25:
            yield (
                f"Pool {pool} waited for validation for {share(seconds[Category.VALIDATION] / total)} of the run",
                "trainer.test_freq, data.val_max_samples and rollout.val_kwargs.n decide how much is validated.",
            )


def _slow_sessions(run: RunDigest) -> Findings:
    """The slowest twentieth takes more than three times the median."""
    if len(run.tallies.sessions.seconds) < 20:
        return
    middle, slow = quantile(run.tallies.sessions.seconds, 0.5), quantile(run.tallies.sessions.seconds, 0.95)
    if middle > 0 and slow > 3 * middle:
        yield (
            f"One attempt in twenty takes more than {duration(slow)}; the median is {duration(middle)}",
            "Long attempts decide when a batch is complete. The tail of requests in the lanes shows them.",
        )


def _drift(run: RunDigest) -> Findings:
    """More than one turn in twenty starts a branch for a reason that is not how agents work by design."""
    harmless = {reason.value for reason in (*REALIGNED, DriftReason.BRANCHED, DriftReason.RESAMPLED)}
    forks = Counter({reason: count for reason, count in run.tallies.sessions.drift.items() if reason not in harmless})
    if run.tallies.sessions.turns and forks.total() / run.tallies.sessions.turns > 0.05:
        reason, count = forks.most_common(1)[0]
        yield (
            f"{forks.total()} of {run.tallies.sessions.turns} turns did not continue their session, most often for "
            f"{reason.replace('_', ' ')} ({count})",
            "Each such turn becomes a row of its own and is prefilled from there. If the agent does not mean to "
            "rewrite its history, let it send back what it was given.",
        )


def _failed_requests(run: RunDigest) -> Findings:
    if run.tallies.requests.failed:
        yield (
            f"{run.tallies.requests.failed} of {run.tallies.requests.started} requests to replicas ended with an error",
            "The finish field of RequestEnded in flight/ names the errors; logs/ has the replicas' own words.",
        )


def _decisions(run: RunDigest) -> Findings:
    """A policy whose loans brought less than half of what it predicted."""
    known = [
        (row.made.predicted_s, row.outcome.realised_s)
        for row in run.decisions
        if row.made.predicted_s is not None and row.outcome is not None and row.outcome.realised_s is not None
    ]
    predicted, realised = sum(pair[0] for pair in known), sum(pair[1] for pair in known)
    if predicted > 0 and realised < 0.5 * predicted:
        yield (
            f"Decisions promised {duration(predicted)} and brought {duration(realised)}",
            "The policy's model of generation speed or switch cost does not fit this machine.",
        )


def _recorder(run: RunDigest) -> Findings:
    if run.tallies.lost:
        yield (
            f"The recorder dropped {run.tallies.lost} events",
            "The disk could not keep up; figures of this page are lower bounds from there on.",
        )


def _well(run: RunDigest) -> Findings:
    pools = run.pools_in_steps()
    total = sum(sum(seconds.values()) for seconds in pools.values())
    if total <= 0:
        return
    useful = sum(seconds[Category.TRAIN] + seconds[Category.GENERATE] for seconds in pools.values()) / total
    if useful >= 0.9:
        yield (
            f"{share(useful)} of the device time in steps was spent training or generating",
            "There is little left to gain from scheduling; look at batch sizes and kernels next.",
        )


# ---------------------------------------------------------------- alarms about what is trained


def _rows_per_rollout(run: RunDigest) -> Findings:
    """The mean of the latest steps is above `_MOST_ROWS`, or above `_MOST_GROWTH` times the median of those before."""
    ratios = list(dict(run.tallies.rows.per_rollout).values())
    if not ratios:
        return
    latest, before = fmean(ratios[-_LATEST:]), ratios[:-_LATEST]
    usual = median(before) if len(before) >= _LATEST else None
    grown = usual is not None and latest > _MOST_GROWTH * usual
    if latest <= _MOST_ROWS and not grown:
        return
    was = f"; before it was {usual:.1f}" if usual is not None and grown else ""
    forks = Counter({name: n for name, n in run.tallies.sessions.drift.items() if name in FORKS}).most_common(1)
    why = f" Most often: {forks[0][0].replace('_', ' ')} ({forks[0][1]} turns)." if forks else ""
    yield (
        f"A rollout became {latest:.1f} rows in the latest steps{was}",
        f"Sessions fork: a request that does not continue what was recorded begins another row.{why} Each row is "
        "prefilled and trained by itself, so steps grow in proportion. Sub-agents and parallel calls do it by design; "
        "an agent that rewrites its history should send back what it was given. The reasons are below, the texts in "
        "seamless-verl watch, mark drifted.",
    )


def _groups_without_signal(run: RunDigest) -> Findings:
    """More than `_MOST_SILENT` of the groups that ended in the latest steps have one reward for all attempts."""
    if run.recording.virtual:  # nothing is solved there
        return
    since = run.step_spans[-_LATEST].start if len(run.step_spans) >= _LATEST else 0.0
    groups = [group for group in run.tallies.sessions.groups.values() if group.attempts > 1 and not group.validation]
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


def _computed_twice(run: RunDigest) -> Findings:
    """Rows computed with ``seamless.shared_prefix`` and without it differ by more than bfloat16 explains."""
    for role in ("actor", "critic"):
        bad = [record for record in run.guard if _is_off(record, role)]
        if bad:
            last = bad[-1]
            off, norm = (_figure(last.get(f"{role}/shared_prefix/{name}", 0.0)) for name in ("off", "grad_norm_off"))
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


def _figure(value: float | None) -> str:
    return "what is no number" if value is None else f"{value:.2g}"


_RULES: tuple[tuple[Callable[[RunDigest], Findings], Severity, str], ...] = (
    (_ended_badly, Severity.BROKEN, "lanes"),
    (_not_ended, Severity.NOTE, "lanes"),
    (_audit, Severity.BROKEN, "learning"),
    (_staleness, Severity.BROKEN, "data"),
    (_computed_twice, Severity.BROKEN, "learning"),
    (_failed, Severity.BROKEN, "lanes"),
    (_failed_requests, Severity.BROKEN, "data"),
    (_rows_per_rollout, Severity.COSTLY, "data"),
    (_groups_without_signal, Severity.COSTLY, "learning"),
    (_idle, Severity.COSTLY, "ledger"),
    (_overheads, Severity.COSTLY, "ledger"),
    (_decisions, Severity.COSTLY, "decisions"),
    (_validation, Severity.NOTE, "ledger"),
    (_slow_sessions, Severity.NOTE, "data"),
    (_drift, Severity.NOTE, "data"),
    (_recorder, Severity.NOTE, "about"),
    (_well, Severity.GOOD, "ledger"),
)
