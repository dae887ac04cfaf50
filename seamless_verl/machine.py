"""What this machine offers: accelerators, memory, disks, ports. Looked up without torch, in milliseconds.

Journals go to the node's own disk: SQLite's write-ahead log needs shared memory in a file beside the journal and locks
on it, neither of which network file systems keep (sqlite.org/wal.html).
"""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

import seamless_verl
from seamless_verl.errors import ConfigError, MachineError

BIND_ERRORS = (OSError, OverflowError, UnicodeError)
"""What binding a socket raises: of the system, of a port above 65535, of a host name that is no name."""
_CARDS_S = 20.0  # nvidia-smi wakes every card first
_OF_THE_PORT = (errno.EADDRINUSE, errno.EACCES, errno.EPERM)
JOURNAL_DIR = "seamless.proxy.journal_dir"
APART = "seamless-journal-"
"""How a folder of journals is called that is not in the run's."""
WEIGHTS = Path("/dev/shm/seamless-weights-")
"""How the folder begins in which a run publishes weights; its id follows."""
HOSTS_IPC, _HOSTS_PIDS = "ipc:[4026531839]", "pid:[4026531836]"  # constants of the kernel's
ANY_VERL = "SEAMLESS_ANY_VERL"
"""In the environment of who tries another verl than the one that this is written for (docs/versions.md)."""
_VERL = re.compile(r"0\.9\.1(\.post\d+)?(\+.*)?")
_MOUNTS = Path("/proc/self/mounts")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_OF_CLUSTERS = ("beegfs", "ceph", "gfs2", "glusterfs", "gpfs", "lustre", "ocfs2", "orangefs", "panfs", "wekafs")
_SHARED = frozenset((*_OF_CLUSTERS, "9p", "afs", "cifs", "nfs", "nfs4", "smb3", "smbfs", "vboxsf"))
# What a user-space program serves is as good as always elsewhere; these lie on the node's own disk.
_OWN_FUSE = frozenset(("fuse.fuse-overlayfs", "fuse.bindfs", "fuse.mergerfs", "fuse.ntfs-3g"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Sizes in bytes; ``accelerators`` counts device files, which is what a process here could open.

    ``accelerator_memory``: of the smallest NVIDIA card; 0: unknown.
    """

    accelerators: int
    cores: int
    memory_available: int
    memory_total: int
    disk_free: int
    shared_memory_free: int
    accelerator_memory: int = 0


def check_whole() -> None:
    """Raise where the folder of the command, which ``python -m`` looks into first, hides the installed package."""
    if getattr(seamless_verl, "__file__", None) is None:
        found, other = "the folder you are in holds a clone called seamless_verl/", "rename the clone"
    elif importlib.util.find_spec("seamless_verl.hydra_configs") is None:
        found, other = "the folder you are in is a clone, from which nothing is installed", "pip install -e ."
    else:
        return
    raise MachineError(
        "seamless_verl", f"{found}; it hides the installed package", f"start in another folder, or {other}"
    )


def survey(folder: Path) -> Machine:
    """Look at this machine; ``folder`` says which disk will be written to (it need not exist yet)."""
    while not folder.exists():
        folder = folder.parent
    memory = psutil.virtual_memory()
    accelerators = count_accelerators()
    return Machine(
        accelerators=accelerators,
        accelerator_memory=card_memory() if accelerators else 0,
        cores=len(os.sched_getaffinity(0)),
        memory_available=memory.available,
        memory_total=memory.total,
        disk_free=shutil.disk_usage(folder).free,
        shared_memory_free=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
    )


def fits_verl(version: str) -> bool:
    """Whether what we change of verl is written for this version of it, or the user tries another one."""
    return ANY_VERL in os.environ or _VERL.fullmatch(version) is not None


def count_accelerators(devices: Path = Path("/dev")) -> int:
    """NVIDIA (``nvidia0``…), AMD (``kfd`` with render nodes) and Ascend (``davinci0``…) devices visible here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    nvidia = len([path for path in devices.glob("nvidia[0-9]*") if path.name[6:].isdigit()])
    if visible is not None:
        nvidia = min(nvidia, len([part for part in visible.split(",") if part.strip() not in ("", "-1")]))
    ascend = len([path for path in devices.glob("davinci[0-9]*") if path.name[7:].isdigit()])
    amd = len(list((devices / "dri").glob("renderD*"))) if (devices / "kfd").exists() else 0
    return nvidia + ascend + amd


def card_memory() -> int:
    """Bytes of the smallest NVIDIA card; 0 where ``nvidia-smi`` is missing or does not say."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_CARDS_S, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return 0
    return min(map(int, told)) << 20 if told and all(word.isdigit() for word in told) else 0


def bind_error(host: str, port: int) -> Exception | None:
    """What speaks against listening on ``host:port`` here; ``None``: nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except BIND_ERRORS as error:
        return error
    return None


def port_is_free(host: str, port: int) -> bool:
    """False where something listens already. A host that cannot be bound says nothing of its ports: `bind_error`."""
    return getattr(bind_error(host, port), "errno", None) != errno.EADDRINUSE


def bind_refused(host: str, port: int, error: Exception, keys: tuple[str, str]) -> ConfigError:
    """What to tell the user of a `bind_error`: whether the host or the port is wrong.

    Args:
        keys: what the host and the port are called where the user set them.
    """
    if isinstance(error, OverflowError) or getattr(error, "errno", None) in _OF_THE_PORT:
        return ConfigError(
            keys[1], port, f"cannot listen on {host}:{port}: {error}", "a port that is free, or 0 to take any"
        )
    return ConfigError(
        keys[0],
        host,
        f"is no address that {socket.gethostname()} can listen on: {error}",
        "127.0.0.1 for agents on the same machine, 0.0.0.0 for agents elsewhere",
    )


def shared_file_system(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """The kind of the network file system that ``path`` lies on; None: the node's own, or not known.

    Args:
        path: need not exist.
        mounts: as ``/proc/self/mounts``: device, mount point, kind, …
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return None
    place = Path(os.path.realpath(path))
    kind, length = "", -1
    for line in lines:
        words = line.split()
        point = Path(_unescaped(words[1])) if len(words) > 2 else None
        # Of two mounts at one point the later hides the earlier.
        if point is not None and (point == place or point in place.parents) and len(point.parts) >= length:
            kind, length = words[2], len(point.parts)
    is_shared = kind in _SHARED or (kind.split(".")[0] == "fuse" and kind not in _OWN_FUSE)
    return kind if is_shared else None


def journal_folder(given: str | None, run_dir: Path, run: str, mounts: Path = _MOUNTS) -> Path:
    """Where the journals of this node's rollout workers go: on its own disk.

    Args:
        given: `JOURNAL_DIR`; journals of different runs may share it.
        run_dir: of the run; its folder ``proxy`` is used where it is on this node's disk.
        run: sets runs apart elsewhere.

    Raises:
        ConfigError: the folder that is given is shared, or there is none on this node's disk.
    """
    if given is not None:
        if kind := shared_file_system(Path(given), mounts):
            raise ConfigError(JOURNAL_DIR, given, _problem(kind), "name a folder on a disk that every node has itself")
        return Path(given) / f"{APART}{run}"
    if shared_file_system(run_dir, mounts) is None:
        return run_dir / "proxy"
    temporary = Path(tempfile.gettempdir())
    if kind := shared_file_system(temporary, mounts):
        problem = f"the run folder {run_dir} and {temporary} are shared ({kind}), and {_problem(kind)}"
        raise ConfigError(JOURNAL_DIR, None, problem, "name a folder on a disk that every node has itself")
    return temporary / f"{APART}{run}"


def told_of_journal(given: str | None, run_dir: Path, mounts: Path = _MOUNTS) -> str:
    """Where the journals are, if not in the run folder; else empty.

    Raises:
        ConfigError: see `journal_folder`.
    """
    folder = journal_folder(given, run_dir, "RUN", mounts)
    if folder.parent == run_dir:
        return ""
    kind = shared_file_system(run_dir, mounts)
    because = f" (the run folder is on {kind})" if kind and given is None else ""
    key = "" if given is not None else f", or where {JOURNAL_DIR} says"
    return f"proxy journals: each node's own {folder.parent}{because}{key}"


def _problem(kind: str) -> str:
    return f"is on {kind}, where SQLite cannot keep a write-ahead log"


def _unescaped(point: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), point)


def identity(pid: int) -> str:
    """A process by number, start and where its number counts: numbers alone come again, and clocks are set anew."""
    return f"{pid} {started_ticks(pid)} {_here()}"


def is_alive(identified: str) -> bool | None:
    """Whether the process of an `identity` still runs; None: it is another machine's, or another container's."""
    number, _, rest = identified.partition(" ")
    ticks, _, here = rest.partition(" ")
    if here != _here():
        return None
    return number.isdigit() and started_ticks(int(number)) == ticks != ""


def _here() -> str:
    """Boot, PID namespace and host: containers may have the host's name and not see its processes."""
    return f"{_BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')} {socket.gethostname()}"


def started_ticks(number: int) -> str:
    """Clock ticks between the machine's start and the process's; empty when it has ended."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def sees_all_users() -> bool:
    """Whether all who use this shared memory can be seen: not from a container that has only it of the host's."""
    return os.readlink("/proc/self/ns/pid") == _HOSTS_PIDS or os.readlink("/proc/self/ns/ipc") != HOSTS_IPC


def mapped_files(pid: int) -> dict[str, int]:
    """Inodes of its shared memory by name: glibc maps a semaphore under another name than the one in the folder."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return {}  # ended meanwhile, or not ours to look into
    return {line.split(maxsplit=5)[-1]: int(line.split()[4]) for line in lines if "/dev/shm/" in line}
