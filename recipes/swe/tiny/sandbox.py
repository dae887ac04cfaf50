"""Runs a test file against untrusted source: confined, killed at its limits, judged by a process outside.

Two processes are forked per run from a small warm server (see ``zygote``), which takes milliseconds where a new
interpreter takes tens. What they may do is set in ``confinement``: no network, no other process, no file but their own
folder and the Python installation, bounded CPU time, memory, file size, output and wall-clock time.

Verdict: only what the process *with the tests* reported counts. A run that ended early, was killed or said nothing has
failed the tests it did not report. Standard library only: the tiny agent imports this in its own process.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import seamless_verl
from seamless_verl.errors import MachineError, SeamlessError
from seamless_verl.recipes.swe.tiny import confinement

_ROOT = str(Path(seamless_verl.__file__).resolve().parents[1])
_RECIPES = str(Path(__file__).resolve().parents[3])  # in a checkout they lie beside the package, else in it
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); import seamless_verl; seamless_verl.__path__.append(sys.argv[2]); "
    "from seamless_verl.recipes.swe.tiny.zygote import main; del sys.path[0]; main()"
)
_REPLY_GRACE_S = 10.0


class SandboxError(SeamlessError):
    """The sandbox itself failed; says nothing about the code under test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one run.

    Attributes:
        cpu_per_test_s: CPU seconds of the code under test within one test; beyond, ``TimeoutError`` is raised there.
        cpu_s: CPU seconds of each process in all, whole seconds; beyond, it is killed.
        wall_s: wall-clock seconds of the run; generous, because a busy machine must not fail good code.
        memory_bytes: address space of each process.
        file_bytes: largest file that can be written.
        output_bytes: how much of what is printed is kept.
    """

    cpu_per_test_s: float = 0.1
    cpu_s: int = 2
    wall_s: float = 10.0
    memory_bytes: int = 256 << 20
    file_bytes: int = 1 << 20
    output_bytes: int = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class TestResult:
    """One test: ``error`` is the name of the exception that failed it, ``None`` when it passed."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    name: str
    error: str | None
    message: str
    doc: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRun:
    """What a run gave.

    Attributes:
        tests: every test of the file; those without a report have the error ``Timeout`` or ``Crash``.
        load_error: name of the exception that loading the source raised, else ``None``.
        problem: why the run is incomplete (``Timeout``, ``Crash``), else ``None``.
        output: what was printed, cut at the limit.
    """

    __test__ = False

    tests: tuple[TestResult, ...]
    load_error: str | None
    problem: str | None
    output: str

    @property
    def passed(self) -> int:
        return sum(test.error is None for test in self.tests)

    @property
    def share(self) -> float:
        """Share of tests passed; 0 when there was no test at all."""
        return self.passed / len(self.tests) if self.tests else 0.0

    @property
    def all_passed(self) -> bool:
        return self.problem is None and bool(self.tests) and self.passed == len(self.tests)


class Sandbox:
    """A few zygotes, started when first needed; ``run`` may be called from many threads at once.

    Raises:
        MachineError: at construction, when this machine cannot confine a process.
    """

    def __init__(self, *, zygotes: int = 1, limits: Limits | None = None) -> None:
        missing = confinement.supported()
        if missing is not None:
            raise MachineError("sandbox for code written by the model", missing, "run on a Linux with seccomp filters")
        self.limits = limits or Limits()
        self._idle: queue.LifoQueue[_Zygote] = queue.LifoQueue()
        for _ in range(zygotes):
            self._idle.put(_Zygote())
        self._zygotes = zygotes
        self._lock = threading.Lock()
        self._closed = False
        self.root = tempfile.mkdtemp(prefix="sandbox-")

    def run(self, *, source_file: str, source: str, test_file: str, tests: str) -> TestRun:
        """Run every ``test_*`` function of ``tests`` against ``source``; file names are plain names ending in ``.py``.

        Raises:
            SandboxError: the sandbox broke, or is closed.
            ValueError: a file name is not a plain ``.py`` name.
        """
        for name in (source_file, test_file):
            if not name.removesuffix(".py").isidentifier() or not name.endswith(".py"):
                raise ValueError(f"{name!r} is no plain name of a Python file")
        with self._borrowed() as zygote, self._folder() as folder:
            (Path(folder) / source_file).write_text(source, encoding="utf-8", errors="backslashreplace")
            request = {
                "folder": folder, "source_file": source_file, "source": source, "test_file": test_file,
                "tests": tests, "limits": asdict(self.limits),
            }  # fmt: skip
            return _verdict(zygote.ask(request, self.limits.wall_s + _REPLY_GRACE_S))

    def close(self) -> None:
        """End every zygote, after the runs in progress; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for _ in range(self._zygotes):
            self._idle.get().close()
        self._idle.put(_Zygote())  # wakes whoever still waits, to be told that the sandbox is closed
        shutil.rmtree(self.root, ignore_errors=True)

    @contextlib.contextmanager
    def _folder(self) -> Iterator[str]:
        folder = tempfile.mkdtemp(dir=self.root)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[_Zygote]:
        zygote = self._idle.get()
        try:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            yield zygote
        finally:
            self._idle.put(zygote)


class _Zygote:
    """The parent's side of one server process, which is started when it is asked and not there."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One request, one reply; when the process is lost or silent, once more from a fresh one."""
        for last in (False, True):
            self._process = self._process or _started()
            try:
                return _asked(self._process, request, time.monotonic() + timeout_s)
            except (OSError, EOFError) as error:
                self.close()
                if last:
                    raise SandboxError(f"two zygotes were lost during one run: {error}") from error
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Kill the process, its forks with it (they are tied to it), and wait for it."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._process = None


def _started() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-B", "-c", _START, _ROOT, _RECIPES]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env={}, cwd="/")


def _asked(process: subprocess.Popen[bytes], request: dict[str, Any], deadline: float) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    fd, pieces = process.stdout.fileno(), [b""]
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not pieces[-1].endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise TimeoutError("the zygote does not answer")
        pieces.append(os.read(fd, 1 << 16))
        if not pieces[-1]:
            raise EOFError(f"the zygote ended with status {process.wait()}")
    reply: dict[str, Any] = json.loads(b"".join(pieces))
    return reply


def _verdict(reply: dict[str, Any]) -> TestRun:
    """From the lines that the tests' process wrote; tests without a line have failed."""
    head, *lines = reply["report"] or [{"tests": [], "load_error": None}]
    if "broken" in head:
        raise SandboxError(f"the sandbox cannot be closed on this machine: {head['broken']}")
    complete = bool(lines) and "end" in lines[-1]
    problem = None if complete else "Timeout" if reply["timed_out"] else "Crash"
    reported = {line["test"]: line for line in lines if "test" in line}
    tests = []
    for name in head["tests"]:
        line = reported.get(name, {"error": problem or "Crash", "message": "", "doc": ""})
        tests.append(TestResult(name=name, error=line["error"], message=line["message"], doc=line["doc"]))
    return TestRun(tests=tuple(tests), load_error=head["load_error"], problem=problem, output=reply["output"])
