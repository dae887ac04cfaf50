"""Clients as they are published, unmodified, in processes of their own: with tools, whole and as streams.

Each conversation must come back as one clean row. The Python SDKs of the development environment always run, litellm
and mini-swe-agent where ``SEAMLESS_CLIENTS_PYTHON`` names an interpreter that has them, as ``make`` does. Node's need:

    npm install --prefix /tmp/clients openai @anthropic-ai/sdk
    SEAMLESS_CLIENTS_NODE=/tmp/clients/node_modules python -m pytest tests/edge/proxy/test_clients.py
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seamless_verl.proxy.client import SessionResult
from seamless_verl.proxy.text.parsing import TagParser
from tests.fakes import serving

SCRIPTS = Path(__file__).parent / "clients"
_PYTHON = os.environ.get("SEAMLESS_CLIENTS_PYTHON", "")
FRAMEWORKS = os.environ.get("SEAMLESS_FRAMEWORKS_PYTHON", "")
_NODE = os.environ.get("SEAMLESS_CLIENTS_NODE", "")
needs_python = pytest.mark.skipif(
    not _PYTHON,
    reason="SEAMLESS_CLIENTS_PYTHON is not set; `make test-edge` sets it",
)
needs_frameworks = pytest.mark.skipif(
    not FRAMEWORKS, reason="SEAMLESS_FRAMEWORKS_PYTHON is not set; `make test-clients` sets it"
)
needs_node = pytest.mark.skipif(
    not _NODE or shutil.which("node") is None,
    reason="SEAMLESS_CLIENTS_NODE is not set, or there is no node; npm install openai @anthropic-ai/sdk and name the "
    "node_modules folder, as the head of this file says",
)
pytestmark = pytest.mark.timeout(200)
_LOOK = 'I look. <tool_call>\n{"name": "run", "arguments": {"a": "é"}}\n</tool_call>'


def _agent(prompt: str) -> str:
    return "done" if "<|im_start|>tool" in prompt else _LOOK


def _thinker(prompt: str) -> str:
    return f"<think>\nhm, so\n</think>\n\n{_agent(prompt)}"


async def run_client(
    *command: str | Path, script: Any = _agent, parser: TagParser, **options: Any
) -> tuple[dict[str, Any], SessionResult]:
    """What a client printed, and what it left in the proxy."""
    async with serving(script, streams=True, parser=parser, **options) as proxy:
        handle = await proxy.open()
        environment = {**os.environ, "NO_PROXY": "*", "NODE_PATH": _NODE}
        ran = await asyncio.to_thread(
            subprocess.run,
            [*command, handle.base_url, handle.api_key],
            capture_output=True,
            text=True,
            timeout=180,
            env=environment,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        result = await proxy.admin.close_session(handle.id)
        assert result.audit.is_clean
        return json.loads(ran.stdout.splitlines()[-1]), result


_SDKS, _LITELLM = SCRIPTS / "sdk_agent.py", SCRIPTS / "litellm_agent.py"
_NODE_SDKS = ["node", SCRIPTS / "sdk_agent.mjs"]


@pytest.mark.parametrize(
    ("command", "thinks"),
    [
        pytest.param([sys.executable, _SDKS], False, id="python"),
        pytest.param([sys.executable, _SDKS], True, id="python-thinks"),
        pytest.param([FRAMEWORKS, _SDKS], False, id="python-openai-2", marks=needs_frameworks),
        pytest.param([FRAMEWORKS, _SDKS], True, id="python-openai-2-thinks", marks=needs_frameworks),
        pytest.param([_PYTHON, _LITELLM], False, id="litellm", marks=needs_python),
        pytest.param([_PYTHON, _LITELLM], True, id="litellm-thinks", marks=needs_python),
        pytest.param(_NODE_SDKS, False, id="node", marks=needs_node),
        pytest.param(_NODE_SDKS, True, id="node-thinks", marks=needs_node),
    ],
)
async def test_every_talk_is_one_clean_row(command: list[Any], thinks: bool) -> None:
    num_talks = 6  # three ways to talk, whole and as a stream
    script = _thinker if thinks else _agent
    report, result = await run_client(
        *command, script=script, parser=TagParser(("<think>", "</think>") if thinks else None)
    )
    assert len(report) == num_talks
    assert report == {name: ["I look.", [["run", {"a": "é"}]], "done"] for name in report}
    # Talks differ in their first message, so each but the first forks there; its second turn extends it, realigned
    # where the client drops the reasoning, or keeps only its last piece (openai for Node, streaming).
    assert len(result.rows) == result.kinds["fork"] + 1 == num_talks
    assert sum(result.kinds.values()) == 2 * num_talks


_STEPS = ("echo one", "echo two", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo three")


def _shell_user(prompt: str) -> str:
    command = json.dumps(_STEPS[prompt.count("<returncode>")])
    return f'Next. <tool_call>\n{{"name": "bash", "arguments": {{"command": {command}}}}}\n</tool_call>'


@needs_python
async def test_mini_swe_agent_works_to_the_end() -> None:
    report, result = await run_client(_PYTHON, SCRIPTS / "mini_agent.py", script=_shell_user, parser=TagParser())
    assert report == {name: ["Submitted", "three", 3] for name in ("LitellmModel", "LitellmResponseModel")}
    assert result.kinds == {"clean": 5, "fork": 1}
    assert [len(row.turns) for row in result.rows] == [3, 3]
