"""What must be on disk before an answer leaves.

Invariant: when :meth:`Journal.append` has returned, a process killed at any instant finds the turn again; when it has
raised, the turn is neither on disk nor in the tree.
"""

from __future__ import annotations

from typing import Protocol

from seamless_verl.proxy.flights import Served
from seamless_verl.proxy.sessions import Session
from seamless_verl.trajectory.audit import LedgerEntry
from seamless_verl.trajectory.segments import TurnRecord


class JournalFailed(Exception):
    """The journal could not be written; earlier data is intact."""


class Journal(Protocol):
    """Append-only memory of open sessions. Every method returns only once its data is safe, or raises JournalFailed."""

    async def opened(self, session: Session) -> None: ...

    async def append(self, session_id: str, record: TurnRecord, entry: LedgerEntry, served: Served) -> None: ...

    async def closed(self, session_id: str) -> None: ...


class NullJournal:
    """Remembers nothing: a restart loses open sessions."""

    async def opened(self, session: Session) -> None:
        return None

    async def append(self, session_id: str, record: TurnRecord, entry: LedgerEntry, served: Served) -> None:
        return None

    async def closed(self, session_id: str) -> None:
        return None
