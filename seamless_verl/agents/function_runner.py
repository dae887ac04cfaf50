"""Runs an agent that is one Python function, and grades it with another one.

::

    rollout worker: FunctionRunner ── AgentPool ──► worker process: agent(task, …) ─► outcome ─► reward(task, outcome)

The two functions are all that a user writes (docs/your-agent.md)::

    def attempt(task, base_url, api_key, model): ...   # may be `async def`; returns whatever the reward looks at
    def score(task, outcome): ...                      # a number, or {"reward": a number, "passed": 1.0, …}

Invariant: a reward comes from ``score`` or the attempt fails. Where the agent raised or ran out of time, ``outcome`` is
``None``, and ``score`` decides what that is worth.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from seamless_verl.agents.agent_pool import OWNER, AgentPool, JobTimedOut, WorkerDied, serve, take_pipes
from seamless_verl.agents.contract import AgentJob, AgentReport, AgentStatus, RewardRefused, checked_reward
from seamless_verl.agents.ties import die_with_owner
from seamless_verl.errors import ConfigError, meant
from seamless_verl.places import error_in_words, is_installed, places_of

_KEY = "seamless.agent.kwargs"
_GRADE_S = 60.0  # for the reward of an attempt that left no outcome
_OWN = re.compile(rf"({re.escape(sys.prefix)}|{re.escape(sys.base_prefix)})/(local/)?lib(64)?/python[\d.]")
_ARGUMENTS = {"agent": ("task", "base_url", "api_key", "model"), "reward": ("task", "outcome")}


class FunctionRunner:
    """An `AgentRunner` for two functions of the user's.

    Args:
        agent: full name of the agent's function, e.g. ``my_task.agent.attempt``.
        reward: full name of the reward's function, e.g. ``my_task.reward.score``.
        processes: worker processes of each rollout worker.
        threads: attempts that one of them runs at a time.
    """

    def __init__(self, *, agent: str, reward: str, processes: int = 1, threads: int = 32) -> None:
        self.max_concurrent = processes * threads  # more jobs are not admitted: in the pool their deadline would run
        command = (sys.executable, "-m", __name__, agent, reward)
        # Workers find the functions where this process does. What its interpreter brings is left out: another one that
        # an agent starts (for the tests of a project) must not look there.
        path = {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path if not _is_brought(entry))}
        self._pool = AgentPool(command, processes=processes, threads=threads, environment=path)

    @staticmethod
    def check_options(options: Mapping[str, Any]) -> None:
        """Refuse functions that cannot be imported, or called as they will be; imports both."""
        for key, arguments in _ARGUMENTS.items():
            if key in options:
                _check_call(key, str(options[key]), _function(key, str(options[key])), arguments)
        for key in ("processes", "threads"):
            value = options.get(key, 1)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{_KEY}.{key}", value, "is no positive whole number", "write 1 or more")

    async def run(self, job: AgentJob) -> AgentReport:
        """Run and grade one attempt.

        Raises:
            RewardRefused: the reward is no finite number.
            JobFailed: the reward's function raised; the message names its lines.
            JobTimedOut: the reward's function did not return, or was not begun.
        """
        task = dict(job.task)
        payload = {"task": task, "base_url": job.base_url, "api_key": job.api_key, "model": job.model}
        status, detail = AgentStatus.FINISHED, ""
        try:
            told = await self._pool.run(payload, timeout=job.deadline_s)
        except (JobTimedOut, WorkerDied) as error:
            status = AgentStatus.TIMED_OUT if isinstance(error, JobTimedOut) else AgentStatus.FAILED
            detail = str(error)
            try:
                told = await self._graded(task)
            except JobTimedOut as late:
                raise JobTimedOut(f"{detail}; nor came its reward: {late}") from late
        if "refused" in told:
            raise RewardRefused(told["refused"])
        if "failed" in told:
            status, detail = AgentStatus.FAILED, told["failed"]
        rewards = told["rewards"]
        return AgentReport(status=status, reward=rewards.pop("reward"), rewards=rewards, detail=detail)

    async def _graded(self, task: Mapping[str, Any]) -> Any:
        """The reward of an attempt that left no outcome."""
        try:
            return await self._pool.run({"task": task}, timeout=_GRADE_S)
        except WorkerDied:  # the pool ended it, since all of its threads hung
            return await self._pool.run({"task": task}, timeout=_GRADE_S)

    async def close(self) -> None:
        await self._pool.close()


def _is_brought(entry: str) -> bool:
    """Whether an interpreter like this one has it in its path by itself."""
    if _OWN.match(entry):
        return True
    if entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):  # also where it is installed, e.g. by pip --target
        return False
    return is_installed(entry) or entry in _of_editable_installs(tuple(sys.path))


@cache
def _of_editable_installs(path: tuple[str, ...]) -> set[str]:
    files = [file for folder in path if is_installed(folder) for file in Path(folder).glob("*.pth")]
    return {line.strip() for file in files for line in file.read_text(errors="replace").splitlines()}


def _function(key: str, name: str) -> Callable[..., Any]:
    """The function of that name.

    Raises:
        ConfigError: there is none, or its module raises when it is imported.
    """
    module, _, attribute = name.rpartition(".")
    full_key, top = f"{_KEY}.{key}", module.partition(".")[0] or "it"
    try:
        found = importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ValueError) or (isinstance(error, ModuleNotFoundError) and _names(error, module)):
            fix = f"write MODULE.FUNCTION, and start the command in the folder that holds {top}"
            raise ConfigError(full_key, name, f"cannot be imported ({error})", fix) from error
        problem = f"its module raises {error_in_words(error)} ({' | '.join(places_of(error))})"
        raise ConfigError(full_key, name, problem, "mend it there") from error
    functions = {known: value for known, value in vars(found).items() if callable(value)}
    if attribute not in functions:
        raise ConfigError(full_key, name, f"{found.__file__} has no such function", meant(attribute, functions))
    return functions[attribute]  # type: ignore[no-any-return]


def _names(error: ModuleNotFoundError, module: str) -> bool:
    """Whether it is the module itself that was not found, and not one that it imports."""
    return f"{module}.".startswith(f"{error.name}.")


def _check_call(key: str, name: str, function: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    """Raise where a function cannot be called with these names."""
    try:
        inspect.signature(function).bind(**dict.fromkeys(arguments))
    except TypeError as error:
        fix = f"write def {name.rpartition('.')[2]}({', '.join(arguments)})"
        raise ConfigError(f"{_KEY}.{key}", name, f"cannot be called: {error}", fix) from error


def graded(agent: Callable[..., Any], reward: Callable[..., Any], payload: Mapping[str, Any]) -> dict[str, Any]:
    """One attempt, or with the task alone its reward without an outcome; what the reward raises is let through.

    Returns:
        ``rewards``: ``reward`` and the other components; ``failed``: what the agent raised, with its lines;
        ``refused``: why the reward is none.
    """
    task, told, outcome = payload["task"], dict[str, Any](), None
    if "base_url" in payload:
        try:
            outcome = agent(**{name: payload[name] for name in _ARGUMENTS["agent"]})
            if inspect.iscoroutine(outcome):
                outcome = asyncio.run(outcome)
        except BaseException as error:  # noqa: BLE001 - told as the end of this attempt, with the user's lines
            outcome, lines = None, " | ".join(reversed(places_of(error)))
            told["failed"] = f"{error_in_words(error)} in {lines}"
    value = reward(task=task, outcome=outcome)
    components = dict(value) if isinstance(value, Mapping) else {"reward": value}
    try:
        if "reward" not in components:
            raise RewardRefused(f"the reward is {value!r}, without the key reward. Fix: return {{'reward': 0.0, …}}")
        told["rewards"] = {
            str(name): checked_reward(one, "the reward" if name == "reward" else f"the reward's component {name!r}")
            for name, one in components.items()
        }
    except RewardRefused as error:
        return {"refused": str(error)}
    return told


def main() -> None:
    """The worker: ``python -m seamless_verl.agents.function_runner AGENT REWARD``."""
    die_with_owner(OWNER)  # before the imports: what they start is of its group, ends with it, and has no pipe of ours
    pipes = take_pipes()
    agent, reward = (_function(key, name) for key, name in zip(_ARGUMENTS, sys.argv[1:3], strict=True))

    def handle(payload: dict[str, Any], _: threading.Event) -> dict[str, Any]:
        return graded(agent, reward, payload)

    serve(handle, pipes)


if __name__ == "__main__":
    main()
