"""Processes of an attempt and the end of the runner's process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from seamless_verl.recipes.swe.real.protocol import OWNER_VARIABLE, TOKEN_VARIABLE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes learn of their parent's death on Linux only")

CHILD = """
import asyncio, sys
from seamless_verl.recipes.swe.real import protocol

async def main(raw):
    with open(raw.decode(), "w") as told:
        told.write("started\\n")
        told.flush()
        try:
            await asyncio.Event().wait()
        finally:
            told.write("sandbox ended\\n")

if __name__ == "__main__":
    sys.exit(protocol.serve(main))
"""
RUNNER = """
import asyncio, sys
from seamless_verl.recipes.swe.real.child import Child, run_child

asyncio.run(run_child(Child(module="attempt", token=sys.argv[1], request=sys.argv[2].encode(), timeout_s=600)))
"""


@pytest.fixture
def token(tmp_path: Path) -> Iterator[str]:
    """Of the attempt; whatever a failed test leaves is ended."""
    name = f"owner-{os.getpid()}"
    (tmp_path / "attempt.py").write_text(CHILD)
    yield name
    for process in psutil.process_iter():
        try:
            if process.environ().get(TOKEN_VARIABLE) == name:
                process.kill()
        except psutil.Error:  # another user's, or gone
            continue


def environment(tmp_path: Path) -> dict[str, str]:
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(tmp_path)}


def read(told: int) -> bytes:
    assert select.select([told], [], [], 60)[0], "neither a word nor an end within 60 s"
    return os.read(told, 1000)


def test_a_killed_runner_takes_its_attempts_and_their_sandboxes_with_it(tmp_path: Path, token: str) -> None:
    fifo = tmp_path / "told"
    os.mkfifo(fifo)
    told = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    runner = subprocess.Popen([sys.executable, "-c", RUNNER, token, str(fifo)], env=environment(tmp_path))
    try:
        assert read(told) == b"started\n"
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    assert read(told) == b"sandbox ended\n"
    assert read(told) == b"", "the process has ended"
    os.close(told)


def test_an_attempt_whose_runner_is_gone_already_does_not_start(tmp_path: Path, token: str) -> None:
    env = {**environment(tmp_path), OWNER_VARIABLE: str(2**22 + 1), TOKEN_VARIABLE: token}
    command = [sys.executable, "-m", "attempt", str(tmp_path / "result")]
    ended = subprocess.run(command, input=b"/dev/null", env=env, cwd=tmp_path, timeout=60, check=False)
    assert ended.returncode == 1
    assert not (tmp_path / "result").exists()
