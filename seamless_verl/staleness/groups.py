"""A group is all rollouts of one prompt: when it is complete, and whom to stop."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from seamless_verl.errors import ConfigError


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
