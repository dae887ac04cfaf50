"""The reward of an attempt."""

from typing import Any


def score(task: dict[str, Any], outcome: dict[str, Any] | None) -> dict[str, float]:
    """1.0 for the right sum, half of it where it took a second turn.

    Args:
        task: what the data says of the task.
        outcome: what the agent returned; None where it raised or ran out of time.

    Returns:
        ``reward`` is trained; a plain number would do, too. Other names are averaged for the validation's line, where
        ``passed`` is its pass rate.
    """
    if outcome is None or outcome["answer"] != task["answer"]:
        return {"reward": 0.0, "passed": 0.0}
    return {"reward": 1.0 / outcome["turns"], "passed": 1.0}
