"""What the scheduler asks of a policy, and the policies that follow one fixed rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from seamless_verl.scheduling.cluster import Cluster, Pending, ids
from seamless_verl.scheduling.commands import Decision, Proposal, Verb
from seamless_verl.scheduling.events import Event
from seamless_verl.scheduling.slices import Tag


class Policy(Protocol):
    """Proposes; the scheduler checks every proposal and may overrule it to keep the system live.

    A policy may name only slices that can move: LEND and HOLD idle ones that can do both, STOP_FEEDING and RECLAIM
    lent ones (RECLAIM also draining ones). Others are an `InvalidTransition`.
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
        verb, reason = self._when_idle()
        if idle and not (verb is Verb.LEND and cluster.last_step):
            yield Decision(verb=verb, slices=ids(idle), reason=reason)

    def _when_due(self, cluster: Cluster, waiting: Pending) -> tuple[Verb, str]:
        raise NotImplementedError

    def _when_idle(self) -> tuple[Verb, str]:
        return Verb.LEND, "idle"


class Greedy(_FixedRule):
    """SeamlessFlow's rule: lends every idle slice as soon as it is released, takes it back when the
    trainer's first groups are ready."""

    def _when_due(self, cluster: Cluster, waiting: Pending) -> tuple[Verb, str]:
        return Verb.RECLAIM, f"{cluster.ready} of {waiting.event.minimum} groups are ready"


class Colocated(_FixedRule):
    """Everybody generates until the batch is complete, when the scheduler itself takes back what is lent; then
    everybody trains."""

    def _when_due(self, cluster: Cluster, waiting: Pending) -> tuple[Verb, str]:
        return Verb.WAIT, f"{cluster.ready} of {waiting.event.batch} groups are ready"


class Disaggregated(_FixedRule):
    """Training slices train and rollout slices roll out. The scheduler lends when otherwise nobody would generate."""

    def _when_due(self, cluster: Cluster, waiting: Pending) -> tuple[Verb, str]:
        return Verb.RECLAIM, "nothing is lent under this policy"

    def _when_idle(self) -> tuple[Verb, str]:
        return Verb.HOLD, "nothing is lent under this policy"
