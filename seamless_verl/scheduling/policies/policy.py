"""What the scheduler asks of a policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from seamless_verl.scheduling.cluster import Cluster
from seamless_verl.scheduling.decisions import Proposal
from seamless_verl.scheduling.events import Event


class Policy(Protocol):
    """Proposes; the scheduler checks every proposal and may overrule it to keep the system live.

    A policy may name only slices that can move: LEND and HOLD idle ones that can do both, STOP_FEEDING and RECLAIM
    lent ones (RECLAIM also draining ones). Others are an `InvalidTransition`.
    """

    def observe(self, event: Event, cluster: Cluster) -> None:
        """Called with every event after the cluster has taken it in."""

    def decide(self, cluster: Cluster) -> Iterable[Proposal]:
        """Called after every event that can change what should be done (not for single requests)."""
