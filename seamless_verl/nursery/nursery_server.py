"""The nursery: ``python -m seamless_verl.nursery.nursery_server SOCKET MODULE…`` imports modules, forks on request.

Single-threaded from beginning to end: a fork of a process with threads would copy locks that nobody will release.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from seamless_verl.nursery.standin import HEADER, receive

_MOST_FILES = 253  # of one message; SCM_MAX_FD
_RESET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """What the new process is to be: arguments as after ``python``, environment, directory, open files by number, and
    the signals that it is to ignore.
    """

    arguments: list[str]
    environment: dict[str, str]
    directory: str
    files: dict[int, int]
    ignored: frozenset[int]


def main() -> None:
    address, modules = sys.argv[1], sys.argv[2:]
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(256)  # who asks during the imports waits in line
    started = time.monotonic()
    with _undrawn() if "ray" in modules else contextlib.nullcontext():
        for name in modules:
            try:
                importlib.import_module(name)
            except ImportError as error:
                sys.stderr.write(f"nursery: {name} is not imported beforehand: {error}\n")
    threads = _threads()
    if threads:
        # Closing the socket sends every stand-in to the plain interpreter.
        sys.stderr.write(f"nursery: the imports left threads behind ({threads}), so nothing is forked from here\n")
        return
    gc.collect()
    gc.freeze()  # what was imported stays: looking at all of it again holds up each child for a second, and copies it
    sys.stderr.write(f"nursery: ready after {time.monotonic() - started:.1f} s\n")
    sys.stderr.flush()
    birth = Nursery(listener).serve()
    if any(birth.environment.get(name) != value for name, value in _read_at_import().items()):
        os.chdir(birth.directory)
        _place_files(birth.files)
        os.execve(sys.executable, [sys.executable, *birth.arguments], birth.environment)
    _become(birth)


def _read_at_import() -> dict[str, str]:
    """Variables that an imported library has read for good, with the value it saw.

    Ray's core reads its configuration from the environment when it is loaded, the job's id among it. The supervisor
    starts the nursery with the id that the first job of a fresh cluster gets; any other job starts the plain way.
    """
    return {name: os.environ[name] for name in ("RAY_JOB_ID",) if name in os.environ}


def _threads() -> list[str]:
    """Names of the threads that a fork would lose; jemalloc's (pyarrow brings it) is made for forks."""
    names = [_text(f"/proc/self/task/{task}/comm") for task in os.listdir("/proc/self/task")]
    names.remove(_text("/proc/self/comm"))
    return [name for name in names if name != "jemalloc_bg_thd"]


def _text(path: str) -> str:
    with open(path) as file:
        return file.read().strip()


class Nursery:
    """Accepts requests and forks; in the child, `serve` returns what the child is to become."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, tuple[int, socket.socket]] = {}  # pid -> (pidfd, connection to its stand-in)

    def serve(self) -> Birth:
        self._selector.register(self._listener, selectors.EVENT_READ, ("listen", 0))
        while True:
            for key, _ in self._selector.select():
                kind, pid = key.data
                if kind == "listen":
                    birth = self._accept()
                    if birth is not None:
                        return birth
                elif pid in self._children:
                    self._end(pid) if kind == "ended" else self._abandoned(pid)

    def _accept(self) -> Birth | None:
        connection, _ = self._listener.accept()
        try:
            birth = _read_request(connection)
        except (OSError, ValueError) as error:
            sys.stderr.write(f"nursery: a request was cut short: {error}\n")
            connection.close()
            return None
        try:
            pid = os.fork()
        except OSError as error:
            sys.stderr.write(f"nursery: could not fork: {error}\n")
            connection.close()
            return None
        if pid == 0:
            self._forget_everything(connection)
            return birth
        for file in birth.files.values():
            os.close(file)
        handle = os.pidfd_open(pid)
        with contextlib.suppress(OSError):  # the stand-in has gone; that its end of the connection says so comes next
            connection.sendall(pid.to_bytes(HEADER, "little"))
        self._children[pid] = (handle, connection)
        self._selector.register(handle, selectors.EVENT_READ, ("ended", pid))
        self._selector.register(connection, selectors.EVENT_READ, ("abandoned", pid))
        return None

    def _end(self, pid: int) -> None:
        handle, connection = self._children.pop(pid)
        self._selector.unregister(handle)
        with contextlib.suppress(KeyError):  # no longer registered once its stand-in is gone
            self._selector.unregister(connection)
        os.close(handle)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):  # nobody waits any more
            connection.sendall((status if status >= 0 else 128 - status).to_bytes(HEADER, "little"))
        connection.close()

    def _abandoned(self, pid: int) -> None:
        """The stand-in was killed: whoever did that meant the process."""
        self._selector.unregister(self._children[pid][1])
        os.kill(pid, signal.SIGKILL)

    def _forget_everything(self, connection: socket.socket) -> None:
        self._selector.close()
        self._listener.close()
        connection.close()
        for handle, other in self._children.values():
            os.close(handle)
            other.close()


def _read_request(connection: socket.socket) -> Birth:
    header, files, _, _ = socket.recv_fds(connection, HEADER, _MOST_FILES)
    request: dict[str, Any] = json.loads(receive(connection, int.from_bytes(header, "little")))
    return Birth(
        arguments=request["arguments"],
        environment=request["environment"],
        directory=request["directory"],
        files=dict(zip(request["files"], files, strict=True)),
        ignored=frozenset(request["ignored"]),
    )


def _become(birth: Birth) -> None:
    """Turn this fork into the process that was asked for; returns when its program ends."""
    os.setpgid(0, 0)  # who ends a process may end its group (Ray does), and that must not be the whole nursery
    for number in _RESET:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in birth.ignored else usual)
    _place_files(birth.files)
    os.environ.clear()
    os.environ.update(birth.environment)
    os.chdir(birth.directory)
    _reseed()
    arguments = birth.arguments
    while arguments and arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
        arguments = arguments[1:]  # interpreter flags: ours were fixed at the start
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _place_files(files: dict[int, int]) -> None:
    """Give the received descriptors the numbers they had, without overwriting one that is still to be placed."""
    above = max([*files, *files.values(), 2]) + 1
    parked: dict[int, int] = {}
    for number, file in files.items():
        parked[number] = fd = above + len(parked)
        os.dup2(file, fd)
        os.close(file)
    for number, file in parked.items():
        os.dup2(file, number, inheritable=True)
        os.close(file)


@contextlib.contextmanager
def _undrawn() -> Iterator[None]:
    """Within, actor classes that modules declare get their ids from the system, not from Ray's own generator (2.60).

    That one is seeded when it is first drawn from, so forks would share its state: threads of two processes would give
    their tasks the same ids, and an actor that runs two such tasks at once ends. Remove when Ray reseeds it in forks.
    """
    actor: Any = importlib.import_module("ray.actor")
    kind = actor.ActorClassID
    actor.ActorClassID = SimpleNamespace(from_random=lambda: kind(os.urandom(kind.size())))
    try:
        yield
    finally:
        actor.ActorClassID = kind


def _reseed() -> None:
    """Forks share the state of random generators; Python reseeds its own, NumPy does not."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(int.from_bytes(os.urandom(4), "little"))


if __name__ == "__main__":
    main()
