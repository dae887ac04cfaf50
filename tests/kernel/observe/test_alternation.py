"""Every second step waits for a whole batch: said once, with what rollout did meanwhile."""

import io

import pytest

from seamless_verl.observe.alternation import Alternation
from seamless_verl.observe.reporter import Reporter
from tests.kernel.observe.test_observe import step

READY, WAITED = (1.0, 0.01), (0.0, 0.76)


def told(steps, rollout=0.32):
    found = Alternation()
    said = [found.step(age, {"trainer": trainer, "rollout": rollout}) for age, trainer in steps]
    return [(number, line) for number, line in enumerate(said, start=1) if line is not None]


def test_steps_that_alternate_are_told_once_with_both_kinds():
    ((number, line),) = told([READY, WAITED] * 6)
    assert number == 6
    assert "staleness 1.00, trainer idle 1%" in line
    assert "(0.00, 76%)" in line
    assert "seamless.staleness.eta=2" in line


def test_where_rollout_is_busy_nothing_else_is_advised():
    ((_, line),) = told([WAITED, READY] * 3, rollout=0.05)
    assert "it is what all wait for" in line
    assert "eta=2" not in line


@pytest.mark.parametrize(
    "steps",
    [
        [READY] * 12,
        [WAITED] * 12,
        [(1.0, 0.7), (0.0, 0.1)] * 6,  # whoever waits is the older one: not the bound
        [(1.0, 0.2), (0.0, 0.3)] * 6,
        [READY, WAITED, WAITED, READY] * 3,
        [(1.0, None), (0.0, None)] * 6,
        [READY, WAITED] * 2,
    ],
    ids=["ready", "waiting", "other", "a little", "uneven", "unknown", "few"],
)
def test_other_courses_are_not(steps):
    assert told(steps) == []


def test_the_console_says_so_after_the_steps_line():
    stream = io.StringIO()
    reporter = Reporter(None, stream)
    for number in range(1, 8):
        age, trainer = (READY, WAITED)[number % 2]
        reporter.step(step(number, staleness_mean=age, idle_share={"trainer": trainer, "rollout": 0.3}), {})
    lines = stream.getvalue().splitlines()
    assert lines[6].startswith("steps alternate: ")
    assert len(lines) == 7 + 2, "two lines, once"
