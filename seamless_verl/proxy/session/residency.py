"""Which sessions have their turns in memory: those in use, and the most recently used of the others.

::

    RESIDENT ──idle, and memory is wanted──▶ SPILLED ──next request──▶ RESIDENT
              (nothing to write: the journal already has every turn)

Invariant: idle resident sessions together weigh at most ``max_resident_bytes``, where the journal can load.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from seamless_verl.proxy.call_errors import ApiError
from seamless_verl.proxy.metrics import Counters
from seamless_verl.proxy.session.journal import Journal, JournalFailed
from seamless_verl.proxy.session.sessions import Session


class Residency:
    """See the module.

    Args:
        max_resident_bytes: of all sessions together, as :attr:`Session.weight_bytes` estimates it.
    """

    def __init__(self, *, journal: Journal, counters: Counters, max_resident_bytes: int) -> None:
        self._journal = journal
        self._counters = counters
        self._max_bytes = max_resident_bytes
        self._resident: OrderedDict[str, tuple[Session, int]] = OrderedDict()
        self._total = 0
        self._loading: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def hold(self, session: Session) -> AsyncIterator[None]:
        """While the block runs, the session's turns are in memory.

        Raises:
            ApiError: 503, they could not be brought back.
        """
        session.num_users += 1
        try:
            if not session.is_resident:
                await self._load(session)
            yield
        finally:
            session.num_users -= 1
            self._weigh(session)
            self._make_room()

    def drop(self, session: Session) -> None:
        """The session is gone for good."""
        self._total -= self._resident.pop(session.id, (session, 0))[1]
        self._counters.resident_bytes = self._total

    async def _load(self, session: Session) -> None:
        task = self._loading.get(session.id)
        if task is None:
            task = self._loading[session.id] = asyncio.create_task(self._journal.load(session))
            task.add_done_callback(lambda _: self._loading.pop(session.id, None))
            self._counters.sessions_loaded += 1
        try:
            await asyncio.shield(task)
        except JournalFailed as error:
            story = f"Session {session.id} cannot be brought back from the journal: {error}."
            raise ApiError(503, "journal_failed", story, retry_after_s=5.0) from None

    def _weigh(self, session: Session) -> None:
        known = self._resident.pop(session.id, None)
        self._total -= known[1] if known is not None else 0
        # One that was dropped while requests still held it must not come back when they leave.
        weight = session.weight_bytes if session.is_resident and not session.is_gone else 0
        if weight:
            self._resident[session.id] = (session, weight)
            self._total += weight

    def _make_room(self) -> None:
        if self._journal.can_load and self._total > self._max_bytes:
            for session, _ in tuple(self._resident.values()):
                if session.is_idle:
                    session.unload()
                    self.drop(session)
                    self._counters.sessions_spilled += 1
                    if self._total <= self._max_bytes:
                        break
        self._counters.resident_bytes = self._total
