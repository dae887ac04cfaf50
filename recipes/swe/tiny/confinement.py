"""Confines the calling process for the rest of its life: resource limits, no network, one folder of files.

Works without privileges on Linux (x86_64 and aarch64) through ``prctl`` and ``syscall`` of the C library: a seccomp
filter decides which system calls fail with EPERM, Landlock which files may be opened. Where the kernel has no
Landlock, the filter denies opening files altogether, so the lack makes the sandbox narrower and not wider; what the
first versions of Landlock do not cover (Linux 5.13 to 6.1: emptying files) it denies everywhere.

Limits of this: a bug in the kernel, and side channels (time, load, the sizes of files), are not covered; file metadata
(``stat``) stays visible; many small files can be written, each bounded, until the CPU limit.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import resource
import struct
import sysconfig
from collections.abc import Iterable

from seamless_verl.agents.ties import KernelRefused, set_attribute

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_LOAD, _AND, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

# System calls by (x86_64, aarch64) number; None where the architecture has none.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    # network, also by way of io_uring
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242), "sendto": (44, 206), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # other processes
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "kill": (62, 129),
    "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "setpgid": (109, 154), "setsid": (112, 157),
    "setpriority": (141, 140), "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122),
    # its own limits and privileges
    "setrlimit": (160, 164), "prlimit64": (302, 261), "prctl": (157, 167), "unshare": (272, 97), "setns": (308, 268),
    "setuid": (105, 146), "setgid": (106, 144), "setresuid": (117, 147), "setresgid": (119, 149),
    # the file system beyond opening files, which Landlock does not cover
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "utime": (132, None), "utimes": (235, None), "utimensat": (280, 88), "futimesat": (261, None),
    "open_by_handle_at": (304, 265), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "mount_setattr": (442, 442),
    # kernel interfaces and memory that outlives the process
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "reboot": (169, 142), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "sethostname": (170, 161),
    # emptying files by name, which Landlock covers from version 3 on only; and openat2, whose flags a filter cannot see
    "truncate": (76, 45), "openat2": (437, 437),
}  # fmt: skip
_OPENING: dict[str, tuple[int | None, int | None]] = {
    "open": (2, None), "creat": (85, None), "openat": (257, 56), "unlink": (87, None), "unlinkat": (263, 35),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "link": (86, None),
    "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "mkdir": (83, None), "mkdirat": (258, 34),
    "rmdir": (84, None), "mknod": (133, None), "mknodat": (259, 33),
}  # fmt: skip
_CLONE3 = (435, 435)

_EVERY_BIT, _CLONE_THREAD, _ACCESS_MODE = 0xFFFFFFFF, 0x00010000, 3
# Denied by an argument: call, which argument, which bits of it, and the values of these that are denied.
_DENIED_VALUES: dict[str, tuple[tuple[int | None, int | None], int, int, tuple[int, ...]]] = {
    "clone": ((56, 220), 0, _CLONE_THREAD, (0,)),
    # Whom the kernel signals for a ready file, and with what: F_SETOWN, F_SETSIG, F_SETOWN_EX; FIOSETOWN, SIOCSPGRP.
    "fcntl": ((72, 25), 1, _EVERY_BIT, (8, 10, 15)),
    "ioctl": ((16, 29), 1, _EVERY_BIT, (0x8901, 0x8902)),
    # Emptied without being opened for writing, again what Landlock does not cover before version 3.
    "open": ((2, None), 1, os.O_TRUNC | _ACCESS_MODE, (os.O_TRUNC, os.O_TRUNC | _ACCESS_MODE)),
    "openat": ((257, 56), 2, os.O_TRUNC | _ACCESS_MODE, (os.O_TRUNC, os.O_TRUNC | _ACCESS_MODE)),
}

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # number of rights by ABI version; 16 from version 5 on
_EXECUTE, _WRITE, _READ, _READ_FOLDER, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_SPECIAL_FILES = 1 << 6 | 1 << 9 | 1 << 11  # character devices, sockets, block devices
_READABLE = sorted(
    {
        *("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64"),
        *(sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")),
    }
)

_libc = ctypes.CDLL(None, use_errno=True)


def supported() -> str | None:
    """Why this machine cannot confine a process, or ``None`` when it can."""
    if os.name != "posix" or platform.system() != "Linux":
        return f"needs Linux, this is {platform.system()}"
    if platform.machine() not in _AUDIT_ARCH:
        return f"needs x86_64 or aarch64, this is {platform.machine()}"
    # A filter at address 0 gives EFAULT where filters exist and EINVAL where the kernel was built without.
    _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, None, 0, 0)
    return None if ctypes.get_errno() in (14, 13) else "the kernel has no seccomp filters"


def landlock_version() -> int:
    """Version of Landlock's interface, 0 when the kernel has none."""
    return max(0, int(_libc.syscall(_LANDLOCK_CREATE, None, 0, 1)))


def confine(folder: str, *, cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Confine this process: only ``folder`` can be written, only it and the Python installation read.

    Args:
        cpu_s: CPU seconds until SIGKILL.
        memory_bytes: limit of the address space.
        file_bytes: largest file that can be written.

    Raises:
        KernelRefused: a part could not be put into force.
    """
    for which, limit in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(which)[1]
        lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(which, (lowest, lowest))
    set_attribute("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)
    version = landlock_version()
    if version:
        _restrict_files(folder, version)
    _install_filter(filter_program(files=version > 0))


@functools.cache
def filter_program(*, files: bool, machine: str | None = None) -> bytes:
    """The seccomp filter as BPF instructions of 8 bytes; ``files`` tells whether files may be opened at all."""
    machine = machine or platform.machine()
    column = ("x86_64", "aarch64").index(machine)

    def instruction(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, jump_true, jump_false, k)

    program = [
        instruction(_LOAD, _ARCH),
        instruction(_JUMP_EQUAL, _AUDIT_ARCH[machine], 1, 0),
        instruction(_RETURN, _KILL),
        instruction(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":  # the x32 calls are the same calls under other numbers
        program += [instruction(_JUMP_GREATER_EQUAL, _X32_BIT, 0, 1), instruction(_RETURN, _ERRNO | _EPERM)]
    denied: Iterable[tuple[int | None, int | None]] = [*_DENIED.values(), *(() if files else _OPENING.values())]
    for numbers in denied:
        number = numbers[column]
        if number is not None:
            program += [instruction(_JUMP_EQUAL, number, 0, 1), instruction(_RETURN, _ERRNO | _EPERM)]
    # The flags of clone3 lie in memory, where a filter cannot look; ENOSYS makes the C library use clone.
    program += [instruction(_JUMP_EQUAL, _CLONE3[column], 0, 1), instruction(_RETURN, _ERRNO | _ENOSYS)]
    for numbers, argument, mask, values in _DENIED_VALUES.values():
        number, last = numbers[column], len(values) - 1
        if number is not None:
            program += [
                instruction(_JUMP_EQUAL, number, 0, len(values) + 4),
                instruction(_LOAD, _FIRST_ARGUMENT + 8 * argument),
                instruction(_AND, mask),
                *(instruction(_JUMP_EQUAL, value, last - at, int(at == last)) for at, value in enumerate(values)),
                instruction(_RETURN, _ERRNO | _EPERM),
                instruction(_LOAD, _NUMBER),  # for the comparisons that follow
            ]
    program += [instruction(_RETURN, _ALLOW)]
    return b"".join(program)


def _install_filter(program: bytes) -> None:
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    if _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) != 0:
        raise KernelRefused(f"seccomp filter: {os.strerror(ctypes.get_errno())}")


def _restrict_files(folder: str, version: int) -> None:
    rights = (1 << _LANDLOCK_FILE_RIGHTS.get(version, 16)) - 1
    attribute = struct.pack("Q", rights)
    ruleset = _libc.syscall(_LANDLOCK_CREATE, attribute, len(attribute), 0)
    if ruleset < 0:
        raise KernelRefused(f"Landlock: {os.strerror(ctypes.get_errno())}")
    reading = _READ | _READ_FOLDER | _EXECUTE
    allowed = [(folder, rights & ~_SPECIAL_FILES), *((path, reading) for path in _READABLE)]
    allowed += [(device, _READ | _WRITE) for device in ("/dev/null", "/dev/zero", "/dev/urandom")]
    try:
        for path, access in allowed:
            _allow_beneath(ruleset, path, access)
        if _libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0) != 0:
            raise KernelRefused(f"Landlock: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(ruleset)


def _allow_beneath(ruleset: int, path: str, access: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if _libc.syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", access, handle), 0) != 0:
            raise KernelRefused(f"Landlock rule for {path}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(handle)
