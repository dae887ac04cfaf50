"""Frameworks for agents as they are published: five turns with tools, whole and as a stream, and structured output.

``make test-clients`` builds the environment that they need and names it; elsewhere they are skipped.
"""

from __future__ import annotations

import json

import pytest

from seamless_verl.proxy.engine import Ability
from seamless_verl.proxy.text.parsing import TagParser
from tests.edge.proxy.test_clients import FRAMEWORKS, SCRIPTS, needs_frameworks, run_client

pytestmark = [pytest.mark.timeout(200), needs_frameworks]
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


@pytest.mark.parametrize(
    ("name", "script", "said", "rows"),
    [
        ("openai_agents", _counter, {"whole": "done", "stream": "done", "json": 4}, [5, 5, 1]),
        ("pydantic_ai", _counter, {"whole": "done", "stream": "done", "json": 4}, [5, 5, 1]),
        ("langchain", _counter, {"whole": "done", "stream": "done", "json": 4}, [5, 5, 1]),
        ("smolagents", _smol, {"whole": "done", "stream": "done"}, 10 * [1]),
        ("autogen", _counter, {"whole": "done", "stream": "done"}, [5, 5]),
        ("dspy", _dspy, {"whole": "done"}, [1, 1, 1, 1, 1]),
        ("instructor", _counter, {"json": 4, "stream": 4}, [1, 1]),
        ("llama_index", _counter, {"whole": "done", "stream": "done"}, [5, 5]),
    ],
)
async def test_a_framework_works_to_the_end(name, script, said, rows):
    abilities = frozenset({Ability.STRUCTURED_OUTPUTS})
    report, result = await run_client(
        *(FRAMEWORKS, SCRIPTS / "frameworks.py", name), script=script, parser=TagParser(), abilities=abilities
    )
    assert report == said
    assert [len(row.turns) for row in result.rows] == rows, result.kinds
