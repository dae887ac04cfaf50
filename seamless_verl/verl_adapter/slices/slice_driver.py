"""Hands events to the scheduler and carries out its commands; their completions are the next events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from ray.exceptions import RayError

from seamless_verl.run.restarts import RunBroken
from seamless_verl.scheduling import commands as cm
from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.cluster import Cluster
from seamless_verl.scheduling.slices import GENERATING, SliceId, SliceState, Tag
from seamless_verl.verl_adapter.slices.deaths import story_of
from seamless_verl.verl_adapter.slices.replica_slices import ReplicaSlices
from seamless_verl.verl_adapter.weights.weight_transfer import TransferBroken

_ROLLOUT = frozenset({Tag.ROLLOUT})
_TOLERATED_SKEW_S = 1.0  # of wall clocks, before the user is told


class WeightsLost(RunBroken):
    """New weights could not be handed to replicas that live."""


class Handles(Protocol):
    """The scheduler, or one that is recorded."""

    def handle(self, event: ev.Event) -> tuple[cm.Command, ...]: ...


class SliceDriver:
    """See the module.

    Args:
        cluster: the scheduler's state, to be read: it changes before the commands that follow from it come out.
        clock: seconds, the run's own.
        fetch: what rollout workers report since the last call, stamped with wall time.
        warn: a line for the user.
    """

    def __init__(
        self,
        scheduler: Handles,
        cluster: Cluster,
        replicas: ReplicaSlices,
        *,
        clock: Callable[[], float],
        fetch: Callable[[], Sequence[ev.Event]],
        warn: Callable[[str], None],
    ) -> None:
        self._scheduler = scheduler
        self._cluster = cluster
        self._replicas = replicas
        self._clock = clock
        self._fetch = fetch
        self._warn = warn
        self._last = clock()
        self._restarts: dict[SliceId, Future[None]] = {}
        self._clock_doubted = False
        self.granted: dict[str, tuple[SliceId, ...]] = {}
        self.refused: dict[str, str] = {}
        self.timer: float | None = None

    def now(self) -> float:
        """Never decreases."""
        self._last = max(self._last, self._clock())
        return self._last

    @property
    def lending(self) -> bool:
        """Whether a slice of the trainer serves."""
        return bool(self._awake())

    @property
    def restarting(self) -> bool:
        """Whether a replica is on its way back."""
        return bool(self._restarts)

    def tell(self, *events: ev.Event) -> None:
        """Events that happened together: all are told before anything is done about them."""
        queue = list(events)
        while queue:
            commands = [c for event in queue if self._is_news(event) for c in self._scheduler.handle(event)]
            queue = self._carry_out(commands)

    def _is_news(self, event: ev.Event) -> bool:
        """Leaves out deaths told before (each request of a dead replica reports it) and ends of unknown requests."""
        if isinstance(event, ev.SliceFailed) and event.restartable:
            return Tag.ROLLOUT in self._cluster[event.slice].usable
        return not isinstance(event, ev.RequestFinished) or event.request in self._cluster.running

    def _awake(self) -> list[SliceId]:
        """Slices of the trainer whose replica serves."""
        return [s.slice.id for s in self._cluster if s.slice.lendable and s.state in GENERATING]

    def tick(self) -> None:
        """Tell the scheduler the time once its timer is due."""
        if self.timer is not None and self.now() >= self.timer:
            self.timer = None
            self.tell(ev.Tick(at=self.now()))

    def tell_requests(self) -> None:
        """Tell the scheduler what rollout workers report."""
        self.tell(*self._requests())

    def tell_restarts(self) -> None:
        """Take in replicas that are back; they get the published weights, which the trainer must still hold."""
        for slice_id in [s for s, restart in self._restarts.items() if restart.done()]:
            error = self._restarts.pop(slice_id).exception()
            if error is None:
                self._warn(f"slice {slice_id} is back")
                self.tell(ev.SliceReturned(at=self.now(), slice=slice_id))
            else:
                reason = f"restarting it failed: {str(error) or type(error).__name__}"
                if self._cluster[slice_id].state is SliceState.FAILED:  # else the scheduler's `FailOver` tells
                    self._warn(f"slice {slice_id} stays out: {reason}")
                gone = ev.SliceFailed(at=self.now(), slice=slice_id, reason=reason, lost=_ROLLOUT, restartable=False)
                self.tell(gone)

    def _requests(self) -> list[ev.Event]:
        """What rollout workers report, with this clock's times and slices for addresses; other servers are left out."""
        by_address = {address: slice_id for slice_id, address in self._replicas.addresses.items()}
        offset = self._clock() - time.time()
        known: list[ev.Event] = []
        events = sorted(self._fetch(), key=lambda event: event.at)
        fetched_at = self._clock()  # nothing was reported that happened later, whatever the clock of its node says
        if events:
            self._check_clock(events[-1].at + offset - fetched_at)
        for event in events:
            self._last = max(self._last, min(event.at + offset, fetched_at))
            changes: dict[str, Any] = {"at": self._last}
            if isinstance(event, (ev.RequestStarted, ev.SliceFailed)):
                if event.slice not in by_address:
                    continue
                changes["slice"] = by_address[event.slice]
            known.append(replace(event, **changes))
        return known

    def _check_clock(self, ahead_s: float) -> None:
        if ahead_s > _TOLERATED_SKEW_S and not self._clock_doubted:
            self._clock_doubted = True
            self._warn(
                f"the clock of a rollout worker's node is {ahead_s:.0f} s ahead of the trainer's: what it reports is "
                "taken to have happened when it was fetched, and forecasts suffer; synchronize the clocks (NTP)"
            )

    # ---------------------------------------------------------------- commands

    def _carry_out(self, commands: Sequence[cm.Command]) -> list[ev.Event]:
        for command in commands:
            self._note(command)
        horizons = [c for c in commands if isinstance(c, cm.SetHorizon)]
        if horizons:  # before the slices are on the router
            self._replicas.set_horizon([c.slice for c in horizons], horizons[-1].outlasting)
        out = self._take_out(commands)
        commands = [c for c in commands if getattr(c, "slice", None) not in out]  # ordered before that was known
        done = self._drain({c.slice: c.command for c in commands if isinstance(c, cm.DrainSlice)})
        lends = [c for c in commands if isinstance(c, cm.LendSlice)]
        return done + self._lend(lends, [c for c in commands if isinstance(c, cm.SyncWeights)])

    def _take_out(self, commands: Sequence[cm.Command]) -> dict[SliceId, str]:
        """Before anything else, since a loan may take minutes: requests go elsewhere, and the time of a restart runs.

        Returns:
            The slices that are out, and why.
        """
        out = {c.slice: c.reason for c in commands if isinstance(c, cm.FailOver)}
        if out:
            self._replicas.leave_out(out)
        for slice_id, reason in out.items():
            self._warn(f"slice {slice_id} is out: {reason}")
        for command in commands:
            if isinstance(command, cm.RestartSlice):
                self._restarts[command.slice] = self._replicas.restart(command.slice)
        return out

    def _note(self, command: cm.Command) -> None:
        if isinstance(command, cm.GrantAcquire):
            self.granted[command.request] = command.slices
        elif isinstance(command, cm.RefuseAcquire):
            self.refused[command.request] = command.reason
        elif isinstance(command, cm.SetTimer):
            self.timer = command.at
        elif isinstance(command, cm.ReportStall):
            self._warn(
                f"{command.request} has waited {command.waited_s:.0f} s for its GPUs: {', '.join(command.waiting_for)}"
            )

    def _drain(self, commands: dict[SliceId, int]) -> list[ev.Event]:
        """Off the router, interrupted, back to the trainer."""
        if not commands:
            return []
        self._replicas.unregister(list(commands))
        failed = self._replicas.interrupt(list(commands))
        events = [*self._failures(failed), *self._requests()]  # interrupted tokens belong to this loan
        drained = [(s, number) for s, number in commands.items() if s not in failed]
        return [*events, *(ev.SliceDrained(at=self.now(), slice=s, command=number) for s, number in drained)]

    def _lend(self, lends: Sequence[cm.LendSlice], syncs: Sequence[cm.SyncWeights]) -> list[ev.Event]:
        """Standing replicas first: verl's checkpoint engine loads them together, or the weights are published and each
        pulls in its turn (`ReplicaSlices.sync`). Then the trainer's own.

        Lent ones are on the router first: what a transfer interrupts is then spread over them, too. Replicas that
        have their weights generate while others wake: what ended meanwhile is told before the end of the waking is, or
        it would seem to have ended with it.
        """
        if not lends and not syncs:
            return []
        receivers: list[cm.LendSlice | cm.SyncWeights] = [*lends, *syncs]
        version = max(c.version or 0 for c in receivers)
        hybrid = {c.slice: c.command for c in receivers if self._replicas.is_hybrid(c.slice)}
        standing = {c.slice: c.command for c in receivers if c.slice not in hybrid}
        returned = [c.slice for c in lends if c.slice in standing]
        lent = [c.slice for c in lends if c.slice in hybrid]
        events: list[ev.Event] = []
        try:
            if lent:
                self._replicas.hold(lent)
                self._replicas.register(lent)
        except RayError as error:
            events += self._cut_short(hybrid, error)
            hybrid = {}
        if syncs:
            self._replicas.forget_caches()
        if standing:
            self._replicas.take_in(returned)
            failed = self._sync(standing, version)
            events += failed
            standing = {s: number for s, number in standing.items() if s not in {f.slice for f in failed}}
            if back := [s for s in returned if s in standing]:
                self._replicas.register(back)
            events += [*self._requests(), *self._ready(standing, version)]
            died = {event.slice for event in events if isinstance(event, ev.SliceFailed)}
            hybrid = {s: number for s, number in hybrid.items() if s not in died}
            at = self.now()
            events += [ev.SliceWaking(at=at, slice=c.slice, command=c.command) for c in lends if c.slice in hybrid]
        if hybrid:
            try:
                refused = self._replicas.wake(list(hybrid), version, self._awake())
                events += self._failures(refused)
                hybrid = {s: number for s, number in hybrid.items() if s not in refused}
            except (RayError, TransferBroken) as error:
                events += self._cut_short(hybrid, error)
                hybrid = {}
        self._replicas.even_out()
        return [*events, *self._requests(), *self._ready(hybrid, version)]

    def _ready(self, commands: dict[SliceId, int], version: int) -> list[ev.Event]:
        at = self.now()
        return [ev.SliceReady(at=at, slice=s, command=number, version=version) for s, number in commands.items()]

    def _sync(self, commands: dict[SliceId, int], version: int) -> list[ev.SliceFailed]:
        """A replica that died is left out, and the transfer begins anew for the others.

        A transfer is for all replicas that stand alone, also those that have no part in ``commands``.

        Raises:
            WeightsLost: it fails although all of them live.
        """
        failed: list[ev.SliceFailed] = []
        standing = [s.slice.id for s in self._cluster if not s.slice.lendable and Tag.ROLLOUT in s.usable]
        while True:
            try:
                self._replicas.sync(version)
                return failed
            except (RayError, TransferBroken) as error:
                living = [s for s in {**dict.fromkeys(standing), **commands} if s not in {f.slice for f in failed}]
                dead = self._replicas.dead(living)
                if not dead:
                    story = f"weights of version {version} did not reach {', '.join(commands)}, and none is dead"
                    raise WeightsLost(f"{story}: {error}") from error
                self._replicas.leave_out(dead)
                failed += [self._failed(slice_id, reason) for slice_id, reason in dead.items()]

    def _cut_short(self, commands: dict[SliceId, int], error: RayError | TransferBroken) -> list[ev.Event]:
        """A loan failed: the trainer's replicas that died are lost, lent or not, and the others are handed back.

        If none is found dead, all that were to be lent count as failed: their state is unknown.

        Raises:
            WeightsLost: a replica whose slice only trains died; it cannot be started again.
        """
        trainers = [s.slice.id for s in self._cluster if s.slice.lendable and Tag.ROLLOUT in s.usable]
        never_lent = [s.slice.id for s in self._cluster if s.slice.capabilities == {Tag.TRAIN}]
        for slice_id, reason in self._replicas.dead([] if self._cluster.wakes_apart else never_lent).items():
            raise WeightsLost(f"the replica of {slice_id}, which verl wakes with those that are lent, died: {reason}")
        dead = self._replicas.dead(trainers) or dict.fromkeys(commands, f"{type(error).__name__}: {error}")
        failed = [self._failed(slice_id, reason) for slice_id, reason in dead.items()]
        return [*failed, *self._drain({s: number for s, number in commands.items() if s not in dead})]

    def _failures(self, errors: Mapping[SliceId, RayError]) -> list[ev.SliceFailed]:
        """Replicas that failed each by itself."""
        dead = self._replicas.dead(errors)
        return [self._failed(s, dead.get(s, story_of(error))) for s, error in errors.items()]

    def _failed(self, slice_id: SliceId, reason: str) -> ev.SliceFailed:
        return ev.SliceFailed(at=self.now(), slice=slice_id, reason=reason, lost=_ROLLOUT)
