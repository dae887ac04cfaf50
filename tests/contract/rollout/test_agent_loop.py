"""The agent loop over a shard with a scripted runner and no proxy: who waits for whom, and what a run's end ends."""

from __future__ import annotations

import asyncio
import math
import re
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("verl")
from msgspec import structs
from omegaconf import OmegaConf

from seamless_verl.agents.contract import AgentJob, AgentReport, AgentStatus, RewardRefused
from seamless_verl.config import AgentConfig, SeamlessConfig
from seamless_verl.observe import flight
from seamless_verl.observe.recording import FLIGHT, FlightRecorder, read_recording
from seamless_verl.places import places_of
from seamless_verl.proxy.client import SessionHandle, SessionResult
from seamless_verl.proxy.session.sessions import SessionSpec
from seamless_verl.trajectory.rows import AuditReport
from seamless_verl.verl_adapter.rollout import agent_loop
from seamless_verl.verl_adapter.rollout.agent_loop import ProxyAgentLoop, RunnerHangs
from seamless_verl.verl_adapter.rollout.proxy_shard import ProxyShard
from tests.fakes import ScriptedEdge, user

# verl warns of engines that are not installed when its trainer is imported, which the tests do that need it.
pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


class Admin:
    """Sessions in which nothing is ever asked."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.closed = False

    async def open_session(self, spec: SessionSpec) -> SessionHandle:
        self.open.append(spec.group)
        return SessionHandle(id=spec.group, api_key="k", base_url="http://proxy/v1")

    async def close_session(self, session_id: str, reward: float, rewards: Any) -> SessionResult:
        self.open.remove(session_id)
        audit = AuditReport(num_rows=0, num_generations=0, num_tokens=0, violations=())
        return SessionResult(
            id=session_id, group=session_id, index=0, metadata={}, reward=reward, rewards=rewards,
            rows=(), images={}, audit=audit, kinds={}, drift={},
        )  # fmt: skip

    async def delete_session(self, session_id: str) -> None:
        await asyncio.sleep(0)
        assert not self.closed, "the proxy is there until the last attempt has ended"
        self.open.remove(session_id)

    async def close(self) -> None:
        self.closed = True


class Proxy:
    def __init__(self) -> None:
        self.stopped = False

    async def stop(self) -> None:
        self.stopped = True


class Runner:
    """Jobs that end when the test says so; takes ``max_concurrent`` at a time where that is given."""

    def __init__(self, **limits: int) -> None:
        self.jobs: list[AgentJob] = []
        self.report: Any = AgentReport(status=AgentStatus.FINISHED, reward=0.0)
        self.may_end = asyncio.Event()
        self.closed = 0
        self.__dict__.update(limits)

    async def run(self, job: AgentJob) -> AgentReport:
        self.jobs.append(job)
        await self.may_end.wait()
        if isinstance(self.report, Exception):
            raise self.report
        return self.report

    async def close(self) -> None:
        self.closed += 1


def shard_of(runner: Runner, **agent: Any) -> ProxyShard:
    proxy: Any = Proxy()
    admin: Any = Admin()
    return ProxyShard(SeamlessConfig(agent=AgentConfig(**agent)), proxy, admin, runner)


def start(group: str) -> asyncio.Task[Any]:
    loop = object.__new__(ProxyAgentLoop)
    loop.config = OmegaConf.create({"actor_rollout_ref": {"model": {"path": "m"}, "rollout": {"response_length": 8}}})
    loop.rollout_config = loop.config.actor_rollout_ref.rollout
    return asyncio.ensure_future(loop.run({}, uid=group, session_id=0))


async def settle() -> None:
    """Until nothing goes on without the test."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("limits", "at_a_time"), [({}, 3), ({"max_concurrent": 2}, 2), ({"max_concurrent": 9}, 3)], ids=str
)
async def test_attempts_wait_for_the_runner_before_their_session_and_deadline_begin(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], at_a_time: int
) -> None:
    runner = Runner(**limits)
    shard = shard_of(runner, max_concurrent=3, deadline_s=5.0)
    monkeypatch.setattr(ProxyShard, "_current", asyncio.ensure_future(asyncio.sleep(0, shard)))
    attempts = [start(f"g{number}") for number in range(5)]
    await settle()
    assert len(runner.jobs) == at_a_time
    assert len(shard.admin.open) == at_a_time, "a session has a deadline as well"
    runner.may_end.set()
    ended = await asyncio.gather(*attempts, return_exceptions=True)
    assert {str(error).partition(". Fix")[0] for error in ended} == {
        "the agent ended without an answer of the model, so there is nothing to train"
    }
    assert [job.deadline_s for job in runner.jobs] == [5.0] * 5


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        (None, "the runner's `run` returned None"),
        (AgentReport(status=AgentStatus.FINISHED, reward=math.nan), "the reward is nan, no finite number"),
        (AgentReport(status=AgentStatus.FINISHED, reward=cast(Any, "0.5")), "the reward is '0.5', no finite number"),
        (AgentReport(status=AgentStatus.FINISHED, reward=cast(Any, None)), "the reward is None, no finite number"),
        (
            AgentReport(status=AgentStatus.FINISHED, reward=1.0, rewards={"passed": math.inf}),
            "the reward's component 'passed' is inf, no finite number",
        ),
    ],
    ids=str,
)
async def test_a_reward_that_is_no_finite_number_is_refused_and_its_session_deleted(
    monkeypatch: pytest.MonkeyPatch, report: Any, problem: str
) -> None:
    runner = Runner()
    runner.report = report
    runner.may_end.set()
    shard = shard_of(runner)
    monkeypatch.setattr(ProxyShard, "_current", asyncio.ensure_future(asyncio.sleep(0, shard)))
    with pytest.raises(RewardRefused, match=re.escape(problem)):
        await start("g0")
    assert not shard.admin.open


async def test_a_runner_that_does_not_return_is_cancelled_and_where_it_waited_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shard = shard_of(Runner(), deadline_s=0.01)
    monkeypatch.setattr(ProxyShard, "_current", asyncio.ensure_future(asyncio.sleep(0, shard)))
    with pytest.raises(RunnerHangs, match=r"had not returned after 0.02 s and .*deadline_s is 0.01") as caught:
        await start("g0")
    assert any(place.endswith("in run: await self.may_end.wait()") for place in places_of(caught.value))
    assert not shard.admin.open


@pytest.mark.parametrize(
    ("why", "status", "detail"),
    [
        (flight.SURPLUS, "surplus", ""),
        (None, "given up", ""),
        (ValueError("no such file\nand more"), "failed", "ValueError: no such file"),
    ],
    ids=str,
)
async def test_an_attempt_that_is_given_up_is_recorded_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: Any, status: str, detail: str
) -> None:
    recorder = FlightRecorder(tmp_path, "worker")
    monkeypatch.setattr(agent_loop, "recorder_of_worker", lambda run_dir: recorder)
    runner = Runner()
    monkeypatch.setattr(ProxyShard, "_current", asyncio.ensure_future(asyncio.sleep(0, shard_of(runner))))
    attempt = start("g0")
    await settle()
    runner.report = why
    runner.may_end.set() if detail else attempt.cancel(why)
    with pytest.raises(ValueError if detail else asyncio.CancelledError):
        await attempt
    recorder.close()
    (event,) = read_recording(tmp_path / FLIGHT).events
    assert isinstance(event, flight.SessionGivenUp)
    assert (event.group, event.index, event.status, event.detail) == ("g0", 0, status, detail)


class SlowAdmin(Admin):
    """Its calls wait for the test; closing fails then, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_close, self.may_delete = asyncio.Event(), asyncio.Event()

    async def close_session(self, session_id: str, reward: float, rewards: Any) -> SessionResult:
        await self.may_close.wait()
        raise ValueError("the proxy is gone")

    async def delete_session(self, session_id: str) -> None:
        await self.may_delete.wait()
        await super().delete_session(session_id)


@pytest.mark.parametrize(
    ("where", "status"), [("run", "surplus"), ("close", "surplus"), ("close fails", "failed")], ids=str
)
async def test_an_attempt_that_is_cancelled_twice_leaves_one_event_and_no_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str, status: str
) -> None:
    recorder = FlightRecorder(tmp_path, "worker")
    monkeypatch.setattr(agent_loop, "recorder_of_worker", lambda run_dir: recorder)
    runner = Runner()
    shard = shard_of(runner)
    shard.admin = admin = SlowAdmin()
    monkeypatch.setattr(ProxyShard, "_current", asyncio.ensure_future(asyncio.sleep(0, shard)))
    attempt = start("g0")
    if where != "run":
        runner.may_end.set()
    await settle()
    admin.may_close.set() if where == "close fails" else attempt.cancel(flight.SURPLUS)
    await settle()
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    closing = asyncio.ensure_future(shard.close())
    await settle()
    admin.may_delete.set()
    await closing
    assert admin.open == []
    recorder.close()
    (event,) = read_recording(tmp_path / FLIGHT).events
    assert isinstance(event, flight.SessionGivenUp)
    assert event.status == status


class RecordingAdmin(Admin):
    """Each session has three rows: a conversation, and two agents beside it; and one of which nothing is trained."""

    async def close_session(self, session_id: str, reward: float, rewards: Any) -> SessionResult:
        edge = ScriptedEdge()
        edge.ask([user("hi")], "a longer answer")
        edge.ask([user("hi there")], "short")
        edge.ask([user("alone")], "x")
        rows = edge.rows()
        seen = structs.replace(rows[0], turns=tuple(structs.replace(turn, trained=False) for turn in rows[0].turns))
        return replace(await super().close_session(session_id, reward, rewards), rows=(*rows, seen))


async def test_each_row_that_is_trained_has_its_reward_and_the_longest_is_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = Runner()
    runner.report = AgentReport(status=AgentStatus.FINISHED, reward=0.25, rewards={"passed": 1.0})
    runner.may_end.set()
    shard = shard_of(runner)
    shard.admin = RecordingAdmin()
    monkeypatch.setattr(ProxyShard, "_current", asyncio.ensure_future(asyncio.sleep(0, shard)))
    outputs = await start("g0")
    assert [output.reward_score for output in outputs] == [0.25] * 3
    assert [output.extra_fields["reward_extra_info"]["passed"] for output in outputs] == [1.0] * 3
    lengths = [len(output.response_ids) for output in outputs]
    assert lengths[-1] == max(lengths) > min(lengths), "verl scores a session by its last row"


async def test_a_closed_worker_leaves_no_attempt_no_agent_and_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    from seamless_verl.verl_adapter.dataloader import rollout_workers
    from seamless_verl.verl_adapter.rollout import proxy_shard

    runner = Runner(max_concurrent=2)
    shard = shard_of(runner)

    async def started(_: ProxyAgentLoop) -> ProxyShard:
        return shard

    at_worker_end = AsyncExitStack()
    monkeypatch.setattr(proxy_shard, "at_worker_end", at_worker_end)
    monkeypatch.setattr(rollout_workers, "at_worker_end", at_worker_end)
    monkeypatch.setattr(ProxyShard, "_start", started)
    monkeypatch.setattr(ProxyShard, "_current", None)
    attempts = [start(f"g{number}") for number in range(3)]
    prompt = asyncio.ensure_future(gathered(attempts))  # as verl runs a prompt
    await settle()
    worker = object.__new__(rollout_workers.NotifyingWorker)
    worker.background_tasks = {prompt}

    await worker.close()

    assert all(attempt.cancelled() for attempt in attempts), "also the one that waited for a place"
    assert prompt.cancelled()
    assert len(runner.jobs) == 2
    assert shard.admin.open == []
    assert runner.closed == 1
    assert shard.admin.closed
    assert shard._proxy.stopped


async def test_a_worker_without_agents_closes_what_it_generates() -> None:
    from seamless_verl.verl_adapter.dataloader import rollout_workers

    prompt = asyncio.ensure_future(asyncio.Event().wait())
    worker = object.__new__(rollout_workers.NotifyingWorker)
    worker.background_tasks = {prompt}
    await worker.close()
    assert prompt.cancelled()


async def gathered(attempts: list[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*attempts, return_exceptions=True)
