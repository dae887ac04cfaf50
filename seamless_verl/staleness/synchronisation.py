"""Which rollout replica takes newer weights, and when (synchronisation of StaleFlow, arXiv 2601.12784).

    no replica has what is wanted   ─┐
    no weights at all                ├─► pull the newest, as long as fewer than ``at_once`` do
    it lags too far                  │
    it idles, or nearly              ┘

Invariant: while a replica is behind and none pulls, `Rolling` either names one, or every replica that is behind is
busy, lags less than ``max_lag`` and may serve every request there is. A replica whose pulls fail comes last. So no
request waits for ever while one replica can still pull.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from seamless_verl.config import WeightsConfig

# StaleFlow: "its load is low". Of what the busiest replica runs; below that, what the pause holds up is little.
_NEARLY_IDLE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaWeights:
    """What a replica generates with, and what it has to do.

    Attributes:
        version: of its weights; None: it has none yet, or broke while it loaded some.
        pulling: it takes newer ones at the moment.
        running, waiting: requests that it decodes, and those in its queue.
        failed: pulls of it that have failed since the last one that did not.
    """

    replica: str
    version: int | None
    pulling: bool
    running: int
    waiting: int
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Have ``replica`` take the newest weights, which are of version ``at_least`` or newer by then."""

    replica: str
    at_least: int
    reason: str


class Synchronisation(Protocol):
    """Decides who pulls; the same answer for the same arguments."""

    def pulls(self, newest: int, replicas: Sequence[ReplicaWeights], wanted: int | None) -> list[Pull]:
        """Pulls to begin now.

        Asked whenever weights were published, a pull has ended, well or not, a replica came, went or ran dry, or a
        request found no replica.

        Args:
            newest: version that was published last.
            wanted: highest version that a request waits for and no replica has; None: there is no such request.
        """


class Together:
    """All replicas that are behind pull at once; none generates meanwhile."""

    def pulls(self, newest: int, replicas: Sequence[ReplicaWeights], wanted: int | None) -> list[Pull]:
        return [Pull(replica=each.replica, at_least=newest, reason="all at once") for each in _behind(newest, replicas)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolling:
    """A few at a time: see the module.

    Attributes:
        at_once: replicas that pull at a time.
        max_lag: versions behind the newest from which on a busy replica pulls, too.
    """

    at_once: int = 1
    max_lag: int = 1

    def pulls(self, newest: int, replicas: Sequence[ReplicaWeights], wanted: int | None) -> list[Pull]:
        places = max(0, self.at_once - sum(each.pulling for each in replicas))
        busiest = max((each.running for each in replicas), default=0)
        lacking = wanted is not None and all(each.version is None or each.version < wanted for each in replicas)
        due = []
        for each in sorted(_behind(newest, replicas), key=_oldest_first):
            reason = self._reason(each, newest, busiest)
            if lacking and each.version is not None:  # one of them is enough
                lacking, reason = False, (1, f"a request waits for version {wanted}, which nobody has")
            if reason is not None:
                due.append((each.failed, *reason, each.replica))
        due.sort(key=lambda entry: entry[:2])
        return [Pull(replica=name, at_least=newest, reason=words) for _, _, words, name in due[:places]]

    def _reason(self, each: ReplicaWeights, newest: int, busiest: int) -> tuple[int, str] | None:
        """How urgent it is for its own sake, the least number first, and why; None: not now."""
        if each.version is None:
            return 0, "it has no weights"
        lag = newest - each.version
        if lag >= self.max_lag:
            return 2, f"it is {lag} behind, and from {self.max_lag} on busy replicas pull, too"
        if not each.waiting and not each.running:
            return 3, "it idles"
        if not each.waiting and each.running <= _NEARLY_IDLE * busiest:
            return 4, f"it nearly idles: it runs {each.running}, the busiest {busiest}"
        return None


def synchronisation_of(config: WeightsConfig) -> Synchronisation:
    """The strategy that ``seamless.weights`` names; the live run and the simulator take the same."""
    if config.sync == "together":
        return Together()
    return Rolling(at_once=config.at_once, max_lag=config.max_lag)


def too_slow(config: WeightsConfig, replicas: int, pulls_s: Sequence[float], step_s: float) -> str:
    """What to tell the user where replicas cannot take versions as fast as they come; empty: they can.

    Args:
        pulls_s: seconds of the last pulls.
        step_s: from the last version to this one.
    """
    each_s = fmean(pulls_s or [0.0])
    needed = math.ceil(replicas * each_s / (config.max_lag * max(step_s, each_s, 1e-9)))
    if needed <= config.at_once:
        return ""
    pace = f"({replicas} × {each_s:.0f} s, steps of {step_s:.0f} s)"
    return f"replicas take new weights more slowly than they come {pace}: seamless.weights.at_once={needed}"


def _behind(newest: int, replicas: Sequence[ReplicaWeights]) -> list[ReplicaWeights]:
    """Those that are not of the newest version, and do not pull already."""
    return [each for each in replicas if not each.pulling and (each.version is None or each.version < newest)]


def _oldest_first(each: ReplicaWeights) -> tuple[int, int, int, str]:
    """Of those whose pulls have failed as often, and of the same age, the one with the least to do."""
    version = -1 if each.version is None else each.version
    return each.failed, version, each.running + each.waiting, each.replica
