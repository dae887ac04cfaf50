"""Generations under way in one session, and who waits for them.

A flight is a task of its own, so that a client may leave and its retry may join. One that nobody waits for is cancelled
after a grace period.

::

    launch ──▶ IN FLIGHT ◀──join── ORPHANED ──grace──▶ cancelled, nothing of it is kept
                  │  └──last client left──▲
                  └──landed──▶ answer is replayable (the last few of a session)
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from seamless_verl.proxy.calls import Answer, StreamHead, Token
from seamless_verl.proxy.errors import ApiError
from seamless_verl.trajectory.retries import Earlier

_NUM_REPLAYABLE = 8


class ClientGone(Exception):
    """Nobody is left to answer."""


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


class Flight:
    """One generation under way; ``wanted`` is set while anybody waits for it."""

    def __init__(self) -> None:
        self.waiters = 0
        self.wanted = asyncio.Event()
        self.progress = Progress()
        self.task: asyncio.Task[Served] | None = None

    def cancel_if_orphaned(self) -> None:
        if not self.waiters and self.task is not None:
            self.task.cancel()


class FlightBoard:
    """Flights and recent answers of one session, by the digest of their request."""

    def __init__(self) -> None:
        self._flights: set[Flight] = set()
        self._by_digest: dict[bytes, Flight] = {}
        self._answers: OrderedDict[bytes, tuple[Served, bool]] = OrderedDict()

    def earlier(self, digest: bytes) -> Earlier:
        """What became of the last request with this digest."""
        flight = self._by_digest.get(digest)
        if flight is not None:
            return Earlier.IN_FLIGHT if flight.waiters else Earlier.ORPHANED
        if digest in self._answers:
            return Earlier.DELIVERED if self._answers[digest][1] else Earlier.UNDELIVERED
        return Earlier.NONE

    def flight(self, digest: bytes) -> Flight:
        return self._by_digest[digest]

    def recorded(self, digest: bytes) -> Served:
        return self._answers[digest][0]

    def record(self, served: Served, *, delivered: bool) -> None:
        """Keep an answer for retries; the oldest of many is dropped."""
        self._answers[served.digest] = (served, delivered)
        self._answers.move_to_end(served.digest)
        while len(self._answers) > _NUM_REPLAYABLE:
            self._answers.popitem(last=False)

    def continued(self, answer_id: str) -> None:
        """A request goes on from this answer, so it was delivered, whatever a restart had left open."""
        for served, delivered in tuple(self._answers.values()):
            if served.answer.id == answer_id and not delivered:
                self._answers[served.digest] = (served, True)

    def delivered(self) -> frozenset[bytes]:
        """Digests of the answers that reached somebody."""
        return frozenset(digest for digest, (_, delivered) in self._answers.items() if delivered)

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
            for flight in flights:
                flight.waiters -= 1
                if not flight.waiters and flight.task is not None and not flight.task.done():
                    flight.wanted.clear()
                    asyncio.get_running_loop().call_later(orphan_grace_s, flight.cancel_if_orphaned)

    async def cancel_all(self) -> None:
        """End every flight; returns when all have ended."""
        tasks = [flight.task for flight in self._flights if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
