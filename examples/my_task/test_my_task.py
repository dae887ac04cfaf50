"""The agent, the reward and the data, without any model: ``pytest my_task``."""

import json

from my_task.agent import converse
from my_task.data import rows, task
from my_task.reward import score


def conversation(*answers):
    """What a model that gives these answers is asked, and what the agent makes of it."""
    asked, left = [], list(answers)

    def ask(messages):
        asked.append([message["content"] for message in messages])
        return left.pop(0)

    return asked, converse(task(7, 5), ask)


def test_a_right_answer_ends_the_conversation():
    asked, outcome = conversation("12")
    assert asked == [[" 7+ 5"]]
    assert score(task(7, 5), outcome) == {"reward": 1.0, "passed": 1.0}


def test_an_answer_that_cannot_be_right_is_asked_for_again_once():
    asked, outcome = conversation("eleven", "12")
    assert asked[1] == [" 7+ 5", "eleven", " 7+ 5"]
    assert score(task(7, 5), outcome) == {"reward": 0.5, "passed": 1.0}
    assert score(task(7, 5), conversation("11", "13")[1])["reward"] == 0.0


def test_an_attempt_without_an_outcome_is_worth_nothing():
    assert score(task(7, 5), None)["reward"] == 0.0


def test_rows_hold_the_task():
    (row,) = rows([(7, 5)], "train")
    assert json.loads(row["extra_info"]["task"]) == task(7, 5)
    assert row["agent_name"] == "seamless_agent"
