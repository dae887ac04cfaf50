"""What every policy decides in a fixed run, command by command: a change of behaviour shows as a line that differs.

``python -m tests.kernel.scheduling.test_golden`` writes the traces anew, for whoever means to change a decision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seamless_verl.config import SchedulerConfig
from seamless_verl.observe.scheduler_flight import plain_fields
from seamless_verl.scheduling.commands import Command
from seamless_verl.scheduling.declaration import policy_of
from tests.kernel.scheduling.test_policies import skewed
from tests.kernel.scheduling.toy import Setting, Toy

FOLDER = Path(__file__).parent / "golden"
SETTING = Setting(lengths=skewed, batch=8, updates=2, members=3, steps=6)
POLICIES = ("predictive", "greedy", "verl_gate", "colocated", "disaggregated")


class _Stamped(Toy):
    """Notes each command with its time."""

    def __init__(self, policy: str) -> None:
        rule = policy_of(
            SchedulerConfig(policy=policy), batch=SETTING.batch, mini_batch=SETTING.batch // SETTING.updates
        )
        super().__init__(rule, SETTING)
        self.lines: list[dict[str, Any]] = []

    def carry_out(self, command: Command) -> None:
        self.lines.append({"at": self.now, "command": type(command).__name__, **plain_fields(command)})
        super().carry_out(command)


def rounded(value: Any) -> Any:
    """Times to a microsecond: what is beyond that another processor may round otherwise."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def trace(policy: str) -> list[dict[str, Any]]:
    toy = _Stamped(policy)
    toy.run()
    return [rounded(line) for line in toy.lines]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_commands_as_ever(policy: str) -> None:
    kept = [json.loads(line) for line in (FOLDER / f"{policy}.jsonl").read_text().splitlines()]
    for number, (found, wanted) in enumerate(zip(trace(policy), kept, strict=True)):
        assert found == wanted, f"line {number + 1}"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in POLICIES:
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in trace(name)))
