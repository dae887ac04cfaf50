"""`MiniSweRunner`: real software-engineering tasks with mini-swe-agent, for ``seamless.agent.runner``.

::

    job ─► harness process ─ sandbox A: base commit, agent's commands ─► diff ─► sandbox A is gone
             └ model calls to the session's URL                            │
        ─► grade process ── sandbox B (fresh): base commit, diff, tests ◄──┘ ─► reward

This module imports neither swe-rex nor mini-swe-agent: both live in the processes of the attempts.

Invariant: `run` raises only when the machinery failed (sandbox, packages), so that no such failure becomes a reward.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seamless_verl.agents.contract import AgentJob, AgentReport, AgentStatus
from seamless_verl.errors import ConfigError, MachineError
from seamless_verl.recipes.swe.real import protocol
from seamless_verl.recipes.swe.real.child import GRACE_S, Child, ChildTimeout, run_child
from seamless_verl.recipes.swe.real.protocol import GradeRequest, GradeResult, HarnessRequest, HarnessResult
from seamless_verl.recipes.swe.real.sandbox import INSTALL, deployment_config
from seamless_verl.recipes.swe.real.settings import KEY, RunnerSettings
from seamless_verl.recipes.swe.real.task import SweTask

_PACKAGES = {"swerex": "swe-rex", "minisweagent": "mini-swe-agent"}
_PACKAGE = "seamless_verl.recipes.swe.real"

# Ways in which mini-swe-agent ends by itself. Anything else is the name of an error.
_ORDERLY = frozenset({"Submitted", "LimitsExceeded", "RepeatedFormatError", "ContextWindowExceededError"})
# The proxy's words for a budget that is spent; the client's error has the same name where a session asks too often.
_SPENT = re.compile(r"has used its \d+ (turns|tokens)")
_OVERTIME = frozenset({"TimedOut", "TimeExceeded"})


class MiniSweRunner:
    """An `AgentRunner`: one mini-swe-agent per job, in its own process, graded in a sandbox of its own.

    Args:
        options: fields of `RunnerSettings`, as plain data.

    Attributes:
        max_concurrent: attempts that this process may have under way; see `AgentRunner`.

    Raises:
        ConfigError: an option that cannot work.
        MachineError: a package is missing, or Docker is not reachable.
    """

    def __init__(self, **options: Any) -> None:
        self._settings = RunnerSettings.from_mapping(options)
        _check_machine(self._settings)
        self.max_concurrent = self._settings.max_concurrent
        self._jobs: set[asyncio.Task[AgentReport]] = set()
        self._closed = False

    @staticmethod
    def check_options(options: Mapping[str, Any]) -> None:
        """Refuse arguments that cannot work, before anything heavy starts; see `RunnerSettings.from_mapping`."""
        RunnerSettings.from_mapping(options)

    @staticmethod
    def check_machine(options: Mapping[str, Any]) -> None:
        """Refuse a machine that cannot run an attempt.

        Raises:
            ConfigError: an option that cannot work.
            MachineError: names what is missing (swe-rex, mini-swe-agent, Docker where sandboxes need it) and its fix.
        """
        settings = RunnerSettings.from_mapping(options)
        _check_machine(settings)
        deployment_config(settings.sandbox, image="none", token="none")

    @staticmethod
    def check_task(task: Mapping[str, Any]) -> None:
        """Refuse a task that could not be run, before anything heavy starts; see `SweTask.from_mapping`."""
        SweTask.from_mapping(task)

    async def run(self, job: AgentJob) -> AgentReport:
        """Run and grade one attempt within ``job.deadline_s``.

        Raises:
            TaskError: ``job.task`` is no task of `prepare`.
            ConfigError: the deadline leaves the agent no time.
            SandboxError, ChildError: the machinery failed; says nothing about the agent.
        """
        if self._closed:
            raise RuntimeError("MiniSweRunner.run after close")
        work = asyncio.ensure_future(self._attempt(job))
        self._jobs.add(work)
        work.add_done_callback(self._jobs.discard)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait({work})
            raise

    async def close(self) -> None:
        """Cancel what runs and wait until its processes and sandboxes are gone; idempotent."""
        self._closed = True
        jobs = set(self._jobs)
        for work in jobs:
            work.cancel()
        if jobs:
            await asyncio.wait(jobs)

    async def _attempt(self, job: AgentJob) -> AgentReport:
        settings = self._settings
        task = SweTask.from_mapping(job.task)
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + job.deadline_s
        if job.deadline_s <= settings.grade_timeout_s:
            raise ConfigError(
                "seamless.agent.deadline_s",
                job.deadline_s,
                f"leaves the agent no time beside {KEY}.grade_timeout_s={settings.grade_timeout_s:g}",
                "raise the one or lower the other",
            )
        token = secrets.token_hex(8)
        left = await self._run_agent(job, task, token, job.deadline_s - settings.grade_timeout_s)
        grade = await self._grade(task, left.patch, token, ends_at - loop.time())
        return _report(_status(left), grade, settings, _detail(left, grade))

    async def _run_agent(self, job: AgentJob, task: SweTask, token: str, limit_s: float) -> HarnessResult:
        log = self._log(task, token)
        request = HarnessRequest(
            token=f"{token}-agent",
            view=task.agent_view(),
            base_url=job.base_url,
            api_key=job.api_key,
            model=job.model,
            limit_s=max(1.0, limit_s - GRACE_S),
            settings=self._settings,
            trajectory=str(log / "trajectory.json") if log else "",
        )
        child = self._child("harness", request, limit_s, log)
        try:
            return HarnessResult(**await run_child(child))
        except ChildTimeout as error:
            # The process takes the diff before its limit; one that could not was stuck in its sandbox.
            return HarnessResult(ended="TimedOut", patch="", detail=str(error))

    async def _grade(self, task: SweTask, patch: str, token: str, limit_s: float) -> GradeResult:
        request = GradeRequest(
            token=f"{token}-grade", task=task, patch=patch, limit_s=max(1.0, limit_s - GRACE_S), settings=self._settings
        )
        try:
            return GradeResult(**await run_child(self._child("grade", request, limit_s, self._log(task, token))))
        except ChildTimeout as error:
            # The sandbox was ready and the tests have a limit of their own: it is the patch that hangs.
            return GradeResult(num_passed=0, num_tests=len(task.expected) or 1, detail=str(error))

    def _child(self, module: str, request: HarnessRequest | GradeRequest, limit_s: float, log: Path | None) -> Child:
        return Child(
            module=f"{_PACKAGE}.{module}",
            token=request.token,
            request=protocol.dump(request),
            timeout_s=max(limit_s, 1.0),
            forward_env=self._settings.forward_env,
            container_runtime=container_runtime(self._settings),
            log=log / f"{module}.log" if log else None,
        )

    def _log(self, task: SweTask, token: str) -> Path | None:
        folder = self._settings.log_dir
        return Path(folder).absolute() / f"{task.view.instance_id}-{token}" if folder else None


def _check_machine(settings: RunnerSettings) -> None:
    for module, package in _PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            raise MachineError(package, "not installed", INSTALL)
    # mini-swe-agent's own lookup, without its import, and from a folder of the attempt's.
    name = Path(settings.config_name).with_suffix(".yaml")
    if spec := importlib.util.find_spec("minisweagent"):
        own = Path(str(spec.origin)).parent / "config"
        yours = [Path(os.environ.get(key, "")) for key in settings.forward_env if key == "MSWEA_CONFIG_DIR"]
        found = [folder / name for folder in (*yours, own, own / "extra", own / "benchmarks")]
        if not any(path.is_absolute() and path.is_file() for path in found):
            problem, fix = f"mini-swe-agent finds no {name}", "write the absolute path of a .yaml file"
            raise ConfigError(f"{KEY}.harness_config", settings.harness_config, problem, fix)
    if runtime := container_runtime(settings):
        _check_containers(runtime)


def container_runtime(settings: RunnerSettings) -> str:
    """``docker`` or ``podman`` where sandboxes are local containers, else an empty string."""
    if settings.sandbox.kind != "docker":
        return ""
    return str(settings.sandbox.options.get("container_runtime", "docker"))


def _check_containers(runtime: str) -> None:
    fix = f"start it, or set {KEY}.sandbox.kind to remote or modal"
    if shutil.which(runtime) is None:
        raise MachineError(runtime, "not found in PATH", f"install it, or set {KEY}.sandbox.kind to remote or modal")
    try:
        done = subprocess.run([runtime, "ps", "--quiet"], capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired as error:
        raise MachineError(runtime, "does not answer within 30 s", fix) from error
    if done.returncode != 0:
        raise MachineError(runtime, f"not usable ({done.stderr.strip()[-300:]})", fix)


def _detail(left: HarnessResult, grade: GradeResult) -> str:
    return "; ".join(filter(None, (left.detail, grade.detail, left.unclean, grade.unclean)))


def _status(left: HarnessResult) -> AgentStatus:
    if left.ended in _OVERTIME:
        return AgentStatus.TIMED_OUT
    spent = left.ended == "RateLimitError" and _SPENT.search(left.detail)
    return AgentStatus.FINISHED if spent or left.ended in _ORDERLY else AgentStatus.FAILED


def _report(status: AgentStatus, grade: GradeResult, settings: RunnerSettings, detail: str) -> AgentReport:
    share = grade.num_passed / grade.num_tests if grade.num_tests else 0.0
    passed = float(share == 1.0)
    reward = passed if settings.reward == "all" else share
    return AgentReport(status=status, reward=reward, rewards={"passed": passed, "share": share}, detail=detail)
