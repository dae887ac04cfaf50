"""Which ends of the trainer's process are worth another start from the last checkpoint. Pure: ends in, verdicts out.

    process of the run died ────────► restart, at most so often within an hour, and so often without a new step
    out of memory ──────────────────► restart, unless it ran out at the same step before
    interrupt, error, finished ─────► the end: another start would end the same way, or nobody wants it

The trainer's process tells by its exit code why it ended (`Exit`, or 128 + the signal that ended it). A restart is what
the same command with the same run folder would do: nothing is remembered but what the checkpoint holds.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from seamless_verl.errors import SeamlessError

WITHIN_S = 3600.0
# By name: this process must not import Ray, torch or vLLM, which is what these are from. `GangRefused` is ours: all
# replicas died, and none came back.
_DEATHS = frozenset(
    {"RayActorError", "WorkerCrashedError", "NodeDiedError", "LocalRayletDiedError", "EngineDeadError", "GangRefused"}
)
_MEMORY = frozenset({"OutOfMemoryError", "MemoryError"})


class RunBroken(SeamlessError):
    """A part of the run died; the message names it."""


class Exit(IntEnum):
    """Why the trainer's process ended, for its supervisor; users see `FAILED` for each of them."""

    FAILED = 1
    DIED = 75
    OUT_OF_MEMORY = 76


def exit_of(error: BaseException) -> Exit:
    """The exit code of a trainer that ended with ``error``."""
    chain = list(_causes(error))
    names = {each.__name__ for link in chain for each in type(link).__mro__}
    if names & _MEMORY or any("OutOfMemoryError" in str(link) for link in chain if isinstance(link, RunBroken)):
        return Exit.OUT_OF_MEMORY
    return Exit.DIED if names & _DEATHS or isinstance(error, RunBroken) else Exit.FAILED


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def visible(code: int) -> int:
    """The exit code that the user's command ends with."""
    return Exit.FAILED if code in (Exit.DIED, Exit.OUT_OF_MEMORY) else code


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A trainer's process has ended.

    Attributes:
        code: its exit code.
        at: seconds of any clock.
        step: the last one that was trained to its end, in this life or an earlier one; 0: none; ``None``: verl's own
            trainer, which does not say.
        obstacle: why another start would not continue this run; empty: it would.
    """

    code: int
    at: float
    step: int | None
    obstacle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``reason`` is a line for the user; empty where the end speaks for itself."""

    restart: bool
    reason: str = ""


class Restarts:
    """The ends of one run, in order.

    Args:
        most: restarts within `WITHIN_S`, and in a row without a step that is new; 0: never.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._begun: list[float] = []
        self._ran_out_at: int | None = None  # the step, if that is what the last life ended with
        self._furthest, self._in_vain = -1, 0  # the last step that was new, and restarts since

    def after(self, end: End) -> Verdict:
        """What follows from this end."""
        cause = _cause_of(end.code)
        ran_out_before, self._ran_out_at = self._ran_out_at, end.step if end.code == Exit.OUT_OF_MEMORY else None
        if cause is None or not self._most:
            return Verdict(restart=False)
        if end.step is not None and end.step > self._furthest:
            self._furthest, self._in_vain = end.step, 0
        recent, hindered = [at for at in self._begun if end.at - at < WITHIN_S], end.obstacle
        if not hindered and self._ran_out_at is not None and self._ran_out_at == ran_out_before:
            hindered = f"the second time after step {end.step}"
        elif not hindered and max(len(recent), self._in_vain) >= self._most:
            period = "within an hour" if len(recent) >= self._most else f"that bring no step after {self._furthest}"
            hindered = f"{self._most} restarts {period} are what seamless.supervise.restarts allows"
        if hindered:
            return Verdict(restart=False, reason=f"{cause}; not restarted: {hindered}")
        self._begun = [*recent, end.at]
        self._in_vain += end.step is not None
        return Verdict(restart=True, reason=f"{cause}; restart {len(self._begun)} of {self._most} within an hour")


def _cause_of(code: int) -> str | None:
    """What died, in words; None where nothing did."""
    if code == Exit.DIED:
        return "a process of the run died"
    if code == Exit.OUT_OF_MEMORY:
        return "memory ran out"
    if code - 128 in signal.valid_signals() - {signal.SIGHUP, signal.SIGINT, signal.SIGTERM}:  # these the user sends
        return f"the trainer's process was ended by {signal.Signals(code - 128).name}"
    return None


def obstacle(*, resume_mode: str, save_freq: int, has_checkpoint: bool) -> str:
    """Why the same command would not continue a run; empty: it would, from the start if no checkpoint is due yet."""
    if resume_mode != "auto":
        return f"trainer.resume_mode={resume_mode} does not go on from the run's last checkpoint (write auto)"
    if not has_checkpoint and save_freq <= 0:
        return f"there is no checkpoint (trainer.save_freq={save_freq}: write how many steps may be lost)"
    return ""
