"""verl's rollout workers, which tell the trainer of news and let it interfere in a group that they roll out.

    worker: group ends ─► status in TransferQueue ─► counter + 1 ─► answers the trainer's open call ─► trainer looks

News is a prompt group that ended, or a replica that died.
TransferQueue 0.1.11 has no notification. Remove when a reader can wait for a change of its metadata.

    roll out ─► members end ─► the first ``needed`` are the group; the others are stopped and their rows cleared
        ▲           │
        └─ restart ◄┘

Invariant: once `GroupRuns.run` has returned, no member of the group writes any more, and the rows that are left are
those of a complete group, or of one that failed (which the trainer clears).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ, apply_greedy_sampling_params

from seamless_verl.agents.contract import checked_reward
from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import SeamlessError
from seamless_verl.observe.failures import LATE, AttemptNews
from seamless_verl.observe.flight import BEGUN_ANEW, GIVEN_UP, GROUP_FAILED, SURPLUS
from seamless_verl.scheduling.events import Event
from seamless_verl.staleness.groups import GroupProgress, GroupState
from seamless_verl.verl_adapter.dataloader.replaced_workers import ReplacingManager
from seamless_verl.verl_adapter.rollout.attempt_watch import (
    LoopWatch,
    attempt_log,
    places_of_task,
    task_name,
    where_rewards_stand,
    with_blocked,
)
from seamless_verl.verl_adapter.rollout.request_log import at_worker_end, cut_groups, request_log

_log = logging.getLogger(__name__)

_RollOut = Callable[[int], Awaitable[None]]  # takes a member
_WATCH = "watch"  # methods of this group have an event loop in a thread of their own


@dataclass(slots=True)
class _Run:
    tasks: dict[asyncio.Task[None], int] = field(default_factory=dict)  # -> member
    rows: dict[int, int] = field(default_factory=dict)  # member -> rows that it writes, or has written
    restarted: bool = False
    over: bool = False  # given up

    def stop(self, members: Sequence[int], why: str) -> None:
        """Cancel these, but for those that write rows just now: they end at once, and half a row is never seen."""
        for task, member in self.tasks.items():
            if member in members and member not in self.rows:
                task.cancel(why)


class GroupRuns:
    """Groups under way in a worker, each of which can be started anew.

    Args:
        redundancy: rollouts started per rollout that a group needs, at least 1.
        clear: removes rows, given as ``(member, index)`` of a group, from where they were written.
    """

    def __init__(self, redundancy: float, clear: Callable[[str, Sequence[tuple[int, int]]], Awaitable[None]]) -> None:
        self._redundancy = redundancy
        self._clear = clear
        self._runs: dict[str, _Run] = {}

    async def run(
        self, group: str, needed: int, roll_out: _RollOut, announce: Callable[[], Awaitable[object]]
    ) -> tuple[bool, list[BaseException]]:
        """Roll ``group`` out, as often as it is restarted.

        Args:
            announce: called first; the group may be given up meanwhile.

        Returns:
            Whether it is complete, and what its members failed with.
        """
        run = self._runs[group] = _Run()
        launched = math.ceil(needed * self._redundancy)
        state, errors = GroupState.GENERATING, list[BaseException]()
        try:
            await announce()
            while not run.over:
                run.rows, run.restarted = {}, False
                progress = GroupProgress(needed=needed, launched=launched)
                state, errors = await _attempt(run, progress, launched, roll_out)
                if run.over or not run.restarted:
                    break
                await self._clear(group, [(member, i) for member, count in run.rows.items() for i in range(count)])
        finally:
            del self._runs[group]  # from here on it is too late to interfere
            for task in run.tasks:
                task.cancel()
        complete = state is GroupState.COMPLETE
        kept = progress.members if complete else range(launched)
        surplus = [(member, i) for member, count in run.rows.items() if member not in kept for i in range(count)]
        if surplus:
            await self._clear(group, surplus)
        return complete, errors

    def here(self, groups: Sequence[str]) -> list[str]:
        """Those that are under way here."""
        return [group for group in groups if group in self._runs]

    def writing(self, group: str, member: int, rows: int) -> None:
        """``member`` has ended and is about to write so many rows."""
        if group in self._runs:
            self._runs[group].rows[member] = rows

    def restart(self, groups: Sequence[str]) -> list[str]:
        """Start these from their prompts again; returns those that will, the others have ended or are not here."""
        accepted = [group for group in self.here(groups) if not self._runs[group].restarted]
        for group in accepted:
            run = self._runs[group]
            run.restarted = True
            run.stop(list(run.tasks.values()), BEGUN_ANEW)
        return accepted

    def give_up(self, groups: Sequence[str]) -> None:
        """Nobody needs these any more: they end as if they had failed."""
        for run in [self._runs[group] for group in self.here(groups)]:
            run.restarted = run.over = True
            run.stop(list(run.tasks.values()), GIVEN_UP)


async def _attempt(
    run: _Run, progress: GroupProgress, launched: int, roll_out: _RollOut
) -> tuple[GroupState, list[BaseException]]:
    """Roll all members out once, until each has ended; returns the group's state and what members failed with."""
    run.tasks = {asyncio.ensure_future(roll_out(member)): member for member in range(launched)}
    state, errors, stopped = GroupState.GENERATING, list[BaseException](), set[int]()
    pending = set(run.tasks)
    while pending:
        ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(ended, key=run.tasks.__getitem__):
            member = run.tasks[task]
            if member in stopped or run.restarted:
                continue
            error = _error_of(task, member)
            if error is not None:
                errors.append(error)
            verdict = progress.fail(member) if error is not None else progress.finish(member)
            if verdict.state is not GroupState.GENERATING:
                state = verdict.state
            stopped.update(verdict.stop)
            run.stop(verdict.stop, SURPLUS if state is GroupState.COMPLETE else GROUP_FAILED)
    return state, errors


def _error_of(task: asyncio.Task[None], member: int) -> BaseException | None:
    """What a rollout that was not stopped failed with; a cancellation that comes out of it nobody here asked for."""
    try:
        return task.exception()
    except asyncio.CancelledError as cancelled:
        error = SeamlessError(f"rollout {member} of its group was cancelled, and not by its group")
        error.__cause__ = cancelled
        return error


class NotifyingWorker(AgentLoopWorkerTQ.__ray_actor_class__):  # type: ignore[name-defined, misc]  # verl decorates the class itself with ray.remote
    """Rolls prompts out exactly as its parent, unless ``seamless.staleness`` lets the trainer interfere."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._news = 0
        self._waiting: list[asyncio.Future[None]] = []
        request_log.ring = self._ring
        request_log.over = self.llm_client.conversations_over
        self._loop_watch: LoopWatch | None = None
        seamless = _seamless(self.config)
        self._late_s = LATE * seamless.agent.deadline_s
        staleness = seamless.staleness
        managed = staleness.manages_groups or staleness.redundancy > 1
        self._groups = GroupRuns(staleness.group_redundancy, _clear) if managed else None

    async def generate_sequences(self, batch: Any, floors: Mapping[str, int] | None = None) -> str:
        """As the parent; ``floors``: the oldest weights that may begin each prompt (`staleness.floors`).

        Returns:
            This node, by Ray's id; "" outside of Ray.
        """
        request_log.reserve(floors or {})
        await super().generate_sequences(batch)
        return ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool = False
    ) -> None:
        try:
            if self._groups is None or trajectory["validate"]:
                await super()._run_prompt(prompt, sampling_params, trajectory, trace)
            else:
                await self._run_group(self._groups, prompt, sampling_params, trajectory, trace)
        finally:
            request_log.release(prompt["uid"])
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
        tell = partial(tq.async_kv_put, key=uid, partition_id="train")
        needed = prompt.pop("__rollout_n__", self.config.actor_rollout_ref.rollout.n)
        params = dict(sampling_params)
        if not prompt.pop("__do_sample__", True):
            apply_greedy_sampling_params(params)

        async def roll_out(member: int) -> None:
            await self._run_agent_loop(params, trajectory=trajectory, trace=trace, session_id=member, **prompt)

        try:
            complete, errors = await groups.run(uid, needed, roll_out, partial(tell, tag={"status": "running"}))
            for error in errors:
                _log.error("Error in _run_prompt for uid=%s", uid, exc_info=(type(error), error, error.__traceback__))
        finally:  # whatever went wrong, the trainer must hear of it, or it waits for ever
            cut_groups.forget(uid)
            await tell(tag={"status": "finished" if complete else "failure"})

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        rows = output if isinstance(output, list) else [output]
        if self._groups is not None and not validate:
            self._groups.writing(kwargs["uid"], kwargs["session_id"], len(rows))
        # Until verl asks its teacher for other rows than the last (agent_loop_tq.py: "TODO: Support output:list").
        teach = partial(self._compute_teacher_logprobs, validate=validate, sample_kwargs=kwargs)
        await asyncio.gather(*(teach(row, row.prompt_ids, row.response_ids) for row in rows[:-1]))
        await super()._agent_loop_postprocess(output, validate, **kwargs)

    async def restart_groups(self, uids: Sequence[str], floor: int) -> list[str]:
        """Start these prompts anew, with weights of ``floor`` or newer; returns those that are under way here."""
        accepted = self._groups.restart(uids) if self._groups is not None else []
        request_log.reserve(dict.fromkeys(accepted, floor))
        return accepted

    async def give_up_groups(self, uids: Sequence[str]) -> None:
        """Stop these prompts; the trainer clears what they wrote."""
        if self._groups is not None:
            self._groups.give_up(uids)

    async def cut_groups(self, uids: Sequence[str]) -> None:
        """End what is generated for these prompts where it is; the trainer tells all workers, and tells them again."""
        cut_groups.cut(self._groups.here(uids) if self._groups is not None else [])

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
        self._loop_watch = self._loop_watch or LoopWatch()
        task, validation = asyncio.current_task(), bool(kwargs["trajectory"]["validate"])
        assert task is not None
        attempt = attempt_log.attempt(task_name(kwargs), validation=validation, where=partial(places_of_task, task))
        with request_log.session(uid, session_id, trained=not validation), attempt:
            return await super()._run_agent_loop(*args, session_id=session_id, uid=uid, **kwargs)

    async def _compute_score(self, outputs: list[Any], kwargs: dict[str, Any]) -> None:
        """As the parent; a reward that is no finite number fails its attempt."""
        validates = attempt_log.agent_ended()
        await super()._compute_score(outputs, kwargs=kwargs)
        for output in outputs if validates else ():  # verl 0.9.1 would put what is called so between its scores
            (output.extra_fields.get("reward_extra_info") or {}).pop("reward", None)
        score = outputs[-1].reward_score
        if score is not None or self.reward_loop_worker_handles is not None:  # else a reward model comes later
            outputs[-1].reward_score = checked_reward(score)

    @ray.method(concurrency_group=_WATCH)
    async def attempts(self) -> AttemptNews:
        """For the console: what became of attempts since the last call, what hangs now."""
        news = attempt_log.take(self._late_s)
        if any(attempt.reward for attempt in news.hanging):
            places = await where_rewards_stand(self.reward_loop_worker_handles or [])
            hanging = (replace(it, places=places) if it.reward else it for it in news.hanging)
            news = replace(news, hanging=tuple(hanging))
        return with_blocked(news, self._loop_watch)

    async def take_request_events(self) -> list[Event]:
        """For the scheduler in the trainer's process: what requests did since the last call."""
        return request_log.take()

    async def news(self, seen: int) -> int:
        """How often there was news in this worker, as soon as that is more than ``seen``."""
        while self._news <= seen:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future
        return self._news


async def _clear(group: str, rows: Sequence[tuple[int, int]]) -> None:
    await tq.async_kv_clear(keys=[f"{group}_{member}_{index}" for member, index in rows], partition_id="train")


def _seamless(config: Any) -> SeamlessConfig:
    section = OmegaConf.select(config, "seamless")
    given: Any = OmegaConf.to_container(section, resolve=True) if section else None
    return SeamlessConfig.from_mapping(given)


class NotifyingManager(ReplacingManager):
    """verl's manager with workers that ring; named in ``actor_rollout_ref.rollout.agent.agent_loop_manager_class``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        in_groups: Any = ray.remote(concurrency_groups={_WATCH: 1})  # type: ignore[call-overload]  # not in Ray's types
        self.agent_loop_workers_class = in_groups(NotifyingWorker)
