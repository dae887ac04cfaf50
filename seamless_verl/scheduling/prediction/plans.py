"""When will groups be ready under a plan, and what is the plan worth?

Decoding is lock-step: on slices that share the work evenly, every running session gains a token per step. So with the
sessions sorted by what remains, one pass gives the time at which each ends: the next ``d`` tokens of ``n`` sessions on
``s`` slices take ``d * step_time(n / s)``. A group is ready with its longest member. A plan changes ``s`` at known
times: up when lent slices are awake, down when they are taken back.

    value of a plan = time at which the trainer ends its batch  -  tokens generated until then / full rate

The second term is what makes lending longer neither good nor bad by itself: tokens made now need not be made in the
next step. What remains is waste: seconds in which slices switch or idle. Benefit = difference of two values.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Sessions that are out.

    Attributes:
        remaining: tokens to come, ascending.
        completes: whether a group is ready when this session ends, aligned.
        awaited: whether the session's group must be in the batch, aligned.
        others: groups beside those that the batch has room for; further ones do not make it ready.
        weight: real sessions (and groups) per listed one; > 1 when the list is a sample.
        duty: share of its time that a session generates; the rest is tools and rewards.
        step_s: seconds per step for a number of requests per slice, each of which has grown by so many tokens.
    """

    remaining: Sequence[float]
    completes: Sequence[bool]
    awaited: Sequence[bool]
    others: float
    weight: float
    duty: float
    step_s: Callable[[float, float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """What the trainer wants next.

    Attributes:
        ready: groups it could take now.
        minimum: groups of one local update.
        batch: groups until the end of the step.
        train_s: seconds of training per group.
    """

    ready: int
    minimum: int
    batch: int
    train_s: float


@dataclass(slots=True)
class Course:
    """How a plan would go: tokens and ready groups over time, both ascending in time."""

    times: list[float] = field(default_factory=lambda: [0.0])
    tokens: list[float] = field(default_factory=lambda: [0.0])
    ready_at: list[float] = field(default_factory=list)

    def tokens_by(self, at: float) -> float:
        right = bisect.bisect_right(self.times, at)
        if right >= len(self.times):
            return self.tokens[-1]
        t0, t1 = self.times[right - 1], self.times[right]
        share = (at - t0) / (t1 - t0) if t1 > t0 else 1.0
        return self.tokens[right - 1] + share * (self.tokens[right] - self.tokens[right - 1])

    def when_ready(self, groups: float) -> float:
        """When so many more groups are ready; infinity if these sessions do not suffice."""
        index = math.ceil(groups) - 1
        if index < 0:
            return 0.0
        return self.ready_at[index] if index < len(self.ready_at) else math.inf


def play(work: Work, slices: Sequence[tuple[float, float]]) -> Course:
    """Run the work down.

    Args:
        slices: ``(from time, slices generating)``, ascending, the first at 0; slices may be fractional speeds.
    """
    course = Course()
    now = done = total = credit = 0.0
    others = work.others
    phase = 0
    n = float(len(work.remaining))
    for remaining, completes, awaited in zip(work.remaining, work.completes, work.awaited, strict=True):
        while True:
            until = slices[phase + 1][0] if phase + 1 < len(slices) else math.inf
            count = slices[phase][1]
            left = remaining - done
            pace = math.inf
            if count > 0:
                pace = work.step_s(n * work.weight * work.duty / count, done + left / 2) / work.duty
            if now + left * pace <= until and pace < math.inf:
                now += left * pace
                total += left * n * work.weight
                done = remaining
                break
            if until == math.inf:
                return course  # nobody generates any more
            made = (until - now) / pace
            total += made * n * work.weight
            done += made
            now = until
            phase += 1
            course.times.append(now)
            course.tokens.append(total)
        n -= 1
        course.times.append(now)
        course.tokens.append(total)
        if completes and (awaited or others > 0):
            others -= 0.0 if awaited else work.weight
            credit += work.weight
            while credit >= 1.0 - 1e-9:
                credit -= 1.0
                course.ready_at.append(now)
    return course


def end_of_training(course: Course, trainer: Trainer, free_at: float) -> float:
    """When the last local update of the step ends, if the gang is free from ``free_at`` on."""
    end = free_at
    used = 0
    while used < trainer.batch:
        update = min(trainer.minimum, trainer.batch - used)
        used += update
        end = max(end, course.when_ready(used - trainer.ready)) + trainer.train_s * update
    return end


def value(course: Course, trainer: Trainer, free_at: float, full_rate: float) -> float:
    """See the module; seconds, smaller is better, infinity when the batch never gets ready."""
    end = end_of_training(course, trainer, free_at)
    return end - course.tokens_by(end) / full_rate if end < math.inf else math.inf
