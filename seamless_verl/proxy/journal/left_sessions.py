"""Answers to agents that died with their rollout worker, for the agents that make their attempts again.

::

    worker dies ─▶ `leave`: what its journal has of open sessions is copied to left.sqlite
        └─▶ its groups begin again ─▶ a session per attempt ─▶ `LeftSessions.of`: the answers that the dead worker's had
                                                                  └─ its requests claim them like unfinished ones

Attempts that were over, in a group that was not, are found in kept.sqlite. An agent that asks what the dead one asked
is answered the same, token for token, and its unfinished answer goes on; whatever it asks otherwise is generated.

Invariant: a session hands over to one other, of the same attempt; what nobody asks for again is in no row.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from seamless_verl.proxy.journal.kept_sessions import KEPT
from seamless_verl.proxy.journal.sqlite_journal import check_format, read_sessions, read_turns, read_unfinished
from seamless_verl.proxy.journal.turn_bytes import Damaged, unpack
from seamless_verl.proxy.session.sessions import Session
from seamless_verl.proxy.session.unfinished import UnfinishedPart
from seamless_verl.trajectory.generation import Generation

LEFT = "left.sqlite"
_log = logging.getLogger(__name__)
_BUSY_S = 5.0


def leave(journal: Path) -> None:
    """Move a dead process's journal out of the way of the next one's; that of the process before it goes."""
    left = journal.with_name(LEFT)
    _remove(left)
    if journal.exists():
        try:
            with closing(_open(journal)) as dead, closing(sqlite3.connect(left)) as copy:
                dead.backup(copy)  # its process may still have it open
        except sqlite3.Error as error:
            _log.warning("what a dead worker's agents were answered is generated again: %s: %s", journal, error)
            _remove(left)
    _remove(journal)


class LeftSessions:
    """Those beside a journal, by attempt.

    Args:
        before: when the process began that goes on; sessions since then are its own.
    """

    def __init__(self, journal: Path, *, before: float) -> None:
        self._heirs: dict[str, str] = {}
        self._known: dict[tuple[str, int], tuple[Path, str]] = {}
        left = journal.with_name(LEFT)
        for file in (journal.with_name(KEPT), left) if left.exists() else ():
            try:
                self._known.update(_attempts(file, before))
            except sqlite3.Error as error:
                _tell(file, error)

    def of(self, heir: Session) -> list[UnfinishedPart]:
        """What the earlier session of an attempt was answered, in order, then what it had of unfinished answers."""
        file, name = self._known.get((heir.spec.group, heir.spec.index), (None, ""))
        if file is None or self._heirs.setdefault(name, heir.id) != heir.id:
            return []
        try:
            with closing(_open(file)) as db:
                same = [session for session in read_sessions(db, name) if session.spec == heir.spec]
                return [*_whole(read_turns(db, name)[1]), *read_unfinished(db, name)] if same else []
        except sqlite3.Error as error:
            _tell(file, error)
            return []


def _attempts(file: Path, before: float) -> Iterator[tuple[tuple[str, int], tuple[Path, str]]]:
    """The latest session of each attempt comes last."""
    with closing(_open(file)) as db:
        sessions = db.execute("SELECT id, spec FROM sessions WHERE opened_at < ? ORDER BY opened_at", (before,))
        for name, told in sessions.fetchall():
            spec = json.loads(told)
            yield (spec["group"], spec["index"]), (file, name)


def _whole(bodies: Sequence[bytes]) -> Iterator[UnfinishedPart]:
    """Answers as parts that lack nothing, up to the first that is damaged."""
    for body in bodies:
        try:
            record, entry, answer = unpack(body)
        except Damaged:
            return
        tokens = Generation(
            token_ids=entry.token_ids,
            log_probs=entry.log_probs,
            version_spans=entry.version_spans,
            finish_reason=record.finish_reason,
        )
        yield UnfinishedPart(
            answer=record.generation_id, digest=answer.digest, prompt=entry.prompt_digest, start=0, tokens=tokens
        )


def _open(file: Path) -> sqlite3.Connection:
    """
    Raises:
        sqlite3.Error: it is not there, or no journal of this version.
    """
    db = sqlite3.connect(f"{file.absolute().as_uri()}?mode=rw", uri=True, timeout=_BUSY_S)
    try:
        check_format(db)
    except sqlite3.Error:
        db.close()
        raise
    return db


def _remove(file: Path) -> None:
    for there in file.parent.glob(f"{file.name}*"):
        there.unlink(missing_ok=True)


def _tell(file: Path, error: sqlite3.Error) -> None:
    _log.warning("what a dead worker's agents were answered is generated again: %s: %s", file, error)
