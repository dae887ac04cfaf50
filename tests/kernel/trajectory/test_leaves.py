"""A turn whose prompt starts with all tokens of a leaf continues a leaf, wherever that hangs in the tree."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.leaves import NastyAgent, restored


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32))
def test_whatever_an_agent_does_a_turn_that_extends_a_leaf_continues_it(seed: int) -> None:
    agent = NastyAgent(seed)
    for _ in range(25):
        agent.turn()
        assert agent.counts["hidden"] == agent.counts["changed"] == 0
    assert agent.counts["extending"] > 0
    assert restored(agent)
