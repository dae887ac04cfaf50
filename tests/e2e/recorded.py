"""What a run's recording must say of its slices, under any policy."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.loans import Loans, loans_of
from seamless_verl.observe import flight
from seamless_verl.observe.recording import Recording
from seamless_verl.observe.time_ledger import Ledger

_NEXT = {
    "idle": {"waking", "training"},
    "waking": {"rollout"},
    "rollout": {"draining"},
    "draining": {"training", "idle"},
    "training": {"idle", "waking"},
}


def moves(recording: Recording, slice_id: str) -> list[str]:
    """States of a slice, one after the other, ``|`` where a step begins."""
    found = []
    for event in recording.events:
        if isinstance(event, flight.StepBegan):
            found.append("|")
        elif isinstance(event, flight.SliceMoved) and event.slice == slice_id:
            found.append(event.state.value)
    return found


def assert_loans_are_whole(recording: Recording, slice_id: str) -> Loans:
    """No state is skipped, every decision has its reason and its loan, bytes move both ways, and what was lent had the
    weights that were published."""
    states = [state for state in moves(recording, slice_id) if state != "|"]
    assert all(after in _NEXT[before] for before, after in pairwise(states)), states
    made = [event for event in recording.events if isinstance(event, flight.DecisionMade)]
    assert all(event.reason for event in made)
    lends = [event.decision for event in made if event.action == "lend" and slice_id in event.slices]
    loans = loans_of(recording.events, slice_id)
    assert loans.wakes == loans.wakes_that_took == states.count("waking") >= len(lends), "validations ask for theirs"
    assert loans.reclaims == loans.reclaims_that_freed
    assert loans.shared == 0, "nothing of the trainer beside a cache"
    assert loans.matching == loans.checked == loans.wakes + 1, "at the start, and in each loan"
    return loans


def gone_on(recording: Recording, lent: str, other: str) -> list[Counter[str]]:
    """Of each loan of ``lent``, on which slices those requests went on that its wake interrupted on ``other``."""
    places = {event.address: event.slice for event in recording.events if isinstance(event, flight.SliceAdded)}
    out = dict[str, flight.RequestStarted]()
    interrupted = set[str]()  # sessions, while it wakes
    is_waking, found = False, list[Counter[str]]()
    for event in recording.events:
        if isinstance(event, flight.SliceMoved) and event.slice == lent:
            is_waking = event.state is flight.SliceState.WAKING
            found += [Counter()] if is_waking else []
            interrupted.clear()
        elif isinstance(event, flight.RequestStarted):
            out[event.request] = event
            if event.session in interrupted:
                interrupted.remove(event.session)
                found[-1][places.get(event.slice, event.slice)] += 1
        elif isinstance(event, flight.RequestEnded) and event.request in out:
            started = out.pop(event.request)
            if is_waking and event.finish == "aborted" and places.get(started.slice) == other:
                interrupted.add(started.session)
    return found


def decisions(recording: Recording) -> Counter[str]:
    return Counter(event.action for event in recording.events if isinstance(event, flight.DecisionMade))


def assert_books_balance(recording: Recording) -> None:
    """Every second of every slice is in one category, from its first to the end of the run."""
    ledger, added = Ledger(), dict[str, float]()
    for event in recording.events:
        ledger.handle(event)
        if isinstance(event, flight.SliceAdded):
            added.setdefault(event.slice, event.at)
    (ended,) = (event.at for event in recording.events if isinstance(event, flight.RunEnded))
    books = {entry.slice: entry for entry in ledger.books(ended)}
    assert books.keys() == added.keys()
    for name, entry in books.items():
        assert sum(entry.seconds.values()) == pytest.approx(ended - added[name], rel=0.005)
