"""One slice, one table: what every move does to its state, flags, deadline and costs, and which moves are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from seamless_verl.scheduling.slices import (
    ACTIVE_TAG,
    FAILED_WAKES,
    TRANSITIONS,
    InvalidTransition,
    Move,
    Order,
    Repair,
    SliceState,
    SliceStatus,
    Switch,
    SwitchTimes,
    Tag,
)
from tests.kernel.scheduling.world import BOTH, ROLLOUT, TRAIN, make_slice


def a_slice(state: SliceState = SliceState.IDLE, capabilities: frozenset[Tag] = BOTH, name: str = "a") -> SliceStatus:
    return SliceStatus(
        slice=make_slice(name, capabilities), costs=SwitchTimes(), state=state, usable=capabilities, since=0.0
    )


def order(number: int = 7, deadline: float = 60.0) -> Order:
    return Order(number=number, deadline=deadline, story="the test says so")


MOVES: dict[Move, Callable[[SliceStatus, float], object]] = {
    Move.LEND: lambda s, at: s.lend(at, order(), decision=3),
    Move.READY: lambda s, at: s.ready(at, version=5),
    Move.SYNC: lambda s, at: s.sync(at, order()),
    Move.DRAIN: lambda s, at: s.drain(at, order()),
    Move.DRAINED: lambda s, at: s.drained(at),
    Move.GRANT: lambda s, at: s.grant(at, "step-1", Tag.TRAIN),
    Move.LOSE_ROLLOUT: lambda s, at: s.lose(at, ROLLOUT, "killed", restartable=True),
    Move.FAIL: lambda s, at: s.lose(at, BOTH, "killed", restartable=True),
    Move.RETURN: lambda s, at: s.restarted(at),
}
"""Release is left out: it also ends a grant of rollout slices, which changes no state."""


@pytest.mark.parametrize("state", SliceState)
@pytest.mark.parametrize("move", MOVES)
def test_every_move_of_every_state_is_in_the_table_or_raises_with_its_story(state: SliceState, move: Move) -> None:
    status = a_slice(state)
    after = TRANSITIONS.get((state, move))
    if after is None:
        with pytest.raises(InvalidTransition, match=rf"slice a is {state.name}, which does not allow {move.value}"):
            MOVES[move](status, 9.0)
        assert (status.state, status.since) == (state, 0.0)
        assert (status.command, status.deadline, status.holder, status.decision) == (None, None, None, None)
        assert status.repair is Repair.NOT_NEEDED
        assert status.usable == BOTH
        return
    MOVES[move](status, 9.0)
    assert status.state is after
    assert status.since == (0.0 if after is state else 9.0), "it entered a state, or stayed in it"


def test_an_order_that_is_refused_says_what_was_ordered() -> None:
    with pytest.raises(InvalidTransition, match="^the test says so: slice a is TRAINING, which does not allow lend$"):
        a_slice(SliceState.TRAINING).lend(1.0, order(), decision=None)


def test_the_table_leads_everywhere_and_back() -> None:
    """From every state every other can be reached, so no slice is ever stuck by the table alone."""
    for start in SliceState:
        reached = {start}
        while more := {after for (before, _), after in TRANSITIONS.items() if before in reached} - reached:
            reached |= more
        assert reached == set(SliceState), start
    assert set(ACTIVE_TAG) == set(SliceState)
    assert {state for state, tag in ACTIVE_TAG.items() if tag is Tag.TRAIN} == {SliceState.TRAINING}
    assert {state for state, tag in ACTIVE_TAG.items() if tag is None} == {SliceState.IDLE, SliceState.FAILED}


def test_a_loan_from_the_first_order_to_the_last_answer() -> None:
    status = a_slice()
    status.lend(1.0, order(1, 600.0), decision=4)
    assert (status.state, status.command, status.deadline, status.decision) == (SliceState.WAKING, 1, 600.0, 4)
    assert status.lent
    status.ready(3.0, version=2)
    assert (status.state, status.command, status.deadline, status.version) == (SliceState.ROLLOUT, None, None, 2)
    status.sync(5.0, order(2, 700.0))
    assert (status.state, status.command, status.deadline, status.version) == (SliceState.SYNCING, 2, 700.0, 2)
    assert status.lent
    status.ready(6.0, version=3)
    assert status.version == 3
    status.drain(8.0, order(3, 800.0))
    assert (status.lent, status.command, status.deadline, status.decision) == (False, 3, 800.0, 4)
    assert status.drained(9.5) == 4
    assert (status.state, status.command, status.deadline) == (SliceState.IDLE, None, None)
    assert (status.decision, status.version) == (None, None)
    assert status.costs.measured[Switch.TO_ROLLOUT][-1] == 2.0
    assert status.costs.measured[Switch.TO_TRAIN][-1] == 1.5


@pytest.mark.parametrize("state", [SliceState.WAKING, SliceState.ROLLOUT, SliceState.SYNCING])
def test_a_lent_slice_is_taken_back_whatever_it_does(state: SliceState) -> None:
    status = a_slice(state)
    status.drain(1.0, order())
    assert status.state is SliceState.DRAINING


def test_only_slices_that_can_do_both_are_lent() -> None:
    for capabilities, lendable in ((BOTH, True), (ROLLOUT, False), (TRAIN, False)):
        status = a_slice(SliceState.ROLLOUT, capabilities)
        assert (status.slice.lendable, status.lent) == (lendable, lendable)


def test_what_the_edge_did_before_it_woke_a_slice_is_no_part_of_the_switch() -> None:
    status = a_slice()
    status.lend(1.0, order(), decision=None)
    status.begin_waking(4.0)
    status.ready(5.0, version=0)
    assert status.costs.typical_s(Switch.TO_ROLLOUT) == 1.0


def test_weights_that_a_serving_slice_takes_are_no_switch() -> None:
    status = a_slice(SliceState.ROLLOUT)
    status.sync(1.0, order())
    status.ready(4.0, version=1)
    assert status.costs.counts == {Switch.TO_ROLLOUT: 0, Switch.TO_TRAIN: 0}


def test_a_drain_that_cuts_a_waking_off_says_how_long_that_took() -> None:
    status = a_slice()
    status.lend(1.0, order(), decision=None)
    status.drain(6.0, order())
    assert status.costs.typical_s(Switch.TO_ROLLOUT) == 5.0, "it would have lasted at least so long"
    status.drained(8.0)
    assert status.costs.typical_s(Switch.TO_TRAIN) == 2.0
    assert status.costs.counts == {Switch.TO_ROLLOUT: 0, Switch.TO_TRAIN: 1}


def test_a_switch_that_ends_since_another_replica_died_leaves_the_slice_as_it_was_and_counts_as_none() -> None:
    status = a_slice()
    status.lend(1.0, order(), decision=4)
    assert status.drained(6.0) == 4
    assert (status.state, status.command, status.deadline) == (SliceState.IDLE, None, None)
    assert (status.usable, status.repair, status.failed_wakes) == (BOTH, Repair.NOT_NEEDED, 0)
    assert status.costs.counts[Switch.TO_ROLLOUT] == 0
    assert status.costs.typical_s(Switch.TO_ROLLOUT) == 5.0, "at least"


def test_slices_that_were_ordered_together_are_one_switch_that_ends_with_the_last() -> None:
    costs = SwitchTimes()
    gang = [a_slice(name=name) for name in "abc"]
    for status in gang:
        status.costs = costs
        status.lend(10.0, order(), decision=1)
    for status, at in zip(gang, (12.0, 15.0, 13.0), strict=True):
        status.ready(at, version=0)
    assert list(costs.measured[Switch.TO_ROLLOUT]) == [3.0], "when the last of them had answered"
    assert costs.counts[Switch.TO_ROLLOUT] == 1
    gang[0].drain(20.0, order())
    gang[1].drain(21.0, order())
    gang[1].drained(22.0)
    gang[0].drained(24.0)
    assert list(costs.measured[Switch.TO_TRAIN]) == [1.0, 4.0], "ordered at two instants, they are two"


def test_the_typical_cost_is_the_median_of_the_last_five() -> None:
    costs, name = SwitchTimes(), make_slice("a").id
    for number, seconds in enumerate((100.0, 1.0, 9.0, 2.0, 3.0, 4.0)):
        costs.begin(name, Switch.TO_TRAIN, 1000.0 * number)
        costs.end(name, 1000.0 * number + seconds)
    assert list(costs.measured[Switch.TO_TRAIN]) == [1.0, 9.0, 2.0, 3.0, 4.0]
    assert costs.typical_s(Switch.TO_TRAIN) == 3.0
    assert costs.counts[Switch.TO_TRAIN] == 6
    costs.abandon(name, 9999.0)
    costs.end(name, 9999.0)
    assert costs.typical_s(Switch.TO_TRAIN) == 3.0, "nothing was under way"


def test_of_switches_that_were_broken_off_the_longest_counts() -> None:
    costs, name = SwitchTimes(), make_slice("a").id
    for began, ended in ((0.0, 30.0), (100.0, 110.0)):
        costs.begin(name, Switch.TO_ROLLOUT, began)
        costs.abandon(name, ended)
    assert costs.typical_s(Switch.TO_ROLLOUT) == 30.0


# ---------------------------------------------------------------- grants


def test_a_gang_trains_and_goes_back() -> None:
    status = a_slice()
    status.grant(1.0, "step-1", Tag.TRAIN)
    assert (status.state, status.holder) == (SliceState.TRAINING, "step-1")
    status.release(5.0, "Released step-1")
    assert (status.state, status.holder, status.since) == (SliceState.IDLE, None, 5.0)


def test_a_slice_that_is_granted_for_rollout_goes_on_as_it_is() -> None:
    status = a_slice(SliceState.ROLLOUT)
    status.grant(1.0, "validate", Tag.ROLLOUT)
    assert (status.state, status.holder, status.since) == (SliceState.ROLLOUT, "validate", 0.0)
    status.release(5.0, "Released validate")
    assert (status.state, status.holder, status.since) == (SliceState.ROLLOUT, None, 0.0)


# ---------------------------------------------------------------- deaths and returns


def test_a_death_ends_what_was_under_way() -> None:
    status = a_slice()
    status.lend(1.0, order(1, 600.0), decision=4)
    assert status.lose(9.0, ROLLOUT, "killed", restartable=True) == 4
    assert (status.state, status.usable, status.repair) == (SliceState.IDLE, TRAIN, Repair.WANTED)
    assert (status.command, status.deadline, status.decision, status.version) == (None, None, None, None)
    assert status.costs.typical_s(Switch.TO_ROLLOUT) == 8.0, "at least"


@pytest.mark.parametrize(
    ("capabilities", "lost", "state", "usable"),
    [
        (BOTH, ROLLOUT, SliceState.IDLE, TRAIN),
        (BOTH, TRAIN, SliceState.FAILED, frozenset()),
        (BOTH, BOTH, SliceState.FAILED, frozenset()),
        (ROLLOUT, ROLLOUT, SliceState.FAILED, frozenset()),
    ],
)
def test_a_slice_without_its_replica_may_train_and_one_that_has_nothing_left_has_failed(
    capabilities: frozenset[Tag], lost: frozenset[Tag], state: SliceState, usable: frozenset[Tag]
) -> None:
    status = a_slice(SliceState.ROLLOUT, capabilities)
    status.holder = "validate"
    status.lose(2.0, lost, "killed", restartable=True)
    assert (status.state, status.usable, status.holder) == (state, usable, None)
    status.restarted(3.0)
    assert (status.state, status.usable, status.repair) == (SliceState.IDLE, capabilities, Repair.NOT_NEEDED)


def test_training_goes_on_without_the_replica_and_keeps_its_holder() -> None:
    status = a_slice()
    status.grant(1.0, "step-1", Tag.TRAIN)
    status.lose(2.0, ROLLOUT, "killed", restartable=True)
    assert (status.state, status.holder, status.usable) == (SliceState.TRAINING, "step-1", TRAIN)
    assert not status.may_restart, "its memory is the trainer's"
    status.release(3.0, "Released step-1")
    assert status.may_restart
    status.begin_restart(deadline=900.0)
    assert (status.may_restart, status.comes_back, status.deadline) == (False, True, 900.0)
    assert status.doing == "restarting its replica"
    status.restarted(4.0)
    assert (status.comes_back, status.deadline, status.usable, status.doing) == (False, None, BOTH, "idle")


@pytest.mark.parametrize("begun", [False, True])
def test_a_restart_that_is_given_up_owes_nothing_any_more(begun: bool) -> None:
    status = a_slice(SliceState.ROLLOUT)
    status.lose(1.0, BOTH, "killed", restartable=True)
    assert status.may_restart
    if begun:
        status.begin_restart(deadline=900.0)
    status.give_up()
    assert (status.repair, status.deadline, status.may_restart, status.comes_back) == (
        Repair.GIVEN_UP,
        None,
        False,
        False,
    )


def fail_to_wake(status: SliceStatus, times: int, lost: frozenset[Tag] = ROLLOUT) -> None:
    for attempt in range(times):
        assert status.repair is Repair.NOT_NEEDED
        status.lend(20.0 * attempt, order(attempt, 600.0), decision=4)
        status.lose(20.0 * attempt + 1, lost, "refused", restartable=True)
        if status.may_restart:
            status.begin_restart(deadline=900.0)
            status.restarted(20.0 * attempt + 2)


def test_a_lent_slice_that_fails_to_wake_again_and_again_is_given_up_and_trains_on() -> None:
    status = a_slice()
    fail_to_wake(status, FAILED_WAKES)
    assert (status.repair, status.state, status.usable) == (Repair.GIVEN_UP, SliceState.IDLE, TRAIN)


def test_a_slice_that_served_in_between_begins_to_count_anew() -> None:
    status = a_slice()
    fail_to_wake(status, FAILED_WAKES - 1)
    status.lend(100.0, order(9, 600.0), decision=4)
    status.ready(101.0, version=0)
    status.lose(102.0, ROLLOUT, "killed", restartable=True)
    status.begin_restart(deadline=900.0)
    status.restarted(103.0)
    fail_to_wake(status, FAILED_WAKES - 1)
    assert status.repair is Repair.NOT_NEEDED


def test_deaths_that_are_no_failed_wakes_and_slices_that_the_trainer_needs_are_restarted_for_ever() -> None:
    asleep, whole = a_slice(), a_slice()
    for attempt in range(2 * FAILED_WAKES):
        asleep.lose(attempt, ROLLOUT, "killed", restartable=True)
        asleep.begin_restart(deadline=900.0)
        asleep.restarted(attempt + 0.5)
    fail_to_wake(whole, 2 * FAILED_WAKES, BOTH)
    assert asleep.repair is whole.repair is Repair.NOT_NEEDED


def test_what_cannot_be_restarted_is_given_up_at_once() -> None:
    status = a_slice(SliceState.ROLLOUT)
    status.lose(1.0, ROLLOUT, "no memory", restartable=False)
    assert status.repair is Repair.GIVEN_UP
