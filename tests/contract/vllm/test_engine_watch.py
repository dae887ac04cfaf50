"""An engine process ends with the server that started it, on every platform. Real processes, no engine in them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(60)

# As vLLM starts it: the plug-in is loaded in the server, then in a child by the name of vLLM's engine process.
SERVER = """
import multiprocessing, sys, time
from seamless_verl.verl_adapter.cpu.vllm_cpu import register

def engine():
    register()
    time.sleep(3600)

register()
process = multiprocessing.get_context("{method}").Process(target=engine, name="{name}")
process.start()
print(process.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("name", ["EngineCore", "EngineCore_DP0", "VllmWorker-1"])
def test_a_killed_server_takes_its_engine_processes_with_it(name: str) -> None:
    environment = {
        key: value for key, value in os.environ.items() if key not in ("VERL_PLATFORM", "SEAMLESS_INTERPRETER")
    }
    command = [sys.executable, "-c", SERVER.format(method="fork", name=name)]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    engine = os.pidfd_open(int(server.stdout.readline()))
    server.send_signal(signal.SIGKILL)
    server.wait(10)
    ended, _, _ = select.select([engine], [], [], 10)
    if not ended:
        signal.pidfd_send_signal(engine, signal.SIGKILL)
    os.close(engine)
    server.stdout.close()
    assert ended, "the engine process outlives its server, and keeps its memory"
