"""Safety and liveness of the scheduler under random events, failures, orders and the worst policy there is."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from seamless_verl.scheduling import commands as cm
from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.cluster import Cluster, ids
from seamless_verl.scheduling.commands import Decision, LookAgain, Verb
from seamless_verl.scheduling.issuing import Patience
from seamless_verl.scheduling.policies import Greedy
from seamless_verl.scheduling.scheduler import Scheduler
from seamless_verl.scheduling.slices import (
    SERVING_SOON,
    TRANSITIONS,
    Move,
    Repair,
    SliceId,
    SliceState,
    SliceStatus,
    Tag,
)
from tests.kernel.scheduling.world import BOTH, ROLLOUT, TRAIN, make_slice

PATIENCE = Patience(wake_s=50, drain_s=30, restart_s=90, stall_s=40)
EXAMPLES = int(os.environ.get("SCHEDULER_EXAMPLES", "250"))
_ROUNDS = 5
SEEN: set[tuple[SliceState, Move]] = set()


class Capricious:
    """Proposes any legal thing at any time."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def observe(self, event: ev.Event, cluster: Cluster) -> None:
        pass

    def decide(self, cluster: Cluster) -> Iterator[Decision | LookAgain]:
        lent = [s for s in cluster.lent() if self._rng.random() < 0.5]
        idle = [s for s in cluster.idle(Tag.ROLLOUT) if s.slice.lendable and self._rng.random() < 0.5]
        verb = self._rng.choice(list(Verb))
        among = {
            Verb.LEND: idle,
            Verb.HOLD: idle,
            Verb.RECLAIM: lent,
            Verb.WAIT: lent,
        }
        if among[verb]:
            yield Decision(verb=verb, slices=ids(among[verb]), reason="whim")
        if self._rng.random() < 0.1:
            yield LookAgain(at=cluster.now + self._rng.random() * 5)


class ClusterLife(RuleBasedStateMachine):
    """A cluster, a trainer and agents, none of them kind."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0.0
        self.names = 0
        self.requests = 0
        self.version = 0
        self.ready = self.in_flight = 0
        self.asked: dict[str, ev.AcquireRequested] = {}
        self.granted: dict[str, tuple[SliceId, ...]] = {}
        self.rollout_grants: set[str] = set()
        self.open: dict[SliceId, cm.LendSlice | cm.DrainSlice | cm.SyncWeights] = {}
        self.stale: list[cm.LendSlice | cm.DrainSlice | cm.SyncWeights] = []
        self.dead: dict[SliceId, bool] = {}
        self.timer: float | None = None
        self.running: dict[str, SliceId] = {}

    @initialize(rng=st.randoms(use_true_random=False), greedy=st.booleans())
    def begin(self, rng: random.Random, greedy: bool) -> None:
        self.scheduler = Scheduler(Greedy() if greedy else Capricious(rng), PATIENCE)
        self.do(ev.WeightsPublished(at=0.0, version=0))
        self.add(BOTH, True)
        self.add(BOTH, False)

    def do(self, event: ev.Event) -> None:
        for command in self.scheduler.handle(event):
            if isinstance(command, (cm.LendSlice, cm.DrainSlice, cm.SyncWeights)):
                superseded = self.open.pop(command.slice, None)
                if superseded is not None:
                    self.stale.append(superseded)
                self.open[command.slice] = command
                if isinstance(command, cm.DrainSlice):
                    self.running = {r: s for r, s in self.running.items() if s != command.slice}
            elif isinstance(command, cm.GrantAcquire):
                event_asked = self.asked.pop(command.request)  # KeyError: answered twice
                assert len(command.slices) == event_asked.count
                self.granted[command.request] = command.slices
                given_up = {s.slice.id for s in self.scheduler.cluster if s.repair is Repair.GIVEN_UP}
                restarting = {s for s, begun in self.dead.items() if begun} - given_up
                assert event_asked.tag is Tag.ROLLOUT or not restarting & set(command.slices)
                if event_asked.tag is Tag.ROLLOUT:
                    self.rollout_grants.add(command.request)
            elif isinstance(command, cm.RefuseAcquire):
                del self.asked[command.request]
            elif isinstance(command, cm.RevokeGrant):
                del self.granted[command.request]  # KeyError: revoked what was not granted
            elif isinstance(command, cm.FailOver):
                self.open.pop(command.slice, None)
                self.running = {r: s for r, s in self.running.items() if s != command.slice}
                self.dead[command.slice] = False
                for request in self.rollout_grants & set(self.granted):  # goes on with the others
                    self.granted[request] = tuple(s for s in self.granted[request] if s != command.slice)
            elif isinstance(command, cm.RestartSlice):
                assert self.scheduler.cluster[command.slice].state is not SliceState.TRAINING
                self.dead[command.slice] = True
            elif isinstance(command, cm.SetTimer):
                assert command.at > self.at or command.at > event.at
                self.timer = command.at

    def now(self, step_s: float = 1.0) -> float:
        self.at += step_s
        return self.at

    # ------------------------------------------------------------ rules

    @precondition(lambda self: self.names < 5)
    @rule(capabilities=st.sampled_from([BOTH, BOTH, ROLLOUT, TRAIN]), serving=st.booleans())
    def add(self, capabilities: frozenset[Tag], serving: bool) -> None:
        self.names += 1
        serves = serving and Tag.ROLLOUT in capabilities
        self.do(
            ev.SliceAdded(
                at=self.now(),
                slice=make_slice(f"s{self.names}", capabilities),
                state=SliceState.ROLLOUT if serves else SliceState.IDLE,
                version=self.version if serves else None,
            )
        )

    @rule(groups=st.integers(1, 6))
    def submit(self, groups: int) -> None:
        self.in_flight += groups
        self.do(ev.GroupsSubmitted(at=self.now(), groups=tuple(str(i) for i in range(groups)), sessions=2))

    @rule()
    def progress(self) -> None:
        """A group becomes ready; that takes somebody who generates."""
        if self.in_flight and self.scheduler.cluster.generating():
            self.in_flight, self.ready = self.in_flight - 1, self.ready + 1
            self.do(ev.GroupsReady(at=self.now(), ready=self.ready, in_flight=self.in_flight))

    @rule(tag=st.sampled_from(list(Tag)), count=st.integers(1, 4), minimum=st.integers(0, 6), more=st.integers(0, 4))
    def acquire(self, tag: Tag, count: int, minimum: int, more: int) -> None:
        if len(self.asked) + len(self.granted) < 3:
            self.requests += 1
            name = f"r{self.requests}"
            event = ev.AcquireRequested(
                at=self.now(), request=name, tag=tag, count=count, minimum=minimum, batch=minimum + more
            )
            self.asked[name] = event
            self.do(event)

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.granted)))
        self.granted.pop(name)
        taken = min(self.ready, 3)
        self.ready -= taken
        self.do(ev.GroupsReady(at=self.now(), ready=self.ready, in_flight=self.in_flight))
        self.do(ev.Released(at=self.at, request=name))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked)))
        del self.asked[name]
        self.do(ev.Released(at=self.now(), request=name))

    @rule()
    def publish(self) -> None:
        self.version += 1
        self.do(ev.WeightsPublished(at=self.now(), version=self.version))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        self.complete(self.open[data.draw(st.sampled_from(sorted(self.open)))])

    def complete(self, command: cm.LendSlice | cm.DrainSlice | cm.SyncWeights) -> None:
        self.open.pop(command.slice, None)
        if isinstance(command, cm.DrainSlice):
            self.do(ev.SliceDrained(at=self.now(), slice=command.slice, command=command.command))
        else:
            assert command.version is not None
            self.do(ev.SliceReady(at=self.now(), slice=command.slice, command=command.command, version=command.version))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def hand_back(self, data: st.DataObject) -> None:
        """Whatever it was told: another replica died, and with it the switch."""
        command = self.open.pop(data.draw(st.sampled_from(sorted(self.open))))
        self.running = {r: s for r, s in self.running.items() if s != command.slice}
        self.do(ev.SliceDrained(at=self.now(), slice=command.slice, command=command.command))

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def late_answer(self, data: st.DataObject) -> None:
        """An answer to a command that was superseded changes nothing."""
        command = data.draw(st.sampled_from(self.stale))
        before = {s.slice.id: s.state for s in self.scheduler.cluster}
        kept = dict(self.open)
        status = self.scheduler.cluster[command.slice]
        assert status.command != command.command
        if isinstance(command, cm.DrainSlice):
            self.do(ev.SliceDrained(at=self.at, slice=command.slice, command=command.command))
        else:
            self.do(ev.SliceReady(at=self.at, slice=command.slice, command=command.command, version=0))
        after = {s.slice.id: s.state for s in self.scheduler.cluster}
        if self.open == kept:  # the policy may use the occasion for ideas of its own
            assert before == after

    @precondition(lambda self: self.names)
    @rule(data=st.data(), whole=st.booleans(), restartable=st.booleans())
    def fail(self, data: st.DataObject, whole: bool, restartable: bool) -> None:
        slice_id = data.draw(st.sampled_from(sorted(s.slice.id for s in self.scheduler.cluster)))
        status = self.scheduler.cluster[slice_id]
        if not whole and Tag.ROLLOUT not in status.usable:
            return
        lost = frozenset(Tag) if whole else ROLLOUT
        self.do(ev.SliceFailed(at=self.now(), slice=slice_id, reason="killed", lost=lost, restartable=restartable))

    @precondition(lambda self: any(s.state is SliceState.TRAINING for s in self.scheduler.cluster))
    @rule(repaired=st.booleans())
    def replica_of_a_training_slice_dies(self, repaired: bool) -> None:
        training = next(s for s in self.scheduler.cluster if s.state is SliceState.TRAINING)
        if Tag.ROLLOUT in training.usable:
            self.do(ev.SliceFailed(at=self.now(), slice=training.slice.id, reason="killed", lost=ROLLOUT))
            assert training.state is SliceState.TRAINING
            if repaired:
                del self.dead[training.slice.id]
                self.do(ev.SliceReturned(at=self.now(), slice=training.slice.id))

    @precondition(lambda self: any(self.dead.values()))
    @rule(data=st.data())
    def repair(self, data: st.DataObject) -> None:
        slice_id = data.draw(st.sampled_from(sorted(s for s, restarting in self.dead.items() if restarting)))
        del self.dead[slice_id]
        self.do(ev.SliceReturned(at=self.now(), slice=slice_id))

    @rule(far=st.booleans())
    def tick(self, far: bool) -> None:
        if far and self.timer is not None:
            self.at = max(self.at, self.timer)
        self.do(ev.Tick(at=self.now()))

    @rule(data=st.data())
    def start_request(self, data: st.DataObject) -> None:
        serving = sorted(s.slice.id for s in self.scheduler.cluster.generating())
        if serving:
            self.requests += 1
            slice_id = data.draw(st.sampled_from(serving))
            self.running[f"g{self.requests}"] = slice_id
            self.do(
                ev.RequestStarted(
                    at=self.now(),
                    request=f"g{self.requests}",
                    session="s",
                    group="g",
                    slice=slice_id,
                    context_tokens=5,
                )
            )

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(0, 9), ending=st.sampled_from(ev.Ending))
    def finish_request(self, data: st.DataObject, tokens: int, ending: ev.Ending) -> None:
        request = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[request]
        self.do(ev.RequestFinished(at=self.now(), request=request, tokens=tokens, ending=ending))

    # ------------------------------------------------------------ safety

    @invariant()
    def safe(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        cluster = self.scheduler.cluster
        holders = [slice_id for gang in self.granted.values() for slice_id in gang]
        assert len(holders) == len(set(holders)), "two owners of one slice"
        gpus = [gpu for status in cluster for gpu in status.slice.gpus]
        assert len(gpus) == len(set(gpus))
        for status in cluster:
            if status.state is SliceState.TRAINING:
                assert status.holder in self.granted
                assert status.command is None
                assert Tag.TRAIN in status.usable
            if status.state in SERVING_SOON:
                assert Tag.ROLLOUT in status.usable
            if status.state is SliceState.ROLLOUT:
                assert status.version == cluster.published, "generates with weights older than the newest"
            if status.state in (SliceState.WAKING, SliceState.SYNCING, SliceState.DRAINING):
                assert status.command is not None, "nobody will ever end this state"
                assert self.open[status.slice.id].command == status.command
        assert set(cluster.pending) == set(self.asked), "an acquire was lost"

    # ------------------------------------------------------------ liveness

    def teardown(self) -> None:
        """From now on everybody does what he should; then every acquire is answered."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(60):
            if not self.asked:
                return
            for slice_id in [s for s, restarting in self.dead.items() if restarting]:
                del self.dead[slice_id]
                self.do(ev.SliceReturned(at=self.now(), slice=slice_id))
            for command in list(self.open.values()):
                if self.open.get(command.slice) is command:
                    self.complete(command)
            self.progress()
            for name in list(self.granted):
                del self.granted[name]
                self.do(ev.Released(at=self.now(), request=name))
            self.tick(far=True)
        raise AssertionError(f"never answered: {self.asked}; {list(self.scheduler.cluster)}")


def test_safety_and_liveness_and_every_transition_is_exercised(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    SEEN.clear()
    original = SliceStatus._move

    def noted(status: SliceStatus, move: Move, at: float, story: str) -> None:
        before = status.state
        original(status, move, at, story)
        SEEN.add((before, move))

    monkeypatch.setattr(SliceStatus, "_move", noted)
    for number in range(_ROUNDS):  # a round may miss a rare transition, or two
        run_state_machine_as_test(
            seed(number)(ClusterLife),
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=50,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
        if set(TRANSITIONS) <= SEEN:
            break
    assert set(TRANSITIONS) - SEEN == set()


def test_an_edge_that_never_answers_still_gets_every_due_acquire_answered() -> None:
    """Two of its four slices are asked back and fail, then the other two; then it is refused."""
    machine = ClusterLife()
    machine.begin(random.Random(0), greedy=True)
    machine.add(BOTH, True)
    machine.add(BOTH, True)
    machine.acquire(Tag.TRAIN, 2, 0, 0)
    while machine.asked and machine.at < 1000:
        machine.tick(far=True)
    assert machine.asked == {}
    assert machine.granted == {}
    assert machine.at <= 2 * PATIENCE.drain_s + PATIENCE.restart_s + 10
