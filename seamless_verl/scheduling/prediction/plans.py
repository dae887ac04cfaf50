"""What a plan is worth, given how it would go (`course`).

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

import math
from dataclasses import dataclass

from seamless_verl.scheduling.prediction.course import Course, Fresh, Work, play

_UNEVEN = 0.3  # how much longer steps get when they alternate between nothing and twice their mean
# The same, where both batches begin and end together, which lasts for many steps, more than a plan looks ahead. To move
# the border between two steps by a second costs half a second: with both terms it pays where one takes 3.5 times as
# long as the other (with the first alone 11 times, and skewed lengths then stay locked in steps of 60 and 500 s).
_LOCKED = 0.5
_LOCKED_POWER = 6


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
    """When the sessions that are left over at ``end`` are done, beside those that are submitted then."""
    if course.done_at <= end:
        return end
    phases = [phase for phase in course.phases if phase[0] < end]
    return play(work, [*phases, (end, fresh.crew)], (end, fresh)).done_at


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
    uneven = abs(this - following) / (this + following)
    longer = _UNEVEN * uneven**2 + _LOCKED * uneven**_LOCKED_POWER
    return this + following / 2 + longer * (this + following) / 2
