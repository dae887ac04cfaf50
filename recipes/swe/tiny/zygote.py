"""The server behind ``sandbox``: per run it forks two confined processes, one for the tests, one for the code.

::

    Sandbox ──request──► zygote ──fork──► tests ──fork──► code under test
            ◄──reply───         ◄─report─       ──calls─►
                                                ◄─values─

The two exchange plain values. The code under test can return wrong values, end, hang or die, but holds no object, no
memory and no file descriptor by which it could say that a test passed. The price: the tests see copies, not the objects
themselves, and a function's changes to its arguments do not come back.

A request and a reply are one line of JSON each. Standard library only; started with ``python -I -S -B``.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import gc
import json
import os
import select
import signal
import sys
import time
from types import FrameType, ModuleType
from typing import Any, NoReturn

from seamless_verl.agents.ties import KernelRefused, adopt_orphans, die_with_parent
from seamless_verl.recipes.swe.tiny.confinement import confine, filter_program, landlock_version

_MAX_MESSAGE_BYTES = 1 << 16


class Disconnected(Exception):
    """The code under test ended, or sent something that is no message."""


class Channel:
    """Messages of plain values over two pipes, each led by its length in 4 bytes."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd

    def send(self, *message: object) -> None:
        data = repr(message).encode("utf-8", "backslashreplace")
        if len(data) > _MAX_MESSAGE_BYTES:
            raise ValueError(f"message of {len(data)} bytes")
        data = len(data).to_bytes(4, "big") + data
        try:
            while data:
                data = data[os.write(self.write_fd, data) :]
        except OSError as error:
            raise Disconnected from error

    def receive(self) -> tuple[Any, ...]:
        size = int.from_bytes(self._read(4), "big")
        if size > _MAX_MESSAGE_BYTES:
            raise Disconnected
        try:
            message = ast.literal_eval(self._read(size).decode())
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise Disconnected from error
        if not isinstance(message, tuple) or not message:
            raise Disconnected
        return message

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = os.read(self.read_fd, size - len(data))
            if not piece:
                raise Disconnected
            data += piece
        return data


class CodeUnderTest(ModuleType):
    """Stands in for the module under test; every function of it is a call into the other process.

    A name that the module lacks looks like a function too, whose call raises ``ImportError``: so that the tests are
    found, counted and failed, instead of ending at their first line.
    """

    def __init__(self, name: str, channel: Channel) -> None:
        super().__init__(name)
        self._channel = channel
        try:
            loaded = channel.receive()
        except Disconnected:
            loaded = ("raised", "Crash", "")
        self._load_error = loaded[1:] if loaded[0] == "raised" else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._load_error is None:
            self._channel.send("get", name)
            kind, *rest = self._channel.receive()
            if kind == "value":
                return rest[0]

        def call(*arguments: object, **keywords: object) -> Any:
            return self._call(name, arguments, keywords)

        return call

    def _call(self, name: str, arguments: tuple[object, ...], keywords: dict[str, object]) -> Any:
        if self._load_error is not None:
            _raise(*self._load_error)
        self._channel.send("call", name, arguments, keywords)
        kind, *rest = self._channel.receive()
        if kind != "value" or len(rest) != 1:
            _raise(*(rest if kind == "raised" else ("Disconnected", "")))
        return rest[0]


def _raise(name: object, text: object = "", *_: object) -> NoReturn:
    """Raise the built-in exception of that name, or a new one when there is none that takes one text."""
    known = getattr(builtins, str(name), None)
    error = type(str(name), (Exception,), {})(str(text))
    if isinstance(known, type) and issubclass(known, Exception):
        with contextlib.suppress(TypeError):
            error = known(str(text))
    raise error


def serve_code(channel: Channel, source_path: str, source: str, cpu_per_test_s: float) -> None:
    """The code under test: load the source, then answer calls until the tests hang up."""
    calling = False

    def on_timer(number: int, frame: FrameType | None) -> None:
        if calling:
            raise TimeoutError

    signal.signal(signal.SIGPROF, on_timer)
    namespace: dict[str, Any] = {"__name__": os.path.basename(source_path)[:-3], "__file__": source_path}

    def load() -> tuple[object, ...]:
        exec(compile(source, source_path, "exec"), namespace)
        return ("loaded",)

    def answer(kind: str, name: str, *rest: Any) -> tuple[object, ...]:
        if kind == "get":
            value = namespace.get(name, serve_code)
            return ("function",) if callable(value) else ("value", _plain(value))
        if name not in namespace:
            raise ImportError(f"cannot import name {name!r}")
        return "value", _plain(namespace[name](*rest[0], **rest[1]))

    request: tuple[Any, ...] = ()
    while True:
        calling = True
        try:
            if not request or request[0] == "test":
                signal.setitimer(signal.ITIMER_PROF, cpu_per_test_s, cpu_per_test_s)
            if not request or request[0] != "test":
                channel.send(*(answer(*request) if request else load()))
        except Disconnected:
            return
        except BaseException as error:  # noqa: BLE001 - whatever the code raises is its outcome, SystemExit too
            name = "Timeout" if isinstance(error, TimeoutError) else type(error).__name__
            calling = False
            channel.send("raised", name, str(error)[:200])
        calling = False
        request = channel.receive()


def _plain(value: Any) -> Any:
    """The value, if it is made of plain types only. Raises ``TypeError``, and ``RecursionError`` for a cycle."""
    kind = type(value)
    if kind in (list, tuple, set):
        return kind(map(_plain, value))
    if kind is dict:
        return {_plain(key): _plain(item) for key, item in value.items()}
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return value
    raise TypeError(f"{kind.__name__} is no plain value")


def run_tests(channel: Channel, report_fd: int, module: str, test_path: str, tests: str) -> None:
    """The tests: run every ``test_*`` function and write one line of JSON per outcome to ``report_fd``."""

    def report(**line: object) -> None:
        os.write(report_fd, json.dumps(line).encode() + b"\n")

    code = CodeUnderTest(module, channel)
    sys.modules[module] = code
    namespace: dict[str, Any] = {"__name__": os.path.basename(test_path)[:-3], "__file__": test_path}
    exec(compile(tests, test_path, "exec"), namespace)
    functions = {name: value for name, value in namespace.items() if name.startswith("test") and callable(value)}
    report(tests=list(functions), load_error=code._load_error and str(code._load_error[0])[:64])
    for name, function in functions.items():
        error: BaseException | None = None
        try:
            channel.send("test")
            function()
        except BaseException as raised:  # noqa: BLE001 - a test that raises anything has failed
            error = raised
        kind = type(error).__name__ if error is not None else None
        report(test=name, error="Crash" if kind == "Disconnected" else kind, message=str(error or "")[:400],
               doc=function.__doc__ or "")  # fmt: skip
    report(end=True)


def _become(request: dict[str, Any], output_fd: int, keep: list[int], parent: int) -> None:
    """What both processes do first: own standard streams, no other descriptor, tied to the parent, confined."""
    die_with_parent(parent)
    null = os.open("/dev/null", os.O_RDONLY)
    for source, target in ((null, 0), (output_fd, 1), (output_fd, 2)):
        os.dup2(source, target)
    low = 3
    for fd in sorted(keep):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, 1024)
    os.chdir(request["folder"])
    limits = request["limits"]
    confine(request["folder"], cpu_s=limits["cpu_s"], memory_bytes=limits["memory_bytes"],
            file_bytes=limits["file_bytes"])  # fmt: skip


def _tests_process(request: dict[str, Any], report_fd: int, output_fd: int, zygote: int) -> None:
    os.setpgid(0, 0)
    calls_read, calls_write = os.pipe()
    values_read, values_write = os.pipe()
    me, folder = os.getpid(), request["folder"]
    if os.fork() == 0:
        try:
            _become(request, output_fd, [calls_read, values_write], me)
            gc.enable()
            channel = Channel(calls_read, values_write)
            path = f"{folder}/{request['source_file']}"
            serve_code(channel, path, request["source"], request["limits"]["cpu_per_test_s"])
        finally:
            os._exit(0)
    _become(request, output_fd, [report_fd, values_read, calls_write], zygote)
    module, path = request["source_file"].removesuffix(".py"), f"{folder}/{request['test_file']}"
    run_tests(Channel(values_read, calls_write), report_fd, module, path, request["tests"])


def run_once(request: dict[str, Any]) -> dict[str, Any]:
    """Fork, wait until the report is complete or the time is up, kill and reap whatever is left."""
    zygote = os.getpid()
    report_read, report_write = os.pipe()
    output_read, output_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _tests_process(request, report_write, output_write, zygote)
        except KernelRefused as error:
            os.write(report_write, json.dumps({"broken": str(error)}).encode() + b"\n")
        except BaseException as error:  # noqa: BLE001 - said on the captured output, then this process ends
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(0)
    os.close(report_write)
    os.close(output_write)
    with contextlib.suppress(OSError):  # the child does the same; whoever comes first
        os.setpgid(child, child)
    report, output = bytearray(), bytearray()
    in_time = _collect(report_read, output_read, report, output, request["limits"])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    _drain(report_read, report, 1 << 20)
    _drain(output_read, output, request["limits"]["output_bytes"])
    lines = [json.loads(line) for line in report.splitlines(keepends=True) if line.endswith(b"\n")]
    return {"report": lines, "output": output.decode("utf-8", "replace"), "timed_out": not in_time}


def _collect(report_fd: int, output_fd: int, report: bytearray, output: bytearray, limits: dict[str, Any]) -> bool:
    """Read until the report ends (``True``) or the time is up; output beyond its cap is read and dropped."""
    deadline = time.monotonic() + limits["wall_s"]
    poll = select.poll()
    for fd in (report_fd, output_fd):
        poll.register(fd, select.POLLIN)
    poll.register(0, 0)  # asks for nothing, yet is told when the owner of this zygote is gone
    while (left := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(left * 1000):
            if fd == 0:
                os._exit(0)  # the forked processes are tied to this one
            data = os.read(fd, 1 << 16)
            if fd == report_fd and not data:
                return True
            if fd == report_fd:
                report += data
            elif data:
                output += data[: limits["output_bytes"] - len(output)]
            else:
                poll.unregister(fd)
    return False


def _drain(fd: int, into: bytearray, most: int) -> None:
    """Read what ended processes left in a pipe, and close it."""
    with os.fdopen(fd, "rb") as pipe:
        into += pipe.read()[: max(0, most - len(into))]


def main() -> None:
    """Answer requests from standard input until it closes, which it does when the owner ends."""
    adopt_orphans()
    filter_program(files=landlock_version() > 0)  # kept by a cache that the forked processes inherit
    gc.collect()
    gc.freeze()
    gc.disable()
    for line in sys.stdin.buffer:
        reply = run_once(json.loads(line))
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()
