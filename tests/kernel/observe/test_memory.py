"""Memory of slices over time: from the books of devices to the page."""

from __future__ import annotations

from typing import Any

from seamless_verl.memory.book import Ended, Held, Needed, Owner, Phase
from seamless_verl.observe import flight
from seamless_verl.observe.digest import RunDigest, digest
from seamless_verl.observe.flight import MemoryHeld, SliceState
from seamless_verl.observe.memory import MemoryTrack
from seamless_verl.observe.page.figures import thinned
from seamless_verl.observe.page.html import render
from seamless_verl.observe.recording import Recording

TRAINER, ENGINE = Owner(name="trainer", process="1 1"), Owner(name="engine", process="2 2")


def moved(at: float, what: str, nbytes: int, user: str = "engine", **changes: Any) -> MemoryHeld:
    values: dict[str, Any] = dict(slice="trainers/0", device="trainer/0", user=user, what=what, nbytes=nbytes)
    return MemoryHeld(at=at, **{**values, **changes})


def run_of(*events: flight.FlightEvent) -> RunDigest:
    start = flight.RunStarted(at=0.0, name="x", policy="greedy", eta=1, bound=1, total_steps=2)
    slice_ = flight.SliceAdded(
        at=0.0, slice="trainers/0", pool="trainers", devices=1, capabilities=("train",), state=SliceState.TRAINING
    )
    return digest(Recording(events=(start, slice_, *events)), (), ())


def test_books_become_events_of_slices_and_a_death_releases() -> None:
    track = MemoryTrack({"trainer/0": "trainers/0"}.get)
    needed = Needed(
        at=0.0, device="trainer/0", owner=ENGINE, what="weights", nbytes=8, phases=frozenset({Phase.ROLLOUT})
    )
    assert list(track.take(needed)) == []
    taken = Held(at=1.0, device="trainer/0", owner=ENGINE, what="weights", nbytes=8)
    assert list(track.take(taken)) == [moved(1.0, "weights", 8, capacity=12)]
    assert list(track.take(Held(at=2.0, device="elsewhere/0", owner=ENGINE, what="weights", nbytes=8))) == []
    assert list(track.take(Ended(at=3.0, process=TRAINER.process))) == []
    assert list(track.take(Ended(at=4.0, process=ENGINE.process))) == [moved(4.0, "weights", 0, capacity=12)]


def test_levels_add_up_over_the_devices_of_a_slice() -> None:
    run = run_of(
        moved(1.0, "parameters", 10, "trainer", capacity=100),
        moved(1.0, "parameters", 11, "trainer", device="trainer/1", capacity=100),
        moved(2.0, "parameters", 0, "trainer"),
        moved(2.5, "parameters", 0, "trainer", device="trainer/1"),
        moved(3.0, "weights", 20),
        moved(4.0, "kv_cache", 60),
        moved(5.0, "weights", 0),
    )
    (one,) = run.memory
    parameters, weights, cache = ("trainer", "parameters"), ("engine", "weights"), ("engine", "kv_cache")
    assert one.levels == (
        (1.0, {parameters: 21}), (2.0, {parameters: 11}), (2.5, {}), (3.0, {weights: 20}),
        (4.0, {weights: 20, cache: 60}), (5.0, {cache: 60}),
    )  # fmt: skip
    assert (one.peak, one.capacity, one.wakes, one.sleeps) == (80, 200, 1, 1)
    assert one.parts[0] == parameters


def test_a_run_that_goes_on_in_the_same_folder_holds_nothing_of_the_earlier_one() -> None:
    asked = flight.RequestStarted(at=3.0, request="x", slice="trainers/0", prompt_tokens=1)
    again = flight.RunStarted(at=36_010.0, name="x", policy="greedy", eta=1, bound=1, total_steps=2)
    killed = (moved(2.0, "weights", 20), asked, flight.StepBegan(at=10.0, step=1))
    held = (2.0, {("engine", "weights"): 20})
    run = run_of(*killed, again)
    assert run.memory[0].levels == (held, (10.0, {})), "it was killed after its last event"
    assert next(lane.load for lane in run.lanes if lane.slice == "trainers/0") == ((3.0, 1), (10.0, 0))
    run = run_of(*killed, flight.RunEnded(at=11.0, outcome="finished"), again)
    assert run.memory[0].levels[:2] == (held, (11.0, {}))


def test_thinned_levels_keep_the_fullest_and_the_last() -> None:
    part = ("engine", "weights")
    levels = [(float(at), {part: 100 if at == 501 else at % 2}) for at in range(1000)]
    kept = thinned(levels, 1000.0, 50)
    assert len(kept) <= 52
    assert {part: 100} in [parts for _, parts in kept]
    assert kept[-1][1] == levels[-1][1]
    assert thinned(levels[:10], 10.0, 50) == levels[:10]


def test_the_page_shows_who_held_what_and_how_many_loans_were_compared() -> None:
    checked = flight.WeightsChecked(at=6.0, slice="trainers/0", version=1, published="a", held="a")
    wrong = flight.WeightsChecked(at=7.0, slice="trainers/0", version=2, published="a", held="b")
    run = run_of(moved(1.0, "weights", 2048, capacity=4096), moved(3.0, "weights", 0), checked, wrong)
    page = render(run)
    assert "engine: weights, up to 2.0 KiB" in page
    assert "at most 2.0 KiB at a time of 4.0 KiB that it has; weights came 1 times and left 1 times" in page
    assert "Weights of 2 loans were compared with the published ones: 1 differed." in page


def test_a_recording_without_memory_says_so() -> None:
    assert "was not counted in this run" in render(run_of())
