"""Prompts that a rollout worker generates, where the trainer may interfere: surplus rollouts, a group started anew.

    roll out ─► members end ─► the first ``needed`` are the group; the others are stopped and their rows cleared
        ▲           │
        └─ restart ◄┘

Invariant: once `GroupRuns.run` has returned, no member of the group writes any more, and the rows that are left are
those of a complete group, or of one that failed (which the trainer clears).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from seamless_verl.errors import SeamlessError
from seamless_verl.staleness.groups import GroupProgress, GroupState


@dataclass(slots=True)
class _Run:
    tasks: dict[asyncio.Task[None], int] = field(default_factory=dict)  # -> member
    rows: dict[int, int] = field(default_factory=dict)  # member -> rows that it writes, or has written
    restarted: bool = False

    def stop(self, members: Sequence[int]) -> None:
        """Cancel these, but for those that write rows just now: they end at once, and half a row is never seen."""
        for task, member in self.tasks.items():
            if member in members and member not in self.rows:
                task.cancel()


class GroupRuns:
    """See the module.

    Args:
        redundancy: rollouts started per rollout that a group needs, at least 1.
        clear: removes rows, given as ``(member, index)`` of a group, from where they were written.
    """

    def __init__(self, redundancy: float, clear: Callable[[str, Sequence[tuple[int, int]]], Awaitable[None]]) -> None:
        self._redundancy = redundancy
        self._clear = clear
        self._runs: dict[str, _Run] = {}

    async def run(
        self, group: str, needed: int, roll_out: Callable[[int], Awaitable[None]]
    ) -> tuple[bool, list[BaseException]]:
        """Roll ``group`` out, as often as it is restarted.

        Returns:
            Whether it is complete, and what its members failed with.
        """
        run = self._runs[group] = _Run()
        launched = math.ceil(needed * self._redundancy)
        try:
            while True:
                progress = GroupProgress(needed=needed, launched=launched)
                state, errors = await _attempt(run, progress, launched, roll_out)
                if not run.restarted:
                    break
                await self._clear(group, [(member, i) for member, count in run.rows.items() for i in range(count)])
                run.rows, run.restarted = {}, False
        finally:
            del self._runs[group]  # from here on it is too late to interfere
            for task in run.tasks:
                task.cancel()
        complete = state is GroupState.COMPLETE
        kept = progress.members if complete else range(launched)
        surplus = [(member, i) for member, count in run.rows.items() if member not in kept for i in range(count)]
        if surplus:
            await self._clear(group, surplus)
        return complete, errors

    def writing(self, group: str, member: int, rows: int) -> None:
        """``member`` has ended and is about to write so many rows."""
        if group in self._runs:
            self._runs[group].rows[member] = rows

    def restart(self, groups: Sequence[str]) -> list[str]:
        """Start these from their prompts again; returns those that will, the others have ended or are not here."""
        accepted = [group for group in groups if group in self._runs and not self._runs[group].restarted]
        for group in accepted:
            run = self._runs[group]
            run.restarted = True
            run.stop(list(run.tasks.values()))
        return accepted


async def _attempt(
    run: _Run, progress: GroupProgress, launched: int, roll_out: Callable[[int], Awaitable[None]]
) -> tuple[GroupState, list[BaseException]]:
    """Until every member has settled; the state is that of the member that decided it."""
    run.tasks = {asyncio.ensure_future(roll_out(member)): member for member in range(launched)}
    state, errors, stopped = GroupState.GENERATING, list[BaseException](), set[int]()
    pending = set(run.tasks)
    while pending:
        ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(ended, key=run.tasks.__getitem__):
            member = run.tasks[task]
            if member in stopped or run.restarted:
                continue
            error = _error_of(task, member)
            if error is not None:
                errors.append(error)
            verdict = progress.fail(member) if error is not None else progress.finish(member)
            if verdict.state is not GroupState.GENERATING:
                state = verdict.state
            stopped.update(verdict.stop)
            run.stop(verdict.stop)
    return state, errors


def _error_of(task: asyncio.Task[None], member: int) -> BaseException | None:
    """What a rollout that was not stopped failed with; a cancellation that comes out of it nobody here asked for."""
    try:
        return task.exception()
    except asyncio.CancelledError as cancelled:
        error = SeamlessError(f"rollout {member} of its group was cancelled, and not by its group")
        error.__cause__ = cancelled
        return error
