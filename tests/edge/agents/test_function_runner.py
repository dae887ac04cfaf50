"""Agents that are functions, in real worker processes: each way in which one may end."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from seamless_verl.agents import agent_pool, function_runner
from seamless_verl.agents.agent_pool import JobFailed, JobTimedOut
from seamless_verl.agents.contract import AgentJob, AgentReport, AgentStatus, RewardRefused
from seamless_verl.agents.function_runner import FunctionRunner

INSTALLED = (".local/lib/python3.11/site-packages", "usr/lib/python3/dist-packages")
TASK = """
import asyncio, os, subprocess, sys, threading
server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]); print("for people", flush=True)
def attempt(task, base_url, api_key, model):
    if task["way"] == "returns":
        return [base_url, api_key, model]
    if task["way"] == "asks people":
        ask = [sys.executable, "-c", "input()"]
        return [str(subprocess.run(ask, timeout=20).returncode)]
    if task["way"] == "tells its path":
        raise LookupError(f"|{os.environ['PYTHONPATH']}|")
    if task["way"] == "raises":
        raise LookupError("no such thing")
    if task["way"] in ("blocks", "both block"):
        threading.Event().wait()
    if task["way"] == "is cancelled":
        raise asyncio.CancelledError
    if task["way"] == "dies":
        print("my last words")
        os._exit(7)

def score(task, outcome):
    if task["way"] == "no reward":
        return float("nan")
    if task["way"] == "both block":
        threading.Event().wait()
    if task["way"] == "grade exits":
        sys.exit(3)
    if task["way"] == "no grade":
        return outcome["passed"]
    return {"reward": 0.0 if outcome is None else 1.0, "length": len(outcome or "")}
"""


@pytest.fixture
async def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FunctionRunner]:
    (tmp_path / "their_task.py").write_text(TASK)
    (tmp_path / "clone").mkdir()
    for name in INSTALLED:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "editable.pth").write_text(f"# a comment\nimport sys\n{tmp_path / 'clone'}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "target" / "site-packages"), prepend=os.pathsep)
    monkeypatch.setattr(
        sys,
        "path",
        [
            str(tmp_path),
            str(tmp_path / "target" / "site-packages"),
            *sys.path,
            *(str(tmp_path / n) for n in (*INSTALLED, "clone")),
        ],
    )
    runner = FunctionRunner(agent="their_task.attempt", reward="their_task.score", threads=1)
    yield runner
    pids = runner._pool.pids
    theirs = [child for pid in pids for child in psutil.Process(pid).children()]  # what the module started
    assert len(theirs) == len(pids)
    await runner.close()
    assert not any(map(psutil.pid_exists, pids))
    assert psutil.wait_procs(theirs, timeout=10)[1] == []


async def run(runner: FunctionRunner, way: str, deadline_s: float = 60.0) -> AgentReport:
    job = AgentJob(task={"way": way}, base_url="http://a/v1", api_key="k", model="m", deadline_s=deadline_s)
    return await runner.run(job)


async def test_every_end_of_an_attempt_is_graded_or_refused(
    runner: FunctionRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_pool, "_FORGET_S", 0.2)
    good = await run(runner, "returns")
    assert (good.status, good.reward, good.rewards) == (AgentStatus.FINISHED, 1.0, {"length": 3.0})
    raised = await run(runner, "raises")
    assert (raised.status, raised.reward, raised.rewards) == (AgentStatus.FAILED, 0.0, {"length": 0.0})
    assert "LookupError: no such thing in /" in raised.detail
    assert "their_task.py:13 in attempt" in raised.detail
    died = await run(runner, "dies")
    assert (died.status, died.reward) == (AgentStatus.FAILED, 0.0)
    assert "status 7" in died.detail
    assert "my last words" in died.detail
    # The only thread hangs for good: the worker is replaced, which the grade after it waits for.
    blocked = await run(runner, "blocks", deadline_s=1.0)
    assert (blocked.status, blocked.reward) == (AgentStatus.TIMED_OUT, 0.0)
    assert "their_task.py:15 in attempt: threading.Event().wait()" in blocked.detail
    with monkeypatch.context() as quickly:
        quickly.setattr(function_runner, "_GRADE_S", 1.5)
        story = r"1\.0 s; it stands in .* in attempt: .*; nor came its reward: no result after 1\.5 s; it"
        with pytest.raises(JobTimedOut, match=story):
            await run(runner, "both block", deadline_s=1.0)
    with pytest.raises(RewardRefused, match="the reward is nan"):
        await run(runner, "no reward")
    with pytest.raises(JobFailed, match=r"TypeError: .*their_task.py:\d+ in score"):
        await run(runner, "no grade")
    with pytest.raises(JobFailed, match=r"SystemExit: 3 in .*their_task.py:\d+ in score"):
        await run(runner, "grade exits")
    cancelled = await run(runner, "is cancelled")
    assert (cancelled.status, cancelled.reward) == (AgentStatus.FAILED, 0.0)
    assert "CancelledError" in cancelled.detail
    assert (await run(runner, "returns")).reward == 1.0


async def test_what_an_attempt_starts_cannot_read_the_jobs_of_others(runner: FunctionRunner) -> None:
    """Nor what its module started: the pipe would be open in it, and it would wait there for a line of input."""
    asked = await run(runner, "asks people")
    assert (asked.status, asked.rewards) == (AgentStatus.FINISHED, {"length": 1.0})  # ended at once, with an EOFError
    (worker,) = runner._pool.pids
    (server,) = psutil.Process(worker).children()
    for number in (0, 1):
        pipe = os.readlink(f"/proc/{server.pid}/fd/{number}")
        assert pipe in ("/dev/null", os.readlink(f"/proc/{worker}/fd/2"))


async def test_another_python_that_an_attempt_starts_does_not_find_the_trainers_packages(
    runner: FunctionRunner, tmp_path: Path
) -> None:
    found = (await run(runner, "tells its path")).detail.split("|")[1].split(os.pathsep)
    assert found[:2] == [str(tmp_path), str(tmp_path / "target" / "site-packages")]
    assert not {str(tmp_path / name) for name in (*INSTALLED, "clone")} & set(found)
    assert not {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} & set(found)
