"""What to do when the trainer waits for the last groups of a step (StaleFlow's proactive filter, section 2.1).

Waiting is unbiased. Starting a straggler anew lets a finished group of a later step take its place, and cutting it
short finishes it at once; both favour short answers, so neither happens unless it was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from seamless_verl.staleness.protocol import StalenessProtocol


class Treatment(Enum):
    WAIT = "wait"
    RETRY = "retry"
    TRUNCATE = "truncate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Stop generating ``group``; `StalenessProtocol.abort` it, reserve it again and start it from its prompt."""

    group: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncate:
    """End the generations of ``group`` where they are; it then finishes as any other group."""

    group: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckPolicy:
    """Treats a STUCK buffer once the trainer has waited for it for ``patience_s`` seconds."""

    treatment: Treatment = Treatment.WAIT
    patience_s: float = 60.0

    def treat(self, protocol: StalenessProtocol, waited_s: float) -> list[Retry | Truncate]:
        """Commands for the stragglers of the step being filled, oldest first.

        Args:
            waited_s: seconds that the trainer has waited for this step without getting a group.
        """
        if self.treatment is Treatment.WAIT or waited_s < self.patience_s:
            return []
        stragglers = protocol.stuck()
        reason = f"step {protocol.version} lacks {len(stragglers)} groups after {waited_s:.0f} s"
        if self.treatment is Treatment.TRUNCATE:
            return [Truncate(group=group, reason=reason) for group in stragglers]
        # Without a finished group to take the place, a retry would only lose tokens.
        return [Retry(group=group, reason=reason) for group in stragglers[: protocol.num_ahead]]
