"""When will groups be ready under a plan, and what is the plan worth?

Decoding is lock-step: on slices that share the work evenly, every running session gains a token per step. So with the
sessions sorted by what remains, one pass gives the time at which each ends: the next ``d`` tokens of ``n`` sessions on
``s`` slices take ``d * step_time(n / s)``. A group is ready with its longest member. A plan changes ``s`` at known
times: up when lent slices are awake, down when they are taken back.

    value of a plan = time at which the trainer ends its batch  -  what was done for the next batch until then

What was done counts in seconds, in one of two ways. Tokens made now need not be made in the next step: tokens / full
rate. Under a bound on staleness the next batch must have the sessions that are left over, and the longest of them
takes its time however many slices there are: then the value is the mean of both ends, that of the batch and that of
the next one, whose sessions go on beside those that are submitted (`next_end`). Lives of batches overlap; what brings
only one of the two ends nearer shortens every other step. And uneven steps cost (`_UNEVEN`): in a short step after a
long one the batch waits for its training, and both batches then start together and crowd the slices. Benefit =
difference of two values.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_UNEVEN = 0.3  # how much longer steps get when they alternate between nothing and twice their mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Sessions that are out.

    Attributes:
        remaining: tokens to come, ascending.
        contexts: tokens that each holds in the cache by now, aligned.
        completes: whether a group is ready when this session ends, aligned.
        awaited: whether the session's group must be in the batch, aligned.
        others: groups beside those that the batch has room for; further ones do not make it ready.
        weight: real sessions (and groups) per listed one; > 1 when the list is a sample.
        duty: share of its time that a session generates; the rest is tools and rewards.
        step_s: seconds per step of a slice with so many requests over so many tokens of cache.
    """

    remaining: Sequence[float]
    contexts: Sequence[float]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh:
    """The batch that is submitted when a step ends.

    Attributes:
        lengths: tokens of its sessions, a sample.
        weight: real sessions per listed one.
        context: tokens of a prompt.
        slices: that will generate then, on average over a step; > 0.
        train_s: seconds of training on the batch before it.
    """

    lengths: Sequence[float]
    weight: float
    context: float
    slices: float
    train_s: float


@dataclass(slots=True)
class Course:
    """How a plan would go: tokens of all sessions, tokens of each and ready groups over time, ascending in time."""

    times: list[float] = field(default_factory=lambda: [0.0])
    tokens: list[float] = field(default_factory=lambda: [0.0])
    each: list[float] = field(default_factory=lambda: [0.0])
    ready_at: list[float] = field(default_factory=list)

    def tokens_by(self, at: float) -> float:
        return self._by(at, self.tokens)

    def each_by(self, at: float) -> float:
        """Tokens that a session which still runs has made."""
        return self._by(at, self.each)

    def _by(self, at: float, values: list[float]) -> float:
        right = bisect.bisect_right(self.times, at)
        if right >= len(self.times):
            return values[-1]
        t0, t1 = self.times[right - 1], self.times[right]
        share = (at - t0) / (t1 - t0) if t1 > t0 else 1.0
        return values[right - 1] + share * (values[right] - values[right - 1])

    def note(self, at: float, tokens: float, each: float) -> None:
        self.times.append(at)
        self.tokens.append(tokens)
        self.each.append(each)

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
    n, held = float(len(work.remaining)), float(sum(work.contexts))
    rows = zip(work.remaining, work.contexts, work.completes, work.awaited, strict=True)
    for remaining, context, completes, awaited in rows:
        while True:
            until = slices[phase + 1][0] if phase + 1 < len(slices) else math.inf
            count = slices[phase][1]
            left = remaining - done
            pace = math.inf
            if count > 0:
                share = work.weight * work.duty / count
                pace = work.step_s(n * share, (held + n * (done + left / 2)) * share) / work.duty
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
            course.note(now, total, done)
        n -= 1
        held -= context
        course.note(now, total, done)
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


def next_end(work: Work, course: Course, end: float, fresh: Fresh) -> float:
    """When the sessions that are left over at ``end`` are done, beside those that are submitted then.

    Raises:
        ValueError: nobody will generate.
    """
    done = course.each_by(end)
    first = bisect.bisect_right(work.remaining, done)
    if first == len(work.remaining):
        return end
    last = work.remaining[-1] - done
    left = zip(work.remaining[first:], work.contexts[first:], strict=True)
    entries = [(remaining - done, work.weight, context + done) for remaining, context in left]
    entries += [(length, fresh.weight, fresh.context) for length in fresh.lengths]
    entries.sort()
    n = sum(weight for _, weight, _ in entries)
    held = sum(weight * context for _, weight, context in entries)
    share = work.duty / fresh.slices
    at, made = end, 0.0
    for remaining, weight, context in entries:
        step = remaining - made
        at += step * work.step_s(n * share, (held + n * (made + step / 2)) * share) / work.duty
        made = remaining
        n -= weight
        held -= weight * context
        if made >= last:
            break
    return at


def value(course: Course, trainer: Trainer, free_at: float, full_rate: float) -> float:
    """By tokens; seconds, smaller is better, infinity when the batch never gets ready."""
    end = end_of_training(course, trainer, free_at)
    return end - course.tokens_by(end) / full_rate if end < math.inf else math.inf


def bounded_value(
    work: Work, course: Course, trainer: Trainer, free_at: float, fresh: Fresh, elapsed_s: float
) -> float:
    """Under a bound on staleness; seconds, smaller is better, infinity when the batch never gets ready."""
    end = end_of_training(course, trainer, free_at)
    if end == math.inf:
        return math.inf
    this = elapsed_s + end
    last = trainer.train_s * trainer.minimum
    following = max(next_end(work, course, end, fresh) - end + last, fresh.train_s, 1e-9)
    uneven = (this - following) / (this + following)
    return this + following / 2 + _UNEVEN * (this + following) / 2 * uneven * uneven
