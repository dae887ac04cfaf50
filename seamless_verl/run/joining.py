"""Which Ray cluster a run joins, found as Ray finds it, but before the run has an environment of its own.

The trainer's process has a temporary folder of its own, under which Ray would look for the address that ``ray start``
left on this machine, and find none (`seamless_verl.run.supervisor`). So the address is looked up here and handed on.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seamless_verl.errors import ConfigError, MachineError

RAY_INIT = "ray_kwargs.ray_init"
ADDRESS = f"{RAY_INIT}.address"
VARIABLE = "RAY_ADDRESS"
_OF_A_NEW_CLUSTER = ("num_cpus", "num_gpus", "resources", "object_store_memory", "labels")
_ANSWER_S = 5.0


def address_file() -> Path:
    """Where ``ray start`` leaves a cluster's address (ray 2.60: ``get_default_system_temp_dir``)."""
    folder = next((os.environ[name] for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "/tmp")
    return Path(folder, "ray", "ray_current_cluster")


def cluster_address(given: str | None) -> str | None:
    """``HOST:PORT`` of the nodes that Ray connects to, or None where it starts its own.

    Args:
        given: `ADDRESS`. Where it is not given, or ``auto``, Ray reads ``RAY_ADDRESS``, then `address_file` (ray 2.60:
            ``get_ray_address_from_environment``). ``auto`` without either is left to Ray, which looks at the processes.
    """
    address = given
    if address in (None, "", "auto"):
        address = os.environ.get(VARIABLE) or address
    if address in (None, "", "auto"):
        with contextlib.suppress(OSError):  # no ``ray start`` on this machine
            address = address_file().read_text(encoding="utf-8").strip() or address
    return address if address and address != "local" else None


def check_cluster(settings: Mapping[str, Any]) -> None:
    """Whether the cluster that a run would join takes it.

    Args:
        settings: the section `RAY_INIT`.

    Raises:
        ConfigError: a setting is for a cluster that the run starts itself; Ray raises then, after verl was imported.
        MachineError: nothing answers there; the file of a cluster that was killed stays behind.
    """
    address = cluster_address(settings.get("address"))
    if address is None:
        return
    alone = f"leave it out, or start a cluster of its own: ++{ADDRESS}=local"
    for key in _OF_A_NEW_CLUSTER:
        if settings.get(key) is not None:
            raise ConfigError(f"{RAY_INIT}.{key}", settings[key], f"cannot change the Ray cluster at {address}", alone)
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return  # ``auto``, or something that only Ray can say is wrong
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise MachineError(
            "Ray cluster",
            f"nothing answers at {address} ({error}), which {_named_by(settings.get('address'))} names",
            f"start it (ray start --head), name another ({VARIABLE}=HOST:PORT), or start a cluster of this run's own "
            f"(++{ADDRESS}=local); `ray stop` removes the file of a cluster that is gone",
        ) from None


def _named_by(given: str | None) -> str:
    if given and given != "auto":
        return ADDRESS
    return VARIABLE if os.environ.get(VARIABLE) not in (None, "", "auto") else str(address_file())
