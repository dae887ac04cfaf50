"""Entry point ``vllm.general_plugins``: runs in vLLM's server, engine and worker processes."""

from __future__ import annotations

import multiprocessing
import os


def register() -> None:
    """Make vLLM's CPU backend accept weight updates, and start its worker by fork."""
    if os.environ.get("VERL_PLATFORM", "").lower() != "cpu":
        return
    import vllm._custom_ops as ops

    # The CPU backend prepacks linear layers with oneDNN and drops `layer.weight`, after which load_weights() cannot
    # find its target. Without oneDNN it keeps the parameter. Remove when vLLM can reload prepacked weights.
    ops._supports_onednn = False
    if "SEAMLESS_INTERPRETER" in os.environ:
        multiprocessing.set_executable(os.environ["SEAMLESS_INTERPRETER"])  # the engine process comes from the nursery
    if multiprocessing.current_process().name.startswith("EngineCore"):
        # The engine process is fresh and single-threaded here: a fork spares another import of vLLM (10 s).
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
