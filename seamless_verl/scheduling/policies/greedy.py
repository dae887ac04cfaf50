"""SeamlessFlow's own rule: whoever is idle rolls out, whoever is needed is preempted at once (PAPERS 1.2)."""

from __future__ import annotations

from collections.abc import Iterator

from seamless_verl.scheduling.cluster import Cluster, ids
from seamless_verl.scheduling.decisions import Decision, Verb
from seamless_verl.scheduling.events import Event
from seamless_verl.scheduling.slices import Tag


class Greedy:
    """Lends every idle slice as soon as it is released; reclaims when the trainer's first groups are ready."""

    def observe(self, event: Event, cluster: Cluster) -> None:
        pass

    def decide(self, cluster: Cluster) -> Iterator[Decision]:
        waiting = cluster.training_request()
        if waiting is not None and cluster.is_due(waiting):
            taken = cluster.shortfall(waiting)
            if taken:
                reason = f"{cluster.ready} of {waiting.event.minimum} groups are ready"
                yield Decision(verb=Verb.RECLAIM, slices=ids(taken), reason=reason)
            return
        idle = [s for s in cluster.idle(Tag.ROLLOUT) if s.slice.lendable]
        if idle and not cluster.last_step:
            yield Decision(verb=Verb.LEND, slices=ids(idle), reason="idle")
