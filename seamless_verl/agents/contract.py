"""The interface between the trainer's side and an agent runner.

A runner is created once per rollout worker process and runs many jobs at the same time. The agent it starts lives
outside that process and is handed a base URL and an API key; how the work is graded is the runner's business, not
the agent's.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

from seamless_verl.errors import SeamlessError

RUNNER_DEADLINES = 2.0  # of a job, until its runner is cancelled: it grades after the agent's end


class AgentStatus(Enum):
    FINISHED = "finished"
    TIMED_OUT = "timed_out"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentJob:
    """One attempt of one agent at one task.

    Attributes:
        task: the task as JSON-compatible data (column ``extra_info.task`` of the dataset, decoded).
        base_url: OpenAI-style base URL, e.g. ``http://127.0.0.1:8123/v1``.
        api_key: the session's key; it alone identifies the session.
        model: model name to put into requests.
        deadline_s: seconds that the attempt may take in all.
    """

    task: Mapping[str, Any]
    base_url: str
    api_key: str
    model: str
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """Outcome of a job, graded by the runner.

    Attributes:
        status: how the agent ended; a ``TIMED_OUT`` or ``FAILED`` attempt is still graded on what it left behind.
        reward: scalar reward.
        rewards: named components (``passed`` is 1.0 when every test passed); same keys for every job of a runner.
        detail: one line for people, e.g. the last error.
    """

    status: AgentStatus
    reward: float
    rewards: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""


class AgentRunner(Protocol):
    """Starts agents and grades what they leave behind.

    The class is called with ``seamless.agent.kwargs``, in every rollout worker, when all replicas have been loaded. So
    that what cannot work is refused long before that, a class may define any of these static methods; they start
    nothing, and raise `SeamlessError` (called in the user's process by `seamless_verl.run.check_references`):

    * ``check_options(options)``: on arguments that the constructor would refuse. Names that its signature does not have
      are refused without it.
    * ``check_machine(options)``: on what this machine lacks; called where rollout workers run on the machine that
      starts the run, not where it joins a cluster.
    * ``check_task(task)``: on a task of the data that could not be run.

    A runner that cannot take any number of jobs at a time says so in an attribute ``max_concurrent`` (see `max_jobs`)
    and never lets a job wait itself: the deadline of a job runs as soon as `run` is called.
    """

    async def run(self, job: AgentJob) -> AgentReport:
        """Run one job to its end. Raises only when the runner itself is broken, never because an agent failed.

        What it raises fails the attempt, and with it the group. A job that takes `RUNNER_DEADLINES` is cancelled.
        """
        ...

    async def close(self) -> None:
        """End every process that the runner started; idempotent.

        Called at the end of a run, however it ends, when the jobs under way have been cancelled; 30 s later the
        process is killed.
        """
        ...


class RewardRefused(SeamlessError):
    """A reward that is no finite number; its attempt fails instead of being trained."""


def checked_reward(value: Any, name: str = "the reward") -> float:
    """``value`` as a number.

    Raises:
        RewardRefused: it is text, nothing, infinite or undefined.
    """
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardRefused(f"{name} is {value!r}, no finite number. Fix: return a float, 0.0 where there is nothing")
    return number


def checked_report(report: Any) -> AgentReport:
    """What `AgentRunner.run` returned, its rewards as Python's own numbers, which travel as JSON.

    Raises:
        RewardRefused: it is no report, or one of its rewards is no finite number.
    """
    if not isinstance(report, AgentReport):
        raise RewardRefused(f"the runner's `run` returned {report!r}. Fix: return an AgentReport")
    rewards = {name: checked_reward(one, f"the reward's component {name!r}") for name, one in report.rewards.items()}
    return replace(report, reward=checked_reward(report.reward), rewards=rewards)


def runner_class(name: str) -> type[AgentRunner]:
    """The class of ``seamless.agent.runner``, by its full name.

    Raises:
        ImportError, AttributeError, ValueError: there is none.
    """
    module, _, of_class = name.rpartition(".")
    found: type[AgentRunner] = getattr(importlib.import_module(module), of_class)
    return found


def max_jobs(runner: AgentRunner, limit: int | None) -> int:
    """Jobs that ``runner`` may have under way in this process: ``limit`` (None: any number), or its own
    ``max_concurrent`` if smaller.

    The caller of `AgentRunner.run` holds further jobs back, so that their deadlines do not run meanwhile.
    """
    most = sys.maxsize if limit is None else limit
    return min(most, getattr(runner, "max_concurrent", most))
