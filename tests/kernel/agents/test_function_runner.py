"""An agent and a reward that are plain functions: what becomes of what they return and raise."""

import json
import math

import pytest

from seamless_verl.agents.function_runner import FunctionRunner, graded
from seamless_verl.errors import ConfigError

JOB = {"task": {"n": 3}, "base_url": "http://127.0.0.1:1/v1", "api_key": "k", "model": "m"}
HERE = __name__


def doubles(task, base_url, api_key, model):
    assert (base_url, api_key, model) == ("http://127.0.0.1:1/v1", "k", "m")
    return 2 * task["n"]


async def doubles_later(task, base_url, api_key, model):
    return doubles(task, base_url, api_key, model)


def breaks(task, base_url, api_key, model):
    return task["no such key"]


def leaves(task, base_url, api_key, model):
    raise SystemExit(3)


def takes_another_name(job):
    return job


def score(task, outcome):
    return 0.0 if outcome is None else outcome / task["n"]


@pytest.mark.parametrize("agent", [doubles, doubles_later])
def test_the_reward_sees_the_task_and_what_the_agent_returned(agent):
    assert graded(agent, score, JOB) == {"rewards": {"reward": 2.0}}


@pytest.mark.parametrize(("agent", "word"), [(breaks, "KeyError: 'no such key'"), (leaves, "SystemExit: 3")])
def test_what_the_agent_raises_is_told_with_its_line_and_the_reward_decides_what_it_is_worth(agent, word):
    told = graded(agent, score, JOB)
    assert told["rewards"] == {"reward": 0.0}
    assert told["failed"].startswith(f"{word} in {__file__}:")
    assert f" in {agent.__name__}: " in told["failed"]


def test_without_an_address_only_the_reward_is_asked():
    assert graded(breaks, score, {"task": {"n": 3}}) == {"rewards": {"reward": 0.0}}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (math.nan, "the reward is nan"),
        ("1.0", "the reward is '1.0'"),
        (None, "the reward is None"),
        ({"passed": 1.0}, "without the key reward"),
        ({"reward": 1.0, "passed": math.inf}, "component 'passed' is inf"),
    ],
)
def test_a_reward_that_is_no_number_is_refused(value, problem):
    assert problem in graded(doubles, lambda task, outcome: value, JOB)["refused"]


def test_components_are_plain_numbers():
    class Number:
        """As numpy's: a number, and nothing that JSON takes."""

        def __float__(self):
            return 0.25

    told = graded(doubles, lambda task, outcome: {"reward": Number(), "passed": True}, JOB)
    assert json.loads(json.dumps(told)) == {"rewards": {"reward": 0.25, "passed": 1.0}}


def test_a_reward_that_raises_is_no_reward():
    with pytest.raises(ZeroDivisionError):
        graded(doubles, lambda task, outcome: 1 / 0, JOB)


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ({"agent": f"{HERE}.doubels"}, "agent", ["has no such function", "write doubles"]),
        ({"agent": "nowhere_at_all.agent.attempt"}, "agent", ["cannot be imported", "holds nowhere_at_all"]),
        ({"agent": "attempt"}, "agent", ["cannot be imported", "MODULE.FUNCTION"]),
        ({"agent": f"{HERE}.takes_another_name"}, "agent", ["cannot be called", "(task, base_url, api_key, model)"]),
        ({"reward": f"{HERE}.doubles"}, "reward", ["cannot be called", "(task, outcome)"]),
        ({"threads": 0}, "threads", ["write 1 or more"]),
    ],
)
def test_functions_that_cannot_be_called_are_refused_before_the_start(options, key, words):
    FunctionRunner.check_options({"agent": f"{HERE}.doubles", "reward": f"{HERE}.score"})
    with pytest.raises(ConfigError) as refused:
        FunctionRunner.check_options({"agent": f"{HERE}.doubles", "reward": f"{HERE}.score", **options})
    assert refused.value.key == f"seamless.agent.kwargs.{key}"
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("line", ["import nowhere_at_all", "1 / 0", "def f(:"])
def test_a_module_that_raises_is_told_with_its_line(tmp_path, monkeypatch, line):
    module = f"broken_{abs(hash(line))}"
    (tmp_path / f"{module}.py").write_text(f"\n{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"its module raises \w+.*{module}\.py:2|its module raises SyntaxError"):
        FunctionRunner.check_options({"agent": f"{module}.f", "reward": f"{HERE}.score"})
