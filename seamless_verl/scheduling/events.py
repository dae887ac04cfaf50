"""What the scheduler is told. Past forms; ``at`` is seconds on the run's one clock and never decreases.

``command`` in a completion is the number of the command it answers: a late answer to a command that was superseded
(or to a slice that failed meanwhile) is recognised by it and ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from seamless_verl.scheduling.slices import Slice, SliceId, SliceState, Tag


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    at: float


# ------------------------------------------------------------------ slices


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceAdded(Event):
    """A slice joins, at the start or later. ``state`` is IDLE, or ROLLOUT for a replica that already serves.

    Attributes:
        version: weight version that a serving replica holds; None when IDLE.
    """

    slice: Slice
    state: SliceState = SliceState.IDLE
    version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceWaking(Event):
    """The edge only now begins to carry out `LendSlice`: what it did first (weights to the slices that only roll out)
    is no part of the cost of the switch. Left out where nothing came first."""

    slice: SliceId
    command: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceReady(Event):
    """Answer to `LendSlice` or `SyncWeights`: it serves with ``version``."""

    slice: SliceId
    command: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceDrained(Event):
    """Answer to `DrainSlice`, or to another command that could not be carried out since another replica died: nothing
    runs on it and its memory is the trainer's again."""

    slice: SliceId
    command: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceFailed(Event):
    """A part of a slice died, whatever it was doing.

    Attributes:
        lost: the tags it can no longer carry. ``{ROLLOUT}``: only the replica died, the slice may still train.
        restartable: whether a `RestartSlice` can bring it back.
    """

    slice: SliceId
    reason: str
    lost: frozenset[Tag] = frozenset(Tag)
    restartable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceReturned(Event):
    """Answer to `RestartSlice`: all its capabilities are back, nothing runs on it."""

    slice: SliceId


# ------------------------------------------------------------------ trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireRequested(Event):
    """``acquire(tag, k)`` of SeamlessFlow: answered by exactly one `GrantAcquire` or `RefuseAcquire`.

    The trainer asks before it has the data it needs; when to preempt is then the policy's choice, between
    ``minimum`` groups ready (training can begin) and ``batch`` (there is nothing more to wait for).

    Attributes:
        request: unique name, e.g. ``step-7/0``.
        count: slices; for training the gang, granted as a whole.
        minimum: groups that must be ready before the trainer can use the gang; 0 for ROLLOUT.
        batch: groups after which waiting longer is of no use to this request; >= minimum.
    """

    request: str
    tag: Tag
    count: int
    minimum: int = 0
    batch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Released(Event):
    """The holder of a grant is done with it; also mid-step, when the trainer starves for its next mini-batch."""

    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded(Event):
    """The trainer finished a step (all its mini-batches).

    Attributes:
        step: counted from 1.
        waited_s: seconds of the step that the trainer spent waiting for groups after it had its gang.
        waited_groups: groups it still missed when those waits began, summed.
        starved_s: seconds that it waited for groups without its gang, of which no slice was lent.
        starved_groups: groups it missed when those waits began, summed.
        last: no step follows.
    """

    step: int
    waited_s: float = 0.0
    waited_groups: int = 0
    starved_s: float = 0.0
    starved_groups: int = 0
    last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPublished(Event):
    """Weights of ``version`` can be loaded by slices."""

    version: int


# ------------------------------------------------------------------ data


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsSubmitted(Event):
    """Prompts handed to the agents: each group is ``sessions`` attempts at one prompt."""

    groups: tuple[str, ...]
    sessions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsReady(Event):
    """How many whole groups the trainer could take now, and how many are still on their way."""

    ready: int
    in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOpened(Event):
    """Another batch is being filled; it cannot do without the unfinished groups ``awaited`` (bound on staleness)."""

    awaited: frozenset[str]


class Ending(Enum):
    COMPLETED = "completed"
    INTERRUPTED = "interrupted"  # tokens kept, continues as a new request
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStarted(Event):
    """A generation (one turn of a session, or its continuation) begins on a slice.

    Attributes:
        request: unique per attempt.
        session: the attempt at a task it belongs to; equal for all its turns.
        context_tokens: prompt and everything generated before.
    """

    request: str
    session: str
    group: str
    slice: SliceId
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished(Event):
    """``tokens`` were generated by this request (not counting its context)."""

    request: str
    tokens: int
    ending: Ending = Ending.COMPLETED


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFinished(Event):
    """A session has its reward or failed; no request of it follows. ``cut``: its length tells nothing of others, since
    it was given up before its end, or validates."""

    session: str
    group: str
    cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """The time of the last `SetTimer` has come. An early or surplus tick is harmless."""


# They move no slice, and nothing has to be decided after them.
REQUEST_EVENTS = (RequestStarted, RequestFinished, SessionFinished)
