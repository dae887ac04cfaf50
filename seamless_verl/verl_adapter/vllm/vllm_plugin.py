"""Entry point ``vllm.general_plugins``: runs in vLLM's server, engine and worker processes, on every platform.

It installs our patches of vLLM, and lets engine processes end with their server, also when that is killed, so that
their GPU memory is freed: vLLM's engine core waits for requests on a socket and does not notice that nobody can send
any (0.24 and 0.27; its own workers notice when the core is gone). Remove that when it does.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import threading
import time

from seamless_verl.verl_adapter.workarounds import VLLM, VLLM_ON_CPU, install

SERVER = "SEAMLESS_VLLM_SERVER"
_ENGINE_PROCESSES = ("EngineCore", "VllmWorker")  # vLLM's names
_POLL_S = 1.0


def register() -> None:
    """Called by vLLM. On a CPU the engine's process forks its worker and stays on its core, too."""
    end_with_server()
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


def end_with_server() -> None:
    """A server's process tells its engine's processes its id; in these a thread ends them when the server has ended."""
    if not multiprocessing.current_process().name.startswith(_ENGINE_PROCESSES):
        os.environ[SERVER] = str(os.getpid())
    elif SERVER in os.environ:
        server = int(os.environ[SERVER])
        threading.Thread(target=_end_after, args=(server,), name="server watch", daemon=True).start()


def _end_after(server: int) -> None:
    try:
        handle = os.pidfd_open(server)
    except ProcessLookupError:
        pass
    except OSError:  # Linux before 5.3
        while os.path.exists(f"/proc/{server}"):
            time.sleep(_POLL_S)
    else:
        select.select([handle], [], [])
    for worker in multiprocessing.active_children():  # they would take their time, and hold the memory meanwhile
        worker.kill()
    os._exit(1)
