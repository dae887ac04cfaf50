"""How long the scheduler waits for an answer before it acts without it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds. No answer within them: a drain that lets requests finish becomes an interrupt; everything else counts
    as a failure of the slice. So every command ends, whatever the edge does.

    Attributes:
        wake_s: `LendSlice` and `SyncWeights`.
        drain_s: a drain that waits for running requests.
        interrupt_s: a drain that interrupts them.
        restart_s: `RestartSlice`; after that the slice is not counted on any more.
        stall_s: an acquire that is due; then it is reported with what it waits for, once.
    """

    wake_s: float = 600.0
    drain_s: float = 120.0
    interrupt_s: float = 120.0
    restart_s: float = 900.0
    stall_s: float = 60.0
