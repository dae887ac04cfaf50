"""What must be on disk before an answer leaves."""

from __future__ import annotations

from typing import Protocol

from seamless_verl.proxy.sessions import Session
from seamless_verl.trajectory.audit import LedgerEntry
from seamless_verl.trajectory.segments import TurnRecord


class Journal(Protocol):
    """Append-only memory of sessions; every method returns only once its data is safe."""

    async def opened(self, session: Session) -> None: ...

    async def append(self, session_id: str, record: TurnRecord, entry: LedgerEntry) -> None: ...

    async def closed(self, session_id: str) -> None: ...


class NullJournal:
    """Remembers nothing: a restart loses open sessions."""

    async def opened(self, session: Session) -> None:
        return None

    async def append(self, session_id: str, record: TurnRecord, entry: LedgerEntry) -> None:
        return None

    async def closed(self, session_id: str) -> None:
        return None
