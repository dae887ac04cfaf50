"""What the scheduler asks of a policy, and the policies that follow one fixed rule."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from seamless_verl.scheduling.cluster import Cluster, Pending, ids
from seamless_verl.scheduling.commands import Decision, Proposal, Verb
from seamless_verl.scheduling.events import AcquireRequested, Event, Released, SliceReady, SliceWaking, StepEnded
from seamless_verl.scheduling.slices import Switch, Tag

_IDLE_WINDOW = 10  # times, of each kind
_RETRY_AFTER = 16  # idle times without a loan before the first one that is tried again; twice as many before each next


class Policy(Protocol):
    """Proposes; the scheduler checks every proposal and may overrule it to keep the system live.

    A policy may name only slices that can move: LEND and HOLD idle ones that can do both, RECLAIM and WAIT lent
    ones. Others are an `InvalidTransition`.
    """

    def observe(self, event: Event, cluster: Cluster) -> None:
        """Called with every event after the cluster has taken it in."""

    def decide(self, cluster: Cluster) -> Iterable[Proposal]:
        """Called after every event that can change what should be done (not for single requests)."""


class _FixedRule:
    """One decision while the trainer's gang is due, another one while slices idle."""

    def observe(self, event: Event, cluster: Cluster) -> None:
        pass

    def decide(self, cluster: Cluster) -> Iterator[Decision]:
        waiting = cluster.training_request()
        if waiting is not None and cluster.is_due(waiting):
            if taken := cluster.shortfall(waiting):
                verb, reason = self._when_due(cluster, waiting)
                yield Decision(verb=verb, slices=ids(taken), reason=reason)
            return
        idle = [s for s in cluster.idle(Tag.ROLLOUT) if s.slice.lendable]
        if not idle:
            return
        verb, reason = self._when_idle(cluster)
        if verb is not Verb.LEND or not cluster.last_step:
            yield Decision(verb=verb, slices=ids(idle), reason=reason)

    def _when_due(self, cluster: Cluster, waiting: Pending) -> tuple[Verb, str]:
        raise NotImplementedError

    def _when_idle(self, cluster: Cluster) -> tuple[Verb, str]:
        return Verb.LEND, "idle"


class SeamlessFlow(_FixedRule):
    """The rule of SeamlessFlow (arXiv 2508.11553): lends every idle slice as soon as it is released, takes it back when
    the trainer's first groups are ready."""

    def _when_due(self, cluster: Cluster, waiting: Pending) -> tuple[Verb, str]:
        return Verb.RECLAIM, f"{cluster.ready} of {waiting.event.minimum} groups are ready"


class Greedy(SeamlessFlow):
    """SeamlessFlow's rule, unless slices idle for less than it takes to change hands twice.

    A lent slice generates from when it is awake until groups are ready; then the trainer waits for it to come back.
    What switches and idling take is measured, so the first loan is made in any case, and one is tried again from time
    to time. A slice idles from when it could wake, which is after new weights were loaded elsewhere, until the trainer
    has groups to train; the time within a step, where it starves for its next mini-batch, is another one than between
    steps, and with a validation in it, it tells nothing.
    """

    def __init__(self) -> None:
        self._gang = ""  # the trainer's last request
        self._step_over = False
        self._idle_since: float | None = None  # of the gang, until groups are ready for it
        self._is_between = False  # whether it idles between steps
        self._idle_s = {between: deque[float](maxlen=_IDLE_WINDOW) for between in (True, False)}
        self._held, self._patience = 0, _RETRY_AFTER  # idle times in a row without a loan, and how many there may be

    def observe(self, event: Event, cluster: Cluster) -> None:
        match event:
            case AcquireRequested(tag=Tag.TRAIN):
                self._gang = event.request
            case AcquireRequested():
                self._idle_since = None
            case StepEnded():
                self._step_over = True
            case Released() if event.request == self._gang:
                self._idle_since, self._is_between, self._step_over = event.at, self._step_over, False
            case SliceWaking() if self._idle_since is not None:
                self._idle_since = event.at
            case SliceReady() if self._idle_since is not None and not cluster[event.slice].slice.lendable:
                self._idle_since = event.at
        waiting = cluster.training_request()
        if self._idle_since is not None and waiting is not None and cluster.is_due(waiting):
            self._idle_s[self._is_between].append(event.at - self._idle_since)
            self._idle_since = None
            self._held += 1

    def _when_idle(self, cluster: Cluster) -> tuple[Verb, str]:
        costs = [cluster.costs.at_best_s(switch) for switch in Switch]
        idle_s = self._idle_s[self._is_between]
        if None in costs or not idle_s:
            return Verb.LEND, "idle"
        usual_s, there_and_back_s = statistics.fmean(idle_s), sum(cost or 0.0 for cost in costs)
        told = f"slices idle for {usual_s:.2f} s, changing hands twice takes {there_and_back_s:.2f} s"
        if usual_s > there_and_back_s:
            self._held, self._patience = 0, _RETRY_AFTER
            return Verb.LEND, "idle"
        if self._held >= self._patience:
            self._held, self._patience = 0, 2 * self._patience
            return Verb.LEND, f"tried again: {told}"
        return Verb.HOLD, told


class Colocated(_FixedRule):
    """Everybody generates until the batch is complete, when the scheduler itself takes back what is lent; then
    everybody trains."""

    def _when_due(self, cluster: Cluster, waiting: Pending) -> tuple[Verb, str]:
        return Verb.WAIT, f"{cluster.ready} of {waiting.event.batch} groups are ready"


class Disaggregated(_FixedRule):
    """Training slices train and rollout slices roll out. The scheduler lends when otherwise nobody would generate."""

    def _when_due(self, cluster: Cluster, waiting: Pending) -> tuple[Verb, str]:
        return Verb.RECLAIM, "nothing is lent under this policy"

    def _when_idle(self, cluster: Cluster) -> tuple[Verb, str]:
        return Verb.HOLD, "nothing is lent under this policy"
