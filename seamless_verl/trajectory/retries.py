"""Is a request that says exactly what an earlier one said a retry, or a second sample?

Client libraries repeat a request after a timeout or a broken connection and say so in a header. An agent may also ask
the same thing twice on purpose. A retry must not be generated again: the first answer would stay in the tree as a
branch that no agent ever saw.
"""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    NEW = "new"
    JOIN = "join"
    REPLAY = "replay"


class Earlier(Enum):
    """What became of the last identical request."""

    NONE = "none"
    IN_FLIGHT = "in_flight"
    ORPHANED = "orphaned"  # still generated, but its client went away
    DELIVERED = "delivered"
    UNDELIVERED = "undelivered"  # answered, but its client went away


_TABLE: dict[Earlier, tuple[Verdict, Verdict, Verdict]] = {
    # what became of it      says nothing     "not a retry"    "a retry"
    Earlier.NONE: (Verdict.NEW, Verdict.NEW, Verdict.NEW),
    Earlier.IN_FLIGHT: (Verdict.JOIN, Verdict.NEW, Verdict.JOIN),
    Earlier.ORPHANED: (Verdict.JOIN, Verdict.JOIN, Verdict.JOIN),
    Earlier.DELIVERED: (Verdict.NEW, Verdict.NEW, Verdict.REPLAY),
    Earlier.UNDELIVERED: (Verdict.REPLAY, Verdict.REPLAY, Verdict.REPLAY),
}


def recognise(earlier: Earlier, retry_count: int | None) -> Verdict:
    """What to do with a repeated request.

    Args:
        retry_count: number the client put into its retry header; None when it sent none.
    """
    column = 0 if retry_count is None else min(retry_count, 1) + 1
    return _TABLE[earlier][column]
