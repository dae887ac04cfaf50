"""The policy for STUCK steps, carried out on the rollout workers: wait, start stragglers anew, or cut them short."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from seamless_verl.errors import SeamlessError
from seamless_verl.staleness.groups import Retry, StuckPolicy, Treatment
from seamless_verl.staleness.protocol import StalenessProtocol


class Stragglers:
    """Patience is counted in `waiting` only: a trainer that trains or publishes weights waits for nobody.

    Args:
        clock: seconds.
    """

    def __init__(self, policy: StuckPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = policy
        self._clock = clock
        self._step: int | None = None
        self._waited_s = 0.0  # in the waits of this step that are over, since a group came
        self._since: float | None = None  # from when on the wait under way counts
        self._workers: Sequence[Any] = ()

    @property
    def look_again_s(self) -> float:
        """When to look again although nobody called."""
        return float("inf") if self.policy.treatment is Treatment.WAIT else self.policy.patience_s

    def listen(self, workers: Sequence[Any]) -> None:
        self._workers = workers

    @contextmanager
    def waiting(self, step: int) -> Iterator[None]:
        """Within, the trainer waits for groups of ``step``; not to be nested."""
        if step != self._step:
            self._step, self._waited_s = step, 0.0
        self._since = self._clock()
        try:
            yield
        finally:
            self._waited_s += self._clock() - self._since
            self._since = None

    def got_some(self) -> None:
        """A group came, or the trainer has what it waited for."""
        self._waited_s = 0.0
        if self._since is not None:
            self._since = self._clock()

    def treat(self, protocol: StalenessProtocol, version: int) -> dict[str, int]:
        """Called at every look that brought nothing; the slots of groups that are started anew move.

        A look outside of `waiting` treats nobody.

        Args:
            version: of the weights that a group started now begins with.

        Returns:
            How many groups were started anew and cut short, by metric.
        """
        if self._since is None:
            return {}
        commands = self.policy.treat(protocol, self._waited_s + self._clock() - self._since)
        if not commands or not self._workers:
            return {}
        self.got_some()  # those that are treated now are given as much time again
        uids = [command.group for command in commands]
        if isinstance(commands[0], Retry):
            return {"training/stuck/retried": self._restart(protocol, version, uids)}
        ray.get([worker.cut_groups.remote(uids) for worker in self._workers])
        return {"training/stuck/truncated": len(uids)}

    def _restart(self, protocol: StalenessProtocol, version: int, uids: Sequence[str]) -> int:
        answers = ray.get([worker.restart_groups.remote(uids) for worker in self._workers])
        accepted = {uid for answer in answers for uid in answer}
        for uid in uids:  # in the policy's order; what has ended meanwhile is found by the next look
            if uid in accepted:
                protocol.abort(uid)
                if protocol.reserve(uid, version) is None:
                    raise SeamlessError(f"prompt {uid} gave its slot back to be started anew and found none")
        return len(accepted)
