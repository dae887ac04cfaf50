"""Agents on a made-up fleet: turns become requests, contexts grow by what was said, groups end with their attempts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.simulation.agents import Agents, Attempt, Group, Replay, Trajectory, Turn
from seamless_verl.simulation.books import Account, Use
from seamless_verl.simulation.clock import Clock
from seamless_verl.simulation.fleet import Fleet, Unit
from seamless_verl.simulation.replica import Replica, Request
from tests.kernel.simulation.build import ENGINE, make_fleet

TWO_TURNS = (Turn(prompt=100, answer=20, tool_s=3.0), Turn(prompt=7, answer=10, tool_s=1.0))
ONE_TURN = (Turn(prompt=100, answer=50, tool_s=2.0),)


class Desk:
    """Takes the requests of agents and lets a test say when each is done."""

    def __init__(self, groups: list[list[Trajectory]], attempts: int) -> None:
        self.clock = Clock()
        self.live: list[Request] = []
        self.sessions: list[str] = []
        self.groups: list[str] = []
        self.agents = Agents(
            self.clock,
            Replay(groups),
            random.Random(0),
            attempts=attempts,
            submit=self.live.extend,
            withdraw=self.live.remove,
            on_session=lambda attempt: self.sessions.append(attempt.session),
            on_group=lambda group: self.groups.append(group.name),
        )

    def start(self, version: int = 0) -> Group:
        group = self.agents.draw(version)
        self.agents.start([group])
        return group

    def finish(self, request: Request, version: int = 0) -> None:
        self.live.remove(request)
        request.version = version if request.version is None else request.version
        self.agents.finished(request)

    def pass_time(self, seconds: float) -> None:
        until = self.clock.now + seconds
        self.clock.at(until, lambda: None)
        self.clock.run(lambda: self.clock.now >= until)


def test_a_turn_brings_all_that_was_said_before_it() -> None:
    desk = Desk([[TWO_TURNS]], 1)
    group = desk.start()
    (first,) = desk.live
    assert (first.context, first.tokens, first.prefix) == (100, 20, 0)
    desk.finish(first)
    assert desk.live == []  # the tool runs
    desk.pass_time(2.9)
    assert desk.live == []
    desk.pass_time(0.2)
    (second,) = desk.live
    assert (second.context, second.tokens, second.prefix) == (127, 10, 120)
    assert second.owner is first.owner
    desk.finish(second)
    assert desk.groups == []  # its last tool counts, too
    desk.pass_time(1.0)
    assert (desk.sessions, desk.groups) == (["g1/0"], ["g1"])
    assert (group.tokens, group.generated) == (137, 30)


def test_a_group_ends_with_its_last_attempt_and_is_as_old_as_its_oldest_token() -> None:
    desk = Desk([[TWO_TURNS, ONE_TURN]], 2)
    group = desk.start(version=4)
    two, one = desk.live
    desk.finish(one, version=6)
    desk.finish(two, version=5)
    desk.pass_time(2.0)
    assert (desk.sessions, desk.groups) == (["g1/1"], [])
    desk.pass_time(1.5)
    (last,) = desk.live
    desk.finish(last, version=7)  # later tokens do not make it younger
    desk.pass_time(5.0)
    assert desk.groups == ["g1"]
    assert (group.reserved, group.version) == (4, 5)
    assert [attempt.version for attempt in group.attempts] == [5, 6]


def test_requests_are_as_old_as_their_session() -> None:
    desk = Desk([[ONE_TURN, ONE_TURN]], 2)
    desk.start()
    desk.start()
    assert [request.age for request in desk.live] == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_request_that_nobody_waits_for_any_more_is_not_looked_at() -> None:
    desk = Desk([[ONE_TURN]], 1)
    group = desk.start()
    (request,) = desk.live
    desk.agents.stop(group)
    assert desk.live == []
    desk.agents.finished(request)
    desk.pass_time(10.0)
    assert (desk.sessions, desk.groups) == (["g1/0"], []), "its session is over, and no length of its kind"
    assert group.generated == 0


# ---------------------------------------------------------------- slices and the router


@pytest.fixture
def both() -> tuple[Fleet, list[tuple[object, str, bool]], list[tuple[object, str]]]:
    """Two slices that serve."""
    stopped: list[tuple[object, str, bool]] = []
    started: list[tuple[object, str]] = []
    found = make_fleet(
        Clock(),
        started=lambda request, name: started.append((request.owner, name)),
        stopped=lambda request, name, finished: stopped.append((request.owner, name, finished)),
    )
    for name in ("a", "b"):
        found.add(name, gpus=1, trainable=False, physics=ENGINE)
        found.units[name].serve(0)
    return found, stopped, started


Both = tuple[Fleet, list[tuple[object, str, bool]], list[tuple[object, str]]]


def test_requests_are_spread_over_slices(both: Both) -> None:
    found, _, started = both
    found.submit([Request(number, 10, 100) for number in range(10)])
    assert sorted(name for _, name in started) == ["a"] * 5 + ["b"] * 5


def test_a_session_stays_where_its_cache_is_until_it_is_forgotten(both: Both) -> None:
    found, _, started = both
    found.submit([Request("s", 10, 100)])
    home = started[0][1]
    fillers = {f"filler {number}": Request(f"filler {number}", 10, 100) for number in range(4)}
    found.submit(fillers.values())
    elsewhere = [owner for owner, name in started if name != home]
    for owner in elsewhere:
        found.withdraw(fillers[str(owner)])
    found.submit([Request("s", 110, 100, prefix=100)])
    assert started[-1] == ("s", home)  # though the other slice has nothing to do
    found.forget("s")
    found.submit([Request("s", 210, 100, prefix=200)])
    assert started[-1][1] != home


def test_a_slice_that_leaves_hands_everything_on_and_gets_nothing(both: Both) -> None:
    found, stopped, started = both
    found.submit([Request(number, 10, 100) for number in range(6)])
    started.clear()
    found.vacate("a")
    assert [name for _, name, finished in stopped if not finished] == ["a"] * 3
    assert [name for _, name in started] == ["b"] * 3
    assert found.idle("a")
    found.submit([Request("new", 10, 100)])
    assert started[-1] == ("new", "b")


def test_a_slice_that_will_be_drained_gets_no_later_turns(both: Both) -> None:
    found, stopped, started = both
    found.submit([Request("s", 10, 100)])
    home = started[0][1]
    found.units[home].accepting = False  # it finishes what it has
    found.submit([Request("s", 110, 100, prefix=100)])
    assert started[-1][1] != home
    assert stopped == []


def test_without_a_slice_that_serves_requests_are_held_and_placed_later(both: Both) -> None:
    found, _, started = both
    for name in ("a", "b"):
        found.units[name].turn_to(Use.TRAIN)
    found.submit([Request("held", 10, 100)])
    assert (found.num_held, started) == (1, [])
    found.units["b"].serve(1)
    found.even_out()
    assert (found.num_held, started) == (0, [("held", "b")])


def test_new_weights_spread_everything_anew(both: Both) -> None:
    found, stopped, started = both
    found.submit([Request(number, 10, 100) for number in range(6)])
    started.clear()
    for unit in found.units.values():
        unit.turn_to(Use.SYNC)
    found.spread(["a", "b"], 3)
    assert len(stopped) == 6
    assert sorted(name for _, name in started) == ["a"] * 3 + ["b"] * 3
    assert {unit.replica.version for unit in found.units.values()} == {3}


@given(st.lists(st.tuples(st.floats(0.0, 9.0), st.sampled_from([None, Use.TRAIN, Use.SWITCH, Use.SYNC])), max_size=12))
def test_every_second_of_a_slice_is_charged_once_whatever_it_turns_to(uses: list[tuple[float, Use | None]]) -> None:
    clock = Clock()
    account = Account(name="s", gpus=1, trainable=True)
    unit = Unit(clock, account, Replica("s", clock, ENGINE, account, lambda request: None))
    at, expected, use = 0.0, dict.fromkeys(Use, 0.0), Use.WAIT_DATA
    for seconds, turn in uses:
        at += seconds
        expected[use] += seconds
        clock.at(at, (lambda: unit.serve(1)) if turn is None else (lambda turn=turn: unit.turn_to(turn)))
        use = turn or Use.WAIT_WORK
    clock.run(lambda: False)
    unit.charge()
    unit.charge()  # a second look books nothing
    assert account.seconds == pytest.approx(expected)
    assert unit.serving == (use is Use.WAIT_WORK)
    assert unit.accepting == unit.serving


def test_a_name_says_whose_attempt_it_is() -> None:
    group = Group(3, 0, 0.0)
    assert Attempt(group, 2, ONE_TURN).session == "g3/2"
