"""verl's rollout workers, ringing a bell whenever a prompt group ends, so that the trainer need not poll.

    worker: group ends ─► status in TransferQueue ─► counter + 1 ─► answers the trainer's open call ─► trainer looks

TransferQueue 0.1.11 has no notification. Remove when a reader can wait for a change of its metadata.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ


class NotifyingWorker(AgentLoopWorkerTQ.__ray_actor_class__):  # verl decorates the class itself with ray.remote
    """Rolls prompts out exactly as its parent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._groups_ended = 0
        self._waiting: list[asyncio.Future[None]] = []

    async def _run_prompt(self, *args: Any, **kwargs: Any) -> None:
        try:
            await super()._run_prompt(*args, **kwargs)
        finally:
            self._groups_ended += 1
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    async def groups_ended(self, seen: int) -> int:
        """Groups that have ended in this worker, as soon as they are more than ``seen``."""
        while self._groups_ended <= seen:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future
        return self._groups_ended


class NotifyingManager(AgentLoopManagerTQ):
    """verl's manager with workers that ring; named in ``actor_rollout_ref.rollout.agent.agent_loop_manager_class``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(NotifyingWorker)
