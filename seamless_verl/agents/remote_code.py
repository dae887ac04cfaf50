"""The tests and the code under test as two processes that exchange plain values; the part of ``zygote`` they run.

The code under test can return wrong values, end, hang or die, but holds no object, no memory and no file descriptor
by which it could say that a test passed. The price: the tests see copies, not the objects themselves, and a function's
changes to its arguments do not come back.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import os
import signal
import sys
from types import FrameType, ModuleType
from typing import Any, NoReturn

MAX_MESSAGE_BYTES = 1 << 16


class Disconnected(Exception):
    """The code under test ended, or sent something that is no message."""


class Channel:
    """Messages of plain values over two pipes, each led by its length in 4 bytes."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd

    def send(self, *message: object) -> None:
        data = repr(message).encode("utf-8", "backslashreplace")
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"message of {len(data)} bytes")
        data = len(data).to_bytes(4, "big") + data
        try:
            while data:
                data = data[os.write(self.write_fd, data) :]
        except OSError as error:
            raise Disconnected from error

    def receive(self) -> tuple[Any, ...]:
        size = int.from_bytes(self._read(4), "big")
        if size > MAX_MESSAGE_BYTES:
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
