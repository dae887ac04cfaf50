"""Clients as they are published, unmodified, in processes of their own: with tools, whole and as streams.

Each conversation must come back as one clean row. The Python SDKs of the development environment always run, litellm
and mini-swe-agent where ``SEAMLESS_CLIENTS_PYTHON`` names an interpreter that has them, as ``make`` does. Node's run in
``make test-clients``.
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
from seamless_verl.proxy.engine import Ability
from seamless_verl.proxy.limits import Limits
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
    not Path(_NODE, "openai").exists() or shutil.which("node") is None,
    reason="SEAMLESS_CLIENTS_NODE is not set, or there is no node; `make test-clients` sets it where npm is",
)
pytestmark = pytest.mark.timeout(200)
_TURNS = 5
_LOOK = 'I look. <tool_call>\n{"name": "run", "arguments": {"a": "é"}}\n</tool_call>'


def _agent(prompt: str) -> str:
    return _LOOK if prompt.count("<|im_start|>tool") < _TURNS - 1 else "done"


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
    looked = ["I look.", [["run", {"a": "é"}]]]
    assert report == {name: [*(_TURNS - 1) * [looked], ["done", []]] for name in report}
    # Talks differ in their first message, so each but the first forks there; its later turns extend it, realigned
    # where the client drops the reasoning, or keeps only its last piece (openai for Node, streaming).
    assert [len(row.turns) for row in result.rows] == num_talks * [_TURNS]
    assert result.kinds["fork"] + 1 == num_talks


_OVERFLOW = """
import json, os, sys
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
said, asked = [], [{"role": "user", "content": "hi"}]
for model, base in (("openai/m", sys.argv[1]), ("anthropic/m", sys.argv[1].removesuffix("/v1"))):
    try:
        litellm.completion(model=model, api_base=base, api_key=sys.argv[2], messages=asked)
    except Exception as error:
        said.append(type(error).__name__)
print(json.dumps(said))
"""


@needs_python
async def test_litellm_knows_a_prompt_that_is_too_long() -> None:
    report, _ = await run_client(_PYTHON, "-c", _OVERFLOW, parser=TagParser(), limits=Limits(max_model_len=4))
    assert report == ["ContextWindowExceededError"] * 2


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


def _counter(prompt: str) -> str:
    """Calls whichever tool there is, four times."""
    question = prompt.rpartition("<|im_start|>user")[2]
    done = question.count("<|im_start|>tool")
    if "as JSON" in question:
        return '{"number": 4}'
    command = {"a": str(done)} if '"name": "run"' in prompt else {"command": f"echo {done}", "description": "counts"}
    call = json.dumps({"name": "run" if "a" in command else "bash", "arguments": command})
    return "done" if done == _TURNS - 1 else f"<tool_call>\n{call}\n</tool_call>"


@needs_node
async def test_vercels_sdk_works_to_the_end() -> None:
    abilities = frozenset({Ability.STRUCTURED_OUTPUTS})
    report, result = await run_client(
        *("node", SCRIPTS / "ai_sdk_agent.mjs"), script=_counter, parser=TagParser(), abilities=abilities
    )
    ways = {f"{talk} {way}": "done" for talk in ("chat", "responses") for way in ("whole", "stream")}
    assert report == ways | {"chat json": {"number": 4}, "responses json": {"number": 4}}
    assert sorted(len(row.turns) for row in result.rows) == [1, 1, 5, 5, 5, 5]
    assert set(result.drift) == {"root_changed", "arguments_respelled"}


@needs_node
async def test_opencode_works_to_the_end(tmp_path: Path) -> None:
    report, result = await run_client(
        *(sys.executable, SCRIPTS / "opencode_agent.py", tmp_path, _NODE), script=_counter, parser=TagParser()
    )
    assert report == {"said": "done"}
    assert [len(row.turns) for row in result.rows] == [5]
    assert set(result.drift) == {"arguments_respelled"}
