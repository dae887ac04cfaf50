"""What a slice is, which tags it can carry, and how its state may change.

            lend             ready
    IDLE ─────────► WAKING ─────────► ROLLOUT ◄────────► SYNCING
      │  ▲             │                 │    sync/ready    │
      │  │             └──────┐          │ drain            │
      │  │ drained            ▼          ▼                  │
      │  └───────────────── DRAINING ◄──────────────────────┘
      │ grant
      ▼  release
    TRAINING ────► IDLE                    any ── fail ──► FAILED ── return ──► IDLE

The table is the whole truth: a move that is not in it raises `InvalidTransition` with its story.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NewType

from seamless_verl.errors import SeamlessError

SliceId = NewType("SliceId", str)


class Tag(Enum):
    """A capability, or the use a slice is in (SeamlessFlow section on tag-driven scheduling; PAPERS 1.2)."""

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
    (_S.ROLLOUT, Move.SYNC): _S.SYNCING,
    (_S.ROLLOUT, Move.DRAIN): _S.DRAINING,
    (_S.SYNCING, Move.READY): _S.ROLLOUT,
    (_S.SYNCING, Move.DRAIN): _S.DRAINING,
    (_S.DRAINING, Move.DRAIN): _S.DRAINING,  # from "let it finish" to "interrupt"
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


class InvalidTransition(SeamlessError):
    """An event or a command that the state of a slice does not allow; a defect of whoever sent it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Facts about one GPU of a slice, from a data sheet. All None-free: unknown hardware has no `Hardware`.

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


def next_state(slice_id: SliceId, state: SliceState, move: Move, story: str) -> SliceState:
    """The state after a move.

    Raises:
        InvalidTransition: not in the table.
    """
    try:
        return TRANSITIONS[(state, move)]
    except KeyError:
        raise InvalidTransition(
            f"{story}: slice {slice_id} is {state.name}, which does not allow {move.value}"
        ) from None
