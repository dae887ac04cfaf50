"""Ends sessions: audits their rows, hands them over, and forgets the session once they have arrived.

::

    close ─▶ CLOSED in the journal ─▶ rows, audited ─┬─▶ written to a folder ─▶ forgotten ◀── asked again: the same
                                                     └─▶ answered ─▶ acknowledged ─▶ forgotten      rows, from there
                                                            └── asked again: the same rows

Invariant: the journal forgets a session only after a sink has written its rows or its consumer has acknowledged them
(or nobody came for them in a long time). Until then, also after a restart, closing it again gives the same rows; after
that, the rows that the sink has.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from seamless_verl.proxy.calls import ApiError, encoded
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.metrics import Counters
from seamless_verl.proxy.session.journal import Journal, JournalFailed
from seamless_verl.proxy.session.sessions import Session, SessionState
from seamless_verl.proxy.session.store import Residency, SessionStore
from seamless_verl.trajectory.rows import AuditReport, Row, audit_rows, build_rows

_log = logging.getLogger(__name__)
_NUM_RESULTS = 8  # sessions whose rows can be asked for again without work, should the first answer have been lost
_MAX_SUMMARY_BYTES = 1 << 16  # of what is kept of a session that is gone; only long metadata makes more


class HandOver:
    """Ends sessions of one proxy."""

    def __init__(
        self,
        *,
        sessions: SessionStore,
        journal: Journal,
        residency: Residency,
        limits: Limits,
        counters: Counters,
        sink: FolderSink | None,
    ) -> None:
        self._sessions = sessions
        self._journal = journal
        self._residency = residency
        self._limits = limits
        self._counters = counters
        self._sink = sink
        self._results: OrderedDict[str, bytes] = OrderedDict()
        self._closing: dict[str, asyncio.Task[bytes]] = {}
        self._tried: dict[str, float] = {}  # when sessions that are closed and not written were last tried

    async def close(
        self, session_id: str, reward: float | None = None, rewards: Mapping[str, float] | None = None
    ) -> bytes:
        """The session's rows, as the body of a response; asked again, the same.

        Raises:
            ApiError: no such session, or its rows could not be read or written; trying again may help.
        """
        known = self._results.get(session_id)
        if known is not None:
            return known
        task = self._closing.get(session_id)
        if task is None and self._sink is not None and self._sessions.is_gone(session_id):
            return await self._written(session_id, self._sink)
        if task is None:
            session = self._sessions.by_id(session_id)
            if session.state is not SessionState.CLOSED:
                session.take_reward(reward, rewards or {})
                session.state = SessionState.CLOSED
            task = self._closing[session_id] = asyncio.create_task(self._close(session))
            task.add_done_callback(lambda _: self._closing.pop(session_id, None))
        return await asyncio.shield(task)

    async def reward(self, session_id: str, reward: float | None, rewards: Mapping[str, float]) -> Session:
        """Note a reward; of a closed session only what is known already, so that a request may be repeated.

        Raises:
            ApiError: no such session, or it is closed and has another reward, or the journal failed.
        """
        session = self._sessions.by_id(session_id)
        known = (session.reward, dict(session.rewards))
        session.take_reward(reward, rewards)
        if session.state is SessionState.CLOSED and (session.reward, session.rewards) != known:
            session.reward, session.rewards = known
            raise ApiError(409, "session_closed", f"Session {session.id} is closed with reward {session.reward}.")
        await self._journal.updated(session)
        return session

    async def acknowledge(self, session_id: str) -> None:
        """Its consumer has the rows, or wants none: forget the session.

        Raises:
            ApiError: there never was such a session.
        """
        if session_id in self._closing:  # that reads the tree, which is taken apart here
            await asyncio.wait([self._closing[session_id]])
        self._results.pop(session_id, None)
        try:
            session = self._sessions.by_id(session_id)
        except ApiError as error:
            if error.status != 409:
                raise
            return
        await self._forget(session)

    async def reap(self) -> None:
        """Forget sessions whose deadline passed long ago and whose rows nobody took; those of a folder are written, one
        at a call, for who opens the next session waits for it."""
        now, unwritten = time.time(), list[Session]()
        for session in self._sessions:
            # Several look at a time, and one may have forgotten it while another one waited.
            if session.is_gone or now <= session.deadline + self._limits.expired_grace_s:
                continue
            if self._sink is not None and session.state is SessionState.CLOSED:
                unwritten.append(session)  # it could not be before; whoever closed it was told that its rows are kept
            else:
                _log.warning("session %s: nobody took its rows; forgetting it", session.id)
                await self.acknowledge(session.id)
        if unwritten:
            await self._finish(min(unwritten, key=lambda session: self._tried.get(session.id, 0.0)))

    async def resume(self) -> None:
        """Finish what an earlier process began: sessions that it closed and whose rows it may not have written."""
        if self._sink is None:
            return
        for session in self._sessions:
            if session.state is SessionState.CLOSED:
                await self._finish(session)

    async def _finish(self, session: Session) -> None:
        self._tried[session.id] = time.time()
        try:
            await self.close(session.id)
        except Exception as error:  # noqa: BLE001 - whatever keeps one from being written, the others go on
            _log.error("session %s: %s: %s", session.id, type(error).__name__, error)

    async def _close(self, session: Session) -> bytes:
        async with self._residency.hold(session):
            await session.board.cancel_all()
            await self._note(session)
            # Nothing changes the session any more, and a long one takes a tenth of a second that others need not
            # wait for.
            body, rows, report = await asyncio.to_thread(_harvest, session)
            await self._sink_rows(session, rows, report)
            # Before the block ends: it may let the turns go, and how they matched with them.
            self._audited(session, rows, report)
            summary = encoded(_summary_to_wire(session, report))
        self._results[session.id] = body
        while len(self._results) > _NUM_RESULTS:
            self._results.popitem(last=False)
        if self._sink is not None or not self._journal.can_load:
            await self._forget(session, summary if len(summary) <= _MAX_SUMMARY_BYTES else b"")
        elif session.is_idle and session.is_resident:
            session.unload()
            self._residency.drop(session)
        return body

    async def _written(self, session_id: str, sink: FolderSink) -> bytes:
        """The result of a session that was forgotten, from what it left behind."""
        try:
            summary = await self._journal.summary(session_id)
            body = await asyncio.to_thread(_read_again, session_id, summary, sink) if summary else b""
        except (JournalFailed, OSError, ValueError) as error:
            story = f"Session {session_id} is closed; its rows cannot be read: {error}."
            raise ApiError(503, "record_failed", story, retry_after_s=5.0) from None
        if not body:
            raise ApiError(409, "session_closed", f"Session {session_id} is closed; its trajectory was handed over.")
        return body

    async def _sink_rows(self, session: Session, rows: tuple[Row, ...], report: AuditReport) -> None:
        if self._sink is None:
            return
        try:
            await asyncio.to_thread(self._sink.write, session, rows, report)
        except OSError as error:
            story = f"The rows could not be written: {error}. They are kept; close the session again."
            raise ApiError(503, "record_failed", story, retry_after_s=5.0) from None

    def _audited(self, session: Session, rows: tuple[Row, ...], report: AuditReport) -> None:
        for violation in report.violations:
            _log.error("session %s: audit: %s: %s", session.id, violation.kind.value, violation.story)
        self._counters.audited(report)
        self._counters.sessions_closed += 1
        if len(rows) > self._limits.alarm_rows:
            self._counters.rows_alarms += 1
            drift = {reason.value: count for reason, count in session.tree.drift.items()}
            _log.warning(
                "session %s left %d rows (alarm above %d); why its turns did not match cleanly: %s",
                session.id,
                len(rows),
                self._limits.alarm_rows,
                drift,
            )

    async def _note(self, session: Session) -> None:
        try:
            await self._journal.updated(session)
        except JournalFailed as error:
            # The rows matter more: at worst a restart finds the session open, and its deadline ends it.
            _log.error("session %s: the journal does not know that it is closed: %s", session.id, error)

    async def _forget(self, session: Session, summary: bytes = b"") -> None:
        self._sessions.drop(session)
        self._tried.pop(session.id, None)
        self._residency.drop(session)
        await session.board.cancel_all()
        try:
            await self._journal.forgotten(session.id, summary)
        except JournalFailed as error:
            # A restart brings it back as closed, and its rows once more under the same name.
            _log.error("session %s: the journal still holds it: %s", session.id, error)
        self._counters.num_sessions = len(self._sessions)


def _read_again(session_id: str, summary: bytes, sink: FolderSink) -> bytes:
    """The body that closing a session answered, empty when its rows are there no more."""
    kept = sink.read(session_id)
    return b"" if kept is None else msgspec.json.encode({**msgspec.json.decode(summary), **kept})


def _harvest(session: Session) -> tuple[bytes, tuple[Row, ...], AuditReport]:
    """Rows of a session that has ended, audited, also as the body of a response."""
    rows = build_rows(session.tree)
    report = audit_rows(rows, session.ledger.entries)
    rows = tuple(session.images.released(row) for row in rows)
    result = _result_to_wire(session, rows, report)
    try:
        body = msgspec.json.encode(result)
    except UnicodeEncodeError:  # half a character in the metadata
        body = encoded(msgspec.to_builtins(result))
    return body, rows, report


def _result_to_wire(session: Session, rows: tuple[Row, ...], report: AuditReport) -> dict[str, Any]:
    """What closing a session answers; read back by :class:`seamless_verl.proxy.client.SessionResult`."""
    result = {**_summary_to_wire(session, report), "rows": rows}
    return {**result, **_images_to_wire(session.images.files(rows))}


def _images_to_wire(files: Mapping[str, bytes]) -> dict[str, Any]:
    """What a result says of the pictures of its rows; without any, nothing."""
    return {"images": {digest: b64encode(data).decode() for digest, data in files.items()}} if files else {}


def _summary_to_wire(session: Session, report: AuditReport) -> dict[str, Any]:
    """The result of a session but for its rows."""
    return {
        "id": session.id,
        "group": session.spec.group,
        "index": session.spec.index,
        "metadata": dict(session.spec.metadata),
        "reward": session.reward,
        "rewards": session.rewards,
        "audit": msgspec.to_builtins(report),
        "kinds": {kind.value: count for kind, count in session.tree.kinds.items()},
        "drift": {reason.value: count for reason, count in session.tree.drift.items()},
    }


class FolderSink:
    """Rows of closed sessions as files: ``rows/SESSION.jsonl`` or ``.parquet``, their pictures as ``images/DIGEST``.

    Invariant: a file appears whole and on disk, or not at all, and a row's pictures before the row.
    ``cat rows/*.jsonl`` is the whole data set, with pictures by name.

    Args:
        folder: gets the folders ``rows`` and ``images``.
        parquet: write Parquet (needs pyarrow) instead of JSON lines.
    """

    def __init__(self, folder: Path, *, parquet: bool = False) -> None:
        self._rows = folder / "rows"
        self._images = folder / "images"
        self._parquet = parquet
        for made in (self._rows, self._images):
            made.mkdir(parents=True, exist_ok=True)

    def write(self, session: Session, rows: tuple[Row, ...], report: AuditReport) -> None:
        """Returns once they are safe; writing the same session again changes nothing.

        Raises:
            OSError: they are not.
        """
        self._write_images(session.id, session.images.files(rows))
        records = [_record(session, number, row, report) for number, row in enumerate(rows)]
        with _appearing(self._path(session.id), session.id) as part:
            if self._parquet:
                _write_parquet(part, records)
            else:
                part.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
        _sync(self._rows)

    def read(self, session_id: str) -> dict[str, Any] | None:
        """The rows of a session and their pictures, as a result has them; None when they are here no more.

        Raises:
            OSError, ValueError: they cannot be read.
        """
        path = self._path(session_id)
        if not path.exists():
            return None
        rows = _read_parquet(path) if self._parquet else _read_lines(path)
        shown = {digest for row in rows for digest in row.images}
        return {"rows": rows, **_images_to_wire({digest: (self._images / digest).read_bytes() for digest in shown})}

    def _write_images(self, session_id: str, files: Mapping[str, bytes]) -> None:
        for digest, data in files.items():
            path = self._images / digest
            if not path.exists():  # it is named by what it shows, so whoever wrote it wrote the same
                with _appearing(path, session_id) as part:
                    part.write_bytes(data)
        if files:
            _sync(self._images)

    def _path(self, session_id: str) -> Path:
        return self._rows / f"{session_id}.{'parquet' if self._parquet else 'jsonl'}"


def _record(session: Session, number: int, row: Row, report: AuditReport) -> dict[str, Any]:
    """One row with whose it is; ``version_spans`` are ``[start, stop, version]``, ``turns`` as in a result."""
    return {
        "session": session.id,
        "group": session.spec.group,
        "index": session.spec.index,
        "row": number,
        "reward": session.reward,
        "rewards": msgspec.json.encode(session.rewards).decode(),
        "metadata": msgspec.json.encode(dict(session.spec.metadata)).decode(),
        "violations": len(report.violations),
        **msgspec.to_builtins(row),
    }


def _write_parquet(path: Path, records: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    tables = [{**record, "turns": msgspec.json.encode(record["turns"]).decode()} for record in records]
    schema = pyarrow.schema(
        [
            *((name, pyarrow.string()) for name in ("session", "group", "rewards", "metadata", "turns")),
            *((name, pyarrow.int64()) for name in ("index", "row", "violations", "prompt_len")),
            ("reward", pyarrow.float64()),
            ("token_ids", pyarrow.list_(pyarrow.int32())),
            ("mask", pyarrow.list_(pyarrow.int8())),
            ("log_probs", pyarrow.list_(pyarrow.float64())),
            ("version_spans", pyarrow.list_(pyarrow.list_(pyarrow.int64()))),
            ("images", pyarrow.list_(pyarrow.string())),
        ]
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(tables, schema=schema), path)


def _read_lines(path: Path) -> list[Row]:
    return [msgspec.json.decode(line, type=Row) for line in path.read_bytes().splitlines()]


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet

    tables: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    for record in tables:
        record |= {"turns": msgspec.json.decode(record["turns"]), "images": record["images"] or ()}
    return msgspec.convert(tables, list[Row])


@contextmanager
def _appearing(path: Path, session_id: str) -> Iterator[Path]:
    """Where to write a file, which then appears whole and on disk; other sessions may write the same one meanwhile."""
    part = path.with_name(f"{path.name}.{session_id}.part")
    try:
        yield part
        _sync(part)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
