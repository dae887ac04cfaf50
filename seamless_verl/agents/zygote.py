"""The server behind ``sandbox``: per run it forks two confined processes, one for the tests, one for the code.

::

    Sandbox ──request──► zygote ──fork──► tests ──fork──► code under test
            ◄──reply───         ◄─report─       ──calls─►
                                                ◄─values─

What the two say to each other, and why the code under test cannot forge a verdict, is told in ``remote_code``. A
request and a reply are one line of JSON each. Standard library only; started with ``python -I -S -B``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
import time
from typing import Any

from seamless_verl.agents.confinement import (
    ConfinementError,
    adopt_orphans,
    confine,
    die_with_parent,
    filter_program,
    landlock_version,
)
from seamless_verl.agents.remote_code import Channel, run_tests, serve_code


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
        except ConfinementError as error:
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
