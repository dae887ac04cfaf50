"""When a group (all rollouts of one prompt) is complete, and what is done about the last groups of a step.

Waiting for stragglers is unbiased. Starting one anew lets a finished group of a later step take its place, and cutting
it short finishes it at once (StaleFlow's proactive filter, section 2.1); both favour short answers, so neither happens
unless it was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from seamless_verl.errors import ConfigError
from seamless_verl.staleness.protocol import StalenessProtocol


class GroupState(Enum):
    GENERATING = "generating"
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupVerdict:
    """Where the group stands now; ``stop`` are the members that need not go on."""

    state: GroupState
    stop: tuple[int, ...] = ()


class GroupProgress:
    """Group redundancy: ``launched`` rollouts start, the first ``needed`` to finish are the group.

    Args:
        needed: rollouts that the trainer wants of a prompt.
        launched: rollouts that are started, at least ``needed``. More of them favour short answers.
    """

    def __init__(self, *, needed: int, launched: int) -> None:
        if needed < 1 or launched < needed:
            raise ConfigError(
                "seamless.staleness.group_redundancy",
                launched / needed if needed > 0 else launched,
                f"starts {launched} rollouts for a group of {needed}",
                "write 1 (no surplus rollouts) or more",
            )
        self._needed = needed
        self._generating = dict.fromkeys(range(launched))
        self._finished: list[int] = []

    @property
    def members(self) -> tuple[int, ...]:
        """Finished members, in the order in which they finished."""
        return tuple(self._finished)

    def finish(self, member: int) -> GroupVerdict:
        """``member`` is done; the one that completes the group stops the others."""
        del self._generating[member]
        self._finished.append(member)
        if len(self._finished) < self._needed:
            return GroupVerdict(state=GroupState.GENERATING)
        return GroupVerdict(state=GroupState.COMPLETE, stop=self._stop_all())

    def fail(self, member: int) -> GroupVerdict:
        """``member`` failed; a group that can no longer be completed stops the others."""
        del self._generating[member]
        if len(self._finished) + len(self._generating) >= self._needed:
            return GroupVerdict(state=GroupState.GENERATING)
        return GroupVerdict(state=GroupState.FAILED, stop=self._stop_all())

    def _stop_all(self) -> tuple[int, ...]:
        members = tuple(self._generating)
        self._generating.clear()
        return members


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
