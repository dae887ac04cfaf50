"""The books of the simulated devices: every slice is charged for every second, so that the uses add up to the wall.

A slice has one use at a time. While it generates, its replica splits the time further (decoding, prefill, prefill of
what it or another replica had computed before, nothing to do).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum


class Use(str, Enum):
    """What a device-second was spent on."""

    TRAIN = "train"
    GENERATE = "generate"
    PREFILL = "prefill"
    PREFILL_AGAIN = "prefill_again"
    SYNC = "sync"
    SWITCH = "switch"
    WAIT_DATA = "wait_data"  # no active tag, or holding the gang and starving
    WAIT_WORK = "wait_work"  # a rollout slice without a request
    FAILED = "failed"


IDLE = frozenset({Use.WAIT_DATA, Use.WAIT_WORK})


@dataclass(slots=True)
class Account:
    """One slice. ``gpus`` devices, ``trainable`` whether the trainer may use it."""

    name: str
    gpus: int
    trainable: bool
    seconds: dict[Use, float] = field(default_factory=lambda: dict.fromkeys(Use, 0.0))

    def charge(self, use: Use, seconds: float) -> None:
        self.seconds[use] += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """GPU-seconds by use between two looks at the books."""

    wall_s: float
    gpus: int
    gpu_seconds: dict[Use, float]
    trainable_gpu_seconds: dict[Use, float]

    def share(self, *uses: Use) -> float:
        """Share of all GPU-seconds."""
        return sum(self.gpu_seconds[use] for use in uses) / (self.wall_s * self.gpus)

    @property
    def idle_share(self) -> float:
        return self.share(*IDLE)

    @property
    def trainable_idle_share(self) -> float:
        """Idle share of the slices that can train (SeamlessFlow's claim)."""
        total = sum(self.trainable_gpu_seconds.values())
        return sum(self.trainable_gpu_seconds[use] for use in IDLE) / total if total else 0.0

    @property
    def balance(self) -> float:
        """GPU-seconds booked over wall time x GPUs; 1 unless the simulator is broken."""
        return sum(self.gpu_seconds.values()) / (self.wall_s * self.gpus)


def snapshot(accounts: Iterable[Account]) -> list[Account]:
    """A copy to subtract later."""
    return [Account(name=a.name, gpus=a.gpus, trainable=a.trainable, seconds=dict(a.seconds)) for a in accounts]


def ledger(before: list[Account], after: list[Account], wall_s: float) -> Ledger:
    """What was booked between two snapshots of the same slices."""
    total, trainable = dict.fromkeys(Use, 0.0), dict.fromkeys(Use, 0.0)
    for old, new in zip(before, after, strict=True):
        for use in Use:
            spent = (new.seconds[use] - old.seconds[use]) * new.gpus
            total[use] += spent
            if new.trainable:
                trainable[use] += spent
    return Ledger(wall_s=wall_s, gpus=sum(a.gpus for a in after), gpu_seconds=total, trainable_gpu_seconds=trainable)
