"""Answers to agents that died with their rollout worker, for the agents that make their attempts again.

::

    worker dies ─▶ `make_way`: its journal is copied to left.sqlite
        └─▶ its groups begin again ─▶ a session per attempt ─▶ `LeftSessions.of`: the answers that the dead worker's had
                                                                  └─ its requests claim them like unfinished ones

Attempts that were over, in a group that was not, are found in kept.sqlite, where the journal's list of forgotten
sessions names them. An agent that asks what the dead one asked is answered the same, token for token, and its
unfinished answer goes on; whatever it asks otherwise is generated.

Invariant: a session hands over to one other, of the same attempt under the same reservation in the same life of a run;
what nobody asks for again is in no row.
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
from seamless_verl.trajectory.generation import Generation, UnfinishedPart

LEFT = "left.sqlite"
_LIFE = "life"
_log = logging.getLogger(__name__)
_BUSY_S = 5.0
_UNREADABLE = (sqlite3.Error, ValueError, TypeError, KeyError)
_ALL = "SELECT id, spec FROM sessions ORDER BY opened_at"
_CLOSED = "SELECT id, spec FROM sessions WHERE state = 'closed' ORDER BY opened_at"  # the others were given up


def make_way(journal: Path, life: str, *, is_successor: bool) -> None:
    """Remove what an earlier process left where the next one's journal will be.

    Args:
        life: of the run; each has its own. What was left in another one is given to nobody.
        is_successor: of a worker that died, whose journal is copied first. If that one had not come to write any, what
            its own predecessor left still counts.
    """
    left, mark = journal.with_name(LEFT), journal.with_name(_LIFE)
    if not (is_successor and mark.is_file() and mark.read_text() == life):
        _remove(left)
    elif journal.is_file():
        try:
            with closing(_open(journal)) as dead, closing(sqlite3.connect(left)) as copy:
                dead.backup(copy)  # its process may still have it open
        except sqlite3.Error as error:
            _tell(journal, error)
            _remove(left)
    _remove(journal)
    mark.write_text(life)


class LeftSessions:
    """Those beside a journal, by attempt."""

    def __init__(self, journal: Path) -> None:
        self._heirs: dict[str, str] = {}
        self._known: dict[tuple[str, int], tuple[Path, str]] = {}
        left, kept = journal.with_name(LEFT), journal.with_name(KEPT)
        if not left.exists():
            return
        try:
            with closing(_open(left)) as db:
                forgotten = {name for (name,) in db.execute("SELECT id FROM gone")}
                not_forgotten = dict(_attempts(db, left, _ALL))
            if kept.exists():
                with closing(_open(kept)) as db:
                    self._known.update(one for one in _attempts(db, kept, _CLOSED) if one[1][1] in forgotten)
            self._known |= not_forgotten
        except _UNREADABLE as error:
            _tell(left, error)

    def of(self, heir: Session) -> list[UnfinishedPart]:
        """What the earlier session of an attempt was answered, in order, then what it had of unfinished answers."""
        file, name = self._known.get((heir.spec.group, heir.spec.index), (None, ""))
        if file is None or self._heirs.setdefault(name, heir.id) != heir.id:
            return []
        try:
            with closing(_open(file)) as db:
                same = [session for session in read_sessions(db, name) if session.spec == heir.spec]
                return [*_answers(read_turns(db, name)[1]), *read_unfinished(db, name)] if same else []
        except _UNREADABLE as error:
            _tell(file, error)
            return []


def _attempts(db: sqlite3.Connection, file: Path, which: str) -> Iterator[tuple[tuple[str, int], tuple[Path, str]]]:
    """Of an attempt the latest session comes last."""
    for name, told in db.execute(which):
        spec = json.loads(told)
        yield (spec["group"], spec["index"]), (file, name)


def _answers(bodies: Sequence[bytes]) -> Iterator[UnfinishedPart]:
    """Recorded answers as parts that lack nothing, up to the first that is damaged."""
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
    """Open a journal that another process has left.

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
        if there.is_file():
            there.unlink()


def _tell(file: Path, error: Exception) -> None:
    _log.warning("what a dead worker's agents were answered is generated again: %s: %s", file, error)
