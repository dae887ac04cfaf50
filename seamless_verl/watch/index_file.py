"""The file of an index: in the first folder where it can be written and no other server has it; anew if it is old.

What every look asks of it is held in memory, too: a long run has thousands of files and steps that do not change.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_SHARE = 0.0025  # of the time, for the summary of a step that changes all the time


class Source(NamedTuple):
    """How far a file has been read.

    Attributes:
        mark: where to read on: a place in the file, or a number in the journal.
        problem: why it could not be read.
        changed_ns: when it had been changed last.
        unread: lines that are no records.
    """

    mark: int = 0
    problem: str = ""
    changed_ns: int = 0
    unread: int = 0


class Read(NamedTuple):
    """What reading on in a file came to.

    Attributes:
        mark: where to read on next time.
        goes_on: there is more in it than was read now.
        unread: lines that are no records, of the whole file so far.
    """

    mark: int
    goes_on: bool = False
    unread: int = 0


class Sources:
    """How far each file of the run was read; names are those in the run's folder."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.known = {file: Source(*values) for file, *values in db.execute("SELECT * FROM sources")}

    def note(self, file: str, source: Source) -> None:
        self.known[file] = source
        self._db.execute("INSERT OR REPLACE INTO sources VALUES (?, ?, ?, ?, ?)", (file, *source))

    def problems(self) -> list[tuple[str, str]]:
        """Files that could not be read, or not all lines of which, and why."""
        bad = ((file, source) for file, source in self.known.items() if source.problem or source.unread)
        return [(file, "; ".join(filter(None, (s.problem, _unread(s.unread))))) for file, s in bad]


def _unread(count: int) -> str:
    lines = "line is" if count == 1 else "lines are"
    return f"{count} {lines} no record that this version can read, and left out" if count else ""


class Summaries:
    """The line of each step in the list of steps, kept until attempts of the step change."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        # By step: its line, until when that is good even if attempts have changed, and whether none has.
        self._held: dict[int | None, tuple[dict[str, Any] | None, float, bool]] = {}

    def get(self, step: int | None) -> dict[str, Any] | None:
        """What `keep` was given last; ``None``: attempts of the step have changed since, make it anew."""
        if step not in self._held:
            row = self._db.execute("SELECT told FROM summaries WHERE step = ?", (_number(step),)).fetchone()
            self._held[step] = (json.loads(row[0]) if row else None), 0.0, row is not None
        summary, again, holds = self._held[step]
        return summary if holds or time.monotonic() < again else None

    def keep(self, step: int | None, summary: dict[str, Any], *, took_s: float, lasts: bool) -> None:
        """Keep the line of a step.

        Args:
            took_s: what making it cost; the more, the longer it is shown though attempts have changed.
            lasts: it changes only with the attempts, and not as time goes by.
        """
        self._held[step] = summary, time.monotonic() + took_s / _SHARE, lasts
        if lasts:
            self._db.execute("INSERT OR REPLACE INTO summaries VALUES (?, ?)", (_number(step), json.dumps(summary)))

    def lose(self, steps: Iterable[int | None]) -> None:
        """Forget the lines of these steps, whose attempts have changed."""
        for step in steps:
            summary, again, _ = self._held.get(step, (None, 0.0, False))
            self._held[step] = summary, again, False
            self._db.execute("DELETE FROM summaries WHERE step = ?", (_number(step),))


def _number(step: int | None) -> int:
    """The step's number in the table of summaries, which knows no ``None``."""
    return -1 if step is None else step


def opened(folders: Sequence[Path], name: str, schema: str, version: int) -> tuple[Path, sqlite3.Connection]:
    """Open the index in the first of some folders that takes it.

    Args:
        folders: where it may lie, the best first.
        schema: makes its tables, and notes the version.

    Raises:
        sqlite3.OperationalError: it can lie nowhere.
    """
    for folder in folders:
        try:
            return folder / name, _opened(folder / name, schema, version)
        except (sqlite3.Error, OSError):
            continue
    raise sqlite3.OperationalError(f"no index can be written in {' or '.join(map(str, folders))}")


def _opened(where: Path, schema: str, version: int) -> sqlite3.Connection:
    db = _connect(where)
    try:
        if not _is_whole(db, version):
            db.close()
            where.unlink(missing_ok=True)
            db = _connect(where)
            db.executescript(schema)
        db.create_function("lower", 1, str.lower)  # SQLite's own knows the letters of ASCII only
        db.execute("PRAGMA synchronous = OFF")  # it can be made again
        db.execute("PRAGMA cache_size = -65536")  # KiB
        # Held from here on, so that another server of this run makes an index of its own.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("BEGIN EXCLUSIVE")
        db.execute(f"PRAGMA user_version = {version}")  # or a file that can only be read would do
        db.execute("COMMIT")
    except sqlite3.Error:
        db.close()
        raise
    return db


def _is_whole(db: sqlite3.Connection, version: int) -> bool:
    """Whether it is an index of this version that can be read.

    Raises:
        sqlite3.OperationalError: another server has it.
    """
    try:
        found = db.execute("PRAGMA user_version").fetchone()[0], *db.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError:
        return False
    return found == (version, "ok")


def _connect(where: Path) -> sqlite3.Connection:
    return sqlite3.connect(where, isolation_level=None, check_same_thread=False, timeout=0.5)
