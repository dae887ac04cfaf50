"""A journal in one SQLite file (write-ahead log), written by one thread in groups.

Whatever is waiting when the thread comes back from the disk goes into its next transaction, so that the cost of a
commit is shared by all turns that arrived meanwhile. Forgetting a session frees its pages for later ones.

Survives the death of the process at any instant (``synchronous=NORMAL``); ``durable=True`` also survives the loss of
power, at the price of an fsync per group.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sqlite3
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from seamless_verl.errors import ConfigError
from seamless_verl.proxy.calls import Answer
from seamless_verl.proxy.journal.turn_bytes import VERSION, Damaged, pack, pack_part, unpack, unpack_part
from seamless_verl.proxy.session.journal import AnsweredTurn, JournalFailed
from seamless_verl.proxy.session.sessions import Session, SessionSpec, SessionState
from seamless_verl.proxy.session.store import NUM_TOMBSTONES, SessionStore
from seamless_verl.proxy.text.pictures import StoredImage
from seamless_verl.trajectory.generation import TrajectoryError, UnfinishedPart
from seamless_verl.trajectory.tokens import pack_ids

_log = logging.getLogger(__name__)
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, key_digest BLOB, opened_at REAL, spec TEXT, state TEXT, rewards TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS turns (number INTEGER PRIMARY KEY, session_id TEXT, body BLOB);
CREATE INDEX IF NOT EXISTS turns_of ON turns (session_id);
CREATE TABLE IF NOT EXISTS images (
    session_id TEXT, number INTEGER, digest TEXT, placeholder INTEGER, token_ids BLOB, data BLOB,
    PRIMARY KEY (session_id, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS unfinished (
    session_id TEXT, answer TEXT, start INTEGER, body BLOB, PRIMARY KEY (session_id, answer, start)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS gone (number INTEGER PRIMARY KEY, id TEXT UNIQUE, key_digest BLOB, summary BLOB);
"""
_INSERT_SESSION = "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?)"
_INSERT_TURN = "INSERT INTO turns (session_id, body) VALUES (?, ?)"
_INSERT_UNFINISHED = "INSERT OR REPLACE INTO unfinished VALUES (?, ?, ?, ?)"
_DELETE_UNFINISHED = "DELETE FROM unfinished WHERE session_id = ? AND answer = ?"
_INSERT_IMAGE = "INSERT OR REPLACE INTO images VALUES (?, ?, ?, ?, ?, ?)"
_UPDATE_SESSION = "UPDATE sessions SET state = ?, rewards = ? WHERE id = ?"
_ADD_GONE = "INSERT OR IGNORE INTO gone (id, key_digest, summary) SELECT id, key_digest, ? FROM sessions WHERE id = ?"
_DELETE_SESSION = (
    "DELETE FROM turns WHERE session_id = ?",
    "DELETE FROM images WHERE session_id = ?",
    "DELETE FROM unfinished WHERE session_id = ?",
    "DELETE FROM sessions WHERE id = ?",
)
_TRIM_GONE = "DELETE FROM gone WHERE number <= (SELECT max(number) FROM gone) - ?"

_Statement = tuple[str, tuple[Any, ...]]
_T = TypeVar("_T")


class SqliteJournal:
    """See the module; one instance per file and process.

    Args:
        path: the file; made if missing.
        durable: also survive the loss of power.

    Attributes:
        earlier: answers that another session left to one; called by the journal's thread.

    Raises:
        ConfigError: the file cannot be used.
    """

    can_load = True

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self.earlier: Callable[[Session], Sequence[UnfinishedPart]] | None = None
        self._path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._waiting: list[tuple[list[_Statement], asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._unfinished: set[tuple[str, str]] = set()  # session and answer of those in the file
        try:
            self._db = self._thread.submit(connect, path, SCHEMA, durable=durable).result()
        except sqlite3.Error as error:
            self._thread.shutdown()
            raise self._unusable(error) from error

    async def opened(self, session: Session) -> None:
        spec = json.dumps(asdict(session.spec))
        values = (session.id, session.key_digest, session.opened_at, spec, session.state.value, _rewards(session))
        await self._write([(_INSERT_SESSION, values)])
        for part in await self._earlier(session):
            session.unfinished.add(part)

    async def append(self, session_id: str, turns: Sequence[AnsweredTurn]) -> None:
        statements: list[_Statement] = [(_INSERT_TURN, (session_id, pack(*turn))) for turn in turns]
        written = self._unfinished.intersection((session_id, record.generation_id) for record, _, _ in turns)
        await self._write([*statements, *((_DELETE_UNFINISHED, which) for which in written)])
        self._unfinished -= written

    def progressed(self, session_id: str, part: UnfinishedPart) -> None:
        self._unfinished.add((session_id, part.answer))
        done = self._queue([(_INSERT_UNFINISHED, (session_id, part.answer, part.start, pack_part(part)))])
        done.add_done_callback(_tell_unwritten)

    async def pictured(self, session_id: str, number: int, stored: StoredImage) -> None:
        ids = pack_ids(stored.token_ids).tobytes()
        await self._write([(_INSERT_IMAGE, (session_id, number, stored.digest, stored.placeholder, ids, stored.data))])

    async def updated(self, session: Session) -> None:
        await self._write([(_UPDATE_SESSION, (session.state.value, _rewards(session), session.id))])

    async def forgotten(self, session_id: str, summary: bytes) -> None:
        deletions = [(statement, (session_id,)) for statement in _DELETE_SESSION]
        await self._write([(_ADD_GONE, (summary, session_id)), *deletions, (_TRIM_GONE, (NUM_TOMBSTONES,))])
        self._unfinished = {which for which in self._unfinished if which[0] != session_id}

    async def summary(self, session_id: str) -> bytes:
        return await self._read(_read_summary, session_id)

    def resume(self, sessions: SessionStore) -> None:
        """Hand over every session that the last process left, and the memory of those that are gone.

        Raises:
            ConfigError: the file is damaged.
        """
        for session in self.sessions():
            sessions.adopt(session)
        for session_id, digest in self.gone():
            sessions.bury(session_id, digest)

    def gone(self) -> list[tuple[str, bytes]]:
        """Ids and key digests of the sessions that were forgotten last, the oldest first.

        Raises:
            ConfigError: the file is damaged.
        """
        return self._read_first(_read_gone)

    def sessions(self) -> list[Session]:
        """Every session that the last process left, without its turns: :meth:`load` brings those.

        Raises:
            ConfigError: the file is damaged.
        """
        return self._read_first(read_sessions)

    async def load(self, session: Session) -> None:
        images, bodies = await self._read(read_turns, session.id)
        parts = await self._read(read_unfinished, session.id)
        earlier = await self._earlier(session)  # before `restore`: then no request waits any more
        for image in images:
            session.images.add(image)
        restore(session, bodies)
        for part in earlier:
            if not session.tree.has(part.answer):
                session.unfinished.add(part)
        for part in parts:
            session.unfinished.add(part)
            self._unfinished.add((session.id, part.answer))

    async def close(self) -> None:
        """Write what is waiting and let the file go."""
        if self._writer is not None:
            await self._writer
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()

    async def _earlier(self, session: Session) -> Sequence[UnfinishedPart]:
        if self.earlier is None:
            return ()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.earlier, session)

    async def _read(self, read: Callable[[sqlite3.Connection, str], _T], session_id: str) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, read, self._db, session_id)
        except sqlite3.Error as error:
            raise JournalFailed.by(error) from error

    def _read_first(self, read: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            return self._thread.submit(read, self._db).result()
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> ConfigError:
        fix = "name another file, or mend this one (sqlite3 FILE .recover saves what can be read)"
        return ConfigError("proxy.journal", self._path, f"cannot be used as a journal: {error}", fix)

    async def _write(self, statements: list[_Statement]) -> None:
        await self._queue(statements)

    def _queue(self, statements: list[_Statement]) -> asyncio.Future[None]:
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((statements, done))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._drain())
        return done

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            group, self._waiting = self._waiting, []
            statements = [statement for item, _ in group for statement in item]
            problem: JournalFailed | None = None
            try:
                await loop.run_in_executor(self._thread, _transact, self._db, statements)
            except Exception as error:  # noqa: BLE001 - whatever it is, all of the group wait for an answer
                problem = JournalFailed.by(error)
            for _, done in group:
                if done.done():
                    continue
                if problem is None:
                    done.set_result(None)
                else:
                    done.set_exception(problem)


def check_format(db: sqlite3.Connection, *, may_be_new: bool = False) -> None:
    """Refuse a file that another version of this program wrote.

    Raises:
        sqlite3.DatabaseError: it did, or the file is no database.
    """
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version != VERSION and not (may_be_new and version == 0):
        raise sqlite3.DatabaseError(f"it was written in format {version}, this is format {VERSION}")


def connect(path: Path, schema: str, *, durable: bool = False) -> sqlite3.Connection:
    """Open a file, or make it.

    Raises:
        sqlite3.Error: it cannot be used.
    """
    # Used by one thread of its owner only; the check would also forbid closing it from there at shutdown.
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        check_format(db, may_be_new=True)
        mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise sqlite3.OperationalError(f"no write-ahead log can be kept there (journal_mode is {mode})")
        db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        db.executescript(schema)
        db.execute(f"PRAGMA user_version = {VERSION}")
    except sqlite3.Error:
        db.close()
        raise
    return db


def _transact(db: sqlite3.Connection, statements: Sequence[_Statement]) -> None:
    with db:
        db.execute("BEGIN IMMEDIATE")
        for sql, values in statements:
            db.execute(sql, values)


def read_sessions(db: sqlite3.Connection, only: str | None = None) -> list[Session]:
    """Every session in the file, or the one of this id, without its turns."""
    sessions = []
    where, values = ("", ()) if only is None else ("WHERE id = ?", (only,))
    for session_id, digest, opened_at, spec, state, rewards in db.execute(
        f"SELECT * FROM sessions {where} ORDER BY opened_at, id", values
    ):
        session = Session(
            session_id=session_id,
            key_digest=bytes(digest),
            spec=SessionSpec(**json.loads(spec)),
            opened_at=opened_at,
            is_resident=False,
        )
        session.state = SessionState(state)
        session.reward, session.rewards = json.loads(rewards)
        sessions.append(session)
    return sessions


def _read_gone(db: sqlite3.Connection) -> list[tuple[str, bytes]]:
    return [(name, bytes(digest)) for name, digest in db.execute("SELECT id, key_digest FROM gone ORDER BY number")]


def _read_summary(db: sqlite3.Connection, session_id: str) -> bytes:
    found = db.execute("SELECT summary FROM gone WHERE id = ?", (session_id,)).fetchone()
    return bytes(found[0]) if found is not None else b""


def read_turns(db: sqlite3.Connection, session_id: str) -> tuple[list[StoredImage], list[bytes]]:
    """Pictures and turns of a session as they are written, for `restore`."""
    rows = db.execute("SELECT body FROM turns WHERE session_id = ? ORDER BY number", (session_id,))
    bodies = [bytes(body) for (body,) in rows]
    fields = "digest, placeholder, token_ids, data"
    images = db.execute(f"SELECT {fields} FROM images WHERE session_id = ? ORDER BY number", (session_id,))
    return [
        StoredImage(digest=digest, placeholder=placeholder, token_ids=array("i", bytes(ids)), data=bytes(data))
        for digest, placeholder, ids, data in images
    ], bodies


def read_unfinished(db: sqlite3.Connection, session_id: str) -> list[UnfinishedPart]:
    """Parts in their order; one that is damaged ends what is known of its answer."""
    rows = db.execute("SELECT answer, start, body FROM unfinished WHERE session_id = ? ORDER BY 1, 2", (session_id,))
    parts = []
    for answer, start, body in rows:
        with contextlib.suppress(Damaged):
            parts.append(unpack_part(answer, start, bytes(body)))
    return parts


def _tell_unwritten(done: asyncio.Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        _log.warning("should this process die, an answer is begun again: what there is of it is not written: %s", error)


def restore(session: Session, bodies: Sequence[bytes]) -> list[Answer]:
    """Commit turns to an empty session, up to the first that is damaged; returns their answers."""
    answers: list[Answer] = []
    for number, body in enumerate(bodies):
        try:
            record, entry, answer = unpack(body)
            turn = session.tree.commit(record)
        except (Damaged, TrajectoryError) as error:
            session.damage = f"turn {number} of {len(bodies)} in the journal cannot be read: {error}"
            break
        session.ledger.restore(entry)
        answers.append(replace(answer, match=turn.kind.value))
    # An answer that was never continued may have died with the process: the next identical request gets it.
    continued = {said.turn.generation_id for said in session.tree.answers if said.turn and not said.is_leaf}
    session.loaded(answers, continued)
    return answers


def _rewards(session: Session) -> str:
    return json.dumps([session.reward, session.rewards])
