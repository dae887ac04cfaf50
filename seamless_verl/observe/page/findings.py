"""What a person should look at next: rules that read the figures of a run and say what they mean and what to try.

Each rule has a threshold that stands beside it; a rule that does not apply says nothing. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from seamless_verl.observe.digest import RunDigest
from seamless_verl.observe.page.words import LABELS, REALIGNED, duration, quantile, share
from seamless_verl.observe.time_ledger import IDLE, Category
from seamless_verl.trajectory.segments import DriftReason


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


def findings(digest: RunDigest) -> list[Finding]:
    """All that apply, the most urgent first; the order of the rules breaks ties."""
    found = [finding for rule in _RULES for finding in rule(digest)]
    return sorted(found, key=lambda finding: list(Weight).index(finding.weight))


def _ended_badly(run: RunDigest) -> Iterator[Finding]:
    if run.start is None or run.outcome == "finished":
        return
    last = run.step_spans[-1].step if run.step_spans else 0
    where = f"in step {last}" if last else "before the first step"
    again = "The same command with hydra.run.dir set to the folder continues from the last checkpoint."
    if run.running:
        title, advice = f"The run goes on; the recording is {where}", "Write the report again later to see more."
        yield Finding(weight=Weight.NOTE, title=title, advice=advice, anchor="lanes")
    elif run.outcome == "KeyboardInterrupt":
        yield Finding(weight=Weight.NOTE, title=f"The run was interrupted {where}", advice=again, anchor="lanes")
    elif run.end is None:
        yield Finding(
            weight=Weight.BROKEN,
            title=f"The recording stops {where}: the run was killed, or its machine went away",
            advice=f"Up to a fifth of a second is missing at its end; the rest is complete. {again}",
            anchor="lanes",
        )
    else:
        detail = f": {run.end.detail}" if run.end.detail else ""
        yield Finding(
            weight=Weight.BROKEN,
            title=f"The run ended {where} with {run.outcome}{detail}",
            advice=f"logs/trainer.log has the whole story, the right end of the lanes what each slice did. {again}",
            anchor="lanes",
        )


def _audit(run: RunDigest) -> Iterator[Finding]:
    bad = sum(record.get("audit_violations", 0) for record in run.steps)
    if bad:
        yield Finding(
            weight=Weight.BROKEN,
            title=f"{bad} rows are not what the engine returned",
            advice="The run ended before it trained on them. This is a defect: logs/trainer.log names the first row.",
            anchor="learning",
        )


def _staleness(run: RunDigest) -> Iterator[Finding]:
    worst = max(run.rows.staleness, default=0)
    if run.start is not None and worst > run.start.eta:
        yield Finding(
            weight=Weight.BROKEN,
            title=f"A row was {worst} versions old; the bound is {run.start.eta}",
            advice="seamless.staleness.eta is a promise, so this is a defect: please report it with this recording.",
            anchor="data",
        )


def _failed(run: RunDigest) -> Iterator[Finding]:
    lost = sum(pool[Category.FAILED] for pool in run.pools().values())
    if lost:
        names = [entry.slice for entry in run.books if entry.seconds[Category.FAILED]]
        yield Finding(
            weight=Weight.BROKEN,
            title=f"{duration(lost)} of device time went by on failed slices",
            advice=f"Failed at some time: {', '.join(names[:5])}{' and others' if len(names) > 5 else ''}.",
            anchor="lanes",
        )


def _idle(run: RunDigest) -> Iterator[Finding]:
    """A fifth of a pool's time in steps is worth a second look."""
    for pool, seconds in run.pools_in_steps().items():
        total = sum(seconds.values())
        idle = sum(seconds[category] for category in IDLE)
        if total <= 0 or idle / total < 0.2:
            continue
        yield Finding(
            weight=Weight.COSTLY,
            title=f"Pool {pool} was idle for {share(idle / total)} of its time in steps ({duration(idle)})",
            advice=_idle_trainer(run, seconds)
            if seconds[Category.TRAIN] > seconds[Category.GENERATE]
            else _idle_rollout(run, pool),
            anchor="ledger",
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


def _overheads(run: RunDigest) -> Iterator[Finding]:
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
            yield Finding(
                weight=Weight.COSTLY,
                title=f"{share(spent / total)} of the device time in steps went into {LABELS[category]}",
                advice=advice,
                anchor="ledger",
            )


def _validation(run: RunDigest) -> Iterator[Finding]:
    """A quarter of the trainer's whole time."""
    for pool, seconds in run.pools().items():
        total = sum(seconds.values())
        if total > 0 and seconds[Category.VALIDATION] / total > 0.25:
            yield Finding(
                weight=Weight.NOTE,
                title=f"Pool {pool} waited for validation for {share(seconds[Category.VALIDATION] / total)} of the run",
                advice="trainer.test_freq, data.val_max_samples and rollout.val_kwargs.n decide how much is validated.",
                anchor="ledger",
            )


def _slow_sessions(run: RunDigest) -> Iterator[Finding]:
    """The slowest twentieth takes more than three times the median."""
    if len(run.sessions.seconds) < 20:
        return
    middle, slow = quantile(run.sessions.seconds, 0.5), quantile(run.sessions.seconds, 0.95)
    if middle > 0 and slow > 3 * middle:
        yield Finding(
            weight=Weight.NOTE,
            title=f"One attempt in twenty takes more than {duration(slow)}; the median is {duration(middle)}",
            advice="Long attempts decide when a batch is complete. The tail of requests in the lanes shows them.",
            anchor="data",
        )


def _drift(run: RunDigest) -> Iterator[Finding]:
    """More than one turn in twenty starts a branch for a reason that is not how agents work by design."""
    harmless = {reason.value for reason in (*REALIGNED, DriftReason.BRANCHED, DriftReason.RESAMPLED)}
    forks = Counter({reason: count for reason, count in run.sessions.drift.items() if reason not in harmless})
    if run.sessions.turns and forks.total() / run.sessions.turns > 0.05:
        reason, count = forks.most_common(1)[0]
        yield Finding(
            weight=Weight.NOTE,
            title=f"{forks.total()} of {run.sessions.turns} turns did not continue their session, most often for "
            f"{reason.replace('_', ' ')} ({count})",
            advice="Each such turn becomes a row of its own and is prefilled from there. If the agent does not mean to "
            "rewrite its history, let it send back what it was given.",
            anchor="data",
        )


def _failed_requests(run: RunDigest) -> Iterator[Finding]:
    if run.requests.failed:
        yield Finding(
            weight=Weight.BROKEN,
            title=f"{run.requests.failed} of {run.requests.started} requests to replicas ended with an error",
            advice="The finish field of RequestEnded in flight/ names the errors; logs/ has the replicas' own words.",
            anchor="data",
        )


def _decisions(run: RunDigest) -> Iterator[Finding]:
    """A policy whose loans brought less than half of what it predicted."""
    known = [
        (row.made.predicted_s, row.outcome.realised_s)
        for row in run.decisions
        if row.made.predicted_s is not None and row.outcome is not None and row.outcome.realised_s is not None
    ]
    predicted, realised = sum(pair[0] for pair in known), sum(pair[1] for pair in known)
    if predicted > 0 and realised < 0.5 * predicted:
        yield Finding(
            weight=Weight.COSTLY,
            title=f"Decisions promised {duration(predicted)} and brought {duration(realised)}",
            advice="The policy's model of generation speed or switch cost does not fit this machine.",
            anchor="decisions",
        )


def _recorder(run: RunDigest) -> Iterator[Finding]:
    if run.lost:
        yield Finding(
            weight=Weight.NOTE,
            title=f"The recorder dropped {run.lost} events",
            advice="The disk could not keep up; figures of this page are lower bounds from there on.",
            anchor="about",
        )


def _well(run: RunDigest) -> Iterator[Finding]:
    pools = run.pools_in_steps()
    total = sum(sum(seconds.values()) for seconds in pools.values())
    if total <= 0:
        return
    useful = sum(seconds[Category.TRAIN] + seconds[Category.GENERATE] for seconds in pools.values()) / total
    if useful >= 0.9:
        yield Finding(
            weight=Weight.GOOD,
            title=f"{share(useful)} of the device time in steps was spent training or generating",
            advice="There is little left to gain from scheduling; look at batch sizes and kernels next.",
            anchor="ledger",
        )


_RULES: tuple[Callable[[RunDigest], Iterator[Finding]], ...] = (
    _ended_badly,
    _audit,
    _staleness,
    _failed,
    _failed_requests,
    _idle,
    _overheads,
    _decisions,
    _validation,
    _slow_sessions,
    _drift,
    _recorder,
    _well,
)
