"""The trainer's loop alone: a stage grants the gang, loads weights and ends groups at the times that a test says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from seamless_verl.observe import flight
from seamless_verl.observe.flight import Phase
from seamless_verl.scheduling import events as ev
from seamless_verl.simulation.agents import Attempt, Constant, Group
from seamless_verl.simulation.books import Use
from seamless_verl.simulation.clock import Clock, Signal
from seamless_verl.simulation.loop import StepRecord, TrainLoop
from seamless_verl.simulation.regimes import REGIMES, Regime
from seamless_verl.simulation.scenario import SwitchCosts, TrainPhysics
from tests.kernel.simulation.build import scenario

GANG = ("trainers/0", "trainers/1")
PUSH_S, UPDATE_S = 4.0, 5.0


class Stage:
    """Stands in for driver, fleet and agents of one loop.

    Args:
        answers: seconds of the groups in the order in which they start, again and again.
        grant_s, load_s, wake_s: from asking for the gang to its grant; of new weights; of a gang that is lent.
        lending: whether somebody else uses the gang.
    """

    def __init__(
        self,
        system: str,
        answers: Sequence[float],
        *,
        rules: Regime | None = None,
        grant_s: float = 0.0,
        load_s: float = 0.0,
        wake_s: float = 0.0,
        lending: bool = False,
        lends_next: bool = False,
        **changes: Any,
    ) -> None:
        self.clock = Clock()
        self.changed = Signal(self.clock)
        self.events: list[ev.Event] = []
        self.log: list[tuple[str, float]] = []
        self.uses: list[tuple[Use, float]] = []
        self.steps: list[StepRecord] = []
        self.recorded: list[flight.FlightEvent] = []
        self.stopped: list[str] = []
        self.granted_: dict[str, tuple[str, ...]] = {}
        self.until: dict[str, float] = defaultdict(float)  # what goes on until when
        self.number = 0
        self._answers, self._lending, self._wake_s = answers, lending, wake_s
        self._grant_s, self._load_s = grant_s, load_s
        self.units = {
            name: SimpleNamespace(turn_to=self._turned if name == GANG[0] else lambda use: None) for name in GANG
        }
        values = {"batch": 2, "mini_batch": 1, "attempts": 1, "steps": 2, "warm": 0, "eta": 0} | changes
        base = scenario(system, workload=Constant(answer=60, prompt=40), **values)
        base = replace(
            base,
            train=TrainPhysics(gpu_s_per_token=0.0, update_s=UPDATE_S),
            costs=SwitchCosts(wake=0.0, drain=0.0, load=load_s, push=PUSH_S),
        )
        rules = rules or REGIMES[system]
        self.feed = rules.feed(self.draw, base.batch, base.eta)
        stage: Any = self
        self.loop = TrainLoop(
            base,
            rules,
            self.clock,
            stage,
            stage,
            stage,
            self.feed,
            on_step=self.steps.append,
            lends_next=lambda: lends_next,
            record=self.recorded.append,
        )

    def run(self) -> Stage:
        self.clock.start(self.loop.run())
        assert self.clock.run(lambda: self.loop.done)
        return self

    def told(self, kind: type[ev.Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def moments(self, *names: str) -> list[tuple[str, float]]:
        return [(name, at) for name, at in self.log if name in names]

    # ------------------------------------------------------------ the agents

    def draw(self, version: int) -> Group:
        self.number += 1
        group = Group(self.number, version, self.clock.now)
        attempt = Attempt(group, 0, (), context=100, generated=60, version=version)
        group.attempts = [attempt]
        return group

    def start(self, groups: list[Group]) -> None:
        for group in groups:
            self.clock.after(self._answers[(group.number - 1) % len(self._answers)], self._ended, group)

    def stop(self, group: Group) -> None:
        self.stopped.append(group.name)

    def _ended(self, group: Group) -> None:
        if group.name not in self.stopped:
            self.loop.group_finished(group)

    # ------------------------------------------------------------ the driver and the fleet

    def tell(self, event: ev.Event) -> None:
        self.events.append(event)
        self.log.append((type(event).__name__, event.at))
        if isinstance(event, ev.AcquireRequested):
            self.clock.after(self._grant_s, self._grant, event.request)
        elif isinstance(event, ev.WeightsPublished):
            self._busy("load", self._load_s)

    def _grant(self, request: str) -> None:
        self.granted_[request] = GANG
        self.changed.fire()

    def _busy(self, what: str, seconds: float) -> None:
        self.until[what] = self.clock.now + seconds
        self.clock.after(seconds, self.changed.fire)

    def granted(self, request: str) -> tuple[str, ...] | None:
        return self.granted_.get(request)

    def release(self, request: str) -> None:
        self.granted_.pop(request)
        self.log.append(("release", self.clock.now))
        self._busy("wake", self._wake_s)

    def register(self, names: Iterable[str]) -> None:
        assert tuple(names) == GANG
        self.log.append(("register", self.clock.now))

    def lending(self) -> bool:
        return self._lending

    def loading(self) -> bool:
        return self.clock.now < self.until["load"]

    def waking(self, names: Iterable[str]) -> bool:
        return bool(tuple(names)) and self.clock.now < self.until["wake"]

    def _turned(self, use: Use) -> None:
        self.uses.append((use, self.clock.now))


def test_a_step_trains_what_comes_pushes_its_weights_and_awaits_their_load() -> None:
    stage = Stage("disaggregated", [10.0, 30.0], load_s=2.0).run()
    first, second = stage.steps
    # Mini-batches are whole at 10 and 30 and take 5 s each; then 4 s of push and 2 s of load.
    assert (first.began, first.ended, second.began, second.ended) == (0.0, 41.0, 41.0, 82.0)
    assert first.waited_s == 10.0 + 15.0
    assert (first.tokens, first.generated, first.answers, first.staleness) == (200, 120, (60, 60), (0, 0))
    assert [at for _, at in stage.moments("WeightsPublished")] == [39.0, 80.0]
    assert [at for _, at in stage.moments("GroupsSubmitted")] == [0.0, 41.0, 82.0]
    assert stage.uses[:6] == [
        (Use.TRAIN, 10.0),
        (Use.WAIT_DATA, 15.0),
        (Use.TRAIN, 30.0),
        (Use.WAIT_DATA, 35.0),
        (Use.SYNC, 35.0),
        (Use.WAIT_DATA, 39.0),
    ]


@pytest.mark.parametrize(("system", "asked"), [("greedy", 2), ("seamlessflow", 1), ("disaggregated", 1)])
def test_a_gang_that_starves_is_given_back_by_who_does_that(system: str, asked: int) -> None:
    """Greedy asks once more for the second mini-batch, which is 15 s away; who does not stream waits for the whole."""
    stage = Stage(system, [10.0, 30.0], steps=1).run()
    requests = stage.told(ev.AcquireRequested)
    assert [request.batch for request in requests] == [2, 1][:asked]
    assert {request.minimum for request in requests} == {1 if REGIMES[system].streaming else 2}
    assert {request.count for request in requests} == {2}
    assert len(stage.moments("release")) == asked


def test_a_gang_is_kept_where_the_next_mini_batch_is_there() -> None:
    stage = Stage("greedy", [10.0, 12.0], steps=1).run()
    assert len(stage.told(ev.AcquireRequested)) == 1


def test_groups_that_are_ready_are_counted_up_to_what_the_batch_misses() -> None:
    """With two batches in flight and all four groups whole at once, the second step finds more than it needs."""
    stage = Stage("disaggregated", [10.0], eta=1).run()
    assert all(0 <= event.ready <= 2 for event in stage.told(ev.GroupsReady))
    progress = [event for event in stage.recorded if isinstance(event, flight.BatchProgress)]
    assert all(event.ready <= event.needed for event in progress)
    assert stage.steps[1].waited_s == 0.0


@pytest.mark.parametrize(("lending", "starved_s"), [(False, 3.0), (True, 0.0)])
def test_a_gang_that_nobody_used_starves_while_its_grant_is_out(lending: bool, starved_s: float) -> None:
    """Not in the first step, where nobody could have prepared anything."""
    stage = Stage("disaggregated", [10.0], grant_s=3.0, lending=lending).run()
    ended = stage.told(ev.StepEnded)
    assert [event.starved_s for event in ended] == [0.0, starved_s]
    assert [event.starved_groups for event in ended] == [0, 0 if lending else 1]
    assert [event.waited_s for event in ended] == [7.0, 7.0]  # for groups, with the gang in hand
    assert [event.waited_groups for event in ended] == [1, 1]


def test_the_scheduler_is_told_what_the_next_step_finds_before_the_step_ends() -> None:
    stage = Stage("disaggregated", [10.0, 30.0]).run()
    names = [name for name, _ in stage.log]
    for number, ended in enumerate(index for index, name in enumerate(names) if name == "StepEnded"):
        assert names[ended - 2 : ended] == ["GroupsReady", "BatchOpened"], number
    assert [event.last for event in stage.told(ev.StepEnded)] == [False, True]
    assert [event.step for event in stage.told(ev.StepEnded)] == [1, 2]


def test_verl_stops_the_world_and_tells_the_router_of_slices_that_join() -> None:
    """Weights are out, the router knows of the gang, everything loads, the gang is given back and wakes up."""
    stage = Stage("verl_enable_switch", [10.0], load_s=2.0, wake_s=7.0, lends_next=True, steps=1).run()
    assert stage.moments("WeightsPublished", "register", "release") == [
        ("WeightsPublished", 20.0),
        ("register", 20.0),
        ("release", 22.0),
    ]
    assert stage.steps[0].ended == 29.0


def test_verl_does_not_wait_for_a_gang_that_is_not_lent() -> None:
    stage = Stage("verl_enable_switch", [10.0], load_s=2.0, wake_s=7.0, steps=1).run()
    assert stage.moments("register") == []
    assert stage.steps[0].ended == 22.0


def test_one_step_off_publishes_when_a_batch_is_whole_and_generates_the_next_while_it_trains() -> None:
    stage = Stage("verl_one_step_off", [10.0], load_s=2.0, steps=3).run()
    # Each batch takes 10 s to generate, of which training takes 5; weights are loaded in between for 2 s.
    assert [step.ended for step in stage.steps] == [15.0, 27.0, 39.0]
    assert [at for _, at in stage.moments("GroupsSubmitted")] == [0.0, 10.0, 22.0]
    assert [at for _, at in stage.moments("WeightsPublished")] == [20.0, 32.0]
    assert [step.staleness for step in stage.steps] == [(0, 0), (1, 1), (1, 1)]


def test_groups_that_a_system_gives_up_for_their_age_are_stopped() -> None:
    """ROLL: every fourth group takes longer than two versions do."""
    stage = Stage("roll", [500.0, 10.0, 10.0, 10.0], eta=1, steps=4).run()
    assert stage.stopped == ["g1", "g5", "g9"]
    assert max(age for step in stage.steps for age in step.staleness) <= 1


def test_surplus_of_a_batch_is_stopped() -> None:
    stage = Stage("disaggregated", [10.0], steps=1)
    take, surplus = stage.feed.take, stage.draw(0)
    stage.feed.take = lambda count: (take(count)[0], [surplus])  # type: ignore[method-assign]
    stage.run()
    assert stage.stopped == [surplus.name] * 2  # of each mini-batch


def test_what_is_recorded_of_a_step() -> None:
    stage = Stage("disaggregated", [10.0, 30.0], eta=1).run()
    nested: list[Phase] = []
    spent: dict[Phase, float] = defaultdict(float)
    for event in stage.recorded:
        if isinstance(event, flight.PhaseBegan):
            assert nested == []
            nested.append(event.phase)
            spent[event.phase] -= event.at
        elif isinstance(event, flight.PhaseEnded):
            assert nested.pop() is event.phase
            spent[event.phase] += event.at
        elif isinstance(event, (flight.StepBegan, flight.StepEnded)):
            assert nested == []
    assert spent[Phase.UPDATE_ACTOR] == 4 * UPDATE_S
    assert spent[Phase.WAIT_FOR_BATCH] == sum(step.waited_s for step in stage.steps)
    assert spent[Phase.SYNC_WEIGHTS] == 2 * PUSH_S
    rows = [event for event in stage.recorded if isinstance(event, flight.RowsTrained)]
    assert [(row.step, row.rollouts, row.prompt_tokens, row.response_tokens) for row in rows] == [
        (step, 2, (40, 40), (60, 60)) for step in (1, 2)
    ]
    assert [row.staleness for row in rows] == [step.staleness for step in stage.steps]
