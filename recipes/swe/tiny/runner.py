"""Runs the tiny agent in the pool and grades the file it leaves, with the task's own tests, on this side.

The agent gets a workspace with the source and the test file, the endpoint and the key. How the bug was made stays here,
and so do the tests that count: an agent that edits the test file changes nothing but its own view.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seamless_verl.agents.agent_pool import AgentPool, JobFailed, JobTimedOut, WorkerDied
from seamless_verl.agents.contract import AgentJob, AgentReport, AgentStatus
from seamless_verl.errors import ConfigError
from seamless_verl.recipes.swe.tiny.sandbox import Limits, Sandbox, TestRun

_AGENT = (sys.executable, "-m", "seamless_verl.recipes.swe.tiny.agent")
_MAX_SOURCE_BYTES = 1 << 16
_AGENT_SHARE = 0.95  # of the deadline: so that the agent ends by itself, and can say how many turns it had
_STATUS = {"failed": AgentStatus.FAILED, "deadline": AgentStatus.TIMED_OUT, "forgotten": AgentStatus.TIMED_OUT}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicTask:
    """The part of a task that the agent may see, checked."""

    source_file: str
    source: str
    test_file: str
    tests: str

    @classmethod
    def parse(cls, task: Mapping[str, Any]) -> PublicTask:
        """Raises ``ConfigError`` naming the key of the dataset that is missing or cannot work."""
        fields = {name: _text(task, name) for name in ("source_file", "source", "test_file", "tests", "test_command")}
        for name in ("source_file", "test_file"):
            if not (fields[name].endswith(".py") and fields[name][:-3].isidentifier()):
                raise _error(name, fields[name], "is no plain name of a Python file", "write a name such as clamp.py")
        command = fields.pop("test_command")
        expected = f"python {fields['test_file']}"
        if command.split() != expected.split():
            raise _error("test_command", command, "is not a command that the sandbox can run", f"write {expected!r}")
        if "def test_" not in fields["tests"]:
            raise _error("tests", "…", "has no test function", "write functions whose names begin with test_")
        return cls(**fields)


def _text(task: Mapping[str, Any], name: str) -> str:
    value = task.get(name)
    if not isinstance(value, str) or not value.strip():
        raise _error(
            name, value, "is missing or no text", "build the dataset with seamless_verl.recipes.swe.tiny.assets"
        )
    return value


def _error(name: str, value: object, problem: str, fix: str) -> ConfigError:
    return ConfigError(f"extra_info.task.{name}", value, problem, fix)


class TinySweRunner:
    """An ``AgentRunner`` for the tiny software-engineering task.

    Args:
        processes: agent processes.
        threads: attempts that one of them works on at a time.
        max_turns: answers per attempt.
        max_tokens: tokens per answer.
        cpu_per_test_s: CPU seconds that the code under test may use in one test.
        test_wall_s: wall-clock seconds of one run of all tests.
        temperature: sampling temperature that the agent asks for; ``None`` leaves it to the endpoint.

    The reward is the share of tests passed. Components: ``passed`` (1.0 when all were), ``share``, ``turns`` (answers
    received), ``valid_edits`` (share of the answers that were edits).
    """

    def __init__(
        self,
        *,
        processes: int = 2,
        threads: int = 64,
        max_turns: int = 3,
        max_tokens: int = 24,
        cpu_per_test_s: float = 0.1,
        test_wall_s: float = 10.0,
        temperature: float | None = None,
    ) -> None:
        for name, value in (("max_turns", max_turns), ("max_tokens", max_tokens), ("processes", processes)):
            if value < 1:
                raise ConfigError(f"runner.{name}", value, "must be positive", "write 1 or more")
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._temperature = temperature
        self.max_concurrent = processes * threads  # who admits jobs is told; in the pool their deadline would run
        self._sandbox = Sandbox(limits=Limits(cpu_per_test_s=cpu_per_test_s, wall_s=test_wall_s))
        self._root = tempfile.mkdtemp(prefix="tiny-swe-")
        inside = {"TMPDIR": self._root}  # agents are killed, and leave their sandbox's folder
        self._pool = AgentPool(_AGENT, processes=processes, threads=threads, environment=inside)
        self._graders = ThreadPoolExecutor(1, thread_name_prefix="grade")
        self._closed = False

    @staticmethod
    def check_task(task: Mapping[str, Any]) -> None:
        """Refuse a task that could not be run, before anything heavy starts; see `PublicTask.parse`."""
        PublicTask.parse(task)

    async def run(self, job: AgentJob) -> AgentReport:
        """Run and grade one attempt. Raises ``ConfigError`` for a malformed task, before the model is asked."""
        task = PublicTask.parse(job.task)
        folder = Path(tempfile.mkdtemp(dir=self._root))
        try:
            (folder / task.source_file).write_text(task.source, encoding="utf-8")
            (folder / task.test_file).write_text(task.tests, encoding="utf-8")
            status, outcome = await self._attempt(job, task, folder)
            graded = await asyncio.get_running_loop().run_in_executor(self._graders, self._grade, task, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        turns = int(outcome.get("turns", 0))
        rewards = {
            "passed": float(graded.all_passed),
            "share": graded.share,
            "turns": float(turns),
            "valid_edits": int(outcome.get("valid_edits", 0)) / turns if turns else 0.0,
        }
        return AgentReport(status=status, reward=graded.share, rewards=rewards, detail=str(outcome.get("detail", "")))

    async def _attempt(self, job: AgentJob, task: PublicTask, folder: Path) -> tuple[AgentStatus, dict[str, Any]]:
        payload = {
            "folder": str(folder),
            "source_file": task.source_file,
            "test_file": task.test_file,
            "base_url": job.base_url,
            "api_key": job.api_key,
            "model": job.model,
            "max_turns": self._max_turns,
            "max_tokens": self._max_tokens,
            "deadline_s": job.deadline_s * _AGENT_SHARE,
            "temperature": self._temperature,
        }
        try:
            outcome: dict[str, Any] = await self._pool.run(payload, timeout=job.deadline_s)
        except JobTimedOut as error:
            return AgentStatus.TIMED_OUT, {"detail": str(error)}
        except (JobFailed, WorkerDied) as error:
            return AgentStatus.FAILED, {"detail": str(error)}
        return _STATUS.get(outcome["ended"], AgentStatus.FINISHED), outcome

    def _grade(self, task: PublicTask, folder: Path) -> TestRun:
        """Run the task's tests against the file as it lies in the workspace; no readable file means an empty one."""
        return self._sandbox.run(
            source_file=task.source_file,
            source=_read_source(folder / task.source_file),
            test_file=task.test_file,
            tests=task.tests,
        )

    async def close(self) -> None:
        """End the agents and the sandbox; idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._pool.close()
        await asyncio.get_running_loop().run_in_executor(None, self._graders.shutdown)
        self._sandbox.close()
        shutil.rmtree(self._root, ignore_errors=True)


def _read_source(path: Path) -> str:
    """What the agent left, read without following links or reading more than any honest file holds."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(handle, "rb") as file:
        return file.read(_MAX_SOURCE_BYTES).decode("utf-8", "replace")
