"""Steps that alternate between a batch that is ready and one that must be waited for: noticed, and told once. Pure.

With ``eta: 1`` two batches are under way. Where answers are alike in length both end together and are trained one right
after the other; the step that follows waits for a whole batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import fmean

_STEPS = 6  # three of each kind
_APART = 0.5  # versions of staleness, and shares of the trainer's idle time, by which the two kinds differ at least
_BUSY = 0.2  # rollout that idles less is what all wait for


class Alternation:
    """The last steps of a run."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=_STEPS)
        self._is_told = False

    def step(self, staleness: float, idle_share: Mapping[str, float | None]) -> str | None:
        """Take in a step; a line for people where the last `_STEPS` alternate, once.

        Args:
            staleness: its mean, in versions.
            idle_share: of ``trainer`` and ``rollout``; None where not measurable.
        """
        shares = idle_share.get("trainer"), idle_share.get("rollout")
        if shares[0] is None or shares[1] is None:
            return None
        self._recent.append((staleness, shares[0], shares[1]))
        if self._is_told or len(self._recent) < _STEPS:
            return None
        steps = list(self._recent)
        waited, ready = sorted((steps[::2], steps[1::2]), reverse=True, key=lambda kind: kind[0][1])
        older = min(step[0] for step in ready) - max(step[0] for step in waited)
        longer = min(step[1] for step in waited) - max(step[1] for step in ready)
        if older < _APART or longer < _APART:
            return None
        self._is_told = True
        rollout = _mean(steps, 2)
        return (
            f"steps alternate: every second has its batch ready (staleness {_mean(ready, 0):.2f}, trainer idle "
            f"{_mean(ready, 1):.0%}), the others wait for one ({_mean(waited, 0):.2f}, {_mean(waited, 1):.0%}).\n"
            "  That is the bound at work: the batches that seamless.staleness.eta lets begin end together where "
            f"answers are alike in length. Rollout idles {rollout:.0%}: {_advice(rollout)}"
        )


def _mean(steps: list[tuple[float, float, float]], of: int) -> float:
    return fmean(step[of] for step in steps)


def _advice(rollout: float) -> str:
    if rollout < _BUSY:
        return "it is what all wait for, and even steps would take as long"
    return "with seamless.staleness.eta=2 another batch may begin meanwhile, and samples are up to two versions old"
