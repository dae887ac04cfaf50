"""All sessions of one process, and which of them have their turns in memory.

::

    RESIDENT ──idle, and memory is wanted──▶ SPILLED ──next request──▶ RESIDENT
              (nothing to write: the journal already has every turn)

Keys are kept as digests only. Looking a key up compares digests, whose bytes an attacker cannot steer, and the final
comparison takes constant time.

Invariant: idle resident sessions together weigh at most ``max_resident_bytes``, where the journal can load.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

from seamless_verl.proxy.calls import ApiError
from seamless_verl.proxy.metrics import Counters
from seamless_verl.proxy.session.address_book import KEY_PREFIX
from seamless_verl.proxy.session.journal import Journal
from seamless_verl.proxy.session.sessions import Session, SessionSpec, SessionState

NUM_TOMBSTONES = 10_000  # sessions that are remembered to be gone


class SessionStore:
    """All sessions of one process, by id and by key; ids and keys begin with ``prefix``.

    One that was closed is found until its rows are handed over. After that it leaves its id and key digest behind (the
    last `NUM_TOMBSTONES` do), so that late agents are told what happened instead of being taken for strangers.

    Args:
        on_drop: told of the id of every session that has ended.
    """

    def __init__(self, *, prefix: str = "", on_drop: Callable[[str], None] = lambda session_id: None) -> None:
        self._prefix = prefix
        self._on_drop = on_drop
        self._by_id: dict[str, Session] = {}
        self._by_key: dict[bytes, Session] = {}
        self._gone: OrderedDict[bytes, str] = OrderedDict()
        self._gone_ids: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Any:
        return iter(tuple(self._by_id.values()))

    def open(self, spec: SessionSpec, *, now: float) -> tuple[Session, str]:
        """A new session and its key; the key exists nowhere else."""
        api_key = f"{KEY_PREFIX}{self._prefix}{secrets.token_urlsafe(24)}"
        session = Session(
            session_id=f"{self._prefix}{secrets.token_hex(12)}",
            key_digest=key_digest(api_key),
            spec=spec,
            opened_at=now,
        )
        self.adopt(session)
        return session, api_key

    def adopt(self, session: Session) -> None:
        """Take over a session, e.g. one that an earlier process left in its journal."""
        self._by_id[session.id] = session
        self._by_key[session.key_digest] = session

    def bury(self, session_id: str, digest: bytes) -> None:
        """Note that a session, perhaps of an earlier process, no longer exists."""
        self._gone[digest] = session_id
        self._gone_ids.add(session_id)
        while len(self._gone) > NUM_TOMBSTONES:
            self._gone_ids.discard(self._gone.popitem(last=False)[1])

    def is_gone(self, session_id: str) -> bool:
        return session_id in self._gone_ids

    def by_id(self, session_id: str) -> Session:
        session = self._by_id.get(session_id)
        if session is not None:
            return session
        if session_id in self._gone_ids:
            raise ApiError(409, "session_closed", f"Session {session_id} is closed; its trajectory was handed over.")
        raise ApiError(404, "session_not_found", f"There is no session {session_id[:64]!r}.")

    def by_key(self, api_key: str) -> Session:
        digest = key_digest(api_key)
        session = self._by_key.get(digest)
        if session is not None and hmac.compare_digest(session.key_digest, digest):
            return session
        if digest in self._gone:
            raise ApiError(409, "session_closed", "The session of this key is closed; its trajectory was handed over.")
        raise ApiError(401, "invalid_api_key", "This API key belongs to no session.")

    def drop(self, session: Session) -> None:
        """Forget a session's tokens; late requests still learn that it is closed."""
        session.state, session.is_gone = SessionState.CLOSED, True
        if self._by_id.pop(session.id, None) is None:
            return
        del self._by_key[session.key_digest]
        self.bury(session.id, session.key_digest)
        session.tree.dissolve()
        self._on_drop(session.id)


def key_digest(api_key: str) -> bytes:
    return sha256(api_key.encode("utf-8", "surrogatepass")).digest()


def same_key(one: str, other: str) -> bool:
    """Whether two keys are equal, in constant time."""
    return hmac.compare_digest(key_digest(one), key_digest(other))


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
        await asyncio.shield(task)

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
