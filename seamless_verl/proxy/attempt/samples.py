"""One sample of a request, and its siblings (``n`` > 1): they share one reservation and one fate.

::

    generated ─┐
    generated ─┼─▶ all there, and waited for ─▶ LANDING: one entry in the journal, then the tree ─▶ all answers
    generated ─┘       └─ one has failed, or is cancelled ─▶ none is recorded

Invariant: all samples of a request are in the journal and in the tree, or none is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from seamless_verl.proxy.calls import ApiError, Call
from seamless_verl.proxy.session.flights import Fate, Flight, Served
from seamless_verl.proxy.session.journal import AnsweredTurn
from seamless_verl.proxy.session.sessions import Session
from seamless_verl.trajectory.messages import Transcript

Record = Callable[[Session, Sequence[AnsweredTurn]], Coroutine[Any, Any, list[Served]]]


class Siblings:
    """The samples of one request; see the module.

    Their tokens are reserved in one go, so that no sample holds some while it waits for another that needs more.
    """

    def __init__(self, session: Session, num: int) -> None:
        self._session = session
        self._num = num
        self._num_under_way = num
        self._share = 0
        self._generated: dict[int, tuple[Flight, AnsweredTurn]] = {}
        self._decided = asyncio.Event()
        self._failed = False
        self._landing: asyncio.Task[dict[int, Served]] | None = None

    async def reserve(self, wanted: int) -> int:
        """How many tokens of the session's budget this sample may generate, at most ``wanted``.

        The first that finds enough reserves for all of them, so that none holds tokens while it waits for another.

        Raises:
            ApiError: 429, nothing is left; or another one failed.
        """
        while not self._share:
            if self._failed:
                raise _sibling_failed()
            self._share = self._session.reserve(wanted, self._num_under_way)
            if not self._share:
                await self._session.released()
        return min(wanted, self._share)

    async def land(self, number: int, flight: Flight, turn: AnsweredTurn, record: Record) -> Served:
        """Sample ``number`` is generated; returns its answer once ``record`` has taken all of them.

        Raises:
            ApiError: another one failed, or they cannot be recorded.
        """
        self._generated[number] = flight, turn
        if len(self._generated) == self._num and not self._failed:
            self._landing = asyncio.create_task(self._land(record))
            self._decided.set()
        await self._decided.wait()
        if self._landing is None:
            raise _sibling_failed()
        await asyncio.wait({self._landing})
        if self._landing.cancelled():
            raise _sibling_failed()
        return self._landing.result()[number]

    async def _land(self, record: Record) -> dict[int, Served]:
        flights = [flight for flight, _ in self._generated.values()]
        while (orphan := next((flight for flight in flights if not flight.wanted.is_set()), None)) is not None:
            await orphan.wanted.wait()
        if any(flight.fate is Fate.CANCELLED for flight in flights):
            raise asyncio.CancelledError
        for flight in flights:
            flight.fate = Fate.LANDING
        numbers = sorted(self._generated)
        answers = await record(self._session, [self._generated[number][1] for number in numbers])
        return dict(zip(numbers, answers, strict=True))

    def ended(self, flight: Flight) -> None:
        """One has ended, and gives its share back; without having landed, it takes the others along."""
        if flight.fate is not Fate.LANDING:
            self._failed = True
            self._decided.set()
            if self._landing is not None:
                self._landing.cancel()
        self._num_under_way -= 1
        self._session.release(self._share)


def _sibling_failed() -> ApiError:
    return ApiError(503, "sibling_failed", "Another sample of this request failed.", retry_after_s=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample to generate.

    Attributes:
        number: which of the request's samples it is, from 0.
        sampling: what the engine will be asked for, ``max_tokens`` still as wished.
        overrides: what the trainer decided against the agent's wish so far.
        remember: to be called once the request turns out to be one that the model can answer.
    """

    session: Session
    call: Call
    number: int
    transcript: Transcript
    digest: bytes
    sampling: dict[str, Any]
    overrides: tuple[str, ...]
    siblings: Siblings
    remember: Callable[[], None]
