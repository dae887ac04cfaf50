"""Training slices train and rollout slices roll out; whoever has nothing to do idles."""

from __future__ import annotations

from collections.abc import Iterator

from seamless_verl.scheduling.cluster import Cluster, ids
from seamless_verl.scheduling.decisions import Decision, Verb
from seamless_verl.scheduling.events import Event
from seamless_verl.scheduling.slices import Tag


class Disaggregated:
    """Never lends. The scheduler still does when otherwise nobody would generate at all."""

    def observe(self, event: Event, cluster: Cluster) -> None:
        pass

    def decide(self, cluster: Cluster) -> Iterator[Decision]:
        waiting = cluster.training_request()
        if waiting is not None and cluster.is_due(waiting):
            taken = cluster.shortfall(waiting)
            if taken:
                yield Decision(verb=Verb.RECLAIM, slices=ids(taken), reason="nothing is lent under this policy")
            return
        idle = [s for s in cluster.idle(Tag.ROLLOUT) if s.slice.lendable]
        if idle:
            yield Decision(verb=Verb.HOLD, slices=ids(idle), reason="nothing is lent under this policy")
