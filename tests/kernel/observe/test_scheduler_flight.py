"""A recorded scheduler says what it was told, what it wants and why; the slices' moves make a ledger that adds up."""

import math
from dataclasses import replace

from seamless_verl.observe import flight
from seamless_verl.observe.recording import decode_event, encode_event
from seamless_verl.observe.scheduler_flight import RecordedScheduler, plain_fields
from seamless_verl.observe.time_ledger import Category, Ledger
from seamless_verl.scheduling import commands as cmd
from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.policies import Greedy
from seamless_verl.scheduling.scheduler import Scheduler
from seamless_verl.scheduling.slices import SliceId, SliceState, Tag
from tests.kernel.scheduling.world import BOTH, ROLLOUT, make_slice

A = SliceId("a")


def a_round() -> list[flight.FlightEvent]:
    """Slice ``a`` is lent, taken back for training, and lent again; every answer comes a second later."""
    written: list[flight.FlightEvent] = []
    scheduler = RecordedScheduler(Scheduler(Greedy()), written.append, policy="greedy", addresses={A: "10.0.0.1:1"})
    now = 0.0

    def tell(event: ev.Event) -> None:
        nonlocal now
        now = event.at
        for command in scheduler.handle(event):
            if isinstance(command, (cmd.LendSlice, cmd.SyncWeights)):
                tell(ev.SliceReady(at=now + 1.0, slice=command.slice, command=command.command, version=0))
            elif isinstance(command, cmd.DrainSlice):
                tell(ev.SliceDrained(at=now + 1.0, slice=command.slice, command=command.command))

    tell(ev.WeightsPublished(at=0.0, version=0))
    tell(ev.SliceAdded(at=0.0, slice=make_slice("a", BOTH)))
    tell(ev.SliceAdded(at=now, slice=make_slice("b", ROLLOUT)))
    tell(ev.GroupsSubmitted(at=5.0, groups=("g", "h"), sessions=2))
    tell(ev.AcquireRequested(at=6.0, request="step-1", tag=Tag.TRAIN, count=1, minimum=2, batch=2))
    tell(ev.GroupsReady(at=10.0, ready=2, in_flight=0))
    tell(ev.Released(at=20.0, request="step-1"))
    return written


def test_moves_and_decisions_are_written_in_the_words_of_the_recording():
    written = a_round()
    added = next(event for event in written if isinstance(event, flight.SliceAdded) and event.slice == "a")
    assert (added.devices, added.capabilities, added.address) == (1, ("rollout", "train"), "10.0.0.1:1")
    states = [event.state for event in written if isinstance(event, flight.SliceMoved) and event.slice == "a"]
    assert states[:5] == [
        SliceState.WAKING,
        SliceState.ROLLOUT,
        SliceState.DRAINING,
        SliceState.TRAINING,
        SliceState.WAKING,
    ]
    (reclaim,) = [event for event in written if isinstance(event, flight.DecisionMade) and event.action == "reclaim"]
    assert reclaim.slices == ("a",)
    assert reclaim.reason
    told = [event.name for event in written if isinstance(event, flight.SchedulerInput)]
    assert told.count("AcquireRequested") == 1
    drain = next(e for e in written if isinstance(e, flight.SchedulerCommand) and e.name == "DrainSlice")
    assert drain.fields["slice"] == "a"


def test_all_of_it_survives_the_way_through_a_file():
    for event in a_round():
        assert decode_event(encode_event(event)) == event


def test_the_ledger_of_a_scheduled_run_adds_up():
    ledger = Ledger()
    for event in a_round():
        ledger.handle(event)
    for books in ledger.books(30.0):
        assert sum(books.seconds.values()) == books.wall_s
    (a,) = [books for books in ledger.books(30.0) if books.slice == "a"]
    assert a.seconds[Category.SWITCH] >= 3.0  # woken, drained, woken again
    assert a.seconds[Category.OTHER] == 20.0 - 11.0  # training, but nobody said in which phase


def test_a_slice_that_returns_is_declared_anew_with_its_new_address():
    written: list[flight.FlightEvent] = []
    addresses = {A: "10.0.0.1:1"}
    scheduler = RecordedScheduler(Scheduler(Greedy()), written.append, policy="greedy", addresses=addresses)
    scheduler.handle(ev.SliceAdded(at=0.0, slice=make_slice("a", BOTH)))
    scheduler.handle(ev.SliceFailed(at=1.0, slice=A, reason="gone", lost=frozenset({Tag.ROLLOUT})))
    addresses[A] = "10.0.0.1:2"
    scheduler.handle(ev.SliceReturned(at=2.0, slice=A))
    added = [event for event in written if isinstance(event, flight.SliceAdded)]
    assert [(event.at, event.address) for event in added] == [(0.0, "10.0.0.1:1"), (2.0, "10.0.0.1:2")]


def test_fields_are_plain_data():
    failed = ev.SliceFailed(at=1.0, slice=A, reason="gone", lost=frozenset({Tag.TRAIN, Tag.ROLLOUT}))
    assert plain_fields(failed) == {"slice": "a", "reason": "gone", "lost": ["rollout", "train"], "restartable": True}


def test_a_benefit_without_an_end_is_written_too():
    """A forecast in which the batch never gets ready without the loan."""

    class Hopeful(Greedy):
        def decide(self, cluster):
            return [replace(decision, predicted_benefit_s=math.inf) for decision in super().decide(cluster)]

    written: list[flight.FlightEvent] = []
    scheduler = RecordedScheduler(Scheduler(Hopeful()), written.append, policy="hopeful")
    scheduler.handle(ev.WeightsPublished(at=0.0, version=0))
    scheduler.handle(ev.SliceAdded(at=0.0, slice=make_slice("a", BOTH)))
    scheduler.handle(ev.GroupsSubmitted(at=5.0, groups=("g",), sessions=1))
    made = [event for event in written if isinstance(event, flight.DecisionMade)]
    assert made
    assert [decode_event(encode_event(event)) for event in made] == made
    assert {event.predicted_s for event in made} == {None}
