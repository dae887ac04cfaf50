"""From the ``seamless.curriculum`` section to the kernel: the trainer and the check before the start agree on it."""

from __future__ import annotations

from collections.abc import Sequence

from seamless_verl.config import CurriculumConfig, StageConfig
from seamless_verl.curriculum.curriculum import Curriculum
from seamless_verl.curriculum.prompt_pool import Resampling
from seamless_verl.curriculum.stages import Plateau, Stage


def configured(
    config: CurriculumConfig, *, sources: Sequence[str], train_batch_size: int, seed: int | None, dataset: str = ""
) -> Curriculum:
    """See `Curriculum`; ``sources`` is the data's ``data_source`` column.

    Raises:
        ConfigError: the section does not fit the data.
    """
    resampling = None
    if config.history_resampling:
        floor = min(train_batch_size, len(sources)) if config.pool_floor is None else config.pool_floor
        resampling = Resampling(floor=floor, readmit_after=config.readmit_after_epochs)
    stages = [_stage(stage) for stage in config.stages]
    return Curriculum(sources=sources, stages=stages, resampling=resampling, seed=seed, dataset=dataset)


def _stage(config: StageConfig) -> Stage:
    rule = config.until_plateau
    return Stage(
        name=config.name,
        sources=config.sources,
        until_step=config.until_step,
        until_epoch=config.until_epoch,
        until_plateau=Plateau(epochs=rule.epochs, min_gain=rule.min_gain) if rule is not None else None,
    )
