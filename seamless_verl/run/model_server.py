"""A vLLM server of one's own over a model folder, for as long as something is tried with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx

from seamless_verl.agents.ties import die_with_parent
from seamless_verl.errors import MachineError
from seamless_verl.run.environment import cpu_settings

SERVED = "tried"
"""Name under which it serves."""
_START_S = 600.0
_LOOK_S = 0.25
_END_S = 20.0
_LAST_LINES = 12


@contextmanager
def model_server(model: str, flags: Sequence[str], *, on_cpu: bool, log: Path) -> Iterator[str]:
    """Start vLLM, wait until it answers, end it with the block, or with this process.

    Args:
        flags: of vLLM's own server.

    Yields:
        Its address.

    Raises:
        MachineError: it ended before it answered, or never did; quotes the last that it said.
    """
    port = _free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", SERVED, *flags]
    environment = {**(cpu_settings(model) if on_cpu else {}), **os.environ}
    with log.open("wb") as out:
        server = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(server, url, log)
        yield url
    finally:
        _end(server)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until and server.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        time.sleep(_LOOK_S)
    how = "did not answer" if server.poll() is None else f"ended with exit code {server.returncode}"
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LAST_LINES:]
    quoted = "\n    ".join(["it last wrote:", *said]) if said else "it wrote nothing"
    raise MachineError("vLLM", f"{how}; {quoted}", "mend what it says, or name a server of yours with --engine URL")


def _end(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server and all that it started, SIGKILL to what is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with suppress(subprocess.TimeoutExpired):
            server.wait(timeout=_END_S)
