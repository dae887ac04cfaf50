"""What a policy proposes, and why; what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from seamless_verl.scheduling.slices import SliceId


class Verb(Enum):
    LEND = "lend"  # idle slices become rollout slices
    HOLD = "hold"  # idle slices stay idle
    STOP_FEEDING = "stop_feeding"  # lent slices get no new requests, running ones may finish
    RECLAIM = "reclaim"  # lent slices are interrupted now (tokens kept)
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
    """What a LEND decision was worth, known when its slices are back and the gang is granted (see `loans`).

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
