"""verl's rollout workers, ringing a bell when there is news, so that the trainer need not poll.

    worker: group ends ─► status in TransferQueue ─► counter + 1 ─► answers the trainer's open call ─► trainer looks

News is a prompt group that ended, a watched replica that has nothing left to do, or a replica that died.
TransferQueue 0.1.11 has no notification. Remove when a reader can wait for a change of its metadata.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ, apply_greedy_sampling_params

from seamless_verl.config import SeamlessConfig, StalenessConfig
from seamless_verl.scheduling.events import Event
from seamless_verl.verl_adapter.dataloader.group_runs import GroupRuns
from seamless_verl.verl_adapter.rollout.request_log import at_worker_end, cut_groups, request_log

_log = logging.getLogger(__name__)


class NotifyingWorker(AgentLoopWorkerTQ.__ray_actor_class__):  # verl decorates the class itself with ray.remote
    """Rolls prompts out exactly as its parent, unless ``seamless.staleness`` lets the trainer interfere."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._news = 0
        self._waiting: list[asyncio.Future[None]] = []
        request_log.ring = self._ring
        staleness = _staleness(self.config)
        self._groups = GroupRuns(staleness.group_redundancy, _clear) if staleness.manages_groups else None

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool = False
    ) -> None:
        try:
            if self._groups is None or trajectory["validate"]:
                await super()._run_prompt(prompt, sampling_params, trajectory, trace)
            else:
                await self._run_group(self._groups, prompt, sampling_params, trajectory, trace)
        finally:
            self._ring()

    async def _run_group(
        self,
        groups: GroupRuns,
        prompt: dict[str, Any],
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        trace: bool,
    ) -> None:
        """As the parent's ``_run_prompt`` (verl 0.9.1), with `GroupRuns` in place of its ``gather``."""
        uid, complete = prompt["uid"], False
        await tq.async_kv_put(key=uid, partition_id="train", tag={"status": "running"})
        needed = prompt.pop("__rollout_n__", self.config.actor_rollout_ref.rollout.n)
        params = dict(sampling_params)
        if not prompt.pop("__do_sample__", True):
            apply_greedy_sampling_params(params)

        async def roll_out(member: int) -> None:
            await self._run_agent_loop(params, trajectory=trajectory, trace=trace, session_id=member, **prompt)

        try:
            complete, errors = await groups.run(uid, needed, roll_out)
            for error in errors:
                _log.error("Error in _run_prompt for uid=%s", uid, exc_info=(type(error), error, error.__traceback__))
        finally:  # whatever went wrong, the trainer must hear of it, or it waits for ever
            cut_groups.forget(uid)
            await tq.async_kv_put(key=uid, partition_id="train", tag={"status": "finished" if complete else "failure"})

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        if self._groups is not None and not validate:
            rows = len(output) if isinstance(output, list) else 1
            self._groups.writing(kwargs["uid"], kwargs["session_id"], rows)
        await super()._agent_loop_postprocess(output, validate, **kwargs)

    async def restart_groups(self, uids: Sequence[str]) -> list[str]:
        """Start these prompts anew; returns those of them that are under way here."""
        return self._groups.restart(uids) if self._groups is not None else []

    async def cut_groups(self, uids: Sequence[str]) -> None:
        """End what is generated for these prompts where it is."""
        cut_groups.cut(uids)

    async def close(self) -> None:
        """End what is generated here and every process that was started for it; for the end of the run.

        The trainer always asks for more than its last step needs, so there are attempts under way at every end.
        """
        prompts = set(self.background_tasks)
        for prompt in prompts:
            prompt.cancel()
        await at_worker_end.aclose()  # before waiting: agents end even where an attempt does not heed its cancellation
        if prompts:
            await asyncio.wait(prompts)

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


async def _clear(group: str, rows: Sequence[tuple[int, int]]) -> None:
    await tq.async_kv_clear(keys=[f"{group}_{member}_{index}" for member, index in rows], partition_id="train")


def _staleness(config: Any) -> StalenessConfig:
    section = OmegaConf.select(config, "seamless")
    return SeamlessConfig.from_mapping(OmegaConf.to_container(section, resolve=True) if section else None).staleness


class NotifyingManager(AgentLoopManagerTQ):
    """verl's manager with workers that ring; named in ``actor_rollout_ref.rollout.agent.agent_loop_manager_class``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(NotifyingWorker)
