"""Entry point ``vllm.general_plugins``: runs in vLLM's server, engine and worker processes."""

from __future__ import annotations

import multiprocessing
import os
from types import ModuleType

import wrapt

from seamless_verl.verl_adapter.vllm import engine_watch, vllm_grammar


def register() -> None:
    """Continue grammars, end with the server; make the CPU backend accept weight updates, sleep, fork its worker and
    stay on its core."""
    engine_watch.end_with_server()
    wrapt.register_post_import_hook(vllm_grammar.install, "vllm.v1.structured_output")
    if os.environ.get("VERL_PLATFORM", "").lower() != "cpu":
        return
    import vllm._custom_ops as ops

    from seamless_verl.verl_adapter.cpu.cores import pin_replica

    pin_replica()
    # The CPU backend prepacks linear layers with oneDNN and drops `layer.weight`, after which load_weights() cannot
    # find its target. Without oneDNN it keeps the parameter. Remove when vLLM can reload prepacked weights.
    ops._supports_onednn = False
    wrapt.register_post_import_hook(_install_sleep_mode, "vllm.platforms.cpu")
    if "SEAMLESS_INTERPRETER" in os.environ:
        multiprocessing.set_executable(os.environ["SEAMLESS_INTERPRETER"])  # the engine process comes from the nursery
    if multiprocessing.current_process().name.startswith("EngineCore"):
        # The engine process is fresh here, without a thread that holds a lock: a fork spares an import of vLLM (10 s).
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def _install_sleep_mode(cpu: ModuleType) -> None:
    from seamless_verl.verl_adapter.cpu import vllm_sleep  # brings vLLM's worker in

    vllm_sleep.install(cpu)
