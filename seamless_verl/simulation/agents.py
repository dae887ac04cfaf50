"""What agents do: how many tokens and turns, how long the tools take; and the attempts under way.

A group is ``attempts`` trajectories of one prompt. Lengths of a group are correlated (hard prompts are long for
everybody): the logarithm of a length is a part that the group shares and a part of its own. `Agents` plays them: turns
become requests, finished requests become turns, attempts and groups.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from typing import Protocol

from seamless_verl.simulation.clock import Clock
from seamless_verl.simulation.replica import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """``prompt`` new tokens come in, ``answer`` tokens are generated, then a tool runs for ``tool_s`` seconds."""

    prompt: int
    answer: int
    tool_s: float = 0.0


Trajectory = tuple[Turn, ...]


class Workload(Protocol):
    """A source of groups; consecutive calls are consecutive prompts."""

    @property
    def max_context(self) -> int:
        """Tokens that the longest trajectory may have."""

    def group(self, rng: random.Random, attempts: int) -> list[Trajectory]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """Every answer has the same length: the negative control of everything that lives on skew."""

    answer: int
    prompt: int = 160

    @property
    def max_context(self) -> int:
        return self.prompt + self.answer

    def group(self, rng: random.Random, attempts: int) -> list[Trajectory]:
        return [(Turn(prompt=self.prompt, answer=self.answer),)] * attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Log-normal lengths, truncated at ``cap`` by the token limit; ``mean`` is that of the truncated lengths.

    Attributes:
        sigma: standard deviation of the logarithm.
        shared: share of the variance that the attempts at one prompt have in common.
    """

    mean: float
    sigma: float
    cap: int
    shared: float = 0.5
    prompt: int = 160

    @property
    def max_context(self) -> int:
        return self.prompt + self.cap

    def group(self, rng: random.Random, attempts: int) -> list[Trajectory]:
        mu = lognormal_mu(self.mean, self.sigma, self.cap)
        common = rng.gauss(0.0, 1.0) * math.sqrt(self.shared)
        own = math.sqrt(1.0 - self.shared)
        lengths = [math.exp(mu + self.sigma * (common + own * rng.gauss(0.0, 1.0))) for _ in range(attempts)]
        return [(Turn(prompt=self.prompt, answer=max(1, min(self.cap, round(length)))),) for length in lengths]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bimodal:
    """Short answers, and with probability ``long_share`` long ones; each +-20 %."""

    short: int
    long: int
    long_share: float
    prompt: int = 160

    @property
    def max_context(self) -> int:
        return self.prompt + round(1.2 * max(self.short, self.long))

    def group(self, rng: random.Random, attempts: int) -> list[Trajectory]:
        centers = [self.long if rng.random() < self.long_share else self.short for _ in range(attempts)]
        return [(Turn(prompt=self.prompt, answer=round(c * rng.uniform(0.8, 1.2))),) for c in centers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agentic:
    """Several turns with a growing context: each adds what the tool said and what the model answers.

    Attributes:
        turns: mean number of turns (geometric, at most ``max_turns``).
        answer, answer_sigma: tokens per turn, log-normal.
        observation: tokens that a tool returns.
        tool_s, tool_sigma: seconds a tool runs, log-normal; heavy tails are test suites.
    """

    turns: float
    max_turns: int
    answer: float
    observation: int
    tool_s: float
    answer_sigma: float = 0.8
    tool_sigma: float = 1.0
    shared: float = 0.3
    prompt: int = 2048
    max_answer: int = 4096

    @property
    def max_context(self) -> int:
        return self.prompt + self.max_turns * (self.max_answer + self.observation)

    def group(self, rng: random.Random, attempts: int) -> list[Trajectory]:
        hardness = math.exp(rng.gauss(0.0, math.sqrt(self.shared)) - self.shared / 2)
        return [self._attempt(rng, hardness) for _ in range(attempts)]

    def _attempt(self, rng: random.Random, hardness: float) -> Trajectory:
        mean = max(1.0, self.turns * hardness)
        count = 1 if mean <= 1 else 1 + int(math.log(1.0 - rng.random()) / math.log(1.0 - 1.0 / mean))
        turns = []
        for number in range(min(count, self.max_turns)):
            answer = math.exp(math.log(self.answer) - self.answer_sigma**2 / 2 + rng.gauss(0.0, self.answer_sigma))
            tool_s = math.exp(math.log(self.tool_s) - self.tool_sigma**2 / 2 + rng.gauss(0.0, self.tool_sigma))
            turns.append(
                Turn(
                    prompt=self.prompt if number == 0 else self.observation,
                    answer=max(1, min(self.max_answer, round(answer))),
                    tool_s=tool_s,
                )
            )
        return tuple(turns)


class Replay:
    """Groups as they were recorded, in their order, again and again."""

    def __init__(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        self._groups = [list(group) for group in groups]
        self._next = 0

    @property
    def max_context(self) -> int:
        return max(sum(t.prompt + t.answer for t in trajectory) for group in self._groups for trajectory in group)

    def group(self, rng: random.Random, attempts: int) -> list[Trajectory]:
        """As many attempts as asked for; the recorded ones repeat when there were fewer."""
        recorded = self._groups[self._next % len(self._groups)]
        self._next += 1
        return [recorded[index % len(recorded)] for index in range(attempts)]


@lru_cache(maxsize=256)
def lognormal_mu(mean: float, sigma: float, cap: float) -> float:
    """Location of a log-normal whose minimum with ``cap`` has the given mean, by bisection.

    Raises:
        ValueError: ``mean`` is not below ``cap``.
    """
    if not 0 < mean < cap:
        raise ValueError(f"a mean length of {mean} needs a cap above it, not {cap}")
    low, high = math.log(mean) - 10 * sigma - 1, math.log(cap) + 10 * sigma + 1
    for _ in range(60):
        middle = (low + high) / 2
        if _capped_mean(middle, sigma, cap) < mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _capped_mean(mu: float, sigma: float, cap: float) -> float:
    normal = NormalDist()
    z = (math.log(cap) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * normal.cdf(z - sigma) + cap * (1.0 - normal.cdf(z))


# ---------------------------------------------------------------- attempts under way


@dataclass(slots=True, eq=False)
class Attempt:
    """One trajectory under way.

    Attributes:
        turn: the next one; ``context`` and ``generated`` are tokens of those before it.
        version: of the first generated token.
        request: that is out.
        ended: with its last tool.
    """

    group: Group
    index: int
    trajectory: Trajectory
    turn: int = 0
    context: int = 0
    generated: int = 0
    version: int | None = None
    request: Request | None = None
    ended: bool = False

    @property
    def session(self) -> str:
        return f"{self.group.name}/{self.index}"


@dataclass(slots=True, eq=False)
class Group:
    """All attempts at one prompt.

    Attributes:
        reserved: weight version it was admitted with.
        submitted: seconds.
        running: attempts that have not ended.
        stopped: it was given up.
    """

    number: int
    reserved: int
    submitted: float
    attempts: list[Attempt] = field(default_factory=list)
    running: int = 0
    stopped: bool = False

    @property
    def name(self) -> str:
        return f"g{self.number}"

    @property
    def tokens(self) -> int:
        """Tokens that the trainer gets, prompts and tool results included."""
        return sum(attempt.context for attempt in self.attempts)

    @property
    def generated(self) -> int:
        return sum(attempt.generated for attempt in self.attempts)

    @property
    def version(self) -> int:
        """Version of the oldest first token."""
        return min(a.version for a in self.attempts if a.version is not None)


class Agents:
    """Plays all attempts: each asks, runs its tools, and asks again until it ends.

    Args:
        submit: places requests on the fleet; withdraw: takes one off it.
        on_session: an attempt has ended, or was given up with its group.
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
        """Give ``group`` up; what its tools return is not looked at."""
        group.stopped = True
        for attempt in group.attempts:
            request, attempt.request = attempt.request, None
            if request is not None:
                self._withdraw(request)
            if not attempt.ended:
                self._on_session(attempt)

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
        attempt.ended = True
        self._on_session(attempt)
        attempt.group.running -= 1
        if not attempt.group.running:
            self._on_group(attempt.group)

    def _request(self, attempt: Attempt) -> Request:
        turn = attempt.trajectory[attempt.turn]
        attempt.request = Request(
            owner=attempt,
            context=attempt.context + turn.prompt,
            tokens=turn.answer,
            prefix=attempt.context,
            age=(attempt.group.number, attempt.index),
        )
        return attempt.request
