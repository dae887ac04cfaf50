"""When a group (all rollouts of one prompt) is complete, what is done about the last groups of a step, and which groups
die with a rollout worker and begin again.

Waiting for stragglers is unbiased. Starting one anew lets a finished group of a later step take its place, and cutting
it short finishes it at once (StaleFlow's proactive filter); both favour short answers, so neither happens
unless it was asked for.

    issue ─► under way ─► ended                      a group is under way in one worker at a time
                │
                └─ its worker dies ─► lost ─► issue (to the worker that takes its place)

Invariant: a group is handed out again only after the worker that had it is gone, and never once it has ended, so it is
trained once. A lost group keeps its reservation. What it begins with is no older than that: weights that are newer by
now, which the bound allows (`StalenessProtocol.occupy`), or recorded answers of its first attempt, which began no
earlier. Liveness: every group that is lost is issued again, or the run is given up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from seamless_verl.errors import ConfigError
from seamless_verl.staleness.protocol import StalenessProtocol

MOST_LOSSES = 3
"""A group that is lost as often probably kills its workers itself, and a worker that loses all of its groups as often
does not start."""
SUCCESSOR = "successor-"
"""In the name of a worker in the place of one that died."""


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
    """What is done about a straggler: nothing; it starts anew from its prompt (`StalenessProtocol.abort`, and reserved
    again); it ends where its generations are, and finishes as any other group."""

    WAIT = "wait"
    RETRY = "retry"
    TRUNCATE = "truncate"


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckPolicy:
    """Treats a STUCK buffer once the trainer has waited for it for ``patience_s`` seconds."""

    treatment: Treatment = Treatment.WAIT
    patience_s: float = 60.0

    def treat(self, protocol: StalenessProtocol, waited_s: float) -> tuple[str, ...]:
        """Stragglers of the step being filled that get ``treatment`` now, oldest first.

        Args:
            waited_s: seconds that the trainer has waited for this step without getting a group.
        """
        if self.treatment is Treatment.WAIT or waited_s < self.patience_s:
            return ()
        stragglers = protocol.stuck()
        # Without a finished group to take the place, a retry would only lose tokens.
        return stragglers[: protocol.num_ahead] if self.treatment is Treatment.RETRY else stragglers


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a dead worker took along.

    Attributes:
        again: groups to begin again, in the order in which they were issued.
        hopeless: of these, groups that were lost `MOST_LOSSES` times; where there are some, the run is given up.
    """

    again: tuple[str, ...]
    hopeless: tuple[str, ...] = ()


class IssuedGroups:
    """Groups that were handed out and are not known to have ended, by the worker that has them."""

    def __init__(self) -> None:
        self._worker: dict[str, str] = {}  # group -> worker
        self._losses: dict[str, int] = {}

    def __contains__(self, group: str) -> bool:
        return group in self._worker

    def held(self) -> Counter[str]:
        """How many groups each worker has."""
        return Counter(self._worker.values())

    def issue(self, worker: str, groups: Iterable[str]) -> None:
        """``groups`` go to ``worker``, for the first time or again."""
        self._worker.update(dict.fromkeys(groups, worker))

    def settle(self, under_way: Collection[str]) -> None:
        """Only the groups of ``under_way`` have not ended."""
        self._worker = {group: worker for group, worker in self._worker.items() if group in under_way}
        self._losses = {group: count for group, count in self._losses.items() if group in under_way}

    def lost(self, worker: str, under_way: Collection[str]) -> Loss:
        """``worker`` is gone, and of all groups those of ``under_way`` have not ended."""
        self.settle(under_way)
        again = tuple(group for group, owner in self._worker.items() if owner == worker)
        for group in again:
            self._losses[group] = self._losses.get(group, 0) + 1
        return Loss(again=again, hopeless=tuple(group for group in again if self._losses[group] >= MOST_LOSSES))
