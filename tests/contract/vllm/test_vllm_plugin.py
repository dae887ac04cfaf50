"""An engine process ends with the server that started it, on every platform. Real processes, no engine in them."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import select
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from seamless_verl.verl_adapter.workarounds import VLLM, install

pytestmark = pytest.mark.timeout(60)

# As vLLM starts it: the plug-in is loaded in the server, then in a child by the name of vLLM's engine process.
SERVER = """
import multiprocessing, sys, time
from seamless_verl.verl_adapter.vllm.vllm_plugin import register

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


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Any:
    core_client = importlib.import_module("vllm.v1.engine.core_client")
    stock = inspect.unwrap(core_client.AsyncMPClient._call_utility_async)
    monkeypatch.setattr(core_client.AsyncMPClient, "_call_utility_async", stock)
    (workaround,) = (it for it in VLLM if it.module == core_client.__name__)
    for _ in range(2):  # vLLM may load its plug-ins more than once
        install([workaround])
    assert core_client.AsyncMPClient._call_utility_async.__wrapped__ is stock
    return core_client


def _client_of_a_silent_engine(kind: Any) -> Any:
    """vLLM's client without a socket behind it: what it sends is never answered."""

    client = object.__new__(kind)
    client.sent = asyncio.Event()

    async def send(*_: Any) -> None:
        client.sent.set()

    client.resources = SimpleNamespace(engine_dead=False)
    client.utility_results, client.client_index = {}, 0
    client.encoder = SimpleNamespace(encode=lambda call: [])
    client._send_input_message, client._ensure_output_queue_task = send, lambda: None
    client.core_engine = b"engine"
    return client


async def _call_and_kill(kind: Any) -> Any:
    client = _client_of_a_silent_engine(kind)
    call = asyncio.ensure_future(client.call_utility_async("sleep", 1))
    await client.sent.wait()
    client.resources.engine_dead = True  # as vLLM's monitor marks it
    return await asyncio.wait_for(call, 5)


async def test_a_call_that_is_under_way_when_its_engine_dies_ends(patched: Any) -> None:
    with pytest.raises(patched.EngineDeadError):
        await _call_and_kill(patched.AsyncMPClient)


async def test_vllm_leaves_such_a_call_waiting_for_ever() -> None:
    """When this fails, vLLM ends it, and the workaround can go."""
    core_client = importlib.import_module("vllm.v1.engine.core_client")
    stock = inspect.unwrap(core_client.AsyncMPClient._call_utility_async)
    with pytest.raises(asyncio.TimeoutError):
        await _call_and_kill(type("Stock", (core_client.AsyncMPClient,), {"_call_utility_async": stock}))


async def test_a_call_that_is_answered_or_fails_is_passed_on(patched: Any) -> None:
    for outcome in (7, RuntimeError("no room")):
        client = _client_of_a_silent_engine(patched.AsyncMPClient)
        call = asyncio.ensure_future(client.call_utility_async("wake_up"))
        await client.sent.wait()
        (answer,) = client.utility_results.values()
        if isinstance(outcome, int):
            answer.set_result(outcome)
            assert await call == outcome
        else:
            answer.set_exception(outcome)
            with pytest.raises(RuntimeError, match="no room"):
                await call
