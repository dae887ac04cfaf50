"""History Resampling (SRPO): prompts that every rollout solved leave the pool at the epoch boundary.

| group in the epoch that ended | fate |
|---|---|
| all correct | removed |
| mixed, all wrong, not sampled | kept: the next policy may learn from it |

Only accuracy decides, never the whole reward. A group whose rollouts all earned the same teaches nothing; what was all
wrong may become solvable, what was all right would only cost rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from seamless_verl.errors import ConfigError


class Outcome(Enum):
    """What an epoch learnt about a prompt."""

    ALL_CORRECT = "all_correct"
    MIXED = "mixed"
    ALL_WRONG = "all_wrong"
    FAILED = "failed"  # no group was consumed: twice, it could not be generated or was surplus

    @classmethod
    def of(cls, accuracies: Sequence[float]) -> Outcome:
        """``accuracies``: one per rollout; 1 (or more) is correct, anything below is not."""
        correct = sum(accuracy >= 1 for accuracy in accuracies)
        if not correct:
            return cls.ALL_WRONG if accuracies else cls.FAILED
        return cls.ALL_CORRECT if correct == len(accuracies) else cls.MIXED


class Change(Enum):
    REMOVED = "removed"
    READMITTED = "readmitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolChange:
    """``prompt`` left or came back when ``epoch`` ended."""

    prompt: int
    epoch: int
    change: Change


@dataclass(frozen=True, slots=True, kw_only=True)
class Resampling:
    """How History Resampling is done.

    Attributes:
        floor: prompts that stay in the pool of a stage, however many are solved.
        readmit_after: epochs after which a removed prompt comes back to be tested again; ``None``: never.
    """

    floor: int = 1
    readmit_after: int | None = None

    def __post_init__(self) -> None:
        if self.floor < 1:
            raise ConfigError("seamless.curriculum.pool_floor", self.floor, "would empty the pool", "write 1 or more")
        if self.readmit_after is not None and self.readmit_after < 1:
            raise ConfigError(
                "seamless.curriculum.readmit_after_epochs",
                self.readmit_after,
                "must be an integer >= 1",
                "write null (never) or for example 3",
            )


class Pool:
    """The prompts that are still worth their rollouts, and the log of those that left."""

    def __init__(self, rule: Resampling) -> None:
        self._rule = rule
        self._removed: dict[int, int] = {}  # prompt -> epoch at whose end it left
        self.log: list[PoolChange] = []

    def __contains__(self, prompt: int) -> bool:
        return prompt not in self._removed

    @property
    def num_removed(self) -> int:
        return len(self._removed)

    def resample(self, epoch: int, solved: Iterable[int], stages: Sequence[Sequence[int]]) -> list[PoolChange]:
        """End ``epoch``: remove what it solved, bring back what has been away long enough.

        Args:
            solved: prompts whose groups were all correct, in the order in which they are to be removed; those that the
                floor keeps are the last ones.
            stages: prompts of the current stage and of those to come; none of their pools falls below the floor.

        Returns:
            What changed, removals first; appended to ``log``.
        """
        changes: list[PoolChange] = []
        members = [frozenset(stage) for stage in stages]
        room = [sum(prompt in self for prompt in stage) - self._rule.floor for stage in members]
        for prompt in solved:
            holding = [position for position, stage in enumerate(members) if prompt in stage]
            if prompt in self._removed or any(room[position] <= 0 for position in holding):
                continue
            for position in holding:
                room[position] -= 1
            self._removed[prompt] = epoch
            changes.append(PoolChange(prompt=prompt, epoch=epoch, change=Change.REMOVED))
        if self._rule.readmit_after is not None:
            due = [prompt for prompt, left in self._removed.items() if epoch - left >= self._rule.readmit_after]
            for prompt in due:
                del self._removed[prompt]
                changes.append(PoolChange(prompt=prompt, epoch=epoch, change=Change.READMITTED))
        self.log += changes
        return changes

    def state(self) -> list[list[object]]:
        """The log as plain data; the pool follows from it."""
        return [[change.prompt, change.epoch, change.change.value] for change in self.log]

    def restore(self, state: Iterable[Sequence[object]]) -> None:
        self.log = [
            PoolChange(prompt=int(str(prompt)), epoch=int(str(epoch)), change=Change(change))
            for prompt, epoch, change in state
        ]
        self._removed = {}
        for change in self.log:
            if change.change is Change.REMOVED:
                self._removed[change.prompt] = change.epoch
            else:
                del self._removed[change.prompt]
