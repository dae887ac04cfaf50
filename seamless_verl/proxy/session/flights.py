"""Generations under way in one session, and who waits for them.

A flight is a task of its own, so that a client may leave and its retry may join. One that nobody waits for is cancelled
after a grace period.

::

    launch ──▶ OPEN ◀──join── orphaned ──grace──▶ CANCELLED, nothing of it is kept
                │ └──last client left──▲
                └──all of its request are generated, and waited for──▶ LANDING ──▶ answer is replayable

Invariant: a flight is cancelled or it lands, and what was decided first holds. What the journal may already have thus
reaches the tree, whoever loses interest meanwhile, and nobody joins what was cancelled.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from seamless_verl.proxy.calls import Answer, ApiError, StreamHead, Token
from seamless_verl.trajectory.matching import Earlier

_MAX_CONTINUED = 8  # their clients have them: who asks again wants another sample, or is very late
_BYTES_PER_TOKEN = 150  # text, log-prob and the objects that hold them


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """An answer on its way to a client.

    Attributes:
        digest: names the request.
        match: how the request fitted the tree (``clean``, ``realign`` or ``fork``).
        overrides: ``name=value`` of what the trainer decided against the agent's wish.
    """

    digest: bytes
    answer: Answer
    match: str
    overrides: tuple[str, ...]

    def matched(self, match: str) -> Served:
        """The same answer, now that it has its place in the tree."""
        return replace(self, match=match)


class Progress:
    """What is settled of an answer that is still generated. Texts and tokens only grow.

    Attributes:
        head: None until the prompt is rendered.
        overrides: as of :class:`Served`; a cap that the session's budget makes is added before the first token.
    """

    def __init__(self) -> None:
        self.head: StreamHead | None = None
        self.overrides: tuple[str, ...] = ()
        self.reasoning = ""
        self.content = ""
        self.tokens: list[Token] = []
        self.listeners: set[asyncio.Event] = set()

    @property
    def has_text(self) -> bool:
        return bool(self.reasoning or self.content or self.tokens)

    def tell(self) -> None:
        """Wake all listeners."""
        for listener in self.listeners:
            listener.set()


class Fate(Enum):
    """What will become of a flight; see the module's picture."""

    OPEN = "open"
    LANDING = "landing"
    CANCELLED = "cancelled"


class Flight:
    """One generation under way; ``wanted`` is set while anybody waits for it."""

    def __init__(self) -> None:
        self.waiters = 0
        self.wanted = asyncio.Event()
        self.progress = Progress()
        self.task: asyncio.Task[Served] | None = None
        self.fate = Fate.OPEN

    def cancel(self) -> None:
        """End it, unless it is landing."""
        if self.fate is Fate.OPEN and self.task is not None:
            self.fate = Fate.CANCELLED
            self.task.cancel()


class Arrival(Enum):
    """What is known of an answer's way to its client."""

    CONTINUED = "continued"  # it was there: a later request goes on from it
    DELIVERED = "delivered"
    UNKNOWN = "unknown"  # not yet, or nobody knows


class FlightBoard:
    """Flights and recent answers of one session, by the digest of their request.

    Args:
        max_parallel: answers that the session may have in flight at once, so that it may have to give as many again.
            Twice as many are kept of those that were delivered, and of those that may not have been; few of those
            that a later request went on from.
    """

    def __init__(self, max_parallel: int) -> None:
        self._max_each = max(8, 2 * max_parallel)
        self._flights: set[Flight] = set()
        self._by_digest: dict[bytes, Flight] = {}
        self._answers: dict[Arrival, OrderedDict[bytes, Served]] = {arrival: OrderedDict() for arrival in Arrival}

    @property
    def num_bytes(self) -> int:
        """About how much memory the tokens of its answers take, as far as clients asked to see them."""
        shown = [served.answer.tokens for answers in self._answers.values() for served in answers.values()]
        return sum(_BYTES_PER_TOKEN * len(tokens) * (1 + len(tokens[0].alternatives)) for tokens in shown if tokens)

    def earlier(self, digest: bytes) -> Earlier:
        """What became of the last request with this digest."""
        flight = self._by_digest.get(digest)
        if flight is not None and flight.fate is not Fate.CANCELLED:
            return Earlier.IN_FLIGHT if flight.waiters else Earlier.ORPHANED
        arrival = self._arrival(digest)
        if arrival is None:
            return Earlier.NONE
        return Earlier.UNDELIVERED if arrival is Arrival.UNKNOWN else Earlier.DELIVERED

    def flight(self, digest: bytes) -> Flight:
        return self._by_digest[digest]

    def recorded(self, digest: bytes) -> Served:
        return next(answers[digest] for answers in self._answers.values() if digest in answers)

    def record(self, served: Served, arrival: Arrival) -> None:
        """Keep an answer for retries; the oldest of too many is dropped, of the delivered ones one that went on."""
        for answers in self._answers.values():
            answers.pop(served.digest, None)
        self._answers[arrival][served.digest] = served
        continued, delivered, unknown = self._answers.values()
        if len(unknown) > self._max_each:
            unknown.popitem(last=False)
        if len(delivered) > self._max_each:
            delivered.popitem(last=False)
        if len(continued) > _MAX_CONTINUED:
            continued.popitem(last=False)

    def continued(self, answer_id: str) -> None:
        """A request goes on from this answer, so it was delivered, whatever a restart had left open."""
        for served in [served for answers in self._answers.values() for served in answers.values()]:
            if served.answer.id == answer_id:
                self.record(served, Arrival.CONTINUED)

    def unknown(self) -> frozenset[bytes]:
        """Digests of the answers that may have reached nobody."""
        return frozenset(self._answers[Arrival.UNKNOWN])

    def _arrival(self, digest: bytes) -> Arrival | None:
        return next((arrival for arrival, answers in self._answers.items() if digest in answers), None)

    def launch(
        self, digest: bytes, fly: Callable[[Flight], Coroutine[Any, Any, Served]], landed: Callable[[], None]
    ) -> Flight:
        """Start a flight; ``landed`` is called once, however it ends."""
        flight = Flight()
        self._flights.add(flight)
        self._by_digest[digest] = flight

        def forget(task: asyncio.Task[Served]) -> None:
            self._flights.discard(flight)
            if self._by_digest.get(digest) is flight:
                del self._by_digest[digest]
            if not task.cancelled():
                task.exception()  # a failure nobody waited for is no surprise
            landed()

        flight.task = asyncio.create_task(fly(flight))
        flight.task.add_done_callback(forget)
        return flight

    @contextmanager
    def attended(self, flights: Sequence[Flight], *, orphan_grace_s: float) -> Iterator[None]:
        """While the block runs, somebody waits for these flights; the last one to leave starts their grace period."""
        for flight in flights:
            flight.waiters += 1
            flight.wanted.set()
        try:
            yield
        finally:
            orphans = []
            for flight in flights:
                flight.waiters -= 1
                if not flight.waiters and flight.task is not None and not flight.task.done():
                    flight.wanted.clear()
                    orphans.append(flight)
            if orphans:
                asyncio.get_running_loop().call_later(orphan_grace_s, _cancel_unattended, orphans)

    async def cancel_all(self) -> None:
        """End every flight, those that are landing with their answer; returns when all have ended."""
        flights = tuple(self._flights)
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*(flight.task for flight in flights if flight.task is not None), return_exceptions=True)


def _cancel_unattended(flights: Sequence[Flight]) -> None:
    for flight in flights:
        if not flight.waiters:
            flight.cancel()


def results_of(flights: Sequence[Flight]) -> list[Served]:
    """Answers of flights that have all landed.

    Raises:
        ApiError: what the first of them failed with, or that the session was closed meanwhile.
    """
    tasks = [flight.task for flight in flights if flight.task is not None]
    errors = [error for task in tasks if task.done() and not task.cancelled() and (error := task.exception())]
    if errors:
        # One sample takes its siblings along; the client wants to know why that one failed.
        raise next((error for error in errors if getattr(error, "code", "") != "sibling_failed"), errors[0])
    if any(task.cancelled() for task in tasks):
        raise ApiError(409, "session_closed", "The session was closed while this answer was generated.")
    return [task.result() for task in tasks]
