"""Rows of like length side by side within each optimizer step: less padding per micro-batch.

Every rank cuts its share in order into mini-batches, one per optimizer step (``TrainingWorker.train_mini_batch``).
Which rows a step gets stays as verl has it, or its gradient would depend on their lengths; the order within a step is
of no matter to the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from omegaconf import DictConfig
from transfer_queue import KVBatchMeta


def lengths_of_cuts(config: DictConfig, rows: int, actor_ranks: int, critic_ranks: int | None) -> list[int]:
    """Lengths at whose multiples a batch of ``rows`` is cut: into shares of ranks, and each share into mini-batches.

    Args:
        critic_ranks: the critic's are its own (sequence parallelism may differ); None: there is no critic.
    """
    n = config.actor_rollout_ref.rollout.n
    lengths = [rows // actor_ranks, config.actor_rollout_ref.actor.ppo_mini_batch_size * n // actor_ranks]
    if critic_ranks is not None:
        lengths.append(config.critic.ppo_mini_batch_size * n // critic_ranks)
    return lengths


def side_by_side(batch: KVBatchMeta, lengths: Sequence[int]) -> KVBatchMeta:
    """``batch``, sorted by length between all multiples of ``lengths``."""
    together, rows = math.gcd(*lengths), len(batch.keys)
    order = [
        row
        for first in range(0, rows, together)
        for row in sorted(range(first, first + together), key=lambda row: batch.tags[row]["seq_len"])
    ]
    batch.reorder(order)
    return batch
