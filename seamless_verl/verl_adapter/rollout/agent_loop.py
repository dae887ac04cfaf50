"""verl's agent loop ``seamless_agent``: one rollout is one proxy session and one agent outside this process.

::

    prompt ─► open session ─► AgentRunner (agent process ──HTTP──► proxy ─► replicas) ─► close ─► rows
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.utils.profiler import simple_timer

from seamless_verl.agents.contract import (
    RUNNER_DEADLINES,
    AgentJob,
    AgentReport,
    AgentRunner,
    AgentStatus,
    checked_report,
)
from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import SeamlessError
from seamless_verl.observe.flight import GIVEN_UP, UNWANTED, SessionEnded, SessionGivenUp
from seamless_verl.places import error_in_words
from seamless_verl.proxy.client import SessionResult
from seamless_verl.proxy.session.sessions import RESERVED, TASK, SessionSpec
from seamless_verl.run.capacity import session_spec
from seamless_verl.trajectory.rows import Row, trained_order
from seamless_verl.verl_adapter.rollout.attempt_watch import attempt_log, task_name
from seamless_verl.verl_adapter.rollout.proxy_shard import ProxyShard
from seamless_verl.verl_adapter.rollout.request_log import recorder_of_worker, request_log
from seamless_verl.verl_adapter.rollout.verl_samples import row_to_output

_MOST_DETAIL = 500  # characters of what went wrong that are recorded


class NothingToTrain(SeamlessError):
    """The agent never got an answer."""


class RunnerHangs(SeamlessError):
    """The runner has not returned long after the deadline."""


class ProxyAgentLoop(AgentLoopBase):
    """Rolls a prompt out with an agent; returns one `AgentLoopOutput` per row of its session."""

    async def run(  # type: ignore[override]  # verl's V1 path takes several rows of a session
        self, sampling_params: dict[str, Any], **kwargs: Any
    ) -> list[AgentLoopOutput]:
        """``kwargs`` are the fields of the data row; ``extra_info["task"]`` is the task, as JSON or as a mapping.

        Raises:
            NothingToTrain: see there; verl refills the group.
            RunnerHangs, RewardRefused: see there.
        """
        shard = await ProxyShard.get(self)
        extra_info = kwargs.get("extra_info") or {}
        task = extra_info.get("task")
        task = json.loads(task) if isinstance(task, str) else dict(task or {})
        timing: dict[str, float] = {}
        async with shard.place():
            attempt_log.begins_now()
            result, report = await self._attempt(
                shard, task, self._spec(shard.seamless, sampling_params, kwargs), timing
            )
        task_id = task_name(kwargs)
        outputs = [
            self._output(row, result, report, task_id, AgentLoopMetrics.model_validate(timing))
            for row in trained_order(result.rows)
        ]
        if not outputs:
            fix = ". Fix: it must send its requests to AgentJob.base_url with AgentJob.api_key as its key"
            raise NothingToTrain(
                f"the agent {_ending(report)} without an answer of the model, so there is nothing to train"
                + (fix if report.status is AgentStatus.FINISHED else "")
            )
        if report.status is not AgentStatus.FINISHED:
            late = "timed out: " if report.status is AgentStatus.TIMED_OUT else ""
            attempt_log.failed(late + (report.detail or "the runner says no more"))
        return outputs

    async def _attempt(
        self, shard: ProxyShard, task: dict[str, Any], spec: SessionSpec, timing: dict[str, float]
    ) -> tuple[SessionResult, AgentReport]:
        session = await shard.admin.open_session(spec)
        request_log.name(session.id)
        recorder = recorder_of_worker(shard.seamless.run_dir)
        began = recorder.now()
        try:
            with simple_timer("generate_sequences", timing):
                job = AgentJob(
                    task=task,
                    base_url=session.base_url,
                    api_key=session.api_key,
                    model=str(self.config.actor_rollout_ref.model.path),
                    deadline_s=shard.seamless.agent.deadline_s,
                )
                report = checked_report(await _returned(shard.runner, job))
            result = await shard.admin.close_session(session.id, report.reward, report.rewards)
        except BaseException as error:
            recorder.record(_session_given_up(recorder.now(), began, session.id, spec, error))
            await shard.delete_session(session.id)
            raise
        recorder.record(_session_ended(recorder.now(), result, report, timing["generate_sequences"]))
        return result, report

    def _spec(self, seamless: SeamlessConfig, sampling_params: dict[str, Any], kwargs: dict[str, Any]) -> SessionSpec:
        return session_spec(
            seamless.agent,
            sampling_params,
            self.rollout_config.response_length,
            group=str(kwargs.get("uid", "")),
            index=int(kwargs.get("session_id", 0)),
            metadata={TASK: task_name(kwargs), RESERVED: request_log.floor("")},
        )

    def _output(
        self, row: Row, result: SessionResult, report: AgentReport, task_id: str, metrics: AgentLoopMetrics
    ) -> AgentLoopOutput:
        return row_to_output(
            row,
            reward=report.reward,
            metrics=metrics,
            extra_fields={"reward_extra_info": {**report.rewards, "task_id": task_id}, "drift": dict(result.drift)},
            violations=len(result.audit.violations),
            images=result.images,
        )


async def _returned(runner: AgentRunner, job: AgentJob) -> Any:
    """What the runner returns for a job.

    Raises:
        RunnerHangs: it took `RUNNER_DEADLINES`; its traceback ends in the line where it waited.
    """
    task, most_s, over = asyncio.current_task(), RUNNER_DEADLINES * job.deadline_s, False
    assert task is not None

    def end() -> None:  # `asyncio.wait_for` would make a second task, and hide where the runner waits
        nonlocal over
        over = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(most_s, end)
    try:
        return await runner.run(job)
    except asyncio.CancelledError as error:
        if not over:
            raise
        raise RunnerHangs(
            f"the runner had not returned after {most_s:g} s and was cancelled; seamless.agent.deadline_s is "
            f"{job.deadline_s:g}. Fix: end the agent by AgentJob.deadline_s"
        ) from error
    finally:
        timer.cancel()


def _ending(report: AgentReport) -> str:
    words = {AgentStatus.FINISHED: "ended", AgentStatus.TIMED_OUT: "timed out", AgentStatus.FAILED: "failed"}
    return words[report.status] + (f" ({report.detail})" if report.detail else "")


def _session_given_up(at: float, began: float, session: str, spec: SessionSpec, error: BaseException) -> SessionGivenUp:
    if isinstance(error, asyncio.CancelledError):  # who ends an attempt says why (`UNWANTED`)
        status, detail = next((why for why in error.args if why in UNWANTED), GIVEN_UP), ""
    else:
        status, detail = AgentStatus.FAILED.value, error_in_words(error)[:_MOST_DETAIL]
    seconds = round(at - began, 3)
    return SessionGivenUp(
        at=at, session=session, group=spec.group, index=spec.index, seconds=seconds, status=status, detail=detail
    )


def _session_ended(at: float, result: SessionResult, report: AgentReport, seconds: float) -> SessionEnded:
    return SessionEnded(
        at=at,
        session=result.id,
        group=result.group,
        seconds=round(seconds, 3),
        turns=sum(result.kinds.values()),
        rows=sum(1 for row in result.rows if row.num_trained),
        reward=report.reward,
        status=report.status.value,
        drift=dict(result.drift),
        index=result.index,
        detail=report.detail[:_MOST_DETAIL],
    )
