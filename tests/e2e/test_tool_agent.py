"""verl's own multi-turn tool agent under our trainer, two steps on the CPU."""

import json

import pytest

from tests.e2e.test_runs import machine, summary  # noqa: F401  (machine is a fixture)
from tests.tool_task import build

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_verls_tool_agent_calls_its_tool_and_is_trained(machine):  # noqa: F811
    code, output = machine.run(
        *build(machine.folder / "task"), "trainer.val_before_train=false", "trainer.test_freq=-1"
    )
    assert code == 0, output
    assert "verl's own agent loops leave no record to compare" in output
    (folder,) = machine.runs()
    figures = summary(folder)
    assert (figures["steps"], figures["rows"], figures["attempts_failed"]) == (2, 256, 0)
    assert figures["max_logprob_diff"] < 1e-3  # of both answers; the tool's is not trained
    rows = [json.loads(line) for path in (folder / "rows").iterdir() for line in path.read_text().splitlines()]
    called = [row for row in rows if "</tool_call>\ntool\n" in row["output"]]
    assert len(called) > len(rows) / 2
    machine.assert_nothing_left()
