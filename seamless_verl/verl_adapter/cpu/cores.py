"""One core is one device: keeps a device's processes on its core, so that what shares a device competes for it.

``SEAMLESS_CORES`` is ``{"trainer": [0], "replica": [0, 1]}``: core of each trainer rank and of each rollout replica
(hybrid ones first, as verl counts). Unset, nothing is pinned.
"""

from __future__ import annotations

import json
import os

VARIABLE = "SEAMLESS_CORES"
_ENGINE = "SEAMLESS_CORE_OF_ENGINE"


def pin_trainer() -> None:
    """Called in a trainer's worker process."""
    if VARIABLE in os.environ:
        _pin(json.loads(os.environ[VARIABLE])["trainer"][int(os.environ["RANK"])])


def pin_replica() -> None:
    """Called in vLLM's server process, a Ray actor that verl names after its replica, and in its engine process."""
    if VARIABLE not in os.environ:
        return
    if _ENGINE not in os.environ:
        import ray

        if not ray.is_initialized():
            return
        name = ray.get_runtime_context().get_actor_name() or ""
        if not name.startswith("vllm_server_"):
            return
        rank = int(name.removeprefix("vllm_server_").split("_")[0])
        os.environ[_ENGINE] = str(json.loads(os.environ[VARIABLE])["replica"][rank])
    _pin(int(os.environ[_ENGINE]))


def _pin(core: int) -> None:
    for thread in os.listdir("/proc/self/task"):  # threads that exist; later ones inherit
        os.sched_setaffinity(int(thread), {core})
