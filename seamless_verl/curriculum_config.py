"""The section ``seamless.curriculum`` of the configuration (docs/curriculum.md), a part of `seamless_verl.config`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from seamless_verl.checked import switch, whole
from seamless_verl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlateauConfig:
    """When accuracy counts as no longer rising.

    Attributes:
        epochs: how many epochs without a gain.
        min_gain: the smallest rise in accuracy that counts as a gain.
    """

    epochs: int
    min_gain: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """One stage of the curriculum. The first ``until_*`` rule that applies ends it; the last stage never ends.

    Attributes:
        name: for messages and checkpoints.
        sources: values of the data's ``data_source`` column that the stage draws from.
        until_step: last training step of the stage.
        until_epoch: epochs that the stage lasts, counted by consumed prompts.
        until_plateau: ends the stage when the accuracy per epoch stops rising.
    """

    name: str
    sources: tuple[str, ...]
    until_step: int | None = None
    until_epoch: int | None = None
    until_plateau: PlateauConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumConfig:
    """Which prompts are worth their rollouts (SRPO; docs/curriculum.md). By default verl's dataloader chooses.

    Attributes:
        history_resampling: at the end of an epoch, take prompts that every rollout solved out of the pool.
        accuracy_key: what the reward function returns beside ``score`` that is 1 for a correct answer. Needed with
            ``history_resampling`` and ``stages``.
        pool_floor: prompts that always stay; None: ``data.train_batch_size``.
        readmit_after_epochs: epochs that a prompt that left stays away; None: it never comes back.
        stages: named stages over data sources, in order, for example
            ``[{name: math, sources: [gsm8k], until_step: 100}, {name: all, sources: [gsm8k, code]}]``.
        zero_overlong_advantage: rows with an answer that was cut off get zero advantage. Works without the rest.
    """

    history_resampling: bool = False
    accuracy_key: str | None = None
    pool_floor: int | None = None
    readmit_after_epochs: int | None = None
    stages: tuple[StageConfig, ...] = ()
    zero_overlong_advantage: bool = False

    def __post_init__(self) -> None:
        for name in ("history_resampling", "zero_overlong_advantage"):
            switch(f"seamless.curriculum.{name}", getattr(self, name))
        figures: dict[str, object] = {"pool_floor": self.pool_floor, "readmit_after_epochs": self.readmit_after_epochs}
        for position, stage in enumerate(self.stages):
            key, plateau = f"stages[{position}].until_", stage.until_plateau
            figures |= {f"{key}step": stage.until_step, f"{key}epoch": stage.until_epoch}
            if plateau is not None:
                key, gain = f"seamless.curriculum.{key}plateau", plateau.min_gain
                whole(f"{key}.epochs", plateau.epochs, 1, "write 1 or more")
                if type(gain) not in (int, float) or not 0 <= gain < math.inf:
                    raise ConfigError(f"{key}.min_gain", gain, "must be a number >= 0", "write for example 0.01")
        for name, value in figures.items():
            if value is not None:
                whole(f"seamless.curriculum.{name}", value, 1, "write 1 or more")
        if self.enabled and not self.accuracy_key:
            raise ConfigError(
                "seamless.curriculum.accuracy_key",
                self.accuracy_key,
                "is not set, and only accuracy decides what is solved",
                "name what the reward function returns beside its score, for example acc",
            )

    @property
    def enabled(self) -> bool:
        return self.history_resampling or bool(self.stages)
