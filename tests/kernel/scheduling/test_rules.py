"""What the scheduler does whatever its policy proposes: grants, refusals, deadlines, stalls, and who may be lent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from seamless_verl.scheduling import commands as cm
from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.cluster import Cluster
from seamless_verl.scheduling.commands import Decision, Horizon, LookAgain, Proposal, Verb
from seamless_verl.scheduling.policies import Colocated, Greedy, SeamlessFlow
from seamless_verl.scheduling.slices import FAILED_WAKES, InvalidTransition, Repair, SliceId, SliceState, Tag
from tests.kernel.scheduling.world import BOTH, ROLLOUT, TRAIN, World, make_slice


class Says:
    """Proposes what the test put into ``next``, once."""

    def __init__(self, *proposals: Proposal) -> None:
        self.next = list(proposals)
        self.asked = 0

    def observe(self, event: ev.Event, cluster: Cluster) -> None:
        pass

    def decide(self, cluster: Cluster) -> Iterator[Proposal]:
        self.asked += 1
        proposals, self.next = self.next, []
        yield from proposals


def decision(verb: Verb, *names: str) -> Decision:
    return Decision(verb=verb, slices=tuple(map(SliceId, names)), reason="the test says so")


def acquire(at: float, name: str = "step-1", tag: Tag = Tag.TRAIN, **needs: int) -> ev.AcquireRequested:
    return ev.AcquireRequested(at=at, request=name, tag=tag, **{"count": 1, "minimum": 4, "batch": 8, **needs})


def groups(at: float, ready: int, in_flight: int) -> ev.GroupsReady:
    return ev.GroupsReady(at=at, ready=ready, in_flight=in_flight)


def world_of(*proposals: Proposal, **slices: frozenset[Tag]) -> World:
    """Where slices that can roll out do, at time 1, and nothing was proposed yet."""
    world = World(Greedy(), **slices)
    world.answer()
    world.scheduler._policy = Says(*proposals)
    world.log.clear()
    return world


# ---------------------------------------------------------------- grants


def test_a_gang_is_granted_as_a_whole_and_only_when_its_data_is_there() -> None:
    world = World(Says(), a=TRAIN, b=TRAIN, r=ROLLOUT)
    world.answer()
    world.do(groups(2.0, 0, 8))
    world.do(acquire(2.0, count=2))
    assert world.do(groups(3.0, 3, 5)) == []
    assert world.state("a") is SliceState.IDLE
    (grant,) = world.do(groups(4.0, 4, 4))
    assert grant == cm.GrantAcquire(request="step-1", slices=(SliceId("a"), SliceId("b")))
    assert world.state("a") is world.state("b") is SliceState.TRAINING
    world.do(ev.Released(at=9.0, request="step-1"))
    assert world.scheduler.cluster.training_s == 5.0
    assert world.state("a") is SliceState.IDLE


def test_what_trains_best_is_granted_first_and_slices_that_can_do_nothing_else_before_all() -> None:
    world = World(Says(), both=BOTH, only=TRAIN)
    world.do(groups(2.0, 8, 0))
    world.do(acquire(2.0))
    assert world.given(cm.GrantAcquire)[0].slices == ("only",)


def test_with_nothing_on_its_way_a_gang_is_due_however_little_is_ready() -> None:
    world = world_of(a=BOTH, r=ROLLOUT)
    world.do(groups(2.0, 1, 1))
    world.do(acquire(2.0))
    assert not world.given(cm.DrainSlice)
    world.do(groups(3.0, 1, 0))
    assert [command.slice for command in world.given(cm.DrainSlice)] == ["a"]


@pytest.mark.parametrize("needs", [{"count": 0}, {"minimum": -1}, {"minimum": 5, "batch": 4}])
def test_nonsense_is_refused_with_an_error(needs: dict[str, int]) -> None:
    with pytest.raises(InvalidTransition, match="count must be >= 1 and 0 <= minimum <= batch"):
        World(Says(), a=BOTH).do(acquire(1.0, **needs))


def test_a_name_is_used_once() -> None:
    world = world_of(a=BOTH, r=ROLLOUT)
    world.do(acquire(2.0))
    with pytest.raises(InvalidTransition, match="step-1 was used before"):
        world.do(acquire(3.0))
    world.do(ev.Released(at=3.0, request="step-1"))  # withdrawn
    world.do(ev.Released(at=3.0, request="step-1"))  # which may cross with a refusal
    with pytest.raises(InvalidTransition, match="step-1 was used before"):
        world.do(acquire(4.0))


def test_more_than_there_is_is_refused_with_what_was_lost() -> None:
    world = world_of(a=BOTH, b=BOTH, r=ROLLOUT)
    world.do(ev.SliceFailed(at=2.0, slice=SliceId("b"), reason="gone", restartable=False))
    (refusal,) = (c for c in world.do(acquire(3.0, count=2)) if isinstance(c, cm.RefuseAcquire))
    assert refusal.reason == "2 slices wanted for train, 1 can; lost: b"
    assert "step-1" not in world.scheduler.cluster.pending


def test_who_waits_for_groups_that_nobody_can_make_is_told_so() -> None:
    world = world_of(t=TRAIN, r=ROLLOUT)
    world.do(groups(2.0, 1, 7))
    world.do(acquire(2.0))
    assert not world.given(cm.RefuseAcquire)
    world.do(ev.SliceFailed(at=3.0, slice=SliceId("r"), reason="gone", restartable=False))
    assert [c.reason for c in world.given(cm.RefuseAcquire)] == [
        "4 groups wanted, 1 ready and no slice left to generate"
    ]


def test_slices_for_validation_are_held_while_they_generate() -> None:
    world = world_of(a=BOTH, r=ROLLOUT)
    world.do(acquire(2.0, "validate", Tag.ROLLOUT, count=2, minimum=0, batch=0))
    (grant,) = world.given(cm.GrantAcquire)
    assert set(grant.slices) == {"a", "r"}
    assert world.state("a") is SliceState.ROLLOUT
    world.scheduler._policy = Says(decision(Verb.RECLAIM, "a"))
    world.do(groups(3.0, 8, 0))
    assert not world.given(cm.DrainSlice), "somebody holds it"
    world.do(ev.Released(at=4.0, request="validate"))
    world.scheduler._policy = Says(decision(Verb.RECLAIM, "a"))
    world.do(groups(5.0, 8, 0))
    assert [command.slice for command in world.given(cm.DrainSlice)] == ["a"]


def test_for_validation_idle_slices_are_lent_but_no_more_than_it_wants() -> None:
    world = World(Says(), a=BOTH, b=BOTH, r=ROLLOUT)
    world.answer()
    world.do(acquire(2.0, "validate", Tag.ROLLOUT, count=2, minimum=0, batch=0))
    lent = [command.slice for command in world.given(cm.LendSlice) if command.slice != "r"]
    assert len(lent) == 1
    assert not world.given(cm.GrantAcquire)
    world.answer()
    assert len(world.given(cm.GrantAcquire)) == 1


def test_what_a_validation_waits_for_is_not_taken_back_before_it_has_it() -> None:
    """Else it is lent again at once, and so on: a run stood still at its last validation."""
    world = World(Says(), a=BOTH, r=ROLLOUT)
    world.answer()
    world.do(groups(1.5, 8, 8))
    world.do(acquire(2.0, "validate", Tag.ROLLOUT, count=2, minimum=0, batch=0))
    for at in (2.1, 2.2):
        world.scheduler._policy = Says(decision(Verb.RECLAIM, "a"))
        world.do(groups(at, 8, 8))
    assert not world.given(cm.DrainSlice)
    world.answer()
    (grant,) = world.given(cm.GrantAcquire)
    assert set(grant.slices) == {"a", "r"}


# ---------------------------------------------------------------- proposals


def test_a_proposal_is_carried_out_with_its_number_and_its_reason() -> None:
    world = World(Says(), a=BOTH, r=ROLLOUT)
    world.scheduler._policy = Says(decision(Verb.LEND, "a"))
    world.do(groups(1.0, 0, 8))
    (lent,) = (c for c in world.given(cm.LendSlice) if c.slice == "a")
    (noted,) = world.given(cm.RecordDecision)
    assert (lent.decision, noted.number, noted.decision.reason) == (1, 1, "the test says so")


def test_a_slice_that_a_gang_could_have_now_is_not_lent() -> None:
    world = World(Says(), a=BOTH, b=BOTH, r=ROLLOUT)
    world.answer()
    world.do(groups(2.0, 4, 4))
    world.do(ev.SliceFailed(at=2.0, slice=SliceId("b"), reason="gone"))
    world.do(acquire(2.5, count=2))
    world.scheduler._policy = Says(decision(Verb.LEND, "a"))
    world.do(groups(3.0, 4, 4))
    assert "a" not in {command.slice for command in world.given(cm.LendSlice)}
    assert world.state("a") is SliceState.IDLE


def test_the_last_that_generate_are_not_stopped_while_the_trainer_waits_for_data() -> None:
    world = world_of(decision(Verb.RECLAIM, "a"), a=BOTH)
    world.do(groups(2.0, 0, 8))
    assert world.state("a") is SliceState.ROLLOUT
    assert not world.given(cm.RecordDecision), "what is not done is not recorded"
    more = world_of(decision(Verb.RECLAIM, "a"), a=BOTH, b=BOTH)
    more.do(groups(2.0, 0, 8))
    assert more.state("a") is SliceState.DRAINING


def test_to_leave_things_as_they_are_is_recorded_once() -> None:
    world = world_of(a=BOTH, r=ROLLOUT)
    for number, verb in enumerate((Verb.WAIT, Verb.WAIT, Verb.HOLD, Verb.WAIT)):
        world.scheduler._policy = Says(decision(verb, "a"))
        world.do(groups(2.0 + number, 0, 8))
    assert [c.decision.verb for c in world.given(cm.RecordDecision)] == [Verb.WAIT, Verb.HOLD, Verb.WAIT]
    first = world.given(cm.RecordDecision)[0].number
    assert [c.number for c in world.given(cm.RecordDecision)] == [first, first + 1, first + 2]


def test_a_horizon_goes_to_each_of_its_slices() -> None:
    horizon = Horizon(slices=(SliceId("a"), SliceId("b")), outlasting=frozenset({"s"}))
    world = world_of(horizon, a=BOTH, b=BOTH, r=ROLLOUT)
    world.do(groups(2.0, 0, 8))
    assert [(c.slice, c.outlasting) for c in world.given(cm.SetHorizon)] == [("a", {"s"}), ("b", {"s"})]


def test_a_policy_that_wants_to_look_again_gets_a_timer_and_is_asked_then() -> None:
    world = world_of(LookAgain(at=7.0), a=BOTH, r=ROLLOUT)
    assert world.do(groups(2.0, 0, 8)) == [cm.SetTimer(at=7.0)]
    policy = world.scheduler._policy
    assert isinstance(policy, Says)
    asked = policy.asked
    assert world.do(ev.Tick(at=7.0)) == []
    assert policy.asked == asked + 1
    world.scheduler._policy = Says(LookAgain(at=3.0))
    assert world.do(ev.Tick(at=8.0)) == [], "that time has passed"


def test_requests_change_nothing_that_has_to_be_decided() -> None:
    world = world_of(a=BOTH, r=ROLLOUT)
    policy = world.scheduler._policy
    assert isinstance(policy, Says)
    start = ev.RequestStarted(at=2.0, request="q", session="s", group="g", slice=SliceId("a"), context_tokens=5)
    for event in (
        start,
        ev.RequestFinished(at=3.0, request="q", tokens=5),
        ev.SessionFinished(at=3.0, session="s", group="g"),
    ):
        assert world.do(event) == []
    assert policy.asked == 0


def test_when_all_groups_are_ready_lent_slices_come_back_though_the_policy_sleeps() -> None:
    world = world_of(a=BOTH, r=ROLLOUT)
    world.do(groups(2.0, 5, 3))
    world.do(acquire(2.0))
    assert not world.given(cm.DrainSlice), "there is something to wait for"
    world.do(groups(3.0, 8, 3))
    (record,) = world.given(cm.RecordDecision)
    assert record.decision.reason == "8 groups are ready and 3 on their way: nothing to wait for"
    assert [command.slice for command in world.given(cm.DrainSlice)] == ["a"]


def test_fewest_slices_come_back_when_not_all_are_needed() -> None:
    world = world_of(a=BOTH, b=BOTH, r=ROLLOUT)
    world.do(groups(2.0, 8, 0))
    world.do(acquire(2.0, count=1))
    assert [command.slice for command in world.given(cm.DrainSlice)] == ["a"]


def test_while_the_trainer_waits_for_groups_somebody_generates() -> None:
    world = World(Says(), a=BOTH, b=BOTH)
    world.do(groups(2.0, 0, 8))
    assert not world.given(cm.LendSlice), "nobody waits"
    world.do(acquire(3.0))
    (record,) = world.given(cm.RecordDecision)
    assert record.decision.reason == "the trainer waits for groups and nobody generates"
    assert {command.slice for command in world.given(cm.LendSlice)} == {"a", "b"}


# ---------------------------------------------------------------- weights


def test_slices_that_only_roll_out_do_and_take_every_version() -> None:
    world = World(Says(), t=TRAIN, r=ROLLOUT)
    (lend,) = world.given(cm.LendSlice)
    assert (lend.slice, lend.version, lend.decision) == ("r", 0, None)
    world.answer()
    world.do(ev.WeightsPublished(at=5.0, version=1))
    (sync,) = world.given(cm.SyncWeights)
    assert (sync.slice, sync.version) == ("r", 1)
    world.do(ev.WeightsPublished(at=6.0, version=2))
    assert len(world.given(cm.SyncWeights)) == 1, "one after the other"
    world.answer()
    assert [command.version for command in world.given(cm.SyncWeights)] == [1, 2]


def test_a_slice_joins_idle_or_serving_and_in_no_other_state() -> None:
    world = World(Says(), r=ROLLOUT)
    with pytest.raises(InvalidTransition, match="late cannot join as TRAINING"):
        world.do(ev.SliceAdded(at=1.0, slice=make_slice("late"), state=SliceState.TRAINING))
    world.do(ev.SliceAdded(at=1.0, slice=make_slice("late"), state=SliceState.ROLLOUT, version=0))
    assert world.scheduler.cluster[SliceId("late")].version == 0
    with pytest.raises(InvalidTransition, match="no slice never; known: r, late"):
        world.do(ev.SliceFailed(at=1.0, slice=SliceId("never"), reason="?"))


# ---------------------------------------------------------------- deadlines


def test_a_drain_that_is_not_answered_is_a_failure() -> None:
    world = world_of(decision(Verb.RECLAIM, "a"), a=BOTH, r=ROLLOUT)
    given = world.do(groups(2.0, 0, 8))
    assert cm.SetTimer(at=122.0) in given
    world.log.clear()
    world.do(ev.Tick(at=121.9))
    assert world.log == []
    world.do(ev.Tick(at=122.0))
    (gone,) = world.given(cm.FailOver)
    assert gone.reason == "no answer for 120 s while draining"
    assert world.state("a") is SliceState.FAILED
    assert [command.slice for command in world.given(cm.RestartSlice)] == ["a"]


def test_answers_that_came_together_and_late_count_each() -> None:
    """The edge carries out a command for several slices as one, and the slowest one decides when it can tell."""
    world = world_of(decision(Verb.RECLAIM, "a", "b"), a=BOTH, b=BOTH, r=ROLLOUT)
    world.do(groups(2.0, 0, 8))
    world.answer(after_s=130.0)  # 120 s are given
    assert not world.given(cm.FailOver)
    assert [world.state(name) for name in ("a", "b")] == [SliceState.IDLE] * 2
    world.do(ev.Tick(at=133.0))
    assert not world.given(cm.FailOver)


def test_what_expired_before_something_else_happened_fails_at_the_tick_that_is_asked_for_then() -> None:
    world = world_of(decision(Verb.RECLAIM, "a"), a=BOTH, r=ROLLOUT)
    world.do(groups(2.0, 0, 8))
    (asked,) = [command for command in world.do(groups(130.0, 0, 8)) if isinstance(command, cm.SetTimer)]
    assert 130.0 < asked.at < 130.001
    assert not world.given(cm.FailOver)
    world.do(ev.Tick(at=asked.at))
    assert [gone.slice for gone in world.given(cm.FailOver)] == ["a"]


def test_a_restart_that_is_not_answered_is_given_up_after_its_time() -> None:
    world = world_of(a=BOTH, r=ROLLOUT)
    world.do(ev.SliceFailed(at=10.0, slice=SliceId("r"), reason="gone"))
    status = world.scheduler.cluster[SliceId("r")]
    assert status.repair is Repair.UNDER_WAY
    world.do(ev.Tick(at=909.9))
    assert status.repair is Repair.UNDER_WAY
    world.do(ev.Tick(at=910.0))
    assert status.repair is Repair.GIVEN_UP
    world.do(ev.SliceReturned(at=950.0, slice=SliceId("r")))
    assert status.repair is Repair.NOT_NEEDED, "better late than never"


def test_a_restart_that_failed_is_known_at_once_and_not_when_its_time_is_up() -> None:
    world = World(Says(), t=TRAIN, r=ROLLOUT)
    world.answer()
    world.do(groups(2.0, 0, 8))
    world.do(acquire(2.0))
    world.do(ev.SliceFailed(at=3.0, slice=SliceId("r"), reason="gone"))
    assert world.given(cm.RestartSlice)
    assert not world.given(cm.RefuseAcquire), "it may come back"
    world.do(ev.SliceFailed(at=4.0, slice=SliceId("r"), reason="restarting it failed", restartable=False))
    assert len(world.given(cm.RefuseAcquire)) == 1


def test_a_lent_slice_that_can_never_load_its_weights_is_restarted_a_few_times_only() -> None:
    world = World(SeamlessFlow(), a=BOTH, r=ROLLOUT)
    at = 1.0
    while world.scheduler.cluster[SliceId("a")].repair is not Repair.GIVEN_UP and at < 100:
        assert world.state("a") is SliceState.WAKING
        world.do(ev.SliceFailed(at=at, slice=SliceId("a"), reason="no weights", lost=ROLLOUT))
        if len(world.given(cm.RestartSlice)) == at:
            world.do(ev.SliceReturned(at=at + 0.5, slice=SliceId("a")))
        at += 1
    assert len(world.given(cm.RestartSlice)) == FAILED_WAKES - 1
    assert world.given(cm.FailOver)[-1].reason == (
        "no weights; it stays out, having failed to wake 3 times in a row; "
        "none of the trainer's slices is lent any more (seamless.weights.sync=rolling goes on)"
    )
    world.do(groups(100.0, 8, 0))
    world.do(acquire(100.0))
    world.answer()
    assert world.state("a") is SliceState.TRAINING, "the trainer goes on with it"


def test_a_slice_does_not_restart_on_gpus_that_a_gang_could_have_at_once() -> None:
    world = world_of(a=BOTH, r=ROLLOUT)
    world.do(groups(2.0, 8, 0))
    world.do(acquire(2.0))
    world.answer()
    assert world.state("a") is SliceState.TRAINING
    world.do(ev.SliceFailed(at=4.0, slice=SliceId("a"), reason="gone", lost=ROLLOUT))
    assert not world.given(cm.RestartSlice)
    assert not world.given(cm.RevokeGrant), "it trains on"
    world.do(ev.Released(at=5.0, request="step-1"))
    assert [command.slice for command in world.given(cm.RestartSlice)] == ["a"]
    world.do(acquire(6.0, "step-2"))
    assert len(world.given(cm.GrantAcquire)) == 1, "not while an engine takes its memory there"
    world.do(ev.SliceReturned(at=9.0, slice=SliceId("a")))
    assert len(world.given(cm.GrantAcquire)) == 2


def test_a_replica_that_dies_on_its_way_to_a_gang_is_restarted_after_the_gang() -> None:
    world = world_of(a=BOTH, b=BOTH, r=ROLLOUT)
    world.do(groups(2.0, 8, 0))
    world.do(acquire(2.0, count=2))
    world.do(ev.SliceFailed(at=3.0, slice=SliceId("a"), reason="gone", lost=ROLLOUT))
    assert not world.given(cm.RestartSlice), "the other is nearly there"
    world.answer()
    assert [set(command.slices) for command in world.given(cm.GrantAcquire)] == [{"a", "b"}]
    world.do(ev.Released(at=9.0, request="step-1"))
    assert [command.slice for command in world.given(cm.RestartSlice)] == ["a"]


def test_a_member_that_dies_takes_the_grant_with_it_and_leaves_the_others_idle() -> None:
    world = World(Says(), a=TRAIN, b=TRAIN, r=ROLLOUT)
    world.answer()
    world.do(groups(2.0, 8, 0))
    world.do(acquire(2.0, count=2))
    world.do(ev.SliceFailed(at=3.0, slice=SliceId("a"), reason="gone"))
    (revoked,) = world.given(cm.RevokeGrant)
    assert (revoked.request, revoked.slice, revoked.reason) == ("step-1", "a", "gone")
    assert (world.state("a"), world.state("b")) == (SliceState.FAILED, SliceState.IDLE)
    assert not world.given(cm.FailOver), "no replica was on it"
    assert world.do(ev.Released(at=4.0, request="step-1")) == [], "crossing with the revocation"


def test_requests_of_a_dead_slice_are_written_off() -> None:
    world = world_of(a=BOTH, r=ROLLOUT)
    for name in ("a", "r"):
        world.do(
            ev.RequestStarted(at=2.0, request=name, session=name, group="g", slice=SliceId(name), context_tokens=1)
        )
    world.do(ev.SliceFailed(at=3.0, slice=SliceId("a"), reason="gone"))
    assert world.scheduler.cluster.running == {"r": "r"}
    world.do(ev.RequestFinished(at=4.0, request="a", tokens=9))
    world.do(ev.RequestFinished(at=4.0, request="r", tokens=9, ending=ev.Ending.INTERRUPTED))
    assert world.scheduler.cluster.generated == {"a": 0, "r": 9}


# ---------------------------------------------------------------- stalls


def test_a_gang_that_is_kept_waiting_is_reported_once_with_what_it_waits_for() -> None:
    world = world_of(a=BOTH, b=BOTH, r=ROLLOUT)
    world.do(groups(2.0, 8, 0))
    world.do(acquire(2.0, count=2))
    assert world.state("a") is SliceState.DRAINING
    world.do(ev.Tick(at=61.9))
    assert not world.given(cm.ReportStall)
    world.do(ev.Tick(at=62.0))
    world.do(ev.Tick(at=70.0))
    (stall,) = world.given(cm.ReportStall)
    assert (stall.request, stall.waited_s) == ("step-1", 60.0)
    assert stall.waiting_for == ("a (draining for 60 s)", "b (draining for 60 s)")


def test_slices_that_the_policy_lets_work_on_keep_nobody_waiting_before_they_are_called() -> None:
    world = World(Colocated(), a=BOTH, b=BOTH)
    world.answer()
    world.do(groups(2.0, 4, 12))
    world.do(acquire(2.0, count=2, batch=16))
    world.do(ev.Tick(at=302.0))
    assert not world.given(cm.ReportStall)
    world.do(groups(303.0, 16, 0))
    assert world.state("a") is SliceState.DRAINING
    world.do(ev.Tick(at=363.0))
    assert [stall.waited_s for stall in world.given(cm.ReportStall)] == [60.0]


def test_waiting_for_data_is_no_stall() -> None:
    world = world_of(a=BOTH, r=ROLLOUT)
    world.do(groups(2.0, 0, 8))
    world.do(acquire(2.0))
    world.do(ev.Tick(at=300.0))
    assert not world.given(cm.ReportStall)


# ---------------------------------------------------------------- what a loan was worth


def test_what_a_loan_was_worth_by_hand() -> None:
    """Lent for 10 s; of 100 tokens it made 40, which saved 4 s; the gang then came 1 s after it was called."""
    world = world_of(a=BOTH, r=ROLLOUT)
    world.do(groups(2.0, 8, 0))
    world.do(acquire(2.0))
    world.answer()
    world.do(groups(5.0, 0, 8))
    world.scheduler._policy = Says(decision(Verb.LEND, "a"))
    world.do(ev.Released(at=10.0, request="step-1"))
    world.answer()
    for name in ("a", "r"):
        world.do(
            ev.RequestStarted(at=12.0, request=name, session=name, group="g", slice=SliceId(name), context_tokens=1)
        )
    for name, tokens in (("a", 40), ("r", 60)):
        world.do(ev.RequestFinished(at=15.0, request=name, tokens=tokens))
    world.do(acquire(16.0, "step-2"))
    world.log.clear()
    world.do(groups(19.0, 8, 0))
    world.answer()
    (outcome,) = (c.outcome for c in world.given(cm.RecordOutcome))
    assert (outcome.lent_tokens, outcome.late_s) == (40, 1.0)
    assert outcome.realised_benefit_s == pytest.approx(10.0 * 40 / 100 - 1.0)


def test_a_loan_on_which_nothing_was_generated_has_no_worth_and_is_settled_all_the_same() -> None:
    world = world_of(a=BOTH, r=ROLLOUT)
    world.do(groups(2.0, 8, 0))
    world.do(acquire(2.0))
    world.answer()
    (outcome,) = (c.outcome for c in world.given(cm.RecordOutcome))
    assert (outcome.decision, outcome.realised_benefit_s, outcome.lent_tokens) == (1, None, 0)
