"""What must be on disk before an answer is sent.

Invariant: when :meth:`Journal.append` has returned, a process killed at any instant finds the turns again; when it has
raised, none of them is on disk or in the tree; killed in between, it finds all of them or none. A session stays in the
journal until :meth:`Journal.forgotten`, which is called only when its rows were handed over or are not wanted.
The journal then keeps enough of it to tell late requests that it is closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from seamless_verl.proxy.calls import Answer, ApiError
from seamless_verl.proxy.session.sessions import Session
from seamless_verl.proxy.text.pictures import StoredImage
from seamless_verl.trajectory.generation import UnfinishedPart
from seamless_verl.trajectory.rows import LedgerEntry
from seamless_verl.trajectory.tokens import TurnRecord

AnsweredTurn = tuple[TurnRecord, LedgerEntry, Answer]


class JournalFailed(ApiError):
    """The journal could not be written or read, so that nothing of the request is; earlier data is intact."""

    def __init__(self, story: str) -> None:
        super().__init__(
            503, "journal_failed", f"The journal could not be written or read: {story}.", retry_after_s=5.0
        )

    @classmethod
    def by(cls, error: Exception) -> JournalFailed:
        return cls(f"{type(error).__name__}: {error}")


class Journal(Protocol):
    """Sessions on disk, which outlive the process. Every method returns only once its data is safe.

    Raises (all methods):
        JournalFailed: see there.
    """

    @property
    def can_load(self) -> bool:
        """Whether :meth:`load` can bring back what a session let go."""
        ...

    async def opened(self, session: Session) -> None: ...

    async def append(self, session_id: str, turns: Sequence[AnsweredTurn]) -> None:
        """One request has been answered, with as many turns as it asked for samples."""
        ...

    def progressed(self, session_id: str, part: UnfinishedPart) -> None:
        """An unfinished answer has more tokens. Returns before they are safe: lost tokens are generated again."""
        ...

    async def pictured(self, session_id: str, number: int, stored: StoredImage) -> None:
        """Record a picture before a turn that contains it; may be called again for the same one."""
        ...

    async def updated(self, session: Session) -> None:
        """State and rewards of the session have changed."""
        ...

    async def forgotten(self, session_id: str, summary: bytes) -> None:
        """Keep no more of a session than its id, its key's digest, and ``summary``; of the latest sessions, that is."""
        ...

    async def summary(self, session_id: str) -> bytes:
        """What :meth:`forgotten` was given for a session; empty when that is not known any more."""
        ...

    async def load(self, session: Session) -> None:
        """Commit all answered turns to a session that holds none, and give it its unfinished answers."""
        ...


class NullJournal:
    """Keeps nothing: a restart loses open sessions, and a session stays in memory until it is closed."""

    can_load = False

    async def opened(self, session: Session) -> None:
        return None

    async def append(self, session_id: str, turns: Sequence[AnsweredTurn]) -> None:
        return None

    def progressed(self, session_id: str, part: UnfinishedPart) -> None:
        return None

    async def pictured(self, session_id: str, number: int, stored: StoredImage) -> None:
        return None

    async def updated(self, session: Session) -> None:
        return None

    async def forgotten(self, session_id: str, summary: bytes) -> None:
        return None

    async def summary(self, session_id: str) -> bytes:
        return b""

    async def load(self, session: Session) -> None:
        raise JournalFailed(f"session {session.id} was never written down")
