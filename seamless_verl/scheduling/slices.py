"""What a slice is, and what it does now: its state, its flags and the costs of its switches, in one table.

            lend             ready
    IDLE ─────────► WAKING ─────────► ROLLOUT ◄────────► SYNCING
      │  ▲             │                 │    sync/ready    │
      │  │             └──────┐          │ drain            │
      │  │ drained            ▼          ▼                  │
      │  └───────────────── DRAINING ◄──────────────────────┘
      │ grant
      ▼  release
    TRAINING ────► IDLE                    any ── fail ──► FAILED ── return ──► IDLE

A switch that ends since another replica died leads from WAKING or SYNCING to IDLE at once (`drained`).

Invariant: a slice changes only through the methods of `SliceStatus`, one per move; a move that is not in the table
raises `InvalidTransition` with its story.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from seamless_verl.errors import SeamlessError

SliceId = NewType("SliceId", str)


class Tag(Enum):
    """A capability, or the use a slice is in (SeamlessFlow, tag-driven scheduling)."""

    ROLLOUT = "rollout"
    TRAIN = "train"


class SliceState(Enum):
    IDLE = "idle"  # no active tag: the trainer's memory is in place, nobody computes
    WAKING = "waking"  # weights go in, the replica wakes up, the router learns of it
    ROLLOUT = "rollout"  # serves generation
    SYNCING = "syncing"  # takes newer weights while staying a rollout slice
    DRAINING = "draining"  # gets no new requests; then the memory goes back to the trainer
    TRAINING = "training"  # member of a gang that was granted
    FAILED = "failed"  # usable for nothing until it returns


class Move(Enum):
    LEND = "lend"
    READY = "ready"
    SYNC = "sync"
    DRAIN = "drain"
    DRAINED = "drained"
    GRANT = "grant"
    RELEASE = "release"
    LOSE_ROLLOUT = "lose_rollout"  # the replica died, the trainer's part of the slice lives
    FAIL = "fail"
    RETURN = "return"


_S = SliceState
TRANSITIONS: dict[tuple[SliceState, Move], SliceState] = {
    (_S.IDLE, Move.LEND): _S.WAKING,
    (_S.IDLE, Move.GRANT): _S.TRAINING,
    (_S.WAKING, Move.READY): _S.ROLLOUT,
    (_S.WAKING, Move.DRAIN): _S.DRAINING,
    (_S.WAKING, Move.DRAINED): _S.IDLE,
    (_S.ROLLOUT, Move.SYNC): _S.SYNCING,
    (_S.ROLLOUT, Move.DRAIN): _S.DRAINING,
    (_S.SYNCING, Move.READY): _S.ROLLOUT,
    (_S.SYNCING, Move.DRAIN): _S.DRAINING,
    (_S.SYNCING, Move.DRAINED): _S.IDLE,
    (_S.DRAINING, Move.DRAINED): _S.IDLE,
    (_S.TRAINING, Move.RELEASE): _S.IDLE,
    (_S.IDLE, Move.LOSE_ROLLOUT): _S.IDLE,
    (_S.WAKING, Move.LOSE_ROLLOUT): _S.IDLE,
    (_S.ROLLOUT, Move.LOSE_ROLLOUT): _S.IDLE,
    (_S.SYNCING, Move.LOSE_ROLLOUT): _S.IDLE,
    (_S.DRAINING, Move.LOSE_ROLLOUT): _S.IDLE,
    (_S.TRAINING, Move.LOSE_ROLLOUT): _S.TRAINING,
    (_S.IDLE, Move.FAIL): _S.FAILED,
    (_S.WAKING, Move.FAIL): _S.FAILED,
    (_S.ROLLOUT, Move.FAIL): _S.FAILED,
    (_S.SYNCING, Move.FAIL): _S.FAILED,
    (_S.DRAINING, Move.FAIL): _S.FAILED,
    (_S.TRAINING, Move.FAIL): _S.FAILED,
    (_S.FAILED, Move.RETURN): _S.IDLE,
    (_S.IDLE, Move.RETURN): _S.IDLE,  # the replica of a slice that had lost only that
    (_S.TRAINING, Move.RETURN): _S.TRAINING,
}

ACTIVE_TAG: dict[SliceState, Tag | None] = {
    _S.IDLE: None,
    _S.WAKING: Tag.ROLLOUT,
    _S.ROLLOUT: Tag.ROLLOUT,
    _S.SYNCING: Tag.ROLLOUT,
    _S.DRAINING: Tag.ROLLOUT,
    _S.TRAINING: Tag.TRAIN,
    _S.FAILED: None,
}

GENERATING = frozenset({_S.ROLLOUT, _S.SYNCING})
SERVING_SOON = GENERATING | {_S.WAKING}


class InvalidTransition(SeamlessError):
    """An event or a command that the state of a slice does not allow; a defect of whoever sent it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Facts about one GPU of a slice, from its data sheet.

    Attributes:
        flops: dense peak in the training precision, FLOP/s.
        bandwidth: memory bandwidth, byte/s.
        memory: bytes.
    """

    flops: float
    bandwidth: float
    memory: float


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Gpu:
    """One device: node (any unique name) and index on that node."""

    node: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The GPUs of one rollout replica (TP x PP x DP), moved together.

    Attributes:
        id: unique in the run, e.g. ``trainers/0``.
        pool: name of the declared resource it belongs to.
        gpus: its devices; no two slices share one.
        capabilities: what it may ever do.
        hardware: per GPU; None when unknown.
        seats: requests that its replica decodes at once (vLLM's ``max_num_seqs``), more wait in its queue; None when
            unknown.
    """

    id: SliceId
    pool: str
    gpus: tuple[Gpu, ...]
    capabilities: frozenset[Tag]
    hardware: Hardware | None = None
    seats: int | None = None

    @property
    def lendable(self) -> bool:
        """Can do both, so its rollout may be preempted by training."""
        return self.capabilities == frozenset(Tag)


class Switch(Enum):
    TO_ROLLOUT = "to_rollout"
    TO_TRAIN = "to_train"


_WINDOW = 5


@dataclass(slots=True)
class SwitchTimes:
    """Measured seconds per episode, oldest first, at most five of each kind; failed slices are left out.

    An episode is everything that was ordered at one instant with one kind of command; it lasts until the last of its
    slices answered. That is the time the gang is away from both uses, and what verl 0.9.1 calls a switch.

    Attributes:
        at_least: how long a switch lasted that was broken off, while none was ever completed.
    """

    measured: dict[Switch, deque[float]] = field(
        default_factory=lambda: {switch: deque(maxlen=_WINDOW) for switch in Switch}
    )
    counts: dict[Switch, int] = field(default_factory=lambda: dict.fromkeys(Switch, 0))
    at_least: dict[Switch, float] = field(default_factory=dict)
    _open: dict[SliceId, tuple[Switch, float]] = field(default_factory=dict)

    def begin(self, slice_id: SliceId, switch: Switch, at: float) -> None:
        self._open[slice_id] = (switch, at)

    def abandon(self, slice_id: SliceId, at: float) -> None:
        """Broken off: superseded, or the slice failed."""
        episode = self._open.pop(slice_id, None)
        if episode is not None:
            switch, began = episode
            self.at_least[switch] = max(self.at_least.get(switch, 0.0), at - began)

    def end(self, slice_id: SliceId, at: float) -> None:
        episode = self._open.pop(slice_id, None)
        if episode is None or episode in self._open.values():
            return
        switch, began = episode
        self.measured[switch].append(at - began)
        self.counts[switch] += 1

    def typical_s(self, switch: Switch) -> float | None:
        """Median of the last episodes; before the first what is known of one that was broken off, or None."""
        measured = self.measured[switch]
        return statistics.median(measured) if measured else self.at_least.get(switch)

    def at_best_s(self, switch: Switch) -> float | None:
        """As `typical_s`, but the shorter of the last two: a slow switch may be an accident, two in a row are none."""
        measured = self.measured[switch]
        return min(list(measured)[-2:]) if measured else self.at_least.get(switch)


FAILED_WAKES = 3  # in a row: a slice that failed to wake so often will not wake after one more restart


class Repair(Enum):
    """How what a slice lost comes back."""

    NOT_NEEDED = "not needed"
    WANTED = "wanted"  # as soon as nobody trains on its GPUs
    UNDER_WAY = "under way"  # a `RestartSlice` is out: its GPUs are taken until that is answered
    GIVEN_UP = "given up"  # it will not come back by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A command to a slice as the slice keeps it: its number, until when it must be answered, and why it was given."""

    number: int
    deadline: float
    story: str


@dataclass(slots=True, kw_only=True)
class SliceStatus:
    """One slice as it is now.

    Attributes:
        costs: of all slices; what this one's switches take is added.
        usable: capabilities that are not lost.
        since: when it entered its state.
        version: weights it holds while it serves.
        command: number of the command it has not answered yet.
        deadline: until when it must have answered that, or have been restarted.
        holder: request that was granted this slice.
        decision: number of the decision that lent it.
        repair: how what it lost comes back.
        failed_wakes: since it last served.
    """

    slice: Slice
    costs: SwitchTimes
    state: SliceState
    usable: frozenset[Tag]
    since: float
    version: int | None = None
    command: int | None = None
    deadline: float | None = None
    holder: str | None = None
    decision: int | None = None
    repair: Repair = Repair.NOT_NEEDED
    failed_wakes: int = 0

    @property
    def lent(self) -> bool:
        """A slice that could train is (or is becoming) a rollout slice and nobody called it back."""
        return self.slice.lendable and self.state in SERVING_SOON

    @property
    def comes_back(self) -> bool:
        """What it lost is being restarted, or will be."""
        return self.repair in (Repair.WANTED, Repair.UNDER_WAY)

    @property
    def may_restart(self) -> bool:
        """A replica takes all the memory that it will ever have when it starts: not while its GPUs train."""
        return self.repair is Repair.WANTED and self.state in (SliceState.IDLE, SliceState.FAILED)

    @property
    def doing(self) -> str:
        """For people."""
        return "restarting its replica" if self.repair is Repair.UNDER_WAY else self.state.value

    # ---------------------------------------------------------------- commands and their answers

    def lend(self, at: float, order: Order, decision: int | None) -> None:
        self._move(Move.LEND, at, order.story)
        self.decision = decision
        self._owe(order)
        self.costs.begin(self.slice.id, Switch.TO_ROLLOUT, at)

    def begin_waking(self, at: float) -> None:
        """What the edge did before is no part of the switch."""
        self.costs.begin(self.slice.id, Switch.TO_ROLLOUT, at)

    def sync(self, at: float, order: Order) -> None:
        self._move(Move.SYNC, at, order.story)
        self._owe(order)

    def ready(self, at: float, version: int) -> None:
        self._move(Move.READY, at, "SliceReady")
        self.costs.end(self.slice.id, at)
        self.version, self.failed_wakes = version, 0
        self._settle()

    def drain(self, at: float, order: Order) -> None:
        self._move(Move.DRAIN, at, order.story)
        self._owe(order)
        self.costs.abandon(self.slice.id, at)
        self.costs.begin(self.slice.id, Switch.TO_TRAIN, at)

    def drained(self, at: float) -> int | None:
        """It has left rollout; returns the decision that had lent it."""
        end = self.costs.end if self.state is SliceState.DRAINING else self.costs.abandon
        self._move(Move.DRAINED, at, "SliceDrained")
        end(self.slice.id, at)
        return self._leave_rollout()

    # ---------------------------------------------------------------- grants

    def grant(self, at: float, request: str, tag: Tag) -> None:
        """A slice that is granted for rollout goes on as it is."""
        if tag is Tag.TRAIN:
            self._move(Move.GRANT, at, f"GrantAcquire {request}")
        self.holder = request

    def release(self, at: float, story: str) -> None:
        self.holder = None
        if self.state is SliceState.TRAINING:
            self._move(Move.RELEASE, at, story)

    # ---------------------------------------------------------------- deaths and returns

    def lose(self, at: float, lost: frozenset[Tag], reason: str, *, restartable: bool) -> int | None:
        """It can no longer do what ``lost`` says; returns the decision that had lent it."""
        usable = self.usable - lost
        whole = Tag.TRAIN in lost or not usable
        self.failed_wakes += self.state is SliceState.WAKING
        self._move(Move.FAIL if whole else Move.LOSE_ROLLOUT, at, f"SliceFailed ({reason})")
        self.usable = frozenset() if whole else usable
        self.costs.abandon(self.slice.id, at)
        hopeless = not whole and self.failed_wakes >= FAILED_WAKES  # the trainer can do without it
        self.repair = Repair.WANTED if restartable and not hopeless else Repair.GIVEN_UP
        if self.state is not SliceState.TRAINING:
            self.holder = None
        return self._leave_rollout()

    def begin_restart(self, deadline: float) -> None:
        self.repair, self.deadline = Repair.UNDER_WAY, deadline

    def give_up(self) -> None:
        """Nobody restarts it any more."""
        self.repair = Repair.GIVEN_UP
        self._settle()

    def restarted(self, at: float) -> None:
        self._move(Move.RETURN, at, "SliceReturned")
        self.usable = self.slice.capabilities
        self.repair = Repair.NOT_NEEDED
        self._settle()

    # ---------------------------------------------------------------- what all of them share

    def _move(self, move: Move, at: float, story: str) -> None:
        try:
            after = TRANSITIONS[(self.state, move)]
        except KeyError:
            raise InvalidTransition(
                f"{story}: slice {self.slice.id} is {self.state.name}, which does not allow {move.value}"
            ) from None
        if after is not self.state:
            self.state, self.since = after, at

    def _owe(self, order: Order) -> None:
        self.command, self.deadline = order.number, order.deadline

    def _settle(self) -> None:
        """It owes no answer any more."""
        self.command = self.deadline = None

    def _leave_rollout(self) -> int | None:
        self._settle()
        decision, self.decision = self.decision, None
        self.version = None
        return decision
