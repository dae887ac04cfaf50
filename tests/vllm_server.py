"""A real vLLM server on the CPU, in a process of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from seamless_verl.run.environment import CPU_ENVIRONMENT


@contextmanager
def vllm_server(model: Path, scratch: Path, *options: str) -> Iterator[str]:
    """Serve ``model`` as ``tiny``; the server's address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "tiny", "--enforce-eager", "--dtype", "float32", *options]
    with (scratch / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **CPU_ENVIRONMENT})
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(1200):
                assert server.poll() is None, (scratch / "log").read_text()[-3000:]
                try:
                    if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                asyncio.run(asyncio.sleep(0.25))
            yield url
        finally:
            server.terminate()
            server.wait(timeout=60)
