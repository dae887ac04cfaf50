"""What the scheduler gives out: numbered commands with deadlines, decisions, and what each loan was worth.

Invariant: every command to a slice has a deadline (`Patience`), so it ends whatever the edge does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from seamless_verl.scheduling.cluster import Cluster
from seamless_verl.scheduling.commands import (
    Command,
    Decision,
    DrainSlice,
    LendSlice,
    Outcome,
    RecordDecision,
    RestartSlice,
    SetTimer,
    SyncWeights,
    Verb,
)
from seamless_verl.scheduling.slices import Order, SliceId, SliceStatus, Tag

_QUIET = (Verb.HOLD, Verb.WAIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds. No answer within them counts as a failure of the slice.

    Attributes:
        wake_s: `LendSlice` and `SyncWeights`.
        drain_s: `DrainSlice`.
        restart_s: `RestartSlice`; after that the slice is not counted on any more.
        stall_s: an acquire that is due; then it is reported with what it waits for, once.
    """

    wake_s: float = 600.0
    drain_s: float = 120.0
    restart_s: float = 900.0
    stall_s: float = 60.0


class Issuer:
    """The outbox of one scheduler."""

    def __init__(self, cluster: Cluster, patience: Patience) -> None:
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
        last, self._last_quiet = self._last_quiet, quiet
        if quiet is not None and quiet == last:
            return None
        self._decisions += 1
        self.say(RecordDecision(number=self._decisions, decision=decision))
        return self._decisions

    def lend(self, statuses: Iterable[SliceStatus], decision: int | None, why: str) -> None:
        for status in statuses:
            order = self._order(self._patience.wake_s, why)
            status.lend(self._cluster.now, order, decision)
            version = self._cluster.published
            self.say(LendSlice(command=order.number, slice=status.slice.id, version=version, decision=decision))

    def drain(self, statuses: Iterable[SliceStatus], decision: int | None, why: str) -> None:
        for status in statuses:
            order = self._order(self._patience.drain_s, why)
            status.drain(self._cluster.now, order)
            self.say(DrainSlice(command=order.number, slice=status.slice.id, decision=decision))

    def sync(self, status: SliceStatus, version: int) -> None:
        order = self._order(self._patience.wake_s, f"WeightsPublished version {version}")
        status.sync(self._cluster.now, order)
        self.say(SyncWeights(command=order.number, slice=status.slice.id, version=version))

    def restart_dead(self) -> None:
        """As soon as nobody trains on their GPUs, or could at once."""
        waiting = self._cluster.training_request()
        due = waiting is not None and self._cluster.is_due(waiting)
        for status in self._cluster:
            if status.may_restart and not (due and Tag.TRAIN in status.usable):
                status.begin_restart(self._cluster.now + self._patience.restart_s)
                self.say(RestartSlice(slice=status.slice.id))

    def set_timer(self, wanted: Iterable[float | None]) -> None:
        earliest = min((at for at in wanted if at is not None and at > self._cluster.now), default=None)
        if earliest is not None and earliest != self._timer:
            self.say(SetTimer(at=earliest))
        self._timer = earliest

    def _order(self, patience_s: float, story: str) -> Order:
        self._commands += 1
        return Order(number=self._commands, deadline=self._cluster.now + patience_s, story=story)


@dataclass(slots=True, kw_only=True)
class _Loan:
    began: float
    out: set[SliceId]
    before: dict[SliceId, int]
    all_before: int
    tokens: int = 0


@dataclass(slots=True)
class LoanBook:
    """What lending was worth, in seconds; the same account for every policy.

    A loan is all the slices that one decision lent. Of everything generated while it ran, the lent slices made a share;
    without them the others would have had to make it, so the loan saved ``duration * share``. The seconds that the
    trainer then waited for its gang although it wanted it (its data was there and the slices were called back) are
    taken off. Tokens count when their request ends, so a short loan is valued roughly.
    """

    _open: dict[int, _Loan] = field(default_factory=dict)
    _closed: list[tuple[int, float | None, int]] = field(default_factory=list)

    def open(self, decision: int, slices: tuple[SliceId, ...], cluster: Cluster) -> None:
        self._open[decision] = _Loan(
            began=cluster.now,
            out=set(slices),
            before={s: cluster.generated[s] for s in slices},
            all_before=sum(cluster.generated.values()),
        )

    def slice_is_back(self, decision: int | None, slice_id: SliceId, cluster: Cluster) -> None:
        """The slice drained or failed. When it was the last one the loan is over and waits for its grant.

        Args:
            decision: that had lent it; None: no loan.
        """
        loan = self._open.get(decision) if decision is not None else None
        if decision is None or loan is None or slice_id not in loan.out:
            return
        loan.out.discard(slice_id)
        loan.tokens += cluster.generated[slice_id] - loan.before[slice_id]
        if loan.out:
            return
        del self._open[decision]
        generated = sum(cluster.generated.values()) - loan.all_before
        saved = (cluster.now - loan.began) * loan.tokens / generated if generated else None
        self._closed.append((decision, saved, loan.tokens))

    def granted(self, late_s: float) -> list[Outcome]:
        """The gang is granted: every loan that is back is settled and pays for the delay."""
        settled = [
            Outcome(
                decision=decision,
                realised_benefit_s=None if saved is None else saved - late_s,
                lent_tokens=tokens,
                late_s=late_s,
            )
            for decision, saved, tokens in self._closed
        ]
        self._closed.clear()
        return settled
