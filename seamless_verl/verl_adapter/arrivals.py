"""verl's rollout workers, ringing a bell when there is news, so that the trainer need not poll.

    worker: group ends ─► status in TransferQueue ─► counter + 1 ─► answers the trainer's open call ─► trainer looks

News is a prompt group that ended, a watched replica that has nothing left to do, or a replica that died.
TransferQueue 0.1.11 has no notification. Remove when a reader can wait for a change of its metadata.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from seamless_verl.scheduling.events import Event
from seamless_verl.verl_adapter.request_log import request_log


class NotifyingWorker(AgentLoopWorkerTQ.__ray_actor_class__):  # verl decorates the class itself with ray.remote
    """Rolls prompts out exactly as its parent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._news = 0
        self._waiting: list[asyncio.Future[None]] = []
        request_log.ring = self._ring

    async def _run_prompt(self, *args: Any, **kwargs: Any) -> None:
        try:
            await super()._run_prompt(*args, **kwargs)
        finally:
            self._ring()

    def _ring(self) -> None:
        self._news += 1
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def _run_agent_loop(self, *args: Any, session_id: int, uid: str = "", **kwargs: Any) -> Any:
        with request_log.session(uid, session_id):
            return await super()._run_agent_loop(*args, session_id=session_id, uid=uid, **kwargs)

    async def take_request_events(self) -> list[Event]:
        """For the scheduler in the trainer's process: what requests did since the last call."""
        return request_log.take()

    async def watch_servers(self, addresses: Sequence[str]) -> None:
        """Ring, from now on, also when a request on one of these replicas ends."""
        request_log.watch(addresses)

    async def news(self, seen: int) -> int:
        """How often there was news in this worker, as soon as that is more than ``seen``."""
        while self._news <= seen:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future
        return self._news


class NotifyingManager(AgentLoopManagerTQ):
    """verl's manager with workers that ring; named in ``actor_rollout_ref.rollout.agent.agent_loop_manager_class``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(NotifyingWorker)
