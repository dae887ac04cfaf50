"""Carries out on the simulated fleet what the scheduler commands, and tells it what happened.

Each transition takes the time that `SwitchCosts` says. A newer command to a slice voids the older one, as the
scheduler's contract asks.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable

from seamless_verl.config import WeightsConfig
from seamless_verl.errors import SeamlessError
from seamless_verl.scheduling import commands as cmd
from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.cluster import Cluster
from seamless_verl.scheduling.commands import Verb
from seamless_verl.scheduling.slices import Slice, SliceId, SliceState
from seamless_verl.simulation.books import Use
from seamless_verl.simulation.clock import Clock, Signal
from seamless_verl.simulation.fleet import Fleet
from seamless_verl.simulation.scenario import SwitchCosts
from seamless_verl.staleness.synchronisation import synchronisation_of


class Driver:
    """Carries out the scheduler's commands on the fleet.

    Args:
        handle: of the scheduler, or of the recorder in front of it.
        cluster: the scheduler's state, to be read.
        weights: how serving slices take new ones.
    """

    def __init__(
        self,
        clock: Clock,
        handle: Callable[[ev.Event], tuple[cmd.Command, ...]],
        cluster: Cluster,
        fleet: Fleet,
        costs: SwitchCosts,
        rng: random.Random,
        weights: WeightsConfig,
    ) -> None:
        self.outlasting: frozenset[str] = frozenset()  # sessions that will probably last longer than slices are lent
        self.lends = 0
        self.stalls = 0
        self.changed = Signal(clock)  # a grant, a replica that is ready or fails
        self._clock = clock
        self._handle = handle
        self._cluster = cluster
        self._fleet = fleet
        self._costs = costs
        self._rng = rng
        self._inbox: deque[ev.Event] = deque()
        self._busy = False
        self._current: dict[str, int] = {}
        self._granted: dict[str, tuple[str, ...]] = {}
        self._varied_at, self._factor = -1.0, 1.0
        self._settling = False
        self._joining: list[str] = []
        self._rolling = synchronisation_of(weights) if weights.sync == "rolling" else None
        self._keeps_cache = weights.cache == "keep"
        self._due: dict[str, int] = {}  # slices that are to take newer weights when their turn comes -> the command
        self._pulling: dict[str, int] = {}  # the same for those whose turn it is

    @property
    def now(self) -> float:
        return self._clock.now

    def granted(self, request: str) -> tuple[str, ...] | None:
        """The slices of a granted request; None while it waits."""
        return self._granted.get(request)

    def tell(self, event: ev.Event) -> None:
        """Hand an event to the scheduler and carry out what it says; events that follow from that come after."""
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox:
                event = self._inbox.popleft()
                for command in self._handle(event):
                    self._carry_out(command)
        finally:
            self._busy = False

    def add(self, piece: Slice, *, serving: bool) -> None:
        if serving:
            self._fleet.units[piece.id].serve(0)
        state = SliceState.ROLLOUT if serving else SliceState.IDLE
        self.tell(ev.SliceAdded(at=self.now, slice=piece, state=state, version=0 if serving else None))

    def loading(self) -> bool:
        """Whether a serving slice takes newer weights at the moment."""
        return bool(self._syncing())

    def waking(self, names: Iterable[str]) -> bool:
        """Whether one of these slices wakes up at the moment."""
        return any(self._cluster[SliceId(name)].state is SliceState.WAKING for name in names)

    def lending(self) -> bool:
        """Whether a slice that could train is, or becomes, a rollout slice."""
        return any(status.lent for status in self._cluster)

    def register(self, names: Iterable[str]) -> None:
        """Slices that will be lent next get their share of what new weights interrupt now, and keep it waiting."""
        lendable = [name for name in names if self._cluster[SliceId(name)].slice.lendable]
        self._fleet.spread([*self._syncing(), *lendable], self._cluster.published or 0)

    def release(self, request: str) -> None:
        """The trainer gives its gang back."""
        for name in self._granted.pop(request):
            self._fleet.units[name].turn_to(Use.WAIT_DATA)
        self.tell(ev.Released(at=self.now, request=request))

    def fail(self, name: str) -> None:
        """A slice dies, whatever it does."""
        if self._cluster[name].state in (SliceState.FAILED, SliceState.TRAINING):  # type: ignore[index]
            return  # the loss of a training gang ends a run of any system
        self._void(name)
        self._fleet.vacate(name)
        self._fleet.units[name].turn_to(Use.FAILED)
        self.tell(ev.SliceFailed(at=self.now, slice=name, reason="simulated"))  # type: ignore[arg-type]
        self.changed.fire()  # nobody need wait for it any longer

    # ---------------------------------------------------------------- commands

    def _carry_out(self, command: cmd.Command) -> None:
        match command:
            case cmd.LendSlice():
                self._wake(command)
            case cmd.DrainSlice():
                self._drain(command)
            case cmd.SyncWeights():
                self._sync(command)
            case cmd.GrantAcquire():
                self._granted[command.request] = tuple(command.slices)
                self.changed.fire()
            case cmd.RestartSlice():
                self._clock.after(self._costs.repair, self._returned, command.slice)
            case cmd.SetTimer():
                self._clock.at(command.at, self._tick)
            case cmd.RecordDecision():
                self.lends += command.decision.verb is Verb.LEND
            case cmd.RecordOutcome():
                pass  # for the flight recorder, which has seen it
            case cmd.ReportStall():
                self.stalls += 1
            case cmd.RefuseAcquire() | cmd.RevokeGrant():
                raise SeamlessError(f"{command.request}: {command.reason}")
            case cmd.FailOver():
                self._fleet.vacate(command.slice)
            case cmd.SetHorizon():
                self._fleet.units[command.slice].lent = True
                self.outlasting = command.outlasting
            case _:
                raise SeamlessError(f"the simulator cannot carry out {type(command).__name__}")

    def _wake(self, command: cmd.LendSlice) -> None:
        self._number(command.slice, command.command)
        self._fleet.units[command.slice].turn_to(Use.SWITCH)
        version = command.version or 0
        if self.loading():  # at the end of a step: what new weights interrupt is spread over the slice, too
            self._joining.append(command.slice)
            self._clock.after(0.0, self._join)
        self._clock.after(self._vary(self._costs.wake), self._ready, command.slice, command.command, version)

    def _join(self) -> None:
        joining, self._joining = self._joining, []
        waking = [name for name in joining if self._cluster[SliceId(name)].state is SliceState.WAKING]
        if waking:
            self.register(waking)

    def _syncing(self) -> list[str]:
        return [status.slice.id for status in self._cluster if status.state is SliceState.SYNCING]

    def pull(self) -> None:
        """Have slices take newer weights whose turn it is: the rule of a live run says which."""
        if self._rolling is None or not self._due:
            return
        here = [each for each in self._fleet.weights(self._pulling) if each.pulling or each.replica in self._due]
        for pull in self._rolling.pulls(self._cluster.published or 0, here, self._fleet.wanted()):
            command = self._due.pop(pull.replica)
            self._pulling[pull.replica] = command
            self._fleet.units[pull.replica].pause(keep=self._keeps_cache)
            self._clock.after(self._vary(self._costs.pull_s), self._pulled, pull.replica, command)

    def _pulled(self, name: str, command: int) -> None:
        if self._pulling.get(name) == command:
            del self._pulling[name]
            self._fleet.emptied(name)
        self._ready(name, command, self._cluster.published or 0)
        self.pull()

    def _sync(self, command: cmd.SyncWeights) -> None:
        self._number(command.slice, command.command)
        if self._rolling is not None:
            self._due[command.slice] = command.command
            self._clock.after(0.0, self.pull)  # when all slices have been told
            return
        unit = self._fleet.units[command.slice]
        unit.turn_to(Use.SYNC)
        self._fleet.caches_lost()
        self._clock.after(self._vary(self._costs.load), self._ready, command.slice, command.command, command.version)

    def _ready(self, name: str, command: int, version: int) -> None:
        if self._current.get(name) != command:
            return
        joins = self.waking([name]) and not self._fleet.units[name].accepting
        self._fleet.units[name].serve(version)
        if joins:
            self._fleet.joined(name)
        self.tell(ev.SliceReady(at=self.now, slice=name, command=command, version=version))  # type: ignore[arg-type]
        self.changed.fire()
        if not self._settling:
            self._settling = True
            self._clock.after(0.0, self._settle)

    def _settle(self) -> None:
        """All slices that became ready at this moment are ready: place what waits, even out what runs."""
        self._settling = False
        self._fleet.even_out()

    def _drain(self, command: cmd.DrainSlice) -> None:
        self._number(command.slice, command.command)
        unit = self._fleet.units[command.slice]
        unit.accepting = unit.lent = False
        if not unit.serving:  # waking or syncing: what waits here must leave too
            unit.turn_to(Use.SWITCH)
        self._fleet.vacate(command.slice)
        unit.turn_to(Use.SWITCH)
        self._clock.after(self._vary(self._costs.drain), self._drained, command.slice, command.command)

    def _drained(self, name: str, command: int) -> None:
        if self._current.get(name) != command:
            return
        self._fleet.units[name].turn_to(Use.WAIT_DATA)
        self.tell(ev.SliceDrained(at=self.now, slice=name, command=command))  # type: ignore[arg-type]

    def _returned(self, name: str) -> None:
        self._fleet.units[name].turn_to(Use.WAIT_DATA)
        self.tell(ev.SliceReturned(at=self.now, slice=name))  # type: ignore[arg-type]

    def _tick(self) -> None:
        self.tell(ev.Tick(at=self.now))

    def _number(self, name: str, command: int) -> None:
        self._current[name] = command
        self._due.pop(name, None)

    def _void(self, name: str) -> None:
        self._current.pop(name, None)
        self._due.pop(name, None)

    def _vary(self, seconds: float) -> float:
        """Transitions that begin together are one collective operation and take equally long."""
        if not self._costs.spread:
            return seconds
        if self._varied_at != self.now:
            self._varied_at, self._factor = self.now, max(0.2, self._rng.gauss(1.0, self._costs.spread))
        return seconds * self._factor
