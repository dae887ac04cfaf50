"""What `benchmarks.lend_cycles` reads from a recording: moves of memory within the moves of a slice."""

from __future__ import annotations

from benchmarks.loans import loans_of
from seamless_verl.observe import flight
from seamless_verl.observe.flight import FlightEvent, SliceState

WEIGHTS, CACHE = 10, 100


def moved(at: float, state: SliceState) -> flight.SliceMoved:
    return flight.SliceMoved(at=at, slice="t/0", state=state)


def held(at: float, what: str, nbytes: int, user: str = "engine") -> flight.MemoryHeld:
    return flight.MemoryHeld(at=at, slice="t/0", device="trainer/0", user=user, what=what, nbytes=nbytes)


def checked(at: float, version: int, published: str, found: str) -> flight.WeightsChecked:
    return flight.WeightsChecked(at=at, slice="t/0", version=version, published=published, held=found)


def cycle(at: float) -> list[FlightEvent]:
    """A loan of ten seconds."""
    return [
        moved(at, SliceState.WAKING), held(at + 1, "weights", WEIGHTS), held(at + 2, "kv_cache", CACHE),
        moved(at + 3, SliceState.ROLLOUT), moved(at + 7, SliceState.DRAINING),
        held(at + 8, "weights", 0), held(at + 8, "kv_cache", 0), moved(at + 9, SliceState.TRAINING),
    ]  # fmt: skip


START = flight.StepBegan(at=0.0, step=1)


def test_cycles_that_move_everything() -> None:
    events = [START, *cycle(1.0), checked(4.0, 1, "a", "a"), *cycle(11.0), checked(14.0, 2, "b", "b")]
    loans = loans_of(events, "t/0")
    assert (loans.wakes, loans.wakes_that_took, loans.reclaims, loans.reclaims_that_freed) == (2, 2, 2, 2)
    assert loans.bytes_moved == 4 * (WEIGHTS + CACHE)
    assert (loans.shared, loans.checked, loans.matching, loans.versions, loans.distinct) == (0, 2, 2, (1, 2), 2)
    assert loans.wake_s == (3.0, 3.0)
    assert loans.reclaim_s == (2.0, 2.0)


def test_a_wake_without_a_cache_a_reclaim_that_keeps_weights_and_other_weights_show() -> None:
    lazy = [event for event in cycle(1.0) if getattr(event, "what", "") != "kv_cache"]
    keeping = [
        event for event in cycle(11.0) if (getattr(event, "what", ""), getattr(event, "nbytes", 1)) != ("weights", 0)
    ]
    loans = loans_of([START, *lazy, *keeping, checked(14.0, 2, "a", "b")], "t/0")
    assert (loans.wakes, loans.wakes_that_took) == (2, 1)
    assert (loans.reclaims, loans.reclaims_that_freed) == (2, 0)
    assert (loans.checked, loans.matching) == (1, 0)


def test_a_trainer_beside_a_cache_shows() -> None:
    resident = held(0.5, "optimizer", 20, user="trainer")
    assert loans_of([START, resident, *cycle(1.0)], "t/0").shared > 0
