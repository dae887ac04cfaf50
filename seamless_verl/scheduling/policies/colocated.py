"""Everybody generates until the batch is complete, then everybody trains."""

from __future__ import annotations

from collections.abc import Iterator

from seamless_verl.scheduling.cluster import Cluster, ids
from seamless_verl.scheduling.decisions import Decision, Verb
from seamless_verl.scheduling.events import Event
from seamless_verl.scheduling.slices import Tag


class Colocated:
    """Lends what is free; takes back when the whole batch is there (the scheduler's own rule does that)."""

    def observe(self, event: Event, cluster: Cluster) -> None:
        pass

    def decide(self, cluster: Cluster) -> Iterator[Decision]:
        waiting = cluster.training_request()
        if waiting is not None and cluster.is_due(waiting):
            lent = cluster.shortfall(waiting)
            if lent:
                reason = f"{cluster.ready} of {waiting.event.batch} groups are ready"
                yield Decision(verb=Verb.WAIT, slices=ids(lent), reason=reason)
            return
        idle = [s for s in cluster.idle(Tag.ROLLOUT) if s.slice.lendable]
        if idle and not cluster.last_step:
            yield Decision(verb=Verb.LEND, slices=ids(idle), reason="idle")
