"""verl's asynchronous replay buffer under the staleness bound of SeamlessFlow, without its two-second poll."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from seamless_verl.errors import SeamlessError

# TransferQueue 0.1.11 has no notification; the price of a look is one RPC to its controller.
# Replaced by events when the streaming dataloader lands.
_POLL_S = 0.05
FAILURES_IN_A_ROW = 32


class RolloutFailed(SeamlessError):
    """Prompt groups fail one after another; refilling them for ever would hide that."""


class BoundedReplayBuffer(ReplayBufferAsync):
    """Hands out whole groups, oldest first; waits for the stragglers that the bound asks for and drops nothing.

    A prompt dispatched during step ``s`` starts with weights of version ``s - 1`` or newer, and the batch of step
    ``k`` updates version ``k - 1``; the bound is ``V_traj + eta >= V_train`` (StaleFlow 2.1). verl's ``wait`` strategy
    with threshold ``eta + 1`` waits, at step ``k``, for every prompt of step ``k - eta`` that is still in flight.
    For eta 0 and 1 that suffices: at most one batch of older groups is left over after a step, and it goes first. For
    larger eta, groups that overtake could leave more than a batch behind; the configuration refuses those.

    ``on_progress`` is told, at every look, how many groups could be taken and how many are needed.
    """

    def __init__(
        self,
        *,
        eta: int,
        on_progress: Callable[[int, int], None] = lambda ready, needed: None,
        trainer_config: Any,
        sampler_kwargs: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            trainer_mode="seamless",
            trainer_config=trainer_config,
            max_off_policy_threshold=eta + 1,
            max_off_policy_strategy="wait",
            sampler_kwargs=sampler_kwargs,
            poll_interval=_POLL_S,
            **kwargs,
        )
        self._on_progress = on_progress
        self._failures = 0
        self._finished_before: set[str] = set()

    def _has_enough_samples(
        self, global_steps: int, partition_id: str, batch_size: int, sampleable_keys: set[str]
    ) -> bool:
        if partition_id == "train":
            self._on_progress(len(sampleable_keys), batch_size)
        return super()._has_enough_samples(global_steps, partition_id, batch_size, sampleable_keys)

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons: Any) -> Any:
        if partition_id == "train":
            self.count_failures(eviction_reasons[2], self.finished_keys[partition_id])
        return super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)

    def count_failures(self, failed: set[str], finished: set[str]) -> None:
        """Note the groups that failed since the last look; a newly finished group starts the count anew.

        Args:
            failed: groups found failed at this look; they are cleared afterwards, so each is counted once.
            finished: groups that wait finished, new or not.

        Raises:
            RolloutFailed: ``FAILURES_IN_A_ROW`` groups failed and none finished.
        """
        self._failures = 0 if finished - self._finished_before else self._failures + len(failed)
        self._finished_before = set(finished)
        if self._failures >= FAILURES_IN_A_ROW:
            raise RolloutFailed(
                f"{self._failures} prompt groups failed in a row and none finished; the reason of each stands in the "
                "logs of the rollout workers (search for 'Error in _run_prompt')"
            )
