"""A place to run commands, through swe-rex: a container per attempt, or a folder on a machine that exists already.

The only module that talks to swe-rex; it is imported on use, so that the trainer's processes never load it.

Invariant: after `stop` nothing of the sandbox is left (container, folder, running command), or `stop` says what may be.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from seamless_verl.errors import ConfigError, MachineError, SeamlessError
from seamless_verl.recipes.swe.real.settings import KEY, MAX_COMMAND_S, SandboxSettings

CONTAINER_LABEL = "seamless-verl-job"
"""Label of every container we start, with the job's token as value."""
INSTALL = "pip install -e '/path/to/clone[swe]'"

# One shell line around every command: a limit that ends the whole process group, and a cap on what is kept of the
# output. $1 seconds, $2 the command, $3 bytes. Arguments, not text: nothing has to be quoted. What stands before the
# line of `_BEGIN` is what an image's .bashrc prints at every start of bash.
_BEGIN = "seamless-verl: the command begins\n"
_WRAPPER = 'set -o pipefail; timeout -k 5 "$1" bash -c "$2" 2>&1 </dev/null | { head -c "$3"; cat > /dev/null; }'
# The same around a long one, which may leave a process behind that holds the output open: what collects the output is
# waited for, but not for long. cat under a limit and not head, which keeps its last 4 KiB to itself until the end.
_LONG = (
    "mkfifo {folder}/pipe; (ulimit -c 0 -f {limit_kib}; exec cat {folder}/pipe > {folder}/out) &"
    " timeout -k 10 {seconds:.1f} bash {folder}/command.sh > {folder}/pipe 2>&1 </dev/null"
    "; code=$?; for _ in {{1..20}}; do kill -0 $! || break; sleep 0.1; done"
    "; echo $code > {folder}/code.part; mv {folder}/code.part {folder}/code"
)
_TIMED_OUT = 124
_KILLED = 137
# From swe-rex's server, where it cannot start a process: the folder or bash is gone, no process id is free, the line is
# too long. By exact type, since those of a lost connection are OSErrors as well.
_UNSTARTABLE = (OSError, BlockingIOError, FileNotFoundError, NotADirectoryError, PermissionError, ValueError)
_END_S = 5.0
_POLL_S = (0.2, 5.0)


class SandboxError(SeamlessError):
    """The sandbox itself failed (did not start, went away): says nothing about the agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What a command left.

    Attributes:
        output: stdout and stderr together, cut at the limit.
        exit_code: its exit status; 124 (137, had it to be killed) when it was stopped by its limit.
        timed_out: True when it was stopped by its limit.
    """

    output: str
    exit_code: int
    timed_out: bool = False


class Sandbox:
    """One deployment of swe-rex.

    Args:
        settings: kind and options.
        image: the task's image; used by the kinds that start one.
        token: the job's token; labels the container and names the scratch folder.

    Attributes:
        scratch: folder for our own files.
        cwd: where commands run.
        base: commit that the agent's work starts from; see `workspace.prepare_workspace`.
    """

    def __init__(self, settings: SandboxSettings, *, image: str, token: str) -> None:
        self._settings = settings
        self._image = image
        self._token = token
        self._deployment: Any = None
        self.scratch = f"/tmp/seamless-swe-{token}"
        self.cwd: str = "/"
        self.base = "HEAD"

    async def start(self) -> None:
        """Start the deployment and make the scratch folder.

        Raises:
            MachineError: swe-rex or a package of the kind is not installed.
            SandboxError: it did not start.
        """
        problems: list[str] = []
        for attempt in range(self._settings.start_attempts):
            await asyncio.sleep(min(attempt, 10))
            self._deployment = build_deployment(self._settings, image=self._image, token=self._token)
            if self._settings.kind == "docker":
                from swerex.utils.wait import _wait_until_alive

                # swe-rex 1.4's own reads the container's output when it gives up, for as long as the container runs.
                wait = partial(_wait_until_alive, self._deployment.is_alive, function_timeout=2.0)
                self._deployment._wait_until_alive = wait
                begin = partial(_start_command, self._deployment._get_swerex_start_cmd)
                self._deployment._get_swerex_start_cmd = begin
            try:
                await self._deployment.start()
                await self.check(f"mkdir -p {self.scratch}")
                drain_output(self._deployment)
                return
            except Exception as error:  # noqa: BLE001 - swe-rex raises whatever the kind's client raises
                problems = [f"{type(error).__name__}: {error}"]
            problems.append(await self._stop_deployment())
        reason = "; ".join(filter(None, problems))[-2000:]
        raise SandboxError(f"sandbox {self._settings.kind} ({self._image or 'no image'}) did not start: {reason}")

    async def stop(self) -> str:
        """Remove the scratch folder and end the deployment; idempotent.

        Returns:
            What may be left, or an empty string. Not an error: the attempt's result stands, and the runner removes
            containers by label.
        """
        problems = []
        if self._deployment is not None and self._settings.shared:
            self.cwd = "/"
            try:
                await self.check(f"rm -rf {self.scratch}", timeout_s=60)
            except SandboxError as error:
                problems.append(f"folder {self.scratch} may be left: {error}")
        problems.append(await self._stop_deployment())
        return "; ".join(filter(None, problems))

    async def ended(self) -> bool:
        """Whether the container has ended by itself, as what runs in it can bring about."""
        process = getattr(self._deployment, "_container_process", None)
        if process is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):  # the client hears of it a little later
            await asyncio.to_thread(process.wait, _END_S)
        # 125: the daemon failed; negative: somebody killed the client.
        return process.returncode is not None and process.returncode >= 0 and process.returncode != 125

    async def run(self, command: str, *, timeout_s: float) -> CommandResult:
        """Run a bash command in `cwd`; a command that fails or hangs is a result, not an error.

        Raises:
            SandboxError: the sandbox did not answer.
        """
        from swerex.exceptions import CommandTimeoutError
        from swerex.runtime.abstract import Command

        seconds = min(timeout_s, MAX_COMMAND_S)
        pairs = [f"{key}={value}" for key, value in self._settings.command_env.items()]
        limit = str(self._settings.output_limit_bytes + len(_BEGIN))
        begun = f"echo '{_BEGIN[:-1]}'\n{command}"
        argv = ["env", *pairs, "bash", "-c", _WRAPPER, "run", f"{seconds:.1f}", begun, limit]
        # A background process that holds the output open outlives the wrapper's limit; the request has one as well.
        started = time.monotonic()
        request = Command(command=argv, cwd=self.cwd, timeout=seconds + 10, merge_output_streams=True)
        try:
            response = await self._deployment.runtime.execute(request)
        except CommandTimeoutError:
            return CommandResult(output="", exit_code=_TIMED_OUT, timed_out=True)
        except Exception as error:
            if type(error) in _UNSTARTABLE:
                return CommandResult(output=f"cannot be started: {type(error).__name__}: {error}", exit_code=126)
            raise SandboxError(f"sandbox did not answer: {type(error).__name__}: {error}") from error
        exit_code = response.exit_code if response.exit_code is not None else 1
        before, begin, output = response.stdout.partition(_BEGIN)
        return CommandResult(
            output=output if begin else before, exit_code=exit_code, timed_out=_late(exit_code, started, seconds)
        )

    async def check(self, command: str, *, timeout_s: float = MAX_COMMAND_S) -> str:
        """Run a command that has to succeed; returns its output.

        Raises:
            SandboxError: it did not.
        """
        result = await self.run(command, timeout_s=timeout_s)
        if result.exit_code != 0:
            raise SandboxError(f"command failed with {result.exit_code}: {command}\n{result.output[-2000:]}")
        return result.output

    async def run_long(self, command: str, *, timeout_s: float) -> CommandResult:
        """Like `run`, for commands that take longer than one request may: started in the background, then polled."""
        folder = f"{self.scratch}/long"
        await self.check(f"rm -rf {folder} && mkdir -p {folder}")
        await self.write(f"{folder}/command.sh", command)
        limit_kib = max(1, self._settings.output_limit_bytes * 10 // 1024)
        line = _LONG.format(folder=folder, seconds=timeout_s, limit_kib=limit_kib)
        started, waited, pause = time.monotonic(), 0.0, _POLL_S[0]
        await self.check(f"setsid nohup bash -c {shlex.quote(line)} >/dev/null 2>&1 </dev/null &")
        while waited < timeout_s + 30:
            code = (await self.run(f"cat {folder}/code 2>/dev/null || true", timeout_s=30)).output.strip()
            if code.isdigit():
                output = await self.read(f"{folder}/out")
                return CommandResult(output=output, exit_code=int(code), timed_out=_late(int(code), started, timeout_s))
            await asyncio.sleep(pause)
            waited, pause = waited + pause, min(pause * 1.5, _POLL_S[1])
        raise SandboxError(f"command did not end {waited:.0f} s after its start, limit {timeout_s:.0f} s")

    async def write(self, path: str, content: str) -> None:
        """Write a text file."""
        from swerex.runtime.abstract import WriteFileRequest

        try:
            await self._deployment.runtime.write_file(WriteFileRequest(path=path, content=content))
        except Exception as error:
            raise SandboxError(f"cannot write {path}: {type(error).__name__}: {error}") from error

    async def read(self, path: str) -> str:
        """Read a text file, bytes that are no UTF-8 replaced."""
        from swerex.runtime.abstract import ReadFileRequest

        request = ReadFileRequest(path=path, encoding="utf-8", errors="replace")
        try:
            return str((await self._deployment.runtime.read_file(request)).content)
        except Exception as error:
            raise SandboxError(f"cannot read {path}: {type(error).__name__}: {error}") from error

    async def _stop_deployment(self) -> str:
        deployment, self._deployment = self._deployment, None
        # A remote server is not ours to stop: it would close the shells of everybody on it.
        if deployment is None or self._settings.kind == "remote":
            return ""
        if self._settings.kind == "docker":
            # The server ends with its container. swe-rex 1.4 asks it first, and skips the container when that fails.
            deployment._runtime = None
        try:
            await deployment.stop()
        except Exception as error:  # noqa: BLE001 - swe-rex raises whatever the kind's client raises
            return f"sandbox did not stop: {type(error).__name__}: {error}"
        return ""


def _start_command(theirs: Callable[[str], list[str]], token: str) -> list[str]:
    """What the container runs. swe-rex 1.4's own, ``server || (install && server)``, begins to install when the agent
    ends the server, instead of ending. Remove when swe-rex asks first."""
    *shell, line = theirs(token)
    server, _, install = line.partition(" || ")
    choice = f"if command -v {server.split()[0]} > /dev/null; then {server}; else {install}; fi"
    return [*shell, choice if install else line]


def _late(exit_code: int, started: float, limit_s: float) -> bool:
    """Whether it was our limit that ended a command: one of its own has the same exit code, but ends it earlier."""
    return exit_code in (_TIMED_OUT, _KILLED) and time.monotonic() - started > limit_s - 0.1  # limits have one decimal


def drain_output(deployment: Any) -> None:
    """Read away what a container prints.

    swe-rex 1.4 starts the container with pipes that nobody reads; the server in it logs every request, and stops at
    about the 900th, when the pipe is full. Remove when swe-rex reads them.
    """
    process = getattr(deployment, "_container_process", None)
    for stream in (process.stdout, process.stderr) if process is not None else ():
        threading.Thread(target=deque, args=(stream,), kwargs={"maxlen": 0}, daemon=True).start()


def build_deployment(settings: SandboxSettings, *, image: str, token: str) -> Any:
    """A swe-rex deployment, not started.

    Raises:
        MachineError: swe-rex, or what the kind needs beside it, is not installed.
        ConfigError: swe-rex refuses the options.
        SandboxError: the kind needs an image and the task names none.
    """
    try:
        return deployment_config(settings, image=image, token=token).get_deployment()
    except ImportError as error:
        extra = f"swe-rex[{settings.kind}]"
        raise MachineError(
            f"swe-rex for {settings.kind}", f"not installed ({error})", f'pip install "{extra}"'
        ) from error


def deployment_config(settings: SandboxSettings, *, image: str, token: str) -> Any:
    """swe-rex's configuration of it; raises as `build_deployment`."""
    try:
        from swerex.deployment import config
    except ImportError as error:
        raise MachineError("swe-rex", f"not installed ({error})", INSTALL) from error
    classes = {
        "local": config.LocalDeploymentConfig,
        "docker": config.DockerDeploymentConfig,
        "remote": config.RemoteDeploymentConfig,
        "modal": config.ModalDeploymentConfig,
        "fargate": config.FargateDeploymentConfig,
        "daytona": config.DaytonaDeploymentConfig,
    }
    options = dict(settings.options)
    if not settings.shared:
        if not image:
            raise SandboxError(
                f"sandbox {settings.kind} starts from an image and the task names none. Fix: prepare the data with "
                "--image-template, or give the records an image_name"
            )
        options["image"] = image
    if settings.kind == "docker":
        options["docker_args"] = [*options.get("docker_args", ()), "--label", f"{CONTAINER_LABEL}={token}"]
    try:
        return classes[settings.kind](**options)
    except ValueError as error:  # pydantic's ValidationError
        raise ConfigError(
            f"{KEY}.sandbox.options", options, f"is refused by swe-rex ({error})", "see its deployment configuration"
        ) from error
