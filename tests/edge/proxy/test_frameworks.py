"""Frameworks for agents as they are published: five turns with tools, whole and as a stream, and structured output.

``make test-clients`` builds the environments that they need and names them; elsewhere they are skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

from seamless_verl.proxy.engine import Ability
from seamless_verl.proxy.text.parsing import TagParser
from tests.edge.proxy.test_clients import FRAMEWORKS, SCRIPTS, needs_frameworks, run_client

pytestmark = pytest.mark.timeout(200)
_CREWAI = os.environ.get("SEAMLESS_CREWAI_PYTHON", "")
_needs_crewai = pytest.mark.skipif(not _CREWAI, reason="SEAMLESS_CREWAI_PYTHON is not set; `make test-clients` sets it")
_CALLS = 4


def _call(name: str, arguments: dict[str, str]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _counter(prompt: str) -> str:
    """Calls the tool until it was answered four times."""
    question = prompt.rpartition("<|im_start|>user")[2]
    if "as JSON" in question:
        return '{"number": 4}'
    done = question.count("<|im_start|>tool")
    return "done" if done == _CALLS else "I look. " + _call("run", {"a": str(done)})


def _smol(prompt: str) -> str:
    """smolagents tells earlier calls and results as text of the user's, and ends with a tool of its own."""
    done = prompt.rpartition("count to four")[2].count("Observation")
    return _call("final_answer", {"answer": "done"}) if done >= _CALLS else _call("run", {"a": str(done)})


def _coder(prompt: str) -> str:
    """smolagents asks for Python, and stops the engine at the end of the code."""
    done = prompt.rpartition("count to four")[2].count("Observation")
    code = 'final_answer("done")' if done >= _CALLS else f'print(run("{done}"))'
    return f"I look.\n<code>\n{code}\n</code>"


def _silent(prompt: str) -> str:
    """CrewAI forgets what stands beside a call."""
    return _counter(prompt).removeprefix("I look. ")


def _fields(**fields: str) -> str:
    return "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in fields.items()) + "[[ ## completed ## ]]"


def _dspy(prompt: str) -> str:
    """DSPy writes calls and results into one message of the user, anew in each turn."""
    done = prompt.count("out ")
    if "next_tool_name" not in prompt.rpartition("<|im_start|>user")[2]:
        return _fields(reasoning="it is", answer="done")
    if done == _CALLS:
        return _fields(next_thought="hm", next_tool_name="finish", next_tool_args="{}")
    return _fields(next_thought="hm", next_tool_name="run", next_tool_args=json.dumps({"a": str(done)}))


@needs_frameworks
@pytest.mark.parametrize(
    ("name", "script", "said", "rows"),
    [
        ("openai_agents", _counter, {"whole": "done", "stream": "done", "json": 4}, [5, 5, 1]),
        ("pydantic_ai", _counter, {"whole": "done", "stream": "done", "json": 4}, [5, 5, 1]),
        ("langchain", _counter, {"whole": "done", "stream": "done", "json": 4}, [5, 5, 1]),
        ("smolagents", _smol, {"whole": "done", "stream": "done"}, 10 * [1]),
        ("smolagents_code", _coder, {"whole": "done", "stream": "done"}, [5, 5]),
        ("autogen", _counter, {"whole": "done", "stream": "done"}, [5, 5]),
        ("dspy", _dspy, {"whole": "done"}, [1, 1, 1, 1, 1]),
        ("instructor", _counter, {"json": 4, "stream": 4}, [1, 1]),
        ("llama_index", _counter, {"whole": "done", "stream": "done"}, [5, 5]),
    ],
)
async def test_a_framework_works_to_the_end(name, script, said, rows):
    await _works(FRAMEWORKS, name, script, said, rows)


@_needs_crewai
async def test_crewai_works_to_the_end() -> None:
    await _works(_CREWAI, "crewai", _silent, {"whole": "done", "stream": "done", "json": 4}, [5, 5, 1])


async def _works(
    python: str, name: str, script: Callable[[str], str], said: dict[str, object], rows: list[int]
) -> None:
    abilities = frozenset({Ability.STRUCTURED_OUTPUTS})
    report, result = await run_client(
        *(python, SCRIPTS / "frameworks.py", name), script=script, parser=TagParser(), abilities=abilities
    )
    assert report == said
    assert [len(row.turns) for row in result.rows] == rows, result.kinds
