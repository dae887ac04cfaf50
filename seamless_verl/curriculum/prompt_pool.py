"""What may be drawn: a stage's data sources, less the prompts that History Resampling took out of the pool.

History Resampling (SRPO): prompts that every rollout solved leave the pool at the epoch boundary.

| group in the epoch that ended | fate |
|---|---|
| all correct | removed |
| mixed, all wrong, not sampled | kept: the next policy may learn from it |

Only accuracy decides, never the whole reward. A group whose rollouts all earned the same teaches nothing; what was all
wrong may become solvable, what was all right would only cost rollouts.

Stages name data sources (SRPO: hard mathematics first, then code is added), and rules of which one ends them.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from seamless_verl.curriculum_config import PlateauConfig, StageConfig
from seamless_verl.errors import ConfigError

_KEY = "seamless.curriculum.stages"


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
    """How History Resampling is done; `CurriculumConfig` checks what a user gave.

    Attributes:
        floor: prompts that stay in the pool of a stage, however many are solved.
        readmit_after: epochs that a removed prompt stays away before it is tested again; ``None``: for ever.
    """

    floor: int = 1
    readmit_after: int | None = None


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


class StageProgress:
    """How long the current stage lasts and how well it does: the first rule that applies ends it, never the last one.

    Raises:
        ConfigError: no stages, a name twice, a source that the data does not have, a stage that cannot end before
            another one.
    """

    def __init__(self, stages: Sequence[StageConfig], known_sources: Collection[str]) -> None:
        _check(stages, known_sources)
        self.stages = tuple(stages)
        self.index = 0
        self.accuracies: list[float] = []  # per epoch of the current stage

    @property
    def current(self) -> StageConfig:
        return self.stages[self.index]

    def step_ended(self, step: int) -> bool:
        """Whether ``step`` was the stage's last one and the next stage has begun."""
        limit = self.current.until_step
        return limit is not None and step >= limit and self._next()

    def epoch_ended(self, accuracy: float) -> bool:
        """Whether the epoch with this mean accuracy was the stage's last one and the next stage has begun."""
        self.accuracies.append(accuracy)
        stage = self.current
        if stage.until_epoch is not None and len(self.accuracies) >= stage.until_epoch:
            return self._next()
        if stage.until_plateau is not None and self._has_plateaued(stage.until_plateau):
            return self._next()
        return False

    def _has_plateaued(self, rule: PlateauConfig) -> bool:
        earlier, recent = self.accuracies[: -rule.epochs], self.accuracies[-rule.epochs :]
        return bool(earlier) and max(recent) < max(earlier) + rule.min_gain

    def _next(self) -> bool:
        if self.index + 1 == len(self.stages):
            return False
        self.index += 1
        self.accuracies = []
        return True


def _check(stages: Sequence[StageConfig], known: Collection[str]) -> None:
    if not stages:
        raise ConfigError(_KEY, "[]", "has no stage", "name one, or leave the key out for a single stage over all data")
    names = [stage.name for stage in stages]
    for position, stage in enumerate(stages):
        if names.index(stage.name) != position:
            raise ConfigError(f"{_KEY}[{position}].name", stage.name, "is used twice", "give every stage its own name")
        if not stage.sources:
            raise ConfigError(f"{_KEY}[{position}].sources", "[]", "names no data source", f"choose of {sorted(known)}")
        for source in stage.sources:
            if source not in known:
                near = difflib.get_close_matches(source, known, n=1, cutoff=0.0)
                hint = f"did you mean {near[0]}? The data has {sorted(known)}" if near else "give data with sources"
                raise ConfigError(f"{_KEY}[{position}].sources", source, "is not a data_source of the data", hint)
        ends = (stage.until_step, stage.until_epoch, stage.until_plateau) != (None, None, None)
        if not ends and position + 1 < len(stages):
            raise ConfigError(
                f"{_KEY}[{position}]",
                stage.name,
                f"never ends, so stage {names[position + 1]} never begins",
                "give it until_step, until_epoch or until_plateau",
            )
