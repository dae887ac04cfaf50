"""What comes out: what a policy proposes and why, what the scheduler wants done, and what came of it.

A numbered command to a slice is answered by an event with the same ``command`` number, or by `SliceFailed`. A newer
command to the same slice supersedes an older one: the edge need not finish the older, and its answer is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from seamless_verl.scheduling.slices import SliceId

# ------------------------------------------------------------------ proposals of a policy


class Verb(Enum):
    LEND = "lend"  # idle slices become rollout slices
    HOLD = "hold"  # idle slices stay idle
    RECLAIM = "reclaim"  # lent slices go back to the trainer now (requests keep their tokens)
    WAIT = "wait"  # the trainer asked for its gang, lent slices work on


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One choice of a policy.

    Attributes:
        slices: the slices it is about.
        reason: one clause with its figures, e.g. ``benefit 1.0 s < cost 7.0 s``.
        predicted_benefit_s: seconds that the trainer gets its data earlier, costs already taken off; None when the
            policy does not predict.
    """

    verb: Verb
    slices: tuple[SliceId, ...]
    reason: str
    predicted_benefit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a LEND decision was worth, known when its slices are back and the gang is granted (see `issuing.LoanBook`).

    Attributes:
        decision: number of the decision.
        realised_benefit_s: seconds saved; None when nothing was generated while the loan ran.
        lent_tokens: tokens generated on the loan.
        late_s: seconds that the trainer had its data, wanted its gang and did not have it.
    """

    decision: int
    realised_benefit_s: float | None
    lent_tokens: int
    late_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAgain:
    """Beside its decisions a policy may ask to be asked again at a time when nothing need have happened."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """Which sessions that are out will probably last longer than slices are lent; the router is told (`SetHorizon`)."""

    slices: tuple[SliceId, ...]
    outlasting: frozenset[str]


Proposal = Decision | LookAgain | Horizon

# ------------------------------------------------------------------ what the scheduler wants done


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class LendSlice(Command):
    """Weights of ``version`` in, replica awake, registered at the router -> `SliceReady`.

    Also sent for slices that only roll out, when they are idle; those are never drained by a policy.

    Attributes:
        decision: number of the decision it carries out; None when no policy had a say.
    """

    command: int
    slice: SliceId
    version: int | None
    decision: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainSlice(Command):
    """Off the router; running requests interrupted, with their tokens kept; memory back to the trainer ->
    `SliceDrained`."""

    command: int
    slice: SliceId
    decision: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncWeights(Command):
    """The slice loads ``version`` -> `SliceReady`."""

    command: int
    slice: SliceId
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantAcquire(Command):
    """Answer to `AcquireRequested`: the slices are the holder's until it releases."""

    request: str
    slices: tuple[SliceId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseAcquire(Command):
    """Answer to `AcquireRequested` that can never be granted as the cluster is."""

    request: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeGrant(Command):
    """A member of a granted gang failed; the other members are idle again and the request is closed."""

    request: str
    slice: SliceId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailOver(Command):
    """Off the router at once; its sessions continue elsewhere with the tokens they have."""

    slice: SliceId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartSlice(Command):
    """Bring back what died -> `SliceReturned`. Until then nobody else uses its GPUs."""

    slice: SliceId


@dataclass(frozen=True, slots=True, kw_only=True)
class SetHorizon(Command):
    """Advice to the router: these sessions will probably last longer than the slice is lent, others are better placed
    there. Holds until the next one, for all lent slices, or until the slice is drained."""

    slice: SliceId
    outlasting: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer(Command):
    """Send a `Tick` at this time (or soon after). A later `SetTimer` replaces an earlier one."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportStall(Command):
    """A request has waited longer than it should; names what it waits for."""

    request: str
    waited_s: float
    waiting_for: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordDecision(Command):
    """For the flight recorder: numbered, so that commands and outcomes can refer to it."""

    number: int
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOutcome(Command):
    """For the flight recorder."""

    outcome: Outcome
