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
    assert drain == cm.DrainSlice(command=3, slice=SliceId("a"), decision=record.number)

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


class Steps:
    """Steps whose groups are ready some time after the gang was released, and switches that take as long as told."""

    def __init__(self) -> None:
        self.world = World(Greedy(), a=BOTH, b=ROLLOUT)
        self.world.answer(3.0)
        self._released = self.world.at

    def step(
        self, *, idle_s: float, switch_s: float, starve_s: float | None = None, sync_s: float = 0.0
    ) -> list[cm.Decision]:
        """What was decided while the slice idled.

        Args:
            starve_s: the trainer then gives its gang back for so long, in the midst of its step.
            sync_s: others load new weights for so long before the slice can wake.
        """
        made = self._idle(idle_s, switch_s)
        if starve_s is not None:
            made += self._decided(ev.Released(at=self._released, request=self._request))
            made += self._idle(starve_s, switch_s)
        self.world.do(ev.StepEnded(at=self._released, step=1))
        made += self._decided(ev.Released(at=self._released, request=self._request))
        if sync_s:
            self._sync(sync_s)
        return made

    def _sync(self, sync_s: float) -> None:
        """As a live run's process does it: the trainer asks for its gang when all of this is done."""
        world = self.world
        waking = world.open.get("a")
        self._released += sync_s
        version = (world.scheduler.cluster.published or 0) + 1
        world.do(ev.WeightsPublished(at=world.at, version=version))
        sync = world.open.pop("b")
        world.do(ev.SliceReady(at=self._released, slice=SliceId("b"), command=sync.command, version=version))
        if waking is not None:
            world.do(ev.SliceWaking(at=self._released, slice=SliceId("a"), command=waking.command))

    def _idle(self, idle_s: float, switch_s: float) -> list[cm.Decision]:
        world, due = self.world, self._released + idle_s
        made = self._decided(ev.GroupsReady(at=world.at, ready=0, in_flight=8), acquire(world.at))
        world.answer(switch_s)
        world.do(ev.GroupsReady(at=max(due, world.at), ready=8, in_flight=8))
        world.answer(switch_s)
        self._request = world.given(cm.GrantAcquire)[-1].request
        self._released = world.at + 1.0
        return made

    def _decided(self, *events: ev.Event) -> list[cm.Decision]:
        return [
            command.decision
            for event in events
            for command in self.world.do(event)
            if isinstance(command, cm.RecordDecision)
        ]


def lends(made: list[cm.Decision]) -> bool:
    return any(decision.verb is cm.Verb.LEND for decision in made)


def test_where_changing_hands_takes_longer_than_slices_idle_loans_are_tried_ever_more_rarely() -> None:
    steps = Steps()
    tried = [number for number in range(120) if lends(steps.step(idle_s=4.0, switch_s=3.0))]
    assert tried == [0, 16, 48, 112]
    reasons = [c.decision.reason for c in steps.world.given(cm.RecordDecision) if c.decision.verb is cm.Verb.HOLD]
    assert reasons[0] == "slices idle for 4.00 s, changing hands twice takes 6.00 s"


def test_when_a_loan_that_was_tried_again_paid_every_idle_time_is_lent() -> None:
    steps = Steps()
    for _ in range(3):
        steps.step(idle_s=4.0, switch_s=3.0)
    found = [lends(steps.step(idle_s=4.0, switch_s=0.5)) for _ in range(20)]
    assert found == [False] * 13 + [True] * 7


def test_one_slow_switch_stops_no_loan_and_two_in_a_row_do() -> None:
    steps = Steps()
    times = [0.5, 0.5, 3.0, 0.5, 3.0, 3.0, 3.0, 3.0]
    assert [lends(steps.step(idle_s=4.0, switch_s=each)) for each in times] == [True] * 5 + [False] * 3


def test_what_others_take_to_load_new_weights_is_no_idle_time() -> None:
    """Nothing can be lent meanwhile, and no slice that is lent comes back sooner."""
    steps = Steps()
    assert [lends(steps.step(idle_s=4.0, switch_s=3.0, sync_s=30.0)) for _ in range(8)] == [True] + [False] * 7


def test_a_validation_between_two_steps_is_no_idle_time() -> None:
    steps, found = Steps(), []
    for number in range(8):
        found.append(lends(steps.step(idle_s=4.0, switch_s=3.0)))
        at = steps.world.at
        steps.world.do(ev.AcquireRequested(at=at, request=f"validate-{number}", tag=Tag.ROLLOUT, count=2))
        steps.world.answer(100.0)
        steps.world.do(ev.Released(at=steps.world.at, request=f"validate-{number}"))
        steps.world.answer(0.0)
    assert found == [True] * 8, "nothing is known of how long slices idle"


def test_idle_times_within_a_step_are_not_taken_for_those_between_steps() -> None:
    steps = Steps()
    for _ in range(5):
        made = steps.step(idle_s=9.0, switch_s=1.0, starve_s=0.5)
    assert [decision.verb for decision in made] == [cm.Verb.HOLD, cm.Verb.LEND]
