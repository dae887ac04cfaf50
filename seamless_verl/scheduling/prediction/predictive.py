"""Lend what pays, for as long as it pays, by prediction.

The policy fits generation speed and lengths to what finishes (`learned`, `session_forecast`), plays plans forward
(`projection`) and compares their value in seconds (`forecast`):

* **hold** against **lend m slices until t**, for several m and t, with the measured costs of waking and of taking back;
  lent is the cheapest plan if it beats holding (by a margin, if one is asked for), also after what has to be prefilled
  again because of the loan (`forecast.PrefillAgain`);
* while slices are lent, **take back now** against later. Candidates for t are one switch before the groups of each
  local update are expected, and as late as the gang's training lets it; a forecast of which nothing has come true yet
  is not believed (lengths that are all equal all come at once, or all late);
* the router learns which sessions will probably outlast the loan and prefers slices for them that are never taken back.

**No thrashing, proven.** (1) After a RECLAIM no LEND follows until the gang was granted and released
(`_returning`). So a slice is lent at most once between two grants. (2) Between two ``StepEnded`` there are at most
``max_loans_per_step`` LEND decisions. Hence at most ``2 * max_loans_per_step`` switches per slice and step, whatever
is predicted. (3) A loan must promise something *after* paying the switch, by ``margin`` times what that costs; once it
runs, its cost of lending is sunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from seamless_verl.scheduling.cluster import Cluster, Pending, ids
from seamless_verl.scheduling.commands import Decision, Horizon, LookAgain, Proposal, Verb
from seamless_verl.scheduling.events import (
    AcquireRequested,
    Event,
    GroupsSubmitted,
    Released,
    StepEnded,
    WeightsPublished,
)
from seamless_verl.scheduling.prediction.forecast import (
    Forecaster,
    Outlook,
    PrefillAgain,
    Trainer,
    capacity_of,
    prefill_s,
)
from seamless_verl.scheduling.prediction.projection import Projection
from seamless_verl.scheduling.slices import SliceState, SliceStatus, Switch, Tag

_ARRIVED_SHARE = 0.25  # share of an update that must be there before the gang is called for the rest of it
_RECALL_LEAD = 1.5  # switches before the groups are there that the gang may be called for them
_MAX_SHORTFALL = 0.5  # groups by which the forecast may fall short then
_MIN_GAIN_OF_FEWER = 0.02  # of a switch: by so much a loan of fewer slices must be better to leave the others idle
_REVIEW_SHARE = 0.05  # of a loan: the time between two reviews while nothing has arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    worth: float  # `Outlook.worth`, smaller is better
    back_s: float  # from now until the reclaim begins
    slices: tuple[SliceStatus, ...] = ()
    left_behind: float = 0.0  # tokens in their caches then


class Predictive:
    """See the module.

    Args:
        margin: a loan must be worth this share of its switch cost beyond the cost itself.
        max_loans_per_step: LEND decisions between two ends of steps.
    """

    def __init__(self, *, margin: float = 0.0, max_loans_per_step: int = 3) -> None:
        self._margin, self._max_loans = margin, max_loans_per_step
        self._forecaster = Forecaster()
        self._returning = False
        self._at_review = (False, False)  # whether it was due, and something had arrived, at the last review of a loan
        self._loans = 0
        self._review_at = 0.0
        self._published_at = -math.inf

    def observe(self, event: Event, cluster: Cluster) -> None:
        self._forecaster.observe(event, cluster)
        match event:
            case GroupsSubmitted() | AcquireRequested(tag=Tag.TRAIN):
                self._review_at = event.at
            case StepEnded():
                self._loans = 0
                self._review_at = event.at
            case Released():
                self._returning = False
                self._review_at = event.at
            case WeightsPublished():
                self._published_at = event.at
            case _:
                pass

    def decide(self, cluster: Cluster) -> Iterator[Proposal]:
        waiting = cluster.training_request()
        lent = [s for s in cluster if s.holder is None and s.lent]
        if lent:
            yield from self._review_loan(cluster, waiting, lent)
        elif not self._returning and not cluster.last_step and not (waiting and cluster.is_due(waiting)):
            idle = [s for s in cluster.by_priority(cluster.idle(Tag.ROLLOUT), Tag.ROLLOUT) if s.slice.lendable]
            if idle and (waiting is not None or self._forecaster.between_steps):
                yield from self._review_idle(cluster, waiting, idle)

    # ---------------------------------------------------------------- lending

    def _review_idle(
        self, cluster: Cluster, waiting: Pending | None, idle: Sequence[SliceStatus]
    ) -> Iterator[Proposal]:
        if cluster.now < self._review_at:
            yield LookAgain(at=self._review_at)
            return
        if self._loans >= self._max_loans:
            yield Decision(verb=Verb.HOLD, slices=ids(idle), reason=f"{self._loans} loans in this step already")
            return
        outlook = self._forecaster.outlook(cluster, waiting)
        if outlook is None:
            self._loans += 1
            yield Decision(verb=Verb.LEND, slices=ids(idle), reason="nothing to predict from yet")
            return
        wake_s = cluster.costs.typical_s(Switch.TO_ROLLOUT) or 0.0
        back_s = cluster.costs.typical_s(Switch.TO_TRAIN) or 0.0
        hold = outlook.worth(outlook.projection((0.0, outlook.standing)), 0.0)
        best = self._best_loan(cluster, outlook, idle, wake_s, back_s)
        again = PrefillAgain.of_loan(
            outlook.work,
            outlook.standing,
            capacity_of(cluster, best.slices),
            best.left_behind,
            caches_lost=self._caches_lost(cluster),
            usual_s=wake_s + back_s,
        )
        benefit = hold - best.worth - again.seconds if best.worth < math.inf else -math.inf
        needed = self._margin * (wake_s + back_s)
        costs = f"after costs of {wake_s:.2f} + {back_s:.2f} s{again}"
        if benefit > needed:
            self._loans += 1
            self._review_at = cluster.now
            yield self._horizon(cluster, outlook, best.slices, best.back_s)
            yield Decision(
                verb=Verb.LEND,
                slices=ids(best.slices),
                reason=f"benefit {benefit:.2f} s > {needed:.2f} s {costs}, for {best.back_s:.2f} s",
                predicted_benefit_s=benefit,
            )
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
        self, cluster: Cluster, outlook: Outlook, idle: Sequence[SliceStatus], wake_s: float, back_s: float
    ) -> _Plan:
        """The cheapest plan over how many slices and until when; all of them unless fewer are clearly better."""
        standing = outlook.standing
        best: _Plan | None = None
        for count in sorted({(len(idle) + 1) // 2, len(idle)}, reverse=True):
            chosen = tuple(idle[:count])
            helped = standing + capacity_of(cluster, chosen)
            projection = outlook.projection((0.0, standing), (wake_s, helped))
            for back_at in _ends_of_loan(outlook, projection, wake_s, back_s):
                planned = outlook.projection((0.0, standing), (wake_s, helped), (back_at, standing))
                plan = _Plan(
                    worth=outlook.worth(planned, back_at + back_s),
                    back_s=back_at,
                    slices=chosen,
                    left_behind=planned.left_behind,
                )
                more = _MIN_GAIN_OF_FEWER * (wake_s + back_s) if best is not None and count < len(best.slices) else 0.0
                if best is None or plan.worth < best.worth - more:
                    best = plan
        return best or _Plan(worth=math.inf, back_s=math.inf, slices=tuple(idle))

    # ---------------------------------------------------------------- taking back

    def _review_loan(
        self, cluster: Cluster, waiting: Pending | None, lent: Sequence[SliceStatus]
    ) -> Iterator[Proposal]:
        due = waiting is not None and cluster.is_due(waiting)
        arrived = due or cluster.ready >= _ARRIVED_SHARE * self._forecaster.minimum(waiting)
        if cluster.now < self._review_at and (due, arrived) == self._at_review:
            yield LookAgain(at=self._review_at)
            return
        outlook = self._forecaster.outlook(cluster, waiting)
        if outlook is None:
            if due:
                self._at_review = due, arrived
                yield self._reclaim(lent, f"{cluster.ready} groups are ready, nothing to predict from yet")
            return
        if not due and outlook.standing.slices == 0:  # nobody else generates: they stay until the trainer can train
            return
        self._at_review = due, arrived
        back_s = cluster.costs.typical_s(Switch.TO_TRAIN) or 0.0
        sure = self._is_nearly_ready(cluster, outlook, back_s)
        best = _best_end(cluster, outlook, lent, back_s, early=sure)
        soon = max(0.25 * back_s, 0.02)
        if best.back_s <= soon and best.worth < math.inf and arrived and sure:
            book = self._forecaster.book
            tokens = sum(book.cached_on(status.slice.id, cluster.now) for status in lent)
            again_s = prefill_s(outlook.work, tokens, outlook.standing)
            reason = f"{cluster.ready} groups are ready; taking back takes {back_s:.2f} s"
            if again_s > back_s:
                reason += str(PrefillAgain(tokens=tokens, seconds=again_s))
            yield self._reclaim(lent, reason)
            return
        elapsed = cluster.now - min(s.since for s in lent)
        # Until something has arrived nothing can be taken back, however often one looks.
        pause_s = 0.0 if arrived else _REVIEW_SHARE * elapsed
        pause_s = max(pause_s, 0.0 if sure else _RECALL_LEAD * back_s)  # sooner nothing can be sure
        self._review_at = cluster.now + max(min(best.back_s, 1e6) / 2, soon, pause_s)
        yield LookAgain(at=self._review_at)
        if best.back_s < math.inf and best.worth < math.inf:
            yield self._horizon(cluster, outlook, lent, best.back_s)
        if due:
            yield Decision(verb=Verb.WAIT, slices=ids(lent), reason=f"they are worth more for {best.back_s:.2f} s")

    def _is_nearly_ready(self, cluster: Cluster, outlook: Outlook, back_s: float) -> bool:
        """Taken back a moment too late, a slice costs that moment; too early, it idles until the last session has ended
        without its help, which is seconds where the last one turns out to be long. Will it probably have ended?"""
        missing = outlook.trainer.minimum - outlook.trainer.ready
        near = self._forecaster.ready_within(cluster, outlook.trainer, _RECALL_LEAD * back_s / outlook.token_s)
        return near >= missing - _MAX_SHORTFALL

    def _horizon(self, cluster: Cluster, outlook: Outlook, slices: Sequence[SliceStatus], back_s: float) -> Horizon:
        outlasting = self._forecaster.longer_than(cluster, back_s / outlook.token_s)
        return Horizon(slices=ids(slices), outlasting=outlasting)

    def _reclaim(self, lent: Sequence[SliceStatus], reason: str) -> Decision:
        self._returning = True
        return Decision(verb=Verb.RECLAIM, slices=ids(lent), reason=reason)

    def _caches_lost(self, cluster: Cluster) -> bool:
        """New weights go out: everything that runs is interrupted, spread anew and prefilled again in any case."""
        return self._forecaster.between_steps or self._published_at == cluster.now


def _best_end(cluster: Cluster, outlook: Outlook, lent: Sequence[SliceStatus], back_s: float, *, early: bool) -> _Plan:
    """When to take lent slices back; later rather than now where it makes no difference.

    Args:
        early: whether to consider now, too.
    """
    standing = outlook.standing
    asleep_s = _asleep_s(cluster, lent)
    everyone = [(asleep_s, standing + capacity_of(cluster, lent))]
    if asleep_s:
        everyone = [(0.0, standing), *everyone]
    best = _Plan(worth=math.inf, back_s=math.inf)
    if early:
        best = _Plan(worth=outlook.worth(outlook.projection(everyone[0], (0.0, standing)), back_s), back_s=0.0)
    for at in _ends_of_loan(outlook, outlook.projection(*everyone), asleep_s, back_s):
        if at > 0.0:
            worth = outlook.worth(outlook.projection(*everyone, (at, standing)), at + back_s)
            if worth <= best.worth:
                best = _Plan(worth=worth, back_s=at)
    return best


def _ends_of_loan(outlook: Outlook, projection: Projection, awake_s: float, back_s: float) -> list[float]:
    """Times at which taking back could begin: so that the gang is free for each local update, and as late as its
    training lets it."""
    trainer = outlook.trainer
    wanted = [projection.when_ready(groups - trainer.ready) - back_s for groups in _marks(trainer)]
    wanted.append(outlook.latest_free(projection) - back_s)
    return sorted({max(awake_s, at) for at in wanted if at < math.inf})


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
