"""Lend what pays, for as long as it pays, by prediction.

The policy fits generation speed and lengths to what finishes (`prediction.sessions`), plays plans forward
(`prediction.plans`) and compares their value in seconds:

* **hold** against **lend m slices until x groups are ready**, for several m and x, with the measured costs of waking
  and of taking back; lent is the cheapest plan if it beats holding by a margin;
* while slices are lent, **take back now** against later: the interrupt is sent one switch before the x-th group is
  expected, so that the gang is free just then, and shortly before that lent slices get no new requests; a forecast of
  which nothing has come true yet is not believed (lengths that are all equal all come at once, or all late);
* the router learns when each loan should end and can keep long work on slices that are never taken back.

**No thrashing, proven.** (1) After a RECLAIM or STOP_FEEDING no LEND follows until the gang was granted and released
(`_returning`). So a slice is lent at most once between two grants. (2) Between two ``StepEnded`` there are at most
``max_loans_per_step`` LEND decisions. Hence at most ``2 * max_loans_per_step`` switches per slice and step, whatever
is predicted. (3) Hysteresis: a loan must promise more than ``margin`` times its switch cost *after* paying that cost;
a loan that runs ends when the best plan from now on ends it now, and by then its cost of lending is sunk. So for one
and the same forecast, lending and ending the loan at once is never chosen: its value is that of holding less the cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from seamless_verl.scheduling.cluster import Cluster, Pending, SliceStatus, ids
from seamless_verl.scheduling.decisions import Decision, Horizon, LookAgain, Proposal, Verb
from seamless_verl.scheduling.events import (
    AcquireRequested,
    BatchOpened,
    Event,
    GroupsSubmitted,
    Released,
    SliceFailed,
    StepEnded,
    WeightsPublished,
)
from seamless_verl.scheduling.prediction.plans import Trainer, Work, play, value
from seamless_verl.scheduling.prediction.sessions import SessionBook
from seamless_verl.scheduling.slices import SliceState, Tag
from seamless_verl.scheduling.switch_costs import Switch

_SAMPLE = 256  # sessions that a plan is played with; more are sampled by whole groups
_ENOUGH_LENGTHS = 4
_ARRIVED = 0.25  # share of an update that must be there before the gang is called for the rest of it
_NOTICE = 0.1  # share of a loan before whose end no new requests are sent to it


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictiveConfig:
    """
    Attributes:
        margin: a loan must be worth this share of its switch cost beyond the cost itself.
        max_loans_per_step: LEND decisions between two ends of steps.
        migration: whether running requests move to slices that join; else only new requests reach them, except at the
            end of a step, when new weights interrupt all of them anyway.
    """

    margin: float = 0.1
    max_loans_per_step: int = 3
    migration: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    worth: float  # `plans.value`, smaller is better
    back_s: float  # from now until the reclaim begins
    groups: int
    slices: tuple[SliceStatus, ...] = ()


class Predictive:
    """See the module."""

    def __init__(self, config: PredictiveConfig | None = None) -> None:
        self._config = config or PredictiveConfig()
        self.book = SessionBook()
        self._needs: AcquireRequested | None = None  # the first acquire of the last step
        self._between_steps = True
        self._submitted: tuple[int, int] = (0, 0)  # groups, sessions per group of the last submission
        self._submitted_since = True  # since the last step ended
        self._awaited: frozenset[str] = frozenset()
        self._returning = False
        self._was_due = False  # at the last review of a loan
        self._loans = 0
        self._review_at = 0.0
        self._train_s = 0.0  # per group, smoothed
        self._trained_before = 0.0
        self._waited_s = 0.0
        self._published_at = -math.inf

    # ---------------------------------------------------------------- learning

    def observe(self, event: Event, cluster: Cluster) -> None:
        self.book.observe(event, cluster.roofline)
        match event:
            case SliceFailed():
                self.book.lost(event.slice)
            case BatchOpened():
                self._awaited = event.awaited
            case GroupsSubmitted():
                self._submitted = (len(event.groups), event.sessions)
                self._submitted_since = True
                self._review_at = event.at
            case AcquireRequested(tag=Tag.TRAIN):
                if self._between_steps:
                    self._needs = event
                self._between_steps = False
                self._review_at = event.at
            case StepEnded():
                self._between_steps, self._submitted_since = True, False
                self._loans, self._waited_s = 0, event.waited_s
                self._review_at = event.at
            case Released():
                self._returning = False
                self._learn_training(cluster)
                self._review_at = event.at
            case WeightsPublished():
                self._published_at = event.at
            case _:
                pass

    def _learn_training(self, cluster: Cluster) -> None:
        if self._between_steps and self._needs is not None and cluster.training_s > self._trained_before:
            busy = max(cluster.training_s - self._trained_before - self._waited_s, 0.0)
            per_group = busy / max(self._needs.batch, 1)
            self._train_s = per_group if self._train_s == 0.0 else 0.7 * self._train_s + 0.3 * per_group
            self._trained_before = cluster.training_s

    # ---------------------------------------------------------------- deciding

    def decide(self, cluster: Cluster) -> Iterator[Proposal]:
        waiting = cluster.training_request()
        lent = [s for s in cluster if s.holder is None and (s.lent or s.leisurely)]
        if lent:
            yield from self._review_loan(cluster, waiting, lent)
        elif not self._returning and not cluster.last_step and not (waiting and cluster.is_due(waiting)):
            idle = [s for s in cluster.by_priority(cluster.idle(Tag.ROLLOUT), Tag.ROLLOUT) if s.slice.lendable]
            if idle and (waiting is not None or self._between_steps):
                yield from self._review_idle(cluster, waiting, idle)

    # ---------------------------------------------------------------- lending

    def _review_idle(
        self, cluster: Cluster, waiting: Pending | None, idle: Sequence[SliceStatus]
    ) -> Iterator[Proposal]:
        if cluster.now < self._review_at:
            yield LookAgain(at=self._review_at)
            return
        if self._loans >= self._config.max_loans_per_step:
            yield Decision(verb=Verb.HOLD, slices=ids(idle), reason=f"{self._loans} loans in this step already")
            return
        trainer = self._trainer(cluster, waiting)
        work = self._work(cluster, trainer) if trainer is not None else None
        if trainer is None or work is None:
            self._loans += 1
            yield Decision(verb=Verb.LEND, slices=ids(idle), reason="nothing to predict from yet")
            return
        wake_s = cluster.costs.typical_s(Switch.TO_ROLLOUT) or 0.0
        back_s = cluster.costs.typical_s(Switch.TO_TRAIN) or 0.0
        standing = _speed(cluster, _standing(cluster))
        full_rate = self._full_rate(cluster, work, standing)
        hold = value(play(work, [(0.0, standing)]), trainer, 0.0, full_rate)
        best = self._best_loan(cluster, work, trainer, idle, wake_s, back_s, full_rate)
        benefit = hold - best.worth
        needed = self._config.margin * (wake_s + back_s)
        costs = f"after costs of {wake_s:.2f} + {back_s:.2f} s"
        if benefit > needed:
            self._loans += 1
            self._review_at = cluster.now
            yield Decision(
                verb=Verb.LEND,
                slices=ids(best.slices),
                reason=f"benefit {benefit:.2f} s > {needed:.2f} s {costs}, until {best.groups} groups are ready",
                predicted_benefit_s=benefit,
            )
            yield Horizon(slices=ids(best.slices), until=cluster.now + best.back_s)
            return
        self._review_at = cluster.now + max(wake_s + back_s, 0.05)
        yield Decision(
            verb=Verb.HOLD,
            slices=ids(idle),
            reason=f"benefit {benefit:.2f} s <= {needed:.2f} s {costs}",
            predicted_benefit_s=benefit,
        )
        yield LookAgain(at=self._review_at)

    def _best_loan(
        self,
        cluster: Cluster,
        work: Work,
        trainer: Trainer,
        idle: Sequence[SliceStatus],
        wake_s: float,
        back_s: float,
        full_rate: float,
    ) -> _Plan:
        """The cheapest plan over how many slices and until when; fewer slices if that costs next to nothing."""
        standing = _speed(cluster, _standing(cluster))
        best: _Plan | None = None
        for count in sorted({(len(idle) + 1) // 2, len(idle)}, reverse=True):
            chosen = tuple(idle[:count])
            helped = self._helped(cluster, work, standing, _speed(cluster, chosen))
            course = play(work, [(0.0, standing), (wake_s, helped)])
            for groups in _marks(trainer):
                back_at = max(wake_s, course.when_ready(groups - trainer.ready) - back_s)
                if back_at == math.inf:
                    break
                planned = play(work, [(0.0, standing), (wake_s, helped), (back_at, standing)])
                worth = value(planned, trainer, back_at + back_s, full_rate)
                plan = _Plan(worth=worth, back_s=back_at, groups=groups, slices=chosen)
                slack = 0.02 * (wake_s + back_s) if best is not None and count < len(best.slices) else 0.0
                if best is None or worth < best.worth + slack:
                    best = plan
        return best or _Plan(worth=math.inf, back_s=math.inf, groups=trainer.minimum, slices=tuple(idle))

    # ---------------------------------------------------------------- taking back

    def _review_loan(
        self, cluster: Cluster, waiting: Pending | None, lent: Sequence[SliceStatus]
    ) -> Iterator[Proposal]:
        due = waiting is not None and cluster.is_due(waiting)
        standing = _speed(cluster, _standing(cluster))
        if not due and standing == 0:  # nobody else generates: they stay until the trainer can train
            return
        if cluster.now < self._review_at and due == self._was_due:
            yield LookAgain(at=self._review_at)
            return
        self._was_due = due
        trainer = self._trainer(cluster, waiting)
        work = self._work(cluster, trainer) if trainer is not None else None
        if trainer is None or work is None:
            if due:
                yield self._reclaim(lent, f"{cluster.ready} groups are ready, nothing to predict from yet")
            return
        back_s = cluster.costs.typical_s(Switch.TO_TRAIN) or 0.0
        asleep_s = _asleep_s(cluster, lent)
        everyone = [(0.0, standing), (asleep_s, standing + _speed(cluster, lent))]
        full_rate = self._full_rate(cluster, work, standing)
        course = play(work, everyone)
        worth = value(play(work, [(0.0, standing)]), trainer, back_s, full_rate)
        best = _Plan(worth=worth, back_s=0.0, groups=cluster.ready)
        for groups in _marks(trainer):
            at = max(asleep_s, course.when_ready(groups - trainer.ready) - back_s)
            if 0.0 < at < math.inf:
                worth = value(play(work, [*everyone, (at, standing)]), trainer, at + back_s, full_rate)
                if worth < best.worth:
                    best = _Plan(worth=worth, back_s=at, groups=groups)
        soon = max(0.25 * back_s, 0.02)
        arriving = due or cluster.ready >= _ARRIVED * trainer.minimum
        if best.back_s <= soon and best.worth < math.inf and arriving:
            yield self._reclaim(lent, f"{cluster.ready} groups are ready; taking back takes {back_s:.2f} s")
            return
        self._review_at = cluster.now + max(min(best.back_s, 1e6) / 2, soon)
        yield LookAgain(at=self._review_at)
        if best.back_s < math.inf and best.worth < math.inf:
            yield Horizon(slices=ids(lent), until=cluster.now + best.back_s)
        if due:
            gain = f"worth it until {best.groups} groups are ready in {best.back_s:.2f} s"
            yield Decision(verb=Verb.WAIT, slices=ids(lent), reason=gain)
            return
        fed = [s for s in lent if s.lent]
        elapsed = cluster.now - min(s.since for s in lent)
        notice_s = min(0.5 * self.book.turn_s, _NOTICE * (elapsed + best.back_s))
        if fed and best.back_s < notice_s:
            self._returning = True
            yield Decision(
                verb=Verb.STOP_FEEDING,
                slices=ids(fed),
                reason=f"wanted back in {best.back_s:.2f} s, a request takes {self.book.turn_s:.2f} s",
            )

    def _reclaim(self, lent: Sequence[SliceStatus], reason: str) -> Decision:
        self._returning = True
        return Decision(verb=Verb.RECLAIM, slices=ids(lent), reason=reason)

    # ---------------------------------------------------------------- what is known

    def _trainer(self, cluster: Cluster, waiting: Pending | None) -> Trainer | None:
        asked = waiting.event if waiting is not None else self._needs
        if asked is None or asked.batch == 0:
            return None
        return Trainer(ready=cluster.ready, minimum=max(asked.minimum, 1), batch=asked.batch, train_s=self._train_s)

    def _work(self, cluster: Cluster, trainer: Trainer) -> Work | None:
        """The sessions that are out, and those of the batch that the trainer is about to submit."""
        book = self.book
        if len(book.lengths) < _ENOUGH_LENGTHS or not book.decode.known:
            return None
        pace_s, context = self._pace(cluster)
        members = self._members(cluster, pace_s)
        sessions = sum(len(remaining) for _, remaining in members)
        every = max(1, round(sessions / _SAMPLE))
        rows = [
            (tokens, i == len(group) - 1, awaited)
            for awaited, group in members[::every]
            for i, tokens in enumerate(sorted(group))
        ]
        rows.sort()
        awaited = sum(awaited for awaited, _ in members)
        duty = 1.0
        if book.sessions:
            duty = min(max(book.running() / len(book.sessions), 0.05), 1.0)
        return Work(
            remaining=[tokens for tokens, _, _ in rows],
            completes=[last for _, last, _ in rows],
            awaited=[awaited for _, _, awaited in rows],
            others=trainer.batch - trainer.ready - awaited,
            weight=float(every),
            duty=duty,
            step_s=lambda n, grown: book.decode.step_s(n, n * (context + grown)),
        )

    def _pace(self, cluster: Cluster) -> tuple[float, float]:
        """(seconds per token since the running requests began, tokens of cache that one has by now)."""
        book = self.book
        began = book.context_per_request()
        per_slice = max(book.running(), 1) / max(_speed(cluster, cluster.generating()), 1e-9)
        age_s = book.age_s(cluster.now)
        grown = age_s / book.decode.step_s(per_slice, per_slice * began)
        step_s = book.decode.step_s(per_slice, per_slice * (began + grown / 2))
        return step_s, began + age_s / step_s

    def _members(self, cluster: Cluster, step_s: float) -> list[tuple[bool, list[float]]]:
        """Of each open group, whether the batch waits for it, and the tokens that its sessions still have to make."""
        book = self.book
        groups: dict[str, list[float]] = {}
        for session in book.sessions.values():
            tokens = book.progress(session, cluster.now, step_s)
            groups.setdefault(session.group, []).append(book.lengths.remaining(tokens, session.u))
        quantiles = book.next_quantiles()
        for group, count in book.unstarted.items():
            fresh = [book.lengths.remaining(0, u) for u in islice(quantiles, count)]
            groups.setdefault(group, []).extend(fresh)
        members = [(group in self._awaited, remaining) for group, remaining in groups.items()]
        if self._between_steps and not self._submitted_since:
            count, size = self._submitted
            fresh_groups = [[book.lengths.remaining(0, u) for u in islice(quantiles, size)] for _ in range(count)]
            members += [(False, remaining) for remaining in fresh_groups]
        return members

    def _full_rate(self, cluster: Cluster, work: Work, standing: float) -> float:
        """Tokens per second if every slice generated under the usual load."""
        lendable = [s for s in cluster if s.slice.lendable and Tag.ROLLOUT in s.usable]
        everyone = standing + _speed(cluster, lendable)
        busy = max(self.book.crowd, len(work.remaining) * work.weight) * work.duty
        return busy / work.step_s(busy / everyone, 0.0)

    def _helped(self, cluster: Cluster, work: Work, standing: float, joining: float) -> float:
        """Slices that the work is spread over once ``joining`` are awake."""
        if self._config.migration or self._between_steps or self._published_at == cluster.now or standing == 0:
            return standing + joining
        sessions = len(work.remaining) * work.weight
        pinned = min(self.book.running() / sessions, 1.0) if sessions else 1.0
        return min(standing + joining, standing / pinned) if pinned > 0 else standing + joining


def _standing(cluster: Cluster) -> list[SliceStatus]:
    """Slices that generate (or are about to) and never train."""
    alive = (SliceState.WAKING, SliceState.ROLLOUT, SliceState.SYNCING)
    return [s for s in cluster if not s.slice.lendable and s.state in alive]


def _speed(cluster: Cluster, statuses: Sequence[SliceStatus]) -> float:
    return sum(cluster.roofline.speed(status.slice.id) for status in statuses)


def _asleep_s(cluster: Cluster, lent: Sequence[SliceStatus]) -> float:
    """Seconds until the last of them is awake, as it usually goes."""
    wake_s = cluster.costs.typical_s(Switch.TO_ROLLOUT) or 0.0
    since = [s.since for s in lent if s.state is SliceState.WAKING]
    return max(max(since) + wake_s - cluster.now, 0.0) if since else 0.0


def _marks(trainer: Trainer) -> list[int]:
    """Numbers of ready groups at which a gang could be wanted back: each local update, four at most."""
    first = trainer.minimum * (trainer.ready // trainer.minimum + 1)
    marks = list(range(first, trainer.batch + 1, trainer.minimum)) or [trainer.batch]
    return marks[:: max(1, math.ceil(len(marks) / 4))]
