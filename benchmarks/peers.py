"""Recorders to compare with, each in an environment of its own under ``--peers``.

python -m venv PEERS/rllm    && PEERS/rllm/bin/pip install rllm-model-gateway==0.1.0
python -m venv PEERS/litellm && PEERS/litellm/bin/pip install 'litellm[proxy]==1.106.2'
python -m venv PEERS/agentlightning && PEERS/agentlightning/bin/pip install 'agentlightning==0.3.0' 'litellm[proxy]'
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.traffic import process

# No look at the network for prices; since 1.106 no start without a master key unless told so.
_LITELLM = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}
_LIGHTNING = """
import sys, threading
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store.memory import InMemoryLightningStore
import asyncio
async def main():
    params = {"model": "hosted_vllm/mock", "api_base": sys.argv[2], "api_key": "k"}
    model = {"model_name": "mock", "litellm_params": params}
    store = InMemoryLightningStore(thread_safe=True)
    proxy = LLMProxy(
        port=int(sys.argv[1]), model_list=[model], store=store, launch_mode="thread", host="127.0.0.1"
    )
    await proxy.start()
    await asyncio.Event().wait()
asyncio.run(main())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """How one recorder is started and spoken to; ``path`` may hold ``{session}``."""

    name: str
    health: str
    path: str
    key: str = "k"

    def start(
        self, peers: Path, scratch: Path, port: int, engine: int, *, core: int, log: Path
    ) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        upstream = f"http://127.0.0.1:{engine}/v1"
        if self.name.startswith("rllm"):
            store = self.name.rpartition(" ")[2]
            command = [str(peers / "rllm/bin/python"), "-m", "rllm_model_gateway", "--host", "127.0.0.1"]
            command += ["--port", str(port), "--worker", upstream, "--store", store, "--log-level", "warning"]
            command += ["--db-path", str(scratch / f"rllm-{port}.sqlite")]
            return process(command, core=core, log=log)
        if self.name == "litellm":
            config = scratch / "litellm.yaml"
            params = {"model": "hosted_vllm/mock", "api_base": upstream, "api_key": "k"}
            config.write_text(json.dumps({"model_list": [{"model_name": "mock", "litellm_params": params}]}))
            command = [str(peers / "litellm/bin/litellm"), "--config", str(config), "--host", "127.0.0.1"]
            command += ["--port", str(port), "--telemetry", "False"]
            return process(command, core=core, log=log, **_LITELLM)
        script = scratch / "lightning.py"
        script.write_text(_LIGHTNING)
        command = [str(peers / "agentlightning/bin/python"), str(script), str(port), upstream]
        return process(command, core=core, log=log, **_LITELLM)


PEERS = (
    Peer(name="rllm-model-gateway sqlite", health="/health", path="/sessions/{session}/v1/chat/completions"),
    Peer(name="rllm-model-gateway memory", health="/health", path="/sessions/{session}/v1/chat/completions"),
    Peer(name="litellm", health="/health/liveliness", path="/v1/chat/completions"),
    Peer(
        name="agentlightning",
        health="/health/liveliness",
        path="/rollout/{session}/attempt/a/v1/chat/completions",
    ),
)
