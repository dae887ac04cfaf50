"""What a run keeps its rows in: the streaming dataloader, or verl's own semantics; and where a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from seamless_verl.config import TRAINER_MODE, StalenessConfig
from seamless_verl.staleness.groups import StuckPolicy, Treatment
from seamless_verl.verl_adapter.dataloader.streaming_buffer import StreamingReplayBuffer
from seamless_verl.verl_adapter.dataloader.woken_buffer import RowBuffer, WokenReplayBuffer


def row_buffer(
    config: DictConfig,
    staleness: StalenessConfig,
    *,
    refill: Callable[[int], int],
    filter_metric: str | None,
    on_progress: Callable[[int, int], None],
) -> WokenReplayBuffer:
    """Builds the replay buffer of a run: ours, or with ``staleness.policy=verl`` one with verl's semantics.

    Args:
        refill: submits that many new prompts.
        filter_metric: of DAPO's filter; None: it is off.
    """
    sampler = config.trainer.v1.sampler
    common = {
        "trainer_config": config.trainer.v1.get(TRAINER_MODE),
        "sampler_kwargs": sampler.sampler_kwargs,
        "refill_fn": refill,
        "filter_groups_metric": filter_metric,
    }
    if staleness.policy == "verl":
        return WokenReplayBuffer(
            trainer_mode=TRAINER_MODE,
            max_off_policy_threshold=sampler.max_off_policy_threshold,
            max_off_policy_strategy=sampler.max_off_policy_strategy,
            **common,
        )
    return StreamingReplayBuffer(
        eta=staleness.eta,
        batch_size=config.data.train_batch_size,
        redundancy=staleness.redundancy,
        in_flight=staleness.in_flight,
        stuck=StuckPolicy(treatment=Treatment(staleness.stuck), patience_s=staleness.stuck_patience_s),
        admits=not config.skip.rollout_tq.enable,
        on_progress=on_progress,
        **common,
    )


def follow_versions(rows: RowBuffer, weights: Any, max_lag: int) -> None:
    """Replicas take new weights one after the other: reserve by what they serve, and wait for nobody if they cannot.

    Args:
        weights: the run's `RollingWeights`.
        max_lag: of ``seamless.weights``.
    """
    assert isinstance(rows, StreamingReplayBuffer)  # `run.check_weights`
    rows.follow_versions(weights.oldest_version, max_lag)
    rows.check = weights.raise_broken


def resumed_folder(trainer: DictConfig, step: int) -> Path:
    """Of the checkpoint that a run goes on from (the section ``trainer``)."""
    if trainer.resume_mode == "resume_path":
        return Path(trainer.resume_from_path)
    return Path(trainer.default_local_dir) / f"global_step_{step}"
