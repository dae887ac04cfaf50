"""Groups with surplus rollouts, and steps that wait for stragglers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.errors import ConfigError
from seamless_verl.staleness.groups import GroupProgress, GroupState, StuckPolicy, Treatment
from seamless_verl.staleness.protocol import StalenessProtocol


@given(st.data(), st.integers(1, 5), st.integers(0, 4))
def test_a_group_is_complete_with_the_first_n_and_everybody_else_is_stopped_once(
    data: st.DataObject, needed: int, surplus: int
) -> None:
    progress = GroupProgress(needed=needed, launched=needed + surplus)
    running, finished, failed = set(range(needed + surplus)), [], 0
    while running:
        member = data.draw(st.sampled_from(sorted(running)))
        running.remove(member)
        if data.draw(st.booleans()):
            finished.append(member)
            verdict = progress.finish(member)
        else:
            failed += 1
            verdict = progress.fail(member)
        if verdict.state is not GroupState.GENERATING:
            assert set(verdict.stop) == running
            break
    complete = len(finished) == needed
    assert verdict.state is (GroupState.COMPLETE if complete else GroupState.FAILED)
    assert complete or failed > surplus
    assert progress.members == tuple(finished)


def test_a_group_smaller_than_asked_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"group_redundancy=0\.5.*2 rollouts for a group of 4"):
        GroupProgress(needed=4, launched=2)


def stuck() -> StalenessProtocol:
    """Step 1 waits for ``old``, reserved at version 0; ``done`` is finished for step 2."""
    protocol = StalenessProtocol(eta=1, batch_size=1)
    protocol.reserve("old", 0), protocol.reserve("first", 0)
    protocol.occupy("first"), protocol.consume(1)
    protocol.reserve("done", 1), protocol.occupy("done")
    assert (protocol.version, protocol.stuck(), protocol.num_ahead) == (1, ("old",), 1)
    return protocol


def test_waiting_is_the_default_and_patience_comes_first() -> None:
    assert StuckPolicy().treat(stuck(), waited_s=1e9) == ()
    assert StuckPolicy(treatment=Treatment.RETRY, patience_s=60).treat(stuck(), waited_s=59) == ()


def test_a_straggler_starts_anew_only_when_a_finished_group_takes_its_place() -> None:
    protocol, policy = stuck(), StuckPolicy(treatment=Treatment.RETRY, patience_s=60)
    (straggler,) = policy.treat(protocol, waited_s=60)
    protocol.abort(straggler)
    assert protocol.num_available == 1, "done moved up"
    assert protocol.reserve(straggler, 1) == 2
    alone = StalenessProtocol(eta=0, batch_size=1)
    alone.reserve("only", 0)
    assert policy.treat(alone, waited_s=60) == ()


def test_truncation_names_every_straggler() -> None:
    protocol = StalenessProtocol(eta=0, batch_size=3)
    for group in "abc":
        protocol.reserve(group, 0)
    protocol.occupy("b")
    assert StuckPolicy(treatment=Treatment.TRUNCATE, patience_s=0).treat(protocol, waited_s=5) == ("a", "c")


def test_where_fewer_prompts_are_under_way_those_of_later_steps_are_stragglers_too() -> None:
    """They were reserved late, as always, and will take the places that nobody else can have."""
    protocol = StalenessProtocol(eta=3, batch_size=3, in_flight=2)
    for group in "abcdef":
        protocol.reserve(group, 0)
    protocol.occupy("b")
    assert (protocol.capacity(0), protocol.num_available) == (0, 1)
    groups = StuckPolicy(treatment=Treatment.TRUNCATE, patience_s=0).treat(protocol, waited_s=5)
    assert len(groups) == len({*groups} - {"b"}) == 2
    for group in groups:
        protocol.occupy(group)
    assert protocol.num_available == 3
    assert protocol.stuck() == ()
