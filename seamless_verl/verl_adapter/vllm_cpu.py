"""Entry point ``vllm.general_plugins``: runs in vLLM's server, engine and worker processes."""

from __future__ import annotations

import multiprocessing
import os
import select
import threading

import wrapt

from seamless_verl.verl_adapter import vllm_grammar

_SERVER = "SEAMLESS_VLLM_SERVER"


def register() -> None:
    """Continue grammars; make the CPU backend accept weight updates, fork its worker, stay on its core and end with its
    server."""
    wrapt.register_post_import_hook(vllm_grammar.install, "vllm.v1.structured_output")
    if os.environ.get("VERL_PLATFORM", "").lower() != "cpu":
        return
    import vllm._custom_ops as ops

    from seamless_verl.verl_adapter.cores import pin_replica

    pin_replica()
    # The CPU backend prepacks linear layers with oneDNN and drops `layer.weight`, after which load_weights() cannot
    # find its target. Without oneDNN it keeps the parameter. Remove when vLLM can reload prepacked weights.
    ops._supports_onednn = False
    if "SEAMLESS_INTERPRETER" in os.environ:
        multiprocessing.set_executable(os.environ["SEAMLESS_INTERPRETER"])  # the engine process comes from the nursery
    if multiprocessing.current_process().name.startswith("EngineCore"):
        # The engine process is fresh here, without a thread that holds a lock: a fork spares an import of vLLM (10 s).
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        if _SERVER in os.environ:
            server = os.pidfd_open(int(os.environ[_SERVER]))
            threading.Thread(target=_end_with, args=(server,), name="server watch", daemon=True).start()
    else:
        os.environ[_SERVER] = str(os.getpid())


def _end_with(server: int) -> None:
    """Coming from the nursery, the engine is no child of its server and would outlive one that is killed."""
    select.select([server], [], [])
    os._exit(1)
