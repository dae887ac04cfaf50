"""What a person should look at next: rules that read the figures of a run and say what they mean and what to try.

Each rule has a threshold that stands beside it, and yields what it found (the fact, with its figure) with what it means
and what to do; a rule that does not apply yields nothing. How urgent that is, and which section shows it, stands in the
table at the end. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from seamless_verl.observe.digest import RunDigest
from seamless_verl.observe.page import alarms
from seamless_verl.observe.page.alarms import Told
from seamless_verl.observe.page.words import LABELS, REALIGNED, duration, quantile, share
from seamless_verl.observe.time_ledger import IDLE, Category
from seamless_verl.trajectory.tokens import DriftReason


class Weight(Enum):
    """In order of urgency."""

    BROKEN = "broken"
    COSTLY = "costly"
    NOTE = "note"
    GOOD = "good"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Attributes:
    title: the fact, with its figure.
    advice: what it means and what to do.
    anchor: section of the page that shows it.
    """

    weight: Weight
    title: str
    advice: str
    anchor: str


def findings(digest: RunDigest, also: Sequence[Finding] = ()) -> list[Finding]:
    """All that apply, the most urgent first; the order of the rules breaks ties, and ``also`` comes before them."""
    found = [*also] + [
        Finding(weight=weight, title=title, advice=advice, anchor=anchor)
        for rule, weight, anchor in _RULES
        for title, advice in rule(digest)
    ]
    return sorted(found, key=lambda finding: list(Weight).index(finding.weight))


def silent_attempts(sessions: Sequence[str]) -> list[Finding]:
    """Args:
    sessions: under way, without an answer for five minutes; journals tell them, not the recording.
    """
    if not sessions:
        return []
    named = ", ".join(session[:8] for session in sessions[:5])
    return [
        Finding(
            weight=Weight.COSTLY,
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


def _ended_badly(run: RunDigest) -> Told:
    if run.start is None or run.running or run.outcome in ("finished", "KeyboardInterrupt"):
        return
    if run.end is None:
        yield (
            f"The recording stops {_where(run)}: the run was killed, or its machine went away",
            f"Up to a fifth of a second is missing at its end; the rest is complete. {_AGAIN}",
        )
    else:
        detail = f": {run.end.detail}" if run.end.detail else ""
        yield (
            f"The run ended {_where(run)} with {run.outcome}{detail}",
            f"logs/trainer.log has the whole story, the right end of the lanes what each slice did. {_AGAIN}",
        )


def _not_ended(run: RunDigest) -> Told:
    if run.start is None or run.outcome == "finished":
        return
    if run.running:
        yield f"The run goes on; the recording is {_where(run)}", _LIVE
    elif run.outcome == "KeyboardInterrupt":
        yield f"The run was interrupted {_where(run)}", _AGAIN


def _audit(run: RunDigest) -> Told:
    bad = sum(record.get("audit_violations", 0) for record in run.steps)
    if bad:
        yield (
            f"{bad} rows are not what the engine returned",
            "The run ended before it trained on them. This is a defect: logs/trainer.log names the first row.",
        )


def _staleness(run: RunDigest) -> Told:
    worst = max(run.rows.staleness, default=0)
    if run.start is not None and worst > run.start.eta:
        yield (
            f"A row was {worst} versions old; the bound is {run.start.eta}",
            "seamless.staleness.eta is a promise, so this is a defect: please report it with this recording.",
        )


def _failed(run: RunDigest) -> Told:
    lost = sum(pool[Category.FAILED] for pool in run.pools().values())
    if lost:
        names = [entry.slice for entry in run.books if entry.seconds[Category.FAILED]]
        yield (
            f"{duration(lost)} of device time went by on failed slices",
            f"Failed at some time: {', '.join(names[:5])}{' and others' if len(names) > 5 else ''}.",
        )


def _idle(run: RunDigest) -> Told:
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
    if not run.sessions.ended:
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


def _overheads(run: RunDigest) -> Told:
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
            yield (
                f"{share(spent / total)} of the device time in steps went into {LABELS[category]}",
                advice,
            )


def _validation(run: RunDigest) -> Told:
    """A quarter of the trainer's whole time."""
    for pool, seconds in run.pools().items():
        total = sum(seconds.values())
        if total > 0 and seconds[Category.VALIDATION] / total > 0.25:
            yield (
                f"Pool {pool} waited for validation for {share(seconds[Category.VALIDATION] / total)} of the run",
                "trainer.test_freq, data.val_max_samples and rollout.val_kwargs.n decide how much is validated.",
            )


def _slow_sessions(run: RunDigest) -> Told:
    """The slowest twentieth takes more than three times the median."""
    if len(run.sessions.seconds) < 20:
        return
    middle, slow = quantile(run.sessions.seconds, 0.5), quantile(run.sessions.seconds, 0.95)
    if middle > 0 and slow > 3 * middle:
        yield (
            f"One attempt in twenty takes more than {duration(slow)}; the median is {duration(middle)}",
            "Long attempts decide when a batch is complete. The tail of requests in the lanes shows them.",
        )


def _drift(run: RunDigest) -> Told:
    """More than one turn in twenty starts a branch for a reason that is not how agents work by design."""
    harmless = {reason.value for reason in (*REALIGNED, DriftReason.BRANCHED, DriftReason.RESAMPLED)}
    forks = Counter({reason: count for reason, count in run.sessions.drift.items() if reason not in harmless})
    if run.sessions.turns and forks.total() / run.sessions.turns > 0.05:
        reason, count = forks.most_common(1)[0]
        yield (
            f"{forks.total()} of {run.sessions.turns} turns did not continue their session, most often for "
            f"{reason.replace('_', ' ')} ({count})",
            "Each such turn becomes a row of its own and is prefilled from there. If the agent does not mean to "
            "rewrite its history, let it send back what it was given.",
        )


def _failed_requests(run: RunDigest) -> Told:
    if run.requests.failed:
        yield (
            f"{run.requests.failed} of {run.requests.started} requests to replicas ended with an error",
            "The finish field of RequestEnded in flight/ names the errors; logs/ has the replicas' own words.",
        )


def _decisions(run: RunDigest) -> Told:
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


def _recorder(run: RunDigest) -> Told:
    if run.lost:
        yield (
            f"The recorder dropped {run.lost} events",
            "The disk could not keep up; figures of this page are lower bounds from there on.",
        )


def _well(run: RunDigest) -> Told:
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


_RULES: tuple[tuple[Callable[[RunDigest], Told], Weight, str], ...] = (
    (_ended_badly, Weight.BROKEN, "lanes"),
    (_not_ended, Weight.NOTE, "lanes"),
    (_audit, Weight.BROKEN, "learning"),
    (_staleness, Weight.BROKEN, "data"),
    (alarms.computed_twice, Weight.BROKEN, "learning"),
    (_failed, Weight.BROKEN, "lanes"),
    (_failed_requests, Weight.BROKEN, "data"),
    (alarms.rows_per_rollout, Weight.COSTLY, "data"),
    (alarms.groups_without_signal, Weight.COSTLY, "learning"),
    (_idle, Weight.COSTLY, "ledger"),
    (_overheads, Weight.COSTLY, "ledger"),
    (_decisions, Weight.COSTLY, "decisions"),
    (_validation, Weight.NOTE, "ledger"),
    (_slow_sessions, Weight.NOTE, "data"),
    (_drift, Weight.NOTE, "data"),
    (_recorder, Weight.NOTE, "about"),
    (_well, Weight.GOOD, "ledger"),
)
