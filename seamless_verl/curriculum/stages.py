"""Named stages over data sources (SRPO: hard mathematics first, then code is added), and when one ends."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from seamless_verl.errors import ConfigError

_KEY = "seamless.curriculum.stages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plateau:
    """Accuracy has stopped rising: no gain of ``min_gain`` over the best within ``epochs`` epochs."""

    epochs: int
    min_gain: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A name and the data sources that it draws from; the first rule that applies ends it, the last stage never ends.

    Attributes:
        until_step: last training step of the stage.
        until_epoch: epochs (counted by consumed prompts) that the stage lasts.
        until_plateau: ends it when the accuracy per epoch stops rising.
    """

    name: str
    sources: tuple[str, ...]
    until_step: int | None = None
    until_epoch: int | None = None
    until_plateau: Plateau | None = None

    @property
    def ends(self) -> bool:
        return any(rule is not None for rule in (self.until_step, self.until_epoch, self.until_plateau))


class StageProgress:
    """How long the current stage lasts and how well it does.

    Raises:
        ConfigError: no stages, a name twice, a source that the data does not have, a stage that cannot end before
            another one, a rule that cannot apply.
    """

    def __init__(self, stages: Sequence[Stage], known_sources: Collection[str]) -> None:
        _check(stages, known_sources)
        self.stages = tuple(stages)
        self.index = 0
        self.accuracies: list[float] = []  # per epoch of the current stage

    @property
    def current(self) -> Stage:
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

    def _has_plateaued(self, rule: Plateau) -> bool:
        earlier, recent = self.accuracies[: -rule.epochs], self.accuracies[-rule.epochs :]
        return bool(earlier) and max(recent) < max(earlier) + rule.min_gain

    def _next(self) -> bool:
        if self.index + 1 == len(self.stages):
            return False
        self.index += 1
        self.accuracies = []
        return True


def _check(stages: Sequence[Stage], known: Collection[str]) -> None:
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
        if not stage.ends and position + 1 < len(stages):
            raise ConfigError(
                f"{_KEY}[{position}]",
                stage.name,
                f"never ends, so stage {names[position + 1]} never begins",
                "give it until_step, until_epoch or until_plateau",
            )
        for rule, value in (
            ("until_step", stage.until_step),
            ("until_epoch", stage.until_epoch),
            ("until_plateau.epochs", stage.until_plateau.epochs if stage.until_plateau else None),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{_KEY}[{position}].{rule}", value, "must be an integer >= 1", "write 1 or more")
