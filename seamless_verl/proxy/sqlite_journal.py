"""A journal in one SQLite file (write-ahead log), written by one thread in groups.

Whatever is waiting when the thread comes back from the disk goes into its next transaction, so that the cost of a
commit is shared by all turns that arrived meanwhile. Closing a session frees its pages for later ones.

Survives the death of the process at any instant (``synchronous=NORMAL``); ``durable=True`` also survives the loss of
power, at the price of an fsync per group.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seamless_verl.errors import ConfigError
from seamless_verl.proxy.flights import Served
from seamless_verl.proxy.journal import JournalFailed
from seamless_verl.proxy.sessions import Session, SessionSpec
from seamless_verl.proxy.wire import served_from_wire, served_to_wire
from seamless_verl.trajectory.audit import LedgerEntry
from seamless_verl.trajectory.generation import FinishReason, VersionSpan
from seamless_verl.trajectory.messages import MessageKey
from seamless_verl.trajectory.segments import DriftReason, TurnRecord

_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, key_digest BLOB, opened_at REAL, spec TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS turns (
    number INTEGER PRIMARY KEY, session_id TEXT, meta TEXT, context_ids BLOB, token_ids BLOB, log_probs BLOB,
    ledger TEXT, ledger_ids BLOB, ledger_log_probs BLOB, reply TEXT);
CREATE INDEX IF NOT EXISTS turns_of ON turns (session_id);
"""
_OPENED = "INSERT INTO sessions VALUES (?, ?, ?, ?)"
_APPENDED = (
    "INSERT INTO turns (session_id, meta, context_ids, token_ids, log_probs, ledger, ledger_ids, ledger_log_probs, "
    "reply) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_FORGET = ("DELETE FROM turns WHERE session_id = ?", "DELETE FROM sessions WHERE id = ?")

_Statement = tuple[str, tuple[Any, ...]]


class SqliteJournal:
    """See the module; one instance per file and process.

    Args:
        path: the file; made if missing.
        durable: also survive the loss of power.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._waiting: list[tuple[list[_Statement], asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        try:
            self._db = self._thread.submit(_connect, path, durable).result()
        except sqlite3.Error as error:
            self._thread.shutdown()
            raise ConfigError("proxy.journal", path, f"cannot be used as a journal: {error}", "another file") from error

    async def opened(self, session: Session) -> None:
        spec = json.dumps(asdict(session.spec))
        await self._write([(_OPENED, (session.id, session.key_digest, session.opened_at, spec))])

    async def append(self, session_id: str, record: TurnRecord, entry: LedgerEntry, served: Served) -> None:
        reply = json.dumps(served_to_wire(served))
        await self._write([(_APPENDED, (session_id, *_record_columns(record), *_entry_columns(entry), reply))])

    async def closed(self, session_id: str) -> None:
        await self._write([(statement, (session_id,)) for statement in _FORGET])

    def sessions(self) -> list[Session]:
        """Every session that was open when the last process ended, with all its answered turns."""
        return self._thread.submit(_read, self._db).result()

    async def close(self) -> None:
        """Write what is waiting and let the file go."""
        if self._writer is not None:
            await self._writer
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()

    async def _write(self, statements: list[_Statement]) -> None:
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((statements, done))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._drain())
        await done

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            group, self._waiting = self._waiting, []
            statements = [statement for item, _ in group for statement in item]
            problem: JournalFailed | None = None
            try:
                await loop.run_in_executor(self._thread, _transact, self._db, statements)
            except sqlite3.Error as error:
                problem = JournalFailed(f"{type(error).__name__}: {error}")
            for _, done in group:
                if done.done():
                    continue
                if problem is None:
                    done.set_result(None)
                else:
                    done.set_exception(problem)


def _connect(path: Path, durable: bool) -> sqlite3.Connection:
    # Used by the journal's own thread only; the check would also forbid closing it from there at shutdown.
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError(f"it was written in format {version}, this is format {_VERSION}")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        db.executescript(_SCHEMA)
        db.execute(f"PRAGMA user_version = {_VERSION}")
    except sqlite3.Error:
        db.close()
        raise
    return db


def _transact(db: sqlite3.Connection, statements: Sequence[_Statement]) -> None:
    db.execute("BEGIN IMMEDIATE")
    try:
        for sql, values in statements:
            db.execute(sql, values)
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _read(db: sqlite3.Connection) -> list[Session]:
    sessions = []
    for session_id, digest, opened_at, spec in db.execute("SELECT * FROM sessions ORDER BY opened_at, id"):
        session = Session(
            session_id=session_id,
            key_digest=bytes(digest),
            spec=SessionSpec(**json.loads(spec)),
            opened_at=opened_at,
        )
        turns = db.execute(
            "SELECT meta, context_ids, token_ids, log_probs, ledger, ledger_ids, ledger_log_probs, reply "
            "FROM turns WHERE session_id = ? ORDER BY number",
            (session_id,),
        )
        replies: list[Served] = []
        for meta, context_ids, token_ids, log_probs, ledger, ledger_ids, ledger_log_probs, reply in turns:
            record = _record_of(meta, context_ids, token_ids, log_probs)
            turn = session.tree.commit(record)
            session.ledger.restore(_entry_of(record.generation_id, ledger, ledger_ids, ledger_log_probs))
            replies.append(served_from_wire(json.loads(reply), match=turn.kind.value))
            session.num_generated += len(record.token_ids)
            session.num_started += 1
        # An answer that was never continued may have died with the process: the next identical request gets it.
        for served, answer in zip(replies, session.tree.answers, strict=True):
            session.board.record(served, delivered=not answer.is_leaf)
        sessions.append(session)
    return sessions


_HEX_FIELDS = ("request_digest", "tools_digest", "chain", "spelled", "spelled_before", "system")


def _record_columns(record: TurnRecord) -> tuple[str, bytes, bytes, bytes]:
    meta: dict[str, Any] = {name: getattr(record, name).hex() for name in _HEX_FIELDS}
    meta |= {
        name: getattr(record, name) for name in ("generation_id", "anchor", "anchor_is_given", "num_cut", "detail")
    }
    meta["version_spans"] = [[span.version, span.num_tokens] for span in record.version_spans]
    meta["finish_reason"] = record.finish_reason.value
    meta["forked"] = record.forked.value if record.forked is not None else None
    meta["realigned"] = [reason.value for reason in record.realigned]
    meta["keys"] = [
        [
            key.identity.hex(),
            key.content.hex(),
            key.arguments.hex(),
            key.reasoning.hex(),
            key.call_ids.hex(),
            key.is_assistant,
        ]
        for key in record.keys
    ]
    blobs = (record.context_ids.tobytes(), record.token_ids.tobytes(), record.log_probs.tobytes())
    return json.dumps(meta), *blobs


def _record_of(text: str, context_ids: bytes, token_ids: bytes, log_probs: bytes) -> TurnRecord:
    meta = json.loads(text)
    for name in _HEX_FIELDS:
        meta[name] = bytes.fromhex(meta[name])
    keys = [(*(bytes.fromhex(part) for part in parts), is_assistant) for *parts, is_assistant in meta.pop("keys")]
    forked = meta.pop("forked")
    return TurnRecord(
        **{name: value for name, value in meta.items() if name not in ("version_spans", "finish_reason", "realigned")},
        keys=tuple(MessageKey(*key) for key in keys),
        forked=DriftReason(forked) if forked is not None else None,
        realigned=tuple(DriftReason(reason) for reason in meta["realigned"]),
        version_spans=tuple(VersionSpan(version=version, num_tokens=n) for version, n in meta["version_spans"]),
        finish_reason=FinishReason(meta["finish_reason"]),
        context_ids=array("i", context_ids),
        token_ids=array("i", token_ids),
        log_probs=array("d", log_probs),
    )


def _entry_columns(entry: LedgerEntry) -> tuple[str, bytes, bytes]:
    spans = [[span.version, span.num_tokens] for span in entry.version_spans]
    ledger = json.dumps([entry.prompt_digest.hex(), entry.prompt_len, spans])
    return ledger, entry.token_ids.tobytes(), entry.log_probs.tobytes()


def _entry_of(generation_id: str, text: str, token_ids: bytes, log_probs: bytes) -> LedgerEntry:
    digest, prompt_len, spans = json.loads(text)
    return LedgerEntry(
        generation_id=generation_id,
        prompt_digest=bytes.fromhex(digest),
        prompt_len=prompt_len,
        token_ids=array("i", token_ids),
        log_probs=array("d", log_probs),
        version_spans=tuple(VersionSpan(version=version, num_tokens=n) for version, n in spans),
    )
