"""Turns intentions into state changes and numbered commands; every command to a slice gets a deadline."""

from __future__ import annotations

from collections.abc import Iterable

from seamless_verl.scheduling.cluster import Cluster, SliceStatus
from seamless_verl.scheduling.commands import (
    Command,
    DrainSlice,
    FailOver,
    LendSlice,
    RecordDecision,
    RestartSlice,
    SetTimer,
    SyncWeights,
)
from seamless_verl.scheduling.decisions import Decision, Verb
from seamless_verl.scheduling.patience import Patience
from seamless_verl.scheduling.slices import Move, SliceId, Tag
from seamless_verl.scheduling.switch_costs import Switch

_QUIET = (Verb.HOLD, Verb.WAIT)


class Issuer:
    """The outbox of one scheduler."""

    def __init__(self, cluster: Cluster, patience: Patience) -> None:
        self.deadlines: dict[SliceId, float] = {}
        self._cluster = cluster
        self._patience = patience
        self._outbox: list[Command] = []
        self._commands = 0
        self._decisions = 0
        self._last_quiet: tuple[Verb, tuple[SliceId, ...]] | None = None
        self._timer: float | None = None

    def say(self, *commands: Command) -> None:
        self._outbox.extend(commands)

    def flush(self) -> tuple[Command, ...]:
        commands, self._outbox = tuple(self._outbox), []
        return commands

    def record(self, decision: Decision) -> int | None:
        """Number a decision; one to leave things as they are is recorded when it is new, not at every look."""
        quiet = (decision.verb, decision.slices) if decision.verb in _QUIET else None
        repeated = quiet is not None and quiet == self._last_quiet
        self._last_quiet = quiet
        if repeated:
            return None
        self._decisions += 1
        self.say(RecordDecision(number=self._decisions, decision=decision))
        return self._decisions

    def lend(self, statuses: Iterable[SliceStatus], decision: int | None, why: str) -> None:
        for status in statuses:
            status.move(Move.LEND, self._cluster.now, why)
            status.decision = decision
            self._cluster.costs.begin(status.slice.id, Switch.TO_ROLLOUT, self._cluster.now)
            number = self._number(status, self._patience.wake_s)
            self.say(
                LendSlice(command=number, slice=status.slice.id, version=self._cluster.published, decision=decision)
            )

    def drain(self, statuses: Iterable[SliceStatus], decision: int | None, why: str, *, interrupt: bool) -> None:
        for status in statuses:
            status.move(Move.DRAIN, self._cluster.now, why)
            status.interrupted = interrupt
            self._cluster.costs.abandon(status.slice.id, self._cluster.now)
            if interrupt:
                self._cluster.costs.begin(status.slice.id, Switch.TO_TRAIN, self._cluster.now)
            number = self._number(status, self._patience.interrupt_s if interrupt else self._patience.drain_s)
            self.say(DrainSlice(command=number, slice=status.slice.id, interrupt=interrupt, decision=decision))

    def sync(self, status: SliceStatus, version: int) -> None:
        status.move(Move.SYNC, self._cluster.now, f"WeightsPublished version {version}")
        number = self._number(status, self._patience.wake_s)
        self.say(SyncWeights(command=number, slice=status.slice.id, version=version))

    def fail_over(self, status: SliceStatus, reason: str, *, restartable: bool) -> None:
        self._cluster.costs.abandon(status.slice.id, self._cluster.now)
        if Tag.ROLLOUT in status.slice.capabilities:
            self.say(FailOver(slice=status.slice.id, reason=reason))
        status.restarting, status.lost_for_good = restartable, not restartable
        status.restart_begun = False
        self.settled(status)

    def restart_dead(self) -> None:
        """As soon as nobody trains on their GPUs, or could at once."""
        waiting = self._cluster.training_request()
        due = waiting is not None and self._cluster.is_due(waiting)
        for status in self._cluster:
            if status.may_restart and not (due and Tag.TRAIN in status.usable):
                status.restart_begun = True
                self.say(RestartSlice(slice=status.slice.id))
                self.deadlines[status.slice.id] = self._cluster.now + self._patience.restart_s

    def settled(self, status: SliceStatus) -> None:
        """The slice owes no answer any more."""
        status.command = None
        self.deadlines.pop(status.slice.id, None)

    def set_timer(self, wanted: Iterable[float]) -> None:
        earliest = min((at for at in wanted if at > self._cluster.now), default=None)
        if earliest is not None and earliest != self._timer:
            self.say(SetTimer(at=earliest))
        self._timer = earliest

    def _number(self, status: SliceStatus, patience_s: float) -> int:
        self._commands += 1
        status.command = self._commands
        self.deadlines[status.slice.id] = self._cluster.now + patience_s
        return self._commands
