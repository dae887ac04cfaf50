"""Entry point ``vllm.general_plugins``: runs in vLLM's server, engine and worker processes."""

from __future__ import annotations

import multiprocessing
import os

from seamless_verl.verl_adapter.vllm import engine_watch
from seamless_verl.verl_adapter.workarounds import VLLM, VLLM_ON_CPU, install


def register() -> None:
    """Patch vLLM and end with the server; on a CPU, fork the engine's worker and stay on its core, too."""
    engine_watch.end_with_server()
    install(VLLM)
    if os.environ.get("VERL_PLATFORM", "").lower() != "cpu":
        return
    from seamless_verl.verl_adapter.cpu.cpu_device import pin_replica

    pin_replica()
    install(VLLM_ON_CPU)
    if "SEAMLESS_INTERPRETER" in os.environ:
        multiprocessing.set_executable(os.environ["SEAMLESS_INTERPRETER"])  # the engine process comes from the nursery
    if multiprocessing.current_process().name.startswith("EngineCore"):
        # The engine process is fresh here, without a thread that holds a lock: a fork spares an import of vLLM (10 s).
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
