"""Which prompt groups die with a rollout worker, and which of them begin again.

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

MOST_LOSSES = 3
"""A group that is lost as often probably kills its workers itself, and a worker that loses all of its groups as often
does not start."""
SUCCESSOR = "successor-"
"""In the name of a worker in the place of one that died."""


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
