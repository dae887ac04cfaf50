"""The scheduler: ``handle(event) -> commands``. It keeps the books and the system live; a policy has the ideas.

    event ─► state of the cluster ─► what must be ─► policy.decide ─► what must not be ─► commands

Safety: a slice changes state only by the table; a GPU belongs to one slice; a gang is granted as a whole and only
from idle slices, so nobody generates on what trains.

Liveness: every acquire is granted, refused or withdrawn, whatever the policy does and whatever the edge fails to do:

* every command to a slice has a deadline (`Patience`): an answer or a failure comes of it;
* an acquire whose data is complete, or for which nothing is on its way, preempts without asking the policy;
* while an acquire waits for data, at least one slice that can generate does (`_keep_generating`), and no proposal
  that would stop the last one is carried out;
* what can never be granted is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.cluster import Cluster, Pending, ids
from seamless_verl.scheduling.commands import (
    Command,
    Decision,
    FailOver,
    GrantAcquire,
    Horizon,
    LookAgain,
    Proposal,
    RecordOutcome,
    RefuseAcquire,
    ReportStall,
    RevokeGrant,
    SetHorizon,
    Verb,
)
from seamless_verl.scheduling.issuing import Issuer, LoanBook, Patience
from seamless_verl.scheduling.policies import Policy
from seamless_verl.scheduling.slices import SERVING_SOON, InvalidTransition, Repair, SliceState, SliceStatus, Tag


class Scheduler:
    """See the module. Not thread-safe: whoever drives it hands in one event after the other."""

    def __init__(self, policy: Policy, patience: Patience | None = None, *, wakes_apart: bool = False) -> None:
        self.cluster = Cluster(wakes_apart=wakes_apart)
        self._policy = policy
        self._patience = patience or Patience()
        self._issuer = Issuer(self.cluster, self._patience)
        self._loans = LoanBook()
        self._grants: dict[str, tuple[SliceStatus, ...]] = {}
        self._closed: set[str] = set()
        self._handlers: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.SliceAdded: self._slice_added,
            ev.SliceWaking: self._slice_waking,
            ev.SliceReady: self._slice_ready,
            ev.SliceDrained: self._slice_drained,
            ev.SliceFailed: self._slice_failed,
            ev.SliceReturned: self._slice_returned,
            ev.AcquireRequested: self._acquire_requested,
            ev.Released: self._released,
            ev.StepEnded: self._step_ended,
            ev.WeightsPublished: self._weights_published,
            ev.GroupsSubmitted: self._groups_submitted,
            ev.GroupsReady: self._groups_ready,
            ev.BatchOpened: lambda event: None,
            ev.RequestStarted: self.cluster.start_request,
            ev.RequestFinished: self.cluster.finish_request,
            ev.SessionFinished: lambda event: None,
            ev.Tick: lambda event: self._expire(),
        }

    def handle(self, event: ev.Event) -> tuple[Command, ...]:
        """Take one event in; what should be done now comes out, in order.

        Raises:
            InvalidTransition: the event contradicts the state, or time runs backwards.
        """
        if event.at < self.cluster.now:
            raise InvalidTransition(f"{event}: time runs backwards, it was {self.cluster.now} already")
        self.cluster.now = event.at
        self._handlers[type(event)](event)
        self._policy.observe(event, self.cluster)
        if not isinstance(event, ev.REQUEST_EVENTS):
            self._settle()
        return self._issuer.flush()

    # ---------------------------------------------------------------- events

    def _slice_added(self, event: ev.SliceAdded) -> None:
        self.cluster.add(event.slice, event.state, event.version)

    def _slice_waking(self, event: ev.SliceWaking) -> None:
        status = self.cluster[event.slice]
        if status.command == event.command:
            status.begin_waking(event.at)

    def _slice_ready(self, event: ev.SliceReady) -> None:
        status = self.cluster[event.slice]
        if status.command == event.command:
            status.ready(event.at, event.version)

    def _slice_drained(self, event: ev.SliceDrained) -> None:
        status = self.cluster[event.slice]
        if status.command == event.command:
            self._loans.slice_is_back(status.drained(event.at), event.slice, self.cluster)

    def _slice_failed(self, event: ev.SliceFailed) -> None:
        self._fail(self.cluster[event.slice], event.reason, event.lost, restartable=event.restartable)

    def _fail(self, status: SliceStatus, reason: str, lost: frozenset[Tag], *, restartable: bool) -> None:
        if status.state is SliceState.FAILED:
            if not restartable:
                status.give_up()
            return
        holder, was_training = status.holder, status.state is SliceState.TRAINING
        self.cluster.write_off(status.slice.id)
        decision = status.lose(self.cluster.now, lost, reason, restartable=restartable)
        self._loans.slice_is_back(decision, status.slice.id, self.cluster)
        if restartable and status.repair is Repair.GIVEN_UP:
            reason = f"{reason}; it stays out, having failed to wake {status.failed_wakes} times in a row"
        if status.repair is Repair.GIVEN_UP and status in self.cluster.awaited():
            reason = f"{reason}; none of the trainer's slices is lent any more (seamless.weights.sync=rolling goes on)"
        if Tag.ROLLOUT in status.slice.capabilities:
            self._issuer.say(FailOver(slice=status.slice.id, reason=reason))
        if holder is None or status.holder is not None:
            return
        self._grants[holder] = tuple(member for member in self._grants[holder] if member is not status)
        if was_training:  # a grant of rollout slices goes on with those that are left
            self._issuer.say(RevokeGrant(request=holder, slice=status.slice.id, reason=reason))
            self._hand_back(holder, f"RevokeGrant of {holder}")

    def _slice_returned(self, event: ev.SliceReturned) -> None:
        status = self.cluster[event.slice]
        if status.usable != status.slice.capabilities:
            status.restarted(event.at)

    def _acquire_requested(self, event: ev.AcquireRequested) -> None:
        if event.request in self.cluster.pending or event.request in self._grants or event.request in self._closed:
            raise InvalidTransition(f"AcquireRequested: {event.request} was used before")
        if event.count < 1 or event.minimum < 0 or event.batch < event.minimum:
            raise InvalidTransition(f"{event}: count must be >= 1 and 0 <= minimum <= batch")
        self.cluster.pending[event.request] = Pending(event=event)

    def _released(self, event: ev.Released) -> None:
        if event.request in self._closed:  # refused or revoked just before
            return
        if self.cluster.pending.pop(event.request, None) is not None:
            self._closed.add(event.request)
            return
        if event.request not in self._grants:
            raise InvalidTransition(f"Released: nobody acquired {event.request}")
        self._hand_back(event.request, f"Released {event.request}")

    def _hand_back(self, request: str, story: str) -> None:
        gang = self._grants.pop(request)
        held = [self.cluster.now - status.since for status in gang if status.state is SliceState.TRAINING]
        self.cluster.training_s += max(held, default=0.0)
        for status in gang:
            status.release(self.cluster.now, story)
        self._closed.add(request)

    def _step_ended(self, event: ev.StepEnded) -> None:
        self.cluster.last_step = event.last

    def _weights_published(self, event: ev.WeightsPublished) -> None:
        self.cluster.published = event.version

    def _groups_submitted(self, event: ev.GroupsSubmitted) -> None:
        self.cluster.in_flight += len(event.groups)

    def _groups_ready(self, event: ev.GroupsReady) -> None:
        self.cluster.ready, self.cluster.in_flight = event.ready, event.in_flight

    # ---------------------------------------------------------------- what must be, then what may be

    def _settle(self) -> None:
        self._issuer.restart_dead()  # before anything is granted
        self._refuse_infeasible()
        self._serve_standing()
        self._grant_due()
        self._lend_for_rollout_requests()
        looks = [self._carry_out(proposal) for proposal in list(self._policy.decide(self.cluster))]
        self._preempt_if_complete()
        self._keep_generating()
        self._report_stalls()
        kept = map(self._kept_since, self.cluster.pending.values())
        stalls = [since + self._patience.stall_s for since in kept if since is not None]
        soon = math.nextafter(self.cluster.now, math.inf)  # for what has expired already: see `_expire`
        deadlines = [max(status.deadline, soon) for status in self.cluster if status.deadline is not None]
        self._issuer.set_timer([*deadlines, *stalls, *looks])

    def _expire(self) -> None:
        """At ticks only: of events that happened together each may be the answer that another one came too late for."""
        now = self.cluster.now
        for status in [s for s in self.cluster if s.deadline is not None and s.deadline <= now]:
            if status.repair is Repair.UNDER_WAY:
                status.give_up()
            else:
                waited = now - status.since
                reason = f"no answer for {waited:.0f} s while {status.state.value}"
                self._fail(status, reason, frozenset(Tag), restartable=True)

    def _refuse_infeasible(self) -> None:
        for request, pending in list(self.cluster.pending.items()):
            reason = self._why_never(pending)
            if reason is not None:
                del self.cluster.pending[request]
                self._closed.add(request)
                self._issuer.say(RefuseAcquire(request=request, reason=reason))

    def _why_never(self, pending: Pending) -> str | None:
        tag, count = pending.event.tag, pending.event.count
        able = [s for s in self.cluster if self.cluster.may_carry(s, tag)]
        if len(able) < count:
            gone = [s.slice.id for s in self.cluster if s.repair is Repair.GIVEN_UP]
            return f"{count} slices wanted for {tag.value}, {len(able)} can; lost: {', '.join(gone) or 'none'}"
        if not self.cluster.is_due(pending) and not any(self.cluster.may_carry(s, Tag.ROLLOUT) for s in self.cluster):
            return f"{pending.event.minimum} groups wanted, {self.cluster.ready} ready and no slice left to generate"
        return None

    def _serve_standing(self) -> None:
        """Slices that can only generate do; rollout slices take the newest weights."""
        standing = [s for s in self.cluster.idle(Tag.ROLLOUT) if Tag.TRAIN not in s.slice.capabilities]
        self._issuer.lend(standing, None, "only rolls out")
        newest = self.cluster.published
        for status in self.cluster:
            if status.state is SliceState.ROLLOUT and newest is not None and status.version != newest:
                self._issuer.sync(status, newest)

    def _grant_due(self) -> None:
        for request, pending in list(self.cluster.pending.items()):
            tag, count = pending.event.tag, pending.event.count
            if tag is Tag.TRAIN:
                if not self.cluster.is_due(pending):
                    pending.due_since = None
                    continue
                free = self.cluster.by_priority(self.cluster.idle(tag), tag)
            else:
                free = [s for s in self.cluster.generating() if s.holder is None]
            if pending.due_since is None:
                pending.due_since = self.cluster.now
            if len(free) < count:
                continue
            gang = tuple(free[:count])
            for status in gang:
                status.grant(self.cluster.now, request, tag)
            del self.cluster.pending[request]
            self._grants[request] = gang
            self._issuer.say(GrantAcquire(request=request, slices=ids(gang)))
            if tag is Tag.TRAIN:
                called = pending.called_at if pending.called_at is not None else self.cluster.now
                late_s = self.cluster.now - max(pending.due_since, called)
                self._issuer.say(*(RecordOutcome(outcome=outcome) for outcome in self._loans.granted(late_s)))

    def _lend_for_rollout_requests(self) -> None:
        for request, pending in self.cluster.pending.items():
            if pending.event.tag is Tag.ROLLOUT:
                serving = sum(s.state in SERVING_SOON and s.holder is None for s in self.cluster)
                missing = pending.event.count - serving
                idle = self.cluster.by_priority(self._spare(self.cluster.idle(Tag.ROLLOUT)), Tag.ROLLOUT)
                self._issuer.lend(idle[: max(missing, 0)], None, f"AcquireRequested {request}")

    # ---------------------------------------------------------------- proposals

    def _carry_out(self, proposal: Proposal) -> float | None:
        if isinstance(proposal, LookAgain):
            return proposal.at
        if isinstance(proposal, Horizon):
            self._issuer.say(*(SetHorizon(slice=s, outlasting=proposal.outlasting) for s in proposal.slices))
            return None
        statuses = [self.cluster[slice_id] for slice_id in proposal.slices]
        why = f"{proposal.verb.value} ({proposal.reason})"
        if proposal.verb in (Verb.HOLD, Verb.WAIT):
            self._issuer.record(proposal)
        elif proposal.verb is Verb.LEND:
            spare = self._spare(statuses)
            if spare:
                number = self._issuer.record(proposal)
                self._issuer.lend(spare, number, why)
                if number is not None:
                    self._loans.open(number, ids(spare), self.cluster)
        elif self._may_stop(statuses):
            number = self._issuer.record(proposal)
            self._drain(statuses, number, why)
        return None

    def _drain(self, statuses: list[SliceStatus], number: int | None, why: str) -> None:
        self._issuer.drain(statuses, number, why)
        waiting = self.cluster.training_request()
        if waiting is not None and waiting.called_at is None:
            waiting.called_at = self.cluster.now

    def _spare(self, statuses: list[SliceStatus]) -> list[SliceStatus]:
        """Those that may be lent without keeping a gang waiting that could train now."""
        if self.cluster.awaited():
            statuses = [status for status in statuses if not status.slice.lendable]
        waiting = self.cluster.training_request()
        if waiting is None or not self.cluster.is_due(waiting):
            return statuses
        kept = self.cluster.by_priority(self.cluster.idle(Tag.TRAIN), Tag.TRAIN)[: waiting.event.count]
        return [status for status in statuses if status not in kept]

    def _may_stop(self, statuses: list[SliceStatus]) -> bool:
        """Not the last that generate, unless the trainer has what it needs; not what somebody holds or has asked for: a
        validation that waits for replicas would have them lent again at once, and so on."""
        if any(status.holder is not None for status in statuses):
            return False
        if any(pending.event.tag is Tag.ROLLOUT for pending in self.cluster.pending.values()):
            return False
        waiting = self.cluster.training_request()
        if waiting is not None and self.cluster.is_due(waiting):
            return True
        return any(status.state in SERVING_SOON and status not in statuses for status in self.cluster)

    def _preempt_if_complete(self) -> None:
        waiting = self.cluster.training_request()
        if waiting is None or not self.cluster.is_due(waiting):
            return
        if self.cluster.ready < waiting.event.batch and self.cluster.in_flight > 0:
            return
        taken = self.cluster.shortfall(waiting)
        if taken:
            reason = (
                f"{self.cluster.ready} groups are ready and {self.cluster.in_flight} on their way: nothing to wait for"
            )
            number = self._issuer.record(Decision(verb=Verb.RECLAIM, slices=ids(taken), reason=reason))
            self._drain(taken, number, reason)

    def _keep_generating(self) -> None:
        waiting = self.cluster.training_request()
        if waiting is None or self.cluster.is_due(waiting):
            return
        if any(s.state in SERVING_SOON or s.state is SliceState.DRAINING for s in self.cluster):
            return
        idle = self.cluster.idle(Tag.ROLLOUT)
        if idle:
            reason = "the trainer waits for groups and nobody generates"
            number = self._issuer.record(Decision(verb=Verb.LEND, slices=ids(idle), reason=reason))
            self._issuer.lend(idle, number, reason)
            if number is not None:
                self._loans.open(number, ids(idle), self.cluster)

    def _kept_since(self, pending: Pending) -> float | None:
        """Since when a request waits for its slices; None where it does not, or the policy has lent ones work on."""
        if pending.due_since is None or pending.stall_reported:
            return None
        if pending.event.tag is Tag.TRAIN and self.cluster.shortfall(pending):
            return None
        return max(pending.due_since, pending.called_at or 0.0)

    def _report_stalls(self) -> None:
        for request, pending in self.cluster.pending.items():
            since = self._kept_since(pending)
            if since is None:
                continue
            waited = self.cluster.now - since
            if waited >= self._patience.stall_s:
                pending.stall_reported = True
                tag = pending.event.tag
                obstacles = tuple(
                    f"{s.slice.id} ({s.doing} for {self.cluster.now - s.since:.0f} s)"
                    for s in self.cluster
                    if tag in s.slice.capabilities and s.holder is None
                )
                self._issuer.say(ReportStall(request=request, waited_s=waited, waiting_for=obstacles))
