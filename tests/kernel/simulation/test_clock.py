"""Virtual time: what comes first, who is woken by what, and that a run is a function of its inputs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.simulation.clock import Clock, Process, Signal


def never() -> bool:
    return False


@given(st.lists(st.floats(0, 100), max_size=30))
def test_callbacks_come_in_the_order_of_their_times_and_then_of_asking(times: list[float]) -> None:
    clock = Clock()
    seen: list[tuple[float, int]] = []
    for number, time in enumerate(times):
        clock.at(time, lambda time=time, number=number: seen.append((time, number)))
    assert not clock.run(never)
    assert seen == sorted((time, number) for number, time in enumerate(times))
    assert clock.events == len(times)
    assert clock.now == max(times, default=0.0)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(-5, 5)), min_size=1, max_size=20))
def test_time_never_goes_back_whatever_is_asked_for(pairs: list[tuple[float, float]]) -> None:
    """Each callback asks for another one, perhaps in the past: that means now."""
    clock = Clock()
    seen: list[float] = []
    for first, shift in pairs:
        clock.at(first, lambda at: clock.at(at, lambda: seen.append(clock.now)), first + shift)
    last = -1.0

    def watch() -> bool:
        nonlocal last
        assert clock.now >= last
        last = clock.now
        return False

    clock.run(watch)
    assert sorted(seen) == sorted(max(first, first + shift) for first, shift in pairs)


def test_a_run_stops_as_soon_as_it_may_and_goes_on_later() -> None:
    clock = Clock()
    seen: list[int] = []
    for number in range(4):
        clock.after(float(number), seen.append, number)
    assert clock.run(lambda: len(seen) == 2)
    assert (seen, clock.now, clock.events) == ([0, 1], 1.0, 2)
    clock.after(0.5, seen.append, 9)  # from now on: between the next two
    assert not clock.run(never)
    assert seen == [0, 1, 9, 2, 3]


def test_a_process_waits_for_the_seconds_that_it_yields() -> None:
    clock = Clock()
    seen: list[float] = []

    def process() -> Process:
        for seconds in (2.0, 0.0, 3.5):
            yield seconds
            seen.append(clock.now)

    clock.at(1.0, clock.start, process())
    clock.run(never)
    assert seen == [3.0, 3.0, 6.5]


def test_a_signal_wakes_all_who_wait_in_the_order_in_which_they_came_and_nobody_else() -> None:
    clock = Clock()
    signal = Signal(clock)
    seen: list[tuple[str, float]] = []

    def process(name: str, asleep: float) -> Process:
        yield asleep
        yield signal
        seen.append((name, clock.now))

    for name, asleep in (("late", 7.0), ("b", 2.0), ("a", 1.0)):
        clock.start(process(name, asleep))
    clock.at(5.0, signal.fire)
    assert not clock.run(never)
    assert seen == [("a", 5.0), ("b", 5.0)]  # a signal is not kept for who comes later


def test_a_process_that_waits_again_is_woken_by_the_next_signal_only() -> None:
    clock = Clock()
    signal = Signal(clock)
    woken: list[float] = []

    def process() -> Process:
        while True:
            yield signal
            woken.append(clock.now)

    clock.start(process())
    for at in (1.0, 1.0, 4.0):
        clock.at(at, signal.fire)
    clock.run(never)
    assert woken == [1.0, 4.0]  # the second signal at 1 came before it waited again


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_generator_inside_of_a_process_is_part_of_it(repeats: int) -> None:
    clock = Clock()
    ended: list[float] = []

    def inner() -> Process:
        yield 1.5
        return "done"

    def outer() -> Process:
        for _ in range(repeats):
            assert (yield from inner()) == "done"
        ended.append(clock.now)

    clock.start(outer())
    clock.run(never)
    assert ended == [1.5 * repeats]
