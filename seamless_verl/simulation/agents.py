"""Groups, attempts and their turns: turns become requests, finished requests become turns, attempts and groups."""

from __future__ import annotations

import random
from collections.abc import Callable

from seamless_verl.simulation.clock import Clock
from seamless_verl.simulation.replica import Request
from seamless_verl.simulation.workload import Trajectory, Workload


class Attempt:
    """One trajectory under way. ``version`` is that of its first generated token."""

    __slots__ = ("context", "generated", "group", "index", "request", "session", "trajectory", "turn", "version")

    def __init__(self, group: Group, index: int, trajectory: Trajectory) -> None:
        self.group = group
        self.index = index
        self.session = f"{group.name}/{index}"
        self.trajectory = trajectory
        self.turn = 0
        self.context = 0
        self.generated = 0
        self.version: int | None = None
        self.request: Request | None = None


class Group:
    """All attempts at one prompt.

    Attributes:
        reserved: weight version it was admitted with.
        submitted: seconds.
        stopped: nobody wants it any more.
    """

    __slots__ = ("attempts", "name", "number", "reserved", "running", "stopped", "submitted")

    def __init__(self, number: int, reserved: int, submitted: float) -> None:
        self.number = number
        self.name = f"g{number}"
        self.reserved = reserved
        self.submitted = submitted
        self.attempts: list[Attempt] = []
        self.running = 0
        self.stopped = False

    @property
    def tokens(self) -> int:
        """Tokens that the trainer gets, prompts and tool results included."""
        return sum(attempt.context for attempt in self.attempts)

    @property
    def generated(self) -> int:
        return sum(attempt.generated for attempt in self.attempts)

    @property
    def version(self) -> int:
        """Of the oldest first token."""
        return min(a.version for a in self.attempts if a.version is not None)


class Agents:
    """Args:
    submit: places requests on the fleet; withdraw: takes one off it.
    on_session: an attempt has ended.
    on_group: all attempts of a group have ended.
    """

    def __init__(
        self,
        clock: Clock,
        workload: Workload,
        rng: random.Random,
        *,
        attempts: int,
        submit: Callable[[list[Request]], None],
        withdraw: Callable[[Request], None],
        on_session: Callable[[Attempt], None],
        on_group: Callable[[Group], None],
    ) -> None:
        self._clock = clock
        self._workload = workload
        self._rng = rng
        self._attempts = attempts
        self._submit = submit
        self._withdraw = withdraw
        self._on_session = on_session
        self._on_group = on_group
        self._names = 0

    def draw(self, version: int) -> Group:
        """The next prompt of the data set, not started."""
        self._names += 1
        group = Group(self._names, version, self._clock.now)
        trajectories = self._workload.group(self._rng, self._attempts)
        group.attempts = [Attempt(group, index, trajectory) for index, trajectory in enumerate(trajectories)]
        return group

    def start(self, groups: list[Group]) -> None:
        requests = []
        for group in groups:
            group.submitted = self._clock.now
            group.running = len(group.attempts)
            requests += [self._request(attempt) for attempt in group.attempts]
        self._submit(requests)

    def stop(self, group: Group) -> None:
        """Nobody wants it any more; what its tools return is not looked at."""
        group.stopped = True
        for attempt in group.attempts:
            request, attempt.request = attempt.request, None
            if request is not None:
                self._withdraw(request)

    def finished(self, request: Request) -> None:
        """A request has all its tokens: the next turn follows after the tool, or the attempt ends."""
        attempt = request.owner
        assert isinstance(attempt, Attempt)
        if attempt.request is not request:
            return
        turn = attempt.trajectory[attempt.turn]
        if attempt.version is None:
            attempt.version = request.version
        attempt.request = None
        attempt.context += turn.prompt + turn.answer
        attempt.generated += turn.answer
        attempt.turn += 1
        if attempt.turn < len(attempt.trajectory):
            self._clock.after(turn.tool_s, self._next_turn, attempt)
        else:
            self._clock.after(turn.tool_s, self._end, attempt)

    def _next_turn(self, attempt: Attempt) -> None:
        if not attempt.group.stopped:
            self._submit([self._request(attempt)])

    def _end(self, attempt: Attempt) -> None:
        if attempt.group.stopped:
            return
        self._on_session(attempt)
        attempt.group.running -= 1
        if not attempt.group.running:
            self._on_group(attempt.group)

    def _request(self, attempt: Attempt) -> Request:
        turn = attempt.trajectory[attempt.turn]
        age = (attempt.group.number, attempt.index)
        request = Request(attempt, attempt.context + turn.prompt, turn.answer, prefix=attempt.context, age=age)
        attempt.request = request
        return request
