"""What the runner and the processes of one attempt tell each other: JSON in on stdin, JSON out in a file.

Stdout is no channel: swe-rex prints to it. The key of the session travels on stdin, so that it is in no process list
and in no environment that the agent's commands inherit.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seamless_verl.agents.ties import die_with_owner
from seamless_verl.errors import SeamlessError
from seamless_verl.recipes.swe.real.settings import RunnerSettings, SandboxSettings
from seamless_verl.recipes.swe.real.task import AgentView, SweTask

TOKEN_VARIABLE = "SEAMLESS_SWE_JOB"
"""Set in every process of an attempt: what the runner looks for when it cleans up behind one."""

OWNER_VARIABLE = "SEAMLESS_SWE_OWNER"
"""Process id of the runner, whose death ends the processes of its attempts as SIGTERM does."""

READY = "ready"
"""File beside the result: the sandbox is ready, so that running out of time is the agent's doing from here on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessRequest:
    """One run of the agent. Holds no test and no solution, by type.

    Attributes:
        token: the job's token.
        view: the task as the agent may see it.
        base_url: OpenAI-style URL of the session.
        api_key: the session's key.
        model: model name for requests.
        limit_s: seconds for start, agent and diff together.
        settings: the runner's settings.
        trajectory: file that the harness keeps its messages in, or empty.
    """

    token: str
    view: AgentView
    base_url: str
    api_key: str
    model: str
    limit_s: float
    settings: RunnerSettings
    trajectory: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessResult:
    """What the agent left.

    Attributes:
        ended: how, in mini-swe-agent's word (``Submitted``, ``LimitsExceeded``), ``TimedOut`` or an error's name.
        patch: the submitted diff, or what changed in the repository where none was submitted.
        detail: the error in one line, or empty.
        unclean: what the sandbox may have left behind, or empty.
    """

    ended: str
    patch: str
    detail: str = ""
    unclean: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeRequest:
    """One grading.

    Attributes:
        token: the job's token.
        task: the task with its tests.
        patch: the agent's diff.
        limit_s: seconds for start and tests together; a test command that runs longer is stopped.
        settings: the runner's settings.
    """

    token: str
    task: SweTask
    patch: str
    limit_s: float
    settings: RunnerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeResult:
    """The grade.

    Attributes:
        num_passed: tests that had to pass and did.
        num_tests: tests that had to pass.
        detail: what a person wants to know first.
        exit_code: of the test command; ``None`` when it was not run.
        unclean: what the sandbox may have left behind, or empty.
    """

    num_passed: int
    num_tests: int
    detail: str = ""
    exit_code: int | None = None
    unclean: str = ""


def dump(message: HarnessRequest | GradeRequest) -> bytes:
    """A request as it goes over stdin."""
    return json.dumps(dataclasses.asdict(message)).encode()


def load_harness_request(raw: bytes) -> HarnessRequest:
    """Inverse of `dump`."""
    data = json.loads(raw)
    view = AgentView(**data.pop("view"))
    return HarnessRequest(view=view, settings=_settings(data.pop("settings")), **data)


def load_grade_request(raw: bytes) -> GradeRequest:
    """Inverse of `dump`."""
    data = json.loads(raw)
    task = data.pop("task")
    task.update(task.pop("view"))
    return GradeRequest(task=SweTask.from_mapping(task), settings=_settings(data.pop("settings")), **data)


def serve(main: Callable[[bytes], Awaitable[HarnessResult | GradeResult]]) -> int:
    """Entry point of an attempt's process: request from stdin, result to the file named on the command line.

    SIGTERM, and on Linux the end of the runner's process as well, cancels ``main``, so that its ``finally`` blocks end
    the sandbox. An error that we raise on purpose goes into the result; anything else ends the process with its
    traceback in the log.
    """
    die_with_owner(OWNER_VARIABLE, signal.SIGTERM)
    target = Path(sys.argv[1])
    raw = sys.stdin.buffer.read()
    code = 0
    try:
        result = asyncio.run(_until_signal(main(raw)))
        answer: Mapping[str, Any] = {"result": dataclasses.asdict(result)}
    except SeamlessError as error:
        answer, code = {"error": {"type": type(error).__name__, "message": str(error)}}, 1
    partial = target.with_suffix(".part")
    partial.write_text(json.dumps(answer), encoding="utf-8")
    partial.replace(target)
    return code


def mark_ready() -> None:
    """Tell the runner, by `READY`, that the sandbox is up with the repository in it."""
    Path(sys.argv[1]).with_name(READY).touch()


async def _until_signal(main: Awaitable[HarnessResult | GradeResult]) -> HarnessResult | GradeResult:
    task = asyncio.ensure_future(main)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    finally:
        with contextlib.suppress(ValueError):
            loop.remove_signal_handler(signal.SIGTERM)


def _settings(data: dict[str, Any]) -> RunnerSettings:
    sandbox = SandboxSettings(**data.pop("sandbox"))
    for name in ("protected_paths", "forward_env"):
        data[name] = tuple(data[name])
    return RunnerSettings(sandbox=sandbox, **data)
