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
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from seamless_verl.proxy.chat_answer import ChatAnswer
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
    answer: ChatAnswer
    match: str
    overrides: tuple[str, ...]

    def matched(self, match: str) -> Served:
        """The same answer, now that it has its place in the tree."""
        return replace(self, match=match)


class Flight:
    """One generation under way; ``wanted`` is set while anybody waits for it."""

    def __init__(self) -> None:
        self.waiters = 0
        self.wanted = asyncio.Event()
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

    async def wait(self, flight: Flight, gone: Callable[[], Awaitable[None]], *, orphan_grace_s: float) -> Served:
        """Wait for a flight until it lands or this client leaves; the last one to leave starts its grace period.

        Raises:
            ClientGone: the client left first.
            ApiError: whatever the flight ended with.
        """
        assert flight.task is not None
        flight.waiters += 1
        flight.wanted.set()
        left = asyncio.ensure_future(gone())
        try:
            await asyncio.wait({flight.task, left}, return_when=asyncio.FIRST_COMPLETED)
            if flight.task.cancelled():
                raise ApiError(409, "session_closed", "The session was closed while this answer was generated.")
            if flight.task.done():
                return flight.task.result()
            raise ClientGone
        finally:
            left.cancel()
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                flight.wanted.clear()
                asyncio.get_running_loop().call_later(orphan_grace_s, flight.cancel_if_orphaned)

    async def cancel_all(self) -> None:
        """End every flight; returns when all have ended."""
        tasks = [flight.task for flight in self._flights if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
