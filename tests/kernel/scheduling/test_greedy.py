"""One round of SeamlessFlow's multiplexing: lend what idles, take it back when the trainer can train."""

from __future__ import annotations

import pytest

from seamless_verl.scheduling import commands as cm
from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.policies import Greedy
from seamless_verl.scheduling.slices import InvalidTransition, SliceId, SliceState, Tag
from tests.kernel.scheduling.world import BOTH, ROLLOUT, TRAIN, World, make_slice


def acquire(at: float, *, count: int = 1, minimum: int = 4, batch: int = 8) -> ev.AcquireRequested:
    return ev.AcquireRequested(at=at, request=f"step@{at}", tag=Tag.TRAIN, count=count, minimum=minimum, batch=batch)


def test_a_round_of_multiplexing() -> None:
    world = World(Greedy(), a=BOTH, b=ROLLOUT)
    world.answer()
    assert world.state("a") is world.state("b") is SliceState.ROLLOUT

    world.do(ev.GroupsSubmitted(at=2.0, groups=tuple("abcdefgh"), sessions=2))
    assert world.do(acquire(3.0)) == []
    record, drain, timer = world.do(ev.GroupsReady(at=4.0, ready=4, in_flight=4))
    assert isinstance(record, cm.RecordDecision)
    assert timer == cm.SetTimer(at=64.0)  # a gang that is kept waiting for a minute is reported
    assert drain == cm.DrainSlice(command=3, slice=SliceId("a"), interrupt=True, decision=record.number)

    given = world.answer()
    assert given[0] == cm.GrantAcquire(request="step@3.0", slices=(SliceId("a"),))
    assert world.state("a") is SliceState.TRAINING
    assert world.state("b") is SliceState.ROLLOUT

    world.do(ev.Released(at=9.0, request="step@3.0"))
    assert world.state("a") is SliceState.WAKING


def test_a_slice_that_only_trains_is_never_lent() -> None:
    world = World(Greedy(), a=TRAIN, b=ROLLOUT)
    world.answer()
    world.do(ev.GroupsSubmitted(at=2.0, groups=tuple("abcd"), sessions=2))
    world.do(acquire(3.0))
    assert world.state("a") is SliceState.IDLE
    world.do(ev.GroupsReady(at=4.0, ready=4, in_flight=0))
    assert world.given(cm.GrantAcquire)[0].slices == (SliceId("a"),)
    assert world.given(cm.DrainSlice) == []


def test_illegal_moves_raise_with_their_story() -> None:
    world = World(Greedy(), a=BOTH)
    with pytest.raises(InvalidTransition, match="a: a/0 already belongs to a"):
        world.do(ev.SliceAdded(at=1.0, slice=make_slice("a")))
    with pytest.raises(InvalidTransition, match="nobody acquired never"):
        world.do(ev.Released(at=1.0, request="never"))
    with pytest.raises(InvalidTransition, match="time runs backwards"):
        world.do(ev.Tick(at=0.5))


def test_a_late_answer_is_recognised_and_ignored() -> None:
    world = World(Greedy(), a=BOTH, b=ROLLOUT)
    lend = world.open["a"]
    world.do(ev.GroupsReady(at=1.0, ready=8, in_flight=0))
    world.do(acquire(1.0))
    assert world.state("a") is SliceState.DRAINING
    world.do(ev.SliceReady(at=2.0, slice=SliceId("a"), command=lend.command, version=0))
    assert world.state("a") is SliceState.DRAINING


@pytest.mark.parametrize("restartable", [True, False])
def test_while_a_replica_of_the_trainer_is_out_none_is_lent_and_the_trainer_is_told_if_that_is_for_ever(
    restartable: bool,
) -> None:
    world = World(Greedy(), a=BOTH, b=BOTH)
    world.answer()
    world.do(acquire(2.0, count=2))
    world.do(ev.GroupsReady(at=3.0, ready=8, in_flight=0))
    world.answer()
    assert world.state("a") is world.state("b") is SliceState.TRAINING
    world.log.clear()
    world.do(ev.SliceFailed(at=5.0, slice=SliceId("a"), reason="killed", lost=ROLLOUT, restartable=restartable))
    world.do(ev.GroupsReady(at=6.0, ready=0, in_flight=4))
    world.do(ev.Released(at=6.0, request="step@2.0"))
    world.do(acquire(7.0, count=2))
    assert not world.given(cm.LendSlice)
    assert [command.request for command in world.given(cm.RefuseAcquire)] == ([] if restartable else ["step@7.0"])
    if restartable:
        world.do(ev.SliceReturned(at=9.0, slice=SliceId("a")))
        assert {command.slice for command in world.given(cm.LendSlice)} == {"a", "b"}
