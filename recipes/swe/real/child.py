"""Processes of one attempt, seen from the runner: start, wait, and leave nothing behind.

::

    spawn ──► request on stdin ──► result file ──► exit 0
      └─ time limit or cancellation ──► SIGTERM (the child ends its sandbox) ──► grace ──► SIGKILL of everything
                                                                                    └──► containers by label

Invariant: when `run_child` returns or raises, no process of the attempt runs on this machine and, for Docker, no
container carries its label.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from seamless_verl.agents.ties import kill_group
from seamless_verl.errors import SeamlessError
from seamless_verl.recipes.swe.real.protocol import OWNER_VARIABLE, READY, TOKEN_VARIABLE
from seamless_verl.recipes.swe.real.sandbox import CONTAINER_LABEL, SandboxError
from seamless_verl.run.supervisor import GRACE, RUN_ID

_LOG = logging.getLogger(__name__)

GRACE_S = 20.0
"""From SIGTERM to SIGKILL: swe-rex may take ten seconds to end a container."""

CLIENT_S = 60.0
"""For one answer of the container client: a daemon that hangs would hang the attempt past every limit."""

_FORWARD = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SSL_CERT_FILE",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
    "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY", "XDG_RUNTIME_DIR",
    "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET", RUN_ID,
)  # fmt: skip


class ChildError(SeamlessError):
    """A process of an attempt ended without a result: the runner, not the agent, is at fault."""


class ChildTimeout(SeamlessError):
    """A process of an attempt was stopped by its time limit, with its sandbox ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """What to run.

    Attributes:
        module: module with a `protocol.serve` entry point.
        token: names the process tree and the containers of this run.
        request: bytes for its stdin.
        timeout_s: wall limit; `GRACE_S` more until everything is killed.
        forward_env: variables to pass on beside paths, locale, proxies and container clients.
        container_runtime: ``docker`` or ``podman`` where containers may have to be removed; empty elsewhere.
        log: file that gets stdout and stderr; ``None`` keeps them only until the end.
    """

    module: str
    token: str
    request: bytes
    timeout_s: float
    forward_env: tuple[str, ...] = ()
    container_runtime: str = ""
    log: Path | None = None


async def run_child(child: Child) -> Mapping[str, Any]:
    """Run it to its end; returns the result it wrote.

    Raises:
        ChildTimeout: stopped by its limit.
        SandboxError: it reports that the sandbox failed, or was stopped by its limit before the sandbox was ready.
        ChildError: it ended without a result, or reports another error; or containers may be left.
    """
    with tempfile.TemporaryDirectory(prefix=f"seamless-swe-{child.token}-") as folder:
        result = Path(folder, "result.json")
        log = child.log or Path(folder, "log.txt")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as sink:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", child.module, str(result),
                stdin=asyncio.subprocess.PIPE, stdout=sink, stderr=sink,
                cwd=folder, env=_environment(child, folder),
            )  # fmt: skip
            try:
                await asyncio.wait_for(process.communicate(child.request), timeout=child.timeout_s)
                return _read(result, child, process.returncode, log)
            except asyncio.TimeoutError as error:
                raise _late(child, Path(folder, READY)) from error
            finally:
                on_its_way = sys.exc_info()[1]
                try:
                    await _leave_nothing(process, child)
                except ChildError as left:
                    if on_its_way is None:
                        raise
                    _LOG.error("%s", left)


def _late(child: Child, ready: Path) -> SeamlessError:
    limit = f"within {child.timeout_s:.0f} s"
    if ready.exists():
        return ChildTimeout(f"{child.module} did not end {limit}")
    not_ready: SeamlessError = SandboxError(f"the sandbox of {child.module} was not ready {limit}")
    return not_ready


async def _leave_nothing(process: asyncio.subprocess.Process, child: Child) -> None:
    """End the process tree. Shielded: a second cancellation must not stop the cleaning."""
    cleaning = asyncio.ensure_future(_clean(process, child))
    try:
        await asyncio.shield(cleaning)
    except asyncio.CancelledError:
        await asyncio.wait({cleaning})
        raise


async def _clean(process: asyncio.subprocess.Process, child: Child) -> None:
    if process.returncode is None:
        process.terminate()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), timeout=GRACE_S)
    kill_group(process.pid)
    await process.wait()
    await asyncio.to_thread(kill_marked, child.token)
    # Whatever the process says: swe-rex 1.4 keeps it to itself when it could not end a container.
    if child.container_runtime:
        await remove_containers(child.container_runtime, child.token)


def kill_marked(token: str) -> None:
    """SIGKILL to every process that inherited ``token``, daemons and other sessions included.

    A loop, because a process can start another one between the look and the kill.
    """
    for _ in range(20):
        found = list(_marked(token))
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()
        psutil.wait_procs(found, timeout=1)
    raise ChildError(f"processes of attempt {token} do not end: {sorted(p.pid for p in _marked(token))}")


def _marked(token: str) -> Iterable[psutil.Process]:
    for process in psutil.process_iter():
        # A zombie, a process of another user and one that just ended cannot be read, and need no killing.
        with contextlib.suppress(psutil.Error):
            if process.environ().get(TOKEN_VARIABLE) == token:
                yield process


async def remove_containers(runtime: str, token: str) -> None:
    """Remove every container labelled with ``token``.

    Raises:
        ChildError: the container client fails, so that containers may be left.
    """
    label = f"label={CONTAINER_LABEL}={token}"
    until = time.monotonic() + CLIENT_S
    while ids := (await _client(runtime, "ps", "--all", "--quiet", "--filter", label)).split():
        try:
            await _client(runtime, "rm", "--force", "--volumes", *ids)
        except ChildError:
            # The client refuses while the daemon removes one by itself (--rm).
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.2)


async def _client(runtime: str, *args: str) -> str:
    process = await asyncio.create_subprocess_exec(
        runtime, *args, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout=CLIENT_S)
    except asyncio.TimeoutError as error:
        process.kill()
        await process.wait()
        problem = f"did not answer within {CLIENT_S:g} s, containers may be left"
        raise ChildError(f"{runtime} {args[0]} {problem}") from error
    if process.returncode != 0:
        raise ChildError(f"{runtime} {args[0]} failed, containers may be left: {err.decode(errors='replace').strip()}")
    return out.decode()


def _environment(child: Child, folder: str) -> dict[str, str]:
    """Little of ours: keys and tokens of the trainer are none of the agent's business."""
    wanted = {*_FORWARD, *child.forward_env}
    return {
        **{name: value for name, value in os.environ.items() if name in wanted},
        TOKEN_VARIABLE: child.token,
        OWNER_VARIABLE: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else every import fetches a price list
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_GLOBAL_CONFIG_DIR": folder,  # else the user's own keys and limits are loaded
        "MSWEA_COST_TRACKING": "ignore_errors",
        # A retry is a new sample. What may be repeated (429, a lost connection) the OpenAI client repeats itself.
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
        GRACE: str(GRACE_S),  # also from the supervisor, which ends what a killed runner leaves
    }


def _read(result: Path, child: Child, returncode: int | None, log: Path) -> Mapping[str, Any]:
    if not result.exists():
        tail = log.read_bytes()[-2000:].decode(errors="replace").strip()
        raise ChildError(f"{child.module} ended with {returncode} and no result: {tail}")
    answer = json.loads(result.read_text(encoding="utf-8"))
    if "error" in answer:
        kind, message = answer["error"]["type"], answer["error"]["message"]
        raise SandboxError(message) if kind == SandboxError.__name__ else ChildError(message)
    outcome: Mapping[str, Any] = answer["result"]
    return outcome
