"""Commands carried out on a fleet, with a scheduler that says what the test tells it to: what takes how long, and what
comes back as which event."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from seamless_verl.config import RouterConfig, WeightsConfig
from seamless_verl.errors import SeamlessError
from seamless_verl.scheduling import commands as cmd
from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.slices import Gpu, Slice, SliceId, SliceState, Tag
from seamless_verl.simulation.books import Use
from seamless_verl.simulation.clock import Clock
from seamless_verl.simulation.driver import Driver
from seamless_verl.simulation.replica import Request
from seamless_verl.simulation.scenario import SwitchCosts
from seamless_verl.staleness.router import router_of
from tests.kernel.simulation.build import ENGINE, make_fleet

A, B = SliceId("a"), SliceId("b")
COSTS = SwitchCosts(wake=7.0, drain=3.0, load=2.0, push=1.0, repair=50.0)


class Cluster:
    """States that a test sets, as the driver reads them."""

    def __init__(self) -> None:
        slices = (SimpleNamespace(id=name, lendable=True) for name in (A, B))
        self.states = {slice_.id: SimpleNamespace(slice=slice_, state=SliceState.IDLE) for slice_ in slices}
        self.published = 0

    def __getitem__(self, name: SliceId) -> Any:
        return self.states[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.states.values())


class Stage:
    """Two slices under a driver; ``events`` with the times at which the scheduler was told of them."""

    def __init__(
        self, costs: SwitchCosts = COSTS, weights: WeightsConfig | None = None, policy: str = "least_requests"
    ) -> None:
        self.clock = Clock()
        self.cluster = Cluster()
        self.events: list[ev.Event] = []
        self.replies: dict[type[ev.Event], list[cmd.Command]] = {}
        router = router_of(RouterConfig(policy=policy, oldest_first=False))
        self.fleet = make_fleet(self.clock, router=router, stopped=lambda request, name, finished: self.idle(name))
        for name in (A, B):
            self.fleet.add(name, gpus=1, trainable=True, physics=ENGINE)
        cluster: Any = self.cluster
        rng, weights = random.Random(1), weights or WeightsConfig()
        self.driver = Driver(self.clock, self.handle, cluster, self.fleet, costs, rng, weights)

    def handle(self, event: ev.Event) -> tuple[cmd.Command, ...]:
        self.events.append(event)
        return tuple(self.replies.pop(type(event), ()))

    def idle(self, name: str) -> None:
        if self.fleet.idle(name):
            self.driver.pull()

    def command(self, *commands: cmd.Command) -> None:
        self.replies[ev.Tick] = list(commands)
        self.driver.tell(ev.Tick(at=self.clock.now))
        del self.events[-1]

    def until(self, at: float) -> None:
        self.clock.at(at, lambda: None)
        self.clock.run(lambda: self.clock.now >= at)

    def told(self) -> list[tuple[str, float]]:
        return [(type(event).__name__, event.at) for event in self.events]

    def seconds(self, name: SliceId, use: Use) -> float:
        self.fleet.units[name].charge()
        return self.fleet.units[name].account.seconds[use]


def test_a_slice_that_is_lent_wakes_up_and_serves() -> None:
    stage = Stage()
    stage.command(cmd.LendSlice(command=1, slice=A, version=4))
    stage.until(6.9)
    assert not stage.fleet.units[A].serving
    stage.until(10.0)
    assert stage.told() == [("SliceReady", 7.0)]
    assert stage.fleet.units[A].serving
    assert stage.fleet.units[A].replica.version == 4
    assert (stage.seconds(A, Use.SWITCH), stage.seconds(A, Use.WAIT_WORK)) == (7.0, 3.0)


def test_new_weights_take_their_load() -> None:
    stage = Stage()
    stage.fleet.units[A].serve(0)
    stage.command(cmd.SyncWeights(command=1, slice=A, version=5))
    stage.until(4.0)
    assert stage.told() == [("SliceReady", 2.0)]
    assert stage.seconds(A, Use.SYNC) == 2.0
    assert stage.fleet.units[A].replica.version == 5


def test_a_slice_that_is_drained_hands_its_requests_on() -> None:
    stage = Stage()
    for name in (A, B):
        stage.fleet.units[name].serve(0)
    stage.fleet.submit([Request(number, 10, 5000) for number in range(4)])
    stage.until(1.0)
    stage.command(cmd.DrainSlice(command=1, slice=A))
    assert stage.fleet.units[B].replica.load == 4
    stage.until(9.0)
    assert stage.told() == [("SliceDrained", 4.0)]
    assert stage.seconds(A, Use.SWITCH) == 3.0


def test_a_newer_command_voids_the_older_one() -> None:
    """Called back while it wakes up: it never becomes ready."""
    stage = Stage()
    stage.command(cmd.LendSlice(command=1, slice=A, version=0))
    stage.until(5.0)
    stage.command(cmd.DrainSlice(command=2, slice=A))
    stage.until(20.0)
    assert stage.told() == [("SliceDrained", 8.0)]
    assert stage.seconds(A, Use.SWITCH) == 8.0
    assert stage.seconds(A, Use.WAIT_DATA) == 12.0


def test_a_slice_that_fails_is_back_after_its_repair_and_what_it_did_is_void() -> None:
    stage = Stage()
    stage.command(cmd.LendSlice(command=1, slice=A, version=0))
    stage.until(2.0)
    stage.replies[ev.SliceFailed] = [cmd.RestartSlice(slice=A)]
    stage.driver.fail(A)
    stage.until(100.0)
    assert stage.told() == [("SliceFailed", 2.0), ("SliceReturned", 52.0)]
    assert stage.seconds(A, Use.FAILED) == 50.0


@pytest.mark.parametrize("state", [SliceState.TRAINING, SliceState.FAILED])
def test_who_trains_or_has_failed_does_not_fail(state: SliceState) -> None:
    stage = Stage()
    stage.cluster[A].state = state
    stage.driver.fail(A)
    assert stage.events == []


def test_a_gang_is_granted_and_given_back() -> None:
    stage = Stage()
    woken: list[float] = []

    def waits() -> Any:
        yield stage.driver.changed
        woken.append(stage.clock.now)

    stage.clock.start(waits())
    stage.until(3.0)
    assert stage.driver.granted("train/1") is None
    stage.command(cmd.GrantAcquire(request="train/1", slices=(A, B)))
    stage.until(4.0)
    assert stage.driver.granted("train/1") == (A, B)
    assert woken == [3.0]
    for name in (A, B):
        stage.fleet.units[name].turn_to(Use.TRAIN)
    stage.until(9.0)
    stage.driver.release("train/1")
    assert stage.driver.granted("train/1") is None
    assert stage.told() == [("Released", 9.0)]
    stage.until(10.0)
    assert (stage.seconds(A, Use.TRAIN), stage.seconds(B, Use.WAIT_DATA)) == (5.0, 5.0)


def test_a_timer_rings_when_it_should() -> None:
    stage = Stage()
    stage.command(cmd.SetTimer(at=12.5))
    stage.until(20.0)
    assert stage.told() == [("Tick", 12.5)]


def test_events_that_follow_from_an_event_come_after_it() -> None:
    """The reply to the first event makes a second one at once: it is told when all commands of the first are done."""
    stage = Stage()
    stage.fleet.units[A].serve(0)
    stage.replies[ev.Tick] = [
        cmd.GrantAcquire(request="r", slices=(B,)),
        cmd.SetTimer(at=0.0),
        cmd.RestartSlice(slice=B),
    ]
    stage.driver.tell(ev.Tick(at=0.0))
    assert stage.told() == [("Tick", 0.0)]
    stage.until(60.0)
    assert stage.told() == [("Tick", 0.0), ("Tick", 0.0), ("SliceReturned", 50.0)]


@pytest.mark.parametrize(
    "command",
    [
        cmd.RefuseAcquire(request="train/1", reason="too large"),
        cmd.RevokeGrant(request="train/1", slice=A, reason="gone"),
    ],
)
def test_a_gang_that_cannot_be_had_ends_a_run(command: cmd.Command) -> None:
    with pytest.raises(SeamlessError, match="train/1: (too large|gone)"):
        Stage().command(command)


def test_stalls_are_counted_and_horizons_kept() -> None:
    stage = Stage()
    stage.command(
        cmd.ReportStall(request="train/1", waited_s=9.0, waiting_for=("a",)),
        cmd.SetHorizon(slice=A, outlasting=frozenset({"g1/0"})),
    )
    assert stage.driver.stalls == 1
    assert stage.driver.outlasting == {"g1/0"}
    assert stage.fleet.units[A].lent
    assert not stage.fleet.units[B].lent


def test_without_spread_a_switch_takes_what_was_said_and_with_it_about_that() -> None:
    exact, spread = Stage(), Stage(SwitchCosts(wake=7.0, drain=3.0, load=2.0, push=1.0, spread=0.1))
    for stage in (exact, spread):
        for number in range(40):
            stage.command(cmd.LendSlice(command=number, slice=A, version=0))
            stage.until(20.0 * (number + 1))
    waits = [at % 20.0 for _, at in spread.told()]
    assert {at % 20.0 for _, at in exact.told()} == {7.0}
    assert len(set(waits)) > 30
    assert sum(waits) / len(waits) == pytest.approx(7.0, rel=0.05)


def _synced(stage: Stage, *, joins: bool, count: int = 4) -> dict[SliceId, list[object]]:
    """B takes new weights, with ``count`` requests on it, while A wakes up; who waits where when both are done."""
    stage.fleet.units[B].serve(0)
    stage.fleet.submit([Request(number, 10, 5000) for number in range(count)])
    stage.until(1.0)
    stage.cluster[B].state = SliceState.SYNCING
    stage.cluster[A].state = SliceState.WAKING if joins else SliceState.IDLE
    commands: list[cmd.Command] = [cmd.SyncWeights(command=1, slice=B, version=1)]
    if joins:
        commands.append(cmd.LendSlice(command=2, slice=A, version=1))
    stage.command(*commands)
    stage.until(1.5)
    assert stage.driver.loading()
    assert stage.driver.waking([A]) == joins
    assert not stage.driver.waking([B])
    assert not stage.driver.waking([])
    running = {name: stage.fleet.units[name].replica for name in (A, B)}
    return {name: [request.owner for request in replica.waiting] for name, replica in running.items()}


@pytest.mark.parametrize("policy", ["least_requests", "cache_aware"])
def test_a_slice_that_is_lent_while_weights_load_gets_its_share_of_what_they_interrupt(policy: str) -> None:
    """More than a router of the kind that holds requests is offered at a time."""
    stage = Stage(policy=policy)
    waiting = _synced(stage, joins=True, count=200)
    assert list(map(len, waiting.values())) == [100, 100]
    assert {owner for owners in waiting.values() for owner in owners} == set(range(200))
    stage.until(20.0)
    assert [name for name, _ in stage.told()] == ["SliceReady", "SliceReady"]
    assert [stage.fleet.units[name].replica.num_running for name in (A, B)] == [100, 100]


def test_a_slice_that_is_not_lent_gets_nothing_of_it() -> None:
    stage = Stage()
    waiting = _synced(stage, joins=False)
    assert waiting[A] == []
    stage.until(20.0)
    assert stage.fleet.units[B].replica.num_running == 4


def test_slices_that_take_over_for_a_lost_one_get_its_requests() -> None:
    stage = Stage()
    for name in (A, B):
        stage.fleet.units[name].serve(0)
    stage.fleet.submit([Request(number, 10, 5000) for number in range(6)])
    stage.until(1.0)
    stage.command(cmd.FailOver(slice=A, reason="silent"))
    assert [stage.fleet.units[name].replica.load for name in (A, B)] == [0, 6]


@pytest.mark.parametrize("lent", [(), (A,), (B,), (A, B)])
def test_lending_is_what_the_cluster_says_of_any_slice(lent: tuple[SliceId, ...]) -> None:
    stage = Stage()
    for status in stage.cluster:
        status.lent = status.slice.id in lent
    assert stage.driver.lending() is bool(lent)


def test_a_slice_that_is_added_serves_at_once_or_stands_idle() -> None:
    stage = Stage()
    pieces = {
        name: Slice(id=name, pool="p", gpus=(Gpu(node=name, index=0),), capabilities=frozenset(Tag)) for name in (A, B)
    }
    stage.driver.add(pieces[A], serving=True)
    stage.driver.add(pieces[B], serving=False)
    added = [event for event in stage.events if isinstance(event, ev.SliceAdded)]
    assert [(event.slice.id, event.state, event.version) for event in added] == [
        (A, SliceState.ROLLOUT, 0),
        (B, SliceState.IDLE, None),
    ]
    assert [stage.fleet.units[name].serving for name in (A, B)] == [True, False]
