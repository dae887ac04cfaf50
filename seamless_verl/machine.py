"""What this machine offers: accelerators, memory, disk, ports. Looked up without torch, in milliseconds."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from seamless_verl.errors import ConfigError

BIND_ERRORS = (OSError, OverflowError, UnicodeError)
"""What binding a socket raises: of the system, of a port above 65535, of a host name that is no name."""
_CARDS_S = 20.0  # nvidia-smi wakes every card first
_OF_THE_PORT = (errno.EADDRINUSE, errno.EACCES, errno.EPERM)


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

    @property
    def platform(self) -> str:
        return "gpu" if self.accelerators else "cpu"


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
