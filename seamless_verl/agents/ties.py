"""Ties a process to others for the rest of its life: it ends with its parent, it adopts descendants without one.

Linux only, through ``prctl`` of the C library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_libc = ctypes.CDLL(None, use_errno=True)


class KernelRefused(Exception):
    """The kernel refused what this process needs, or its parent is gone; the process must not go on."""


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """This process gets signal ``number`` when its parent, whose process id is given, ends.

    Raises:
        KernelRefused: the parent has ended, or the kernel refuses.
    """
    set_attribute("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        raise KernelRefused("the parent ended before its child was tied to it")


def die_with_owner(variable: str, number: int = signal.SIGKILL) -> None:
    """`die_with_parent` for a child whose parent put its own process id into an environment variable.

    It becomes a process group, out of the terminal's reach: in a session of its own it may wait seconds for a core of a
    busy machine (ADR 13), and uvloop cannot spawn into a group. A process started by hand has no such variable and goes
    on.
    """
    owner = os.environ.pop(variable, None)
    if owner is None:
        return
    os.setpgid(0, 0)
    if platform.system() == "Linux":
        try:
            die_with_parent(int(owner), number)
        except KernelRefused:
            os._exit(1)


def kill_group(pid: int) -> None:
    """SIGKILL for the process group that `die_with_owner` made, and for a process that has not come to that yet.

    Not by ``process.kill``, which takes the status of one that has just ended from whoever waits for it.
    """
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process, so that it can wait for every one of them."""
    set_attribute("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def set_attribute(name: str, option: int, value: int) -> None:
    """``prctl`` with one value; ``name`` is for the error."""
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise KernelRefused(f"prctl({name}): {os.strerror(ctypes.get_errno())}")
