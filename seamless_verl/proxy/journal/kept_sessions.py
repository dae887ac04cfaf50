"""Sessions that are over, kept whole for `seamless-verl watch`.

::

    forgotten ──▶ copied from journal.sqlite to kept.sqlite ──▶ deleted from journal.sqlite
                       └ the oldest leave when the file is full

Keeping is a favour: an answer never waits for it (a thread and a connection of its own), and where it fails the run
goes on without, after one line in the log.

Invariant: a session in the file is there with all its turns; the file stays below its bound (and one session).
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from seamless_verl.proxy.journal.sqlite_journal import SCHEMA, SqliteJournal, connect

KEPT = "kept.sqlite"
_log = logging.getLogger(__name__)
# `number` only grows, so that a reader knows what is new to it.
_SCHEMA = f"""{SCHEMA}
CREATE TABLE IF NOT EXISTS kept (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, num_bytes INTEGER);
"""
_TABLES = ("sessions", "turns", "images")
_LEAVES = (
    *(f"DELETE FROM {table} WHERE {'id' if table == 'sessions' else 'session_id'} = ?" for table in _TABLES),
    "DELETE FROM kept WHERE id = ?",
)
_COPIED = (
    "INSERT INTO sessions SELECT * FROM journal.sessions WHERE id = ?",
    "INSERT INTO turns (session_id, body) SELECT session_id, body FROM journal.turns WHERE session_id = ? "
    "ORDER BY number",
    "INSERT INTO images SELECT * FROM journal.images WHERE session_id = ?",
)
_SIZE = (
    "SELECT (SELECT total(length(body)) FROM turns WHERE session_id = :id) "
    "+ (SELECT total(length(data)) FROM images WHERE session_id = :id)"
)


class KeepingJournal(SqliteJournal):
    """A journal that keeps what it forgets, in ``kept.sqlite`` beside it.

    Args:
        path: as `SqliteJournal`.
        max_bytes: of turns and pictures in ``kept.sqlite``; above it the oldest sessions leave.
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        super().__init__(path)
        self._keeper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kept")
        self._kept: _KeptFile | None = None
        try:
            self._kept = self._keeper.submit(_KeptFile, path, max_bytes).result()
        except sqlite3.Error as error:
            self._stop(error)

    async def forgotten(self, session_id: str, summary: bytes) -> None:
        if self._kept is not None:
            try:
                await asyncio.get_running_loop().run_in_executor(self._keeper, self._kept.take, session_id)
            except sqlite3.Error as error:
                self._stop(error)
        await super().forgotten(session_id, summary)

    async def close(self) -> None:
        if self._kept is not None:
            await asyncio.get_running_loop().run_in_executor(self._keeper, self._kept.close)
        self._keeper.shutdown()
        await super().close()

    def _stop(self, error: sqlite3.Error) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            self._keeper.submit(kept.close)
        _log.warning("sessions that end from now on are not kept for `seamless-verl watch`: %s", error)


class _KeptFile:
    """``kept.sqlite`` beside a journal, for one thread.

    Raises:
        sqlite3.Error: it cannot be used, or not any more.
    """

    def __init__(self, journal: Path, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._db = connect(journal.with_name(KEPT), _SCHEMA)
        try:
            self._db.execute("ATTACH ? AS journal", (str(journal),))
            self._num_bytes = self._sum()
        except sqlite3.Error:
            self._db.close()
            raise

    def take(self, session_id: str) -> None:
        """Copy a session out of the journal, whose own thread may write meanwhile. If the journal does not have it, the
        copy stays as it is."""
        num_bytes = self._num_bytes
        with self._db:
            self._db.execute("BEGIN")
            if self._db.execute("SELECT 1 FROM journal.sessions WHERE id = ?", (session_id,)).fetchone() is None:
                return
            num_bytes -= self._leave(session_id)  # there already if a process died before it was forgotten
            for sql in _COPIED:
                self._db.execute(sql, (session_id,))
            size = self._db.execute(_SIZE, {"id": session_id}).fetchone()[0]
            self._db.execute("INSERT INTO kept (id, num_bytes) VALUES (?, ?)", (session_id, size))
            num_bytes += size
            while num_bytes > self._max_bytes:
                oldest = self._db.execute("SELECT id FROM kept ORDER BY number LIMIT 1").fetchone()[0]
                if oldest == session_id:
                    break
                num_bytes -= self._leave(oldest)
        self._num_bytes = num_bytes

    def close(self) -> None:
        self._db.close()

    def _leave(self, session_id: str) -> float:
        """Delete a session; returns its bytes."""
        found = self._db.execute("SELECT num_bytes FROM kept WHERE id = ?", (session_id,)).fetchone()
        if found is None:
            return 0
        for sql in _LEAVES:
            self._db.execute(sql, (session_id,))
        return float(found[0])

    def _sum(self) -> float:
        return float(self._db.execute("SELECT total(num_bytes) FROM kept").fetchone()[0])
