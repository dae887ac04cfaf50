"""An index of a run's attempts beside the run: SQLite, brought up to date with what has been written since.

    files that grow ──readers──▶ attempts (by session)  ─┐
                                 texts (rows of a step)  ─┴─▶ steps, groups, one attempt

What several sources say of one attempt is joined: each fills in what it knows. The index is a cache: another version of
this program, or a recording that shrank or went (a run that began anew), makes it afresh. A step that a restarted run
repeats is written again, so a dump that was changed is read again from its beginning. The index lies in the run's
folder, or, where nothing can be written there or another server has it, in a temporary folder.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from seamless_verl.observe.recording import FLIGHT
from seamless_verl.watch import readers
from seamless_verl.watch.index_file import Read, Source, Sources, Summaries, opened
from seamless_verl.watch.readers import AttemptFacts, TrainedText
from seamless_verl.watch.run_places import JOURNALS, KEPT_FILES, ROW_FILES, ROW_FOLDERS, files_of

INDEX = "watch.sqlite"
_Limit = TypeVar("_Limit")
_VERSION = 5
_MOST_KEPT = 25  # sessions, and bytes of a file: between two looks at the clock
_MOST_BYTES = 1 << 18
_UPDATE_S = 0.2  # so that a click is answered while a large run is still being read
_AGAIN_S = 10.0  # between two looks at row files of which none is new and none had changed
_MOST_UNTRAINED = 500  # groups; a run that writes down no rows has all of them there
_UNTRAINED = "SELECT grp FROM groups WHERE step IS NULL"
_FACTS = tuple(spec.name for spec in fields(AttemptFacts) if spec.name != "session")
_NAMES = {"group": "grp"}
_QUOTED = tuple(f'"{_NAMES.get(name, name)}"' for name in _FACTS)
_SCHEMA = f"""
CREATE TABLE sources (file TEXT PRIMARY KEY, mark INTEGER, problem TEXT, changed_ns INTEGER,
    unread INTEGER) WITHOUT ROWID;
CREATE TABLE attempts (session TEXT PRIMARY KEY, {", ".join(_QUOTED)}, file TEXT) WITHOUT ROWID;
CREATE INDEX attempts_of ON attempts (grp, "index");
CREATE INDEX attempts_in ON attempts (file) WHERE file IS NOT NULL;
CREATE TABLE texts (grp TEXT, "index" INTEGER, row INTEGER, step INTEGER, score REAL, file TEXT, start INTEGER,
    length INTEGER, PRIMARY KEY (grp, "index", row)) WITHOUT ROWID;
CREATE INDEX texts_of ON texts (file);
CREATE TABLE groups (grp TEXT UNIQUE, step INTEGER);
CREATE INDEX groups_of ON groups (step);
CREATE TABLE summaries (step INTEGER PRIMARY KEY, told TEXT);
PRAGMA user_version = {_VERSION};
"""
_PUT = (
    f"INSERT INTO attempts (session, {', '.join(_QUOTED)}, file) VALUES (?, {', '.join('?' * len(_QUOTED))}, ?) "
    "ON CONFLICT (session) DO UPDATE SET "
    + ", ".join(f"{column} = coalesce(excluded.{column}, attempts.{column})" for column in (*_QUOTED, "file"))
)
_SEARCHED = ("session", "grp", "task", "status", "detail", "drift")
_NAMES_OF = " || ' ' || ".join(f"coalesce({column}, '')" for column in _SEARCHED)
_NAMED = f"SELECT session FROM attempts WHERE instr(replace(lower({_NAMES_OF}), ' ', '_'), ?) LIMIT ?"


class RunIndex:
    """The index of one place; not for several threads at once.

    Args:
        beside: in the run's folder, where it can be.

    Attributes:
        where: the index's file.
        is_behind: the last update left something for the next one: a large file is read in parts.
    """

    def __init__(self, place: Path, *, beside: bool = True) -> None:
        self._place = place
        self._scratch = tempfile.TemporaryDirectory(prefix="seamless-watch-")
        self.scratch = Path(self._scratch.name)
        self.where, self._db = opened((place, self.scratch)[not beside :], INDEX, _SCHEMA, _VERSION)
        self._open_sessions: dict[str, dict[str, int]] = {}  # by journal: turns of each that were read
        self._turns: dict[str, readers.Turns] = {}
        self._groups: set[str] = set()  # that this update touched, and steps that it took attempts from
        self._lost: set[int | None] = set()
        self.sources, self.summaries = Sources(self._db), Summaries(self._db)
        self._rows_as: list[int] = []  # when the folders of rows had been changed
        self._rows_changed, self._rows_again = True, 0.0
        self.is_behind = True

    def close(self) -> None:
        self._db.close()
        self._scratch.cleanup()

    # ------------------------------------------------------------ up to date

    def update(self) -> set[int | None]:
        """Read what was written since the last call, or a part of it; what cannot be read is noted (`problems`).

        Returns:
            Steps whose attempts may have changed; ``None`` for attempts that no step is known to have trained.
        """
        self._lost = set()
        if any(not file.exists() or file.stat().st_size < mark for file, mark in self._marks()):
            self._lost = {None, *self.steps()}
            self._begin_anew()
        grow = [(file, self._read_recording) for file in files_of(self._place, (f"{FLIGHT}/*.jsonl",))]
        grow += [(file, self._read_rows) for file in self._row_files()]
        grow += [(file, self._read_kept) for file in files_of(self._place, KEPT_FILES)]
        self.is_behind, self._groups = False, set()
        self._db.execute("BEGIN")
        try:
            until = time.monotonic() + _UPDATE_S
            for file in files_of(self._place, JOURNALS):
                self.is_behind |= self._guarded(file, self._read_journal, until)[0]
            self._read_on(grow)
            return self._changed()
        finally:
            self._db.execute("COMMIT")

    def _read_on(self, grow: Sequence[tuple[Path, Callable[[Path, str, Source, int], Read]]]) -> None:
        """Read what is new in these files for as long as `_UPDATE_S`, but in one of them at least."""
        until, most, has_read = time.monotonic() + _UPDATE_S, _MOST_BYTES, False
        for file, read in grow:
            more, is_new = self._guarded(file, read, most)
            has_read |= is_new
            while more and time.monotonic() < until:
                more, _ = self._guarded(file, read, most)
            self.is_behind |= more
            if has_read and time.monotonic() >= until:
                most = 0  # of the others only whether there is something

    def _row_files(self) -> list[Path]:
        """The row files to look at now: none while nothing new is there, and all of them every `_AGAIN_S` seconds.

        A long run has thousands. Those that are whole change only where a restarted run repeats their step.
        """
        folders = [folder.stat().st_mtime_ns for folder in files_of(self._place, ROW_FOLDERS)]
        known, self._rows_as = self._rows_as, folders
        if folders == known and not self._rows_changed and not self.is_behind and time.monotonic() < self._rows_again:
            return []
        self._rows_changed, self._rows_again = False, time.monotonic() + _AGAIN_S
        return files_of(self._place, ROW_FILES)

    def _changed(self) -> set[int | None]:
        if self._groups:
            self._lost |= self._steps_of_groups()
        self.summaries.lose(self._lost)
        return self._lost

    def _steps_of_groups(self) -> set[int | None]:
        self._db.execute("CREATE TEMP TABLE IF NOT EXISTS changed (grp TEXT PRIMARY KEY) WITHOUT ROWID")
        self._db.execute("DELETE FROM changed")
        self._db.executemany("INSERT OR IGNORE INTO changed VALUES (?)", ((group,) for group in self._groups))
        found = self._db.execute("SELECT DISTINCT step FROM groups WHERE grp IN (SELECT grp FROM changed)")
        return {None, *(step for (step,) in found)}

    def _guarded(
        self, file: Path, read: Callable[[Path, str, Source, _Limit], Read], limit: _Limit
    ) -> tuple[bool, bool]:
        """Read on in a file up to ``read``'s limit, and note how far, or why it cannot be read.

        Returns:
            Whether there is more in it, and whether anything was new.
        """
        name = str(file.relative_to(self._place))
        known, more = self.sources.known.get(name, Source()), False
        try:
            changed_ns = file.stat().st_mtime_ns
            mark, more, unread = read(file, name, known, limit)
            source = Source(mark, "", changed_ns, unread)
        except (OSError, sqlite3.Error, ValueError, KeyError, TypeError, IndexError) as error:
            source = known._replace(problem=f"{type(error).__name__}: {error}")
        if source != known:
            self.sources.note(name, source)
        return more, source != known

    def _read_recording(self, file: Path, name: str, known: Source, most: int) -> Read:
        found = readers.new_lines(file, known.mark, most)
        if found.lines:
            self._put(readers.ended_attempts(found, readers.clock_offset(file)), None)
        return Read(found.end, found.is_part, known.unread + found.unread)

    def _read_rows(self, file: Path, name: str, known: Source, most: int) -> Read:
        state = file.stat()
        is_changed, mark, unread = known.changed_ns != state.st_mtime_ns, known.mark, known.unread
        if mark == state.st_size and not is_changed:
            return Read(mark, unread=unread)  # as nearly all files of a long run
        if mark and is_changed:
            self._forget_texts(name)
            mark = unread = 0
        if not mark and most and (rows := readers.closed_session(file)):
            self._put([readers.facts_of_rows(rows)], name)
            num_lines = sum(1 for line in file.read_bytes().splitlines() if line.strip())
            found = Read(state.st_size, unread=max(0, num_lines - len(rows)))
        else:
            lines = readers.new_lines(file, mark, most)
            self._put_texts(list(readers.trained_texts(lines)), name)
            found = Read(lines.end, lines.is_part, unread + lines.unread)
        self._rows_changed |= is_changed or found.mark != mark
        return found

    def _read_kept(self, file: Path, name: str, known: Source, most: int) -> Read:
        with readers.journal(file, self.scratch) as db:
            asked = "SELECT id, number FROM kept WHERE number > ? ORDER BY number LIMIT ?"
            new = db.execute(asked, (known.mark, _MOST_KEPT + 1)).fetchall()
            numbers = dict(new[: _MOST_KEPT if most else 0])
            goes_on = len(new) > len(numbers)
            self._put(readers.kept_sessions(db, frozenset(numbers)), name)
            if numbers and not goes_on:  # else they may have left the file meanwhile
                there = {session for (session,) in db.execute("SELECT id FROM kept")}
                gone = self._db.execute("SELECT session FROM attempts WHERE file = ?", (name,)).fetchall()
                left = [row for row in gone if row[0] not in there]
                self._db.executemany("UPDATE attempts SET file = NULL WHERE session = ?", left)
        return Read(max(numbers.values(), default=known.mark), goes_on)

    def _read_journal(self, file: Path, name: str, known: Source, until: float) -> Read:
        """Read new turns of the sessions under way until time is up; sessions that left the journal are over."""
        before, goes_on = self._open_sessions.setdefault(name, {}), False
        with readers.journal(file, self.scratch) as db:
            sessions = {row[0]: 0 for row in db.execute("SELECT id FROM sessions")} | readers.num_turns(db)
            changed = [session for session, turns in sessions.items() if before.get(session) != turns]
            for start in range(0, len(changed), _MOST_KEPT):
                if start and time.monotonic() >= until:
                    goes_on = True
                    break
                part = changed[start : start + _MOST_KEPT]
                self._put(readers.sessions_in(db, part, self._turns), name)
                before.update((session, sessions[session]) for session in part)
        ours = self._db.execute("SELECT session, grp FROM attempts WHERE file = ?", (name,)).fetchall()
        over = [(session, group) for session, group in ours if session not in sessions]
        self._groups |= {group for _, group in over}
        self._db.executemany(
            "UPDATE attempts SET file = NULL, state = CASE state WHEN 'open' THEN 'over' ELSE state END "
            "WHERE session = ?",
            [(session,) for session, _ in over],
        )
        for session in before.keys() - sessions.keys():
            del before[session]
            self._turns.pop(session, None)
        return Read(known.mark, goes_on)

    def _put(self, found: Iterable[AttemptFacts], file: str | None) -> None:
        rows = []
        for facts in found:
            drift = None if facts.drift is None else json.dumps(facts.drift)
            self._groups.add(facts.group)
            values = (drift if name == "drift" else getattr(facts, name) for name in _FACTS)
            rows.append((facts.session, *values, file))
        self._db.executemany(_PUT, rows)
        at = _FACTS.index("group") + 1
        self._db.executemany("INSERT OR IGNORE INTO groups (grp) VALUES (?)", {(row[at],) for row in rows})

    def _put_texts(self, found: list[TrainedText], file: str) -> None:
        self._groups |= {text.group for text in found}
        self._db.executemany(
            "INSERT OR REPLACE INTO texts VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            ((t.group, t.index, t.row, t.step, t.score, file, t.start, t.length) for t in found),
        )
        self._db.executemany(
            "INSERT INTO groups VALUES (?, ?) ON CONFLICT (grp) DO UPDATE SET step = excluded.step",
            {(t.group, t.step) for t in found},
        )

    def _forget_texts(self, file: str) -> None:
        self._groups |= {group for (group,) in self._db.execute("SELECT grp FROM texts WHERE file = ?", (file,))}
        self._lost |= {step for (step,) in self._db.execute("SELECT DISTINCT step FROM texts WHERE file = ?", (file,))}
        self._db.execute("UPDATE groups SET step = NULL WHERE grp IN (SELECT grp FROM texts WHERE file = ?)", (file,))
        self._db.execute("DELETE FROM texts WHERE file = ?", (file,))
        self._db.execute("DELETE FROM groups WHERE step IS NULL AND grp NOT IN (SELECT grp FROM attempts)")

    def _marks(self) -> list[tuple[Path, int]]:
        return [(self._place / f, s.mark) for f, s in self.sources.known.items() if f.startswith(f"{FLIGHT}/")]

    # ------------------------------------------------------------ asked

    def attempts(self, *, step: int | None) -> list[dict[str, Any]]:
        """Attempts of the groups that a step trained; ``None``: of those that no step is known to have trained all that
        have one under way, and the latest of the others."""
        if step is None:
            under_way = f"{_UNTRAINED} AND grp IN (SELECT grp FROM attempts WHERE state = 'open')"
            latest = f"SELECT grp FROM ({_UNTRAINED} ORDER BY rowid DESC LIMIT ?)"
            return self._joined(f"grp IN ({latest} UNION {under_way})", (_MOST_UNTRAINED,), [])
        return self._selected("grp IN (SELECT grp FROM groups WHERE step = ?)", (step,))

    def group(self, name: str) -> list[dict[str, Any]]:
        return self._selected("grp = ?", (name,))

    def steps(self) -> list[int]:
        """Steps that are known to have trained something."""
        found = self._db.execute("SELECT DISTINCT step FROM groups WHERE step IS NOT NULL ORDER BY step")
        return [step for (step,) in found]

    def num_groups(self, step: int | None) -> int:
        """How many groups the step trained; ``None``: how many no step did (`attempts` has the latest of those)."""
        found: int = self._db.execute("SELECT count(*) FROM groups WHERE step IS ?", (step,)).fetchone()[0]
        return found

    def silent(self, before: float) -> list[tuple[str, float]]:
        """Sessions under way that got no answer since ``before``, each with when it got its last; the oldest first."""
        asked = "SELECT session, latest FROM attempts WHERE state = 'open' AND latest < ? AND file IS NOT NULL"
        return list(self._db.execute(f"{asked} ORDER BY latest", (before,)))

    def attempt(self, key: str) -> dict[str, Any] | None:
        group = self._db.execute("SELECT grp FROM attempts WHERE session = ?", (key,)).fetchone()
        name = group[0] if group is not None else key.rpartition("~")[0]
        return next((attempt for attempt in self.group(name) if attempt["key"] == key), None)

    def numbered(self, group: str, index: int) -> dict[str, Any] | None:
        return next((attempt for attempt in self.group(group) if attempt["index"] == index), None)

    def named(self, text: str, most: int, until: Callable[[], bool]) -> tuple[list[dict[str, Any]], bool]:
        """Attempts with ``text`` in their session, group, task, status, error or drift reasons, the latest first.

        Args:
            text: in lower case; spaces match underscores.
            until: whether it is time to stop looking.

        Returns:
            So many attempts at most, and whether all were looked at.
        """
        sessions, whole = [], True
        self._db.set_progress_handler(until, 20_000)
        try:
            for (session,) in self._db.execute(_NAMED, (text.replace(" ", "_"), most)):
                sessions.append(session)
        except sqlite3.OperationalError as error:
            if "interrupted" not in str(error):
                raise
            whole = False
        finally:
            self._db.set_progress_handler(None, 0)
        found = [attempt for session in sessions if (attempt := self.attempt(session)) is not None]
        return sorted(found, key=lambda attempt: -(attempt["began"] or 0.0)), whole and len(sessions) < most

    def kept(self) -> list[str]:
        """Sessions of which a journal has the turns, the latest first."""
        latest = "SELECT session FROM attempts WHERE file IS NOT NULL AND file LIKE '%.sqlite' ORDER BY began DESC"
        return [session for (session,) in self._db.execute(latest)]

    def text_files(self) -> list[Path]:
        """verl's dumps, those of the latest steps first."""
        known = [Path(file) for file in self.sources.known if Path(file).stem.isdecimal()]
        return [self._place / file for file in sorted(known, key=lambda file: -int(file.stem))]

    def _selected(self, where: str, values: tuple[Any, ...]) -> list[dict[str, Any]]:
        texts = self._db.execute(
            f'SELECT grp, "index", step, score, min(row) FROM texts WHERE {where} GROUP BY grp, "index"', values
        ).fetchall()
        return self._joined(where, values, texts)

    def _joined(self, where: str, values: tuple[Any, ...], texts: list[Any]) -> list[dict[str, Any]]:
        """Sessions that the condition names, with what was trained of them."""
        scores = {(group, index): score for group, index, _, score, _ in texts}
        steps = {group: step for group, _, step, _, _ in texts}
        cursor = self._db.execute(f"SELECT * FROM attempts WHERE {where} ORDER BY began", values)
        names = [column[0] for column in cursor.description]
        found = []
        for row in cursor:
            attempt = dict(zip(names, row, strict=True))
            group, attempt["drift"] = attempt.pop("grp"), json.loads(attempt["drift"] or "{}")
            score = scores.pop((group, attempt["index"]), None)
            attempt |= {"group": group, "key": attempt["session"], "step": steps.get(group), "score": score}
            found.append(attempt)
        return found + [_of_texts(group, index, steps[group], score) for (group, index), score in scores.items()]

    def state_of_texts(self, group: str, index: int) -> list[Any]:
        """A value that changes whenever what `texts` returns does."""
        asked = (
            "SELECT row, file, start, length, changed_ns FROM texts LEFT JOIN sources USING (file) "
            'WHERE grp = ? AND "index" = ? ORDER BY row'
        )
        return self._db.execute(asked, (group, index)).fetchall()

    def texts(self, group: str, index: int) -> list[dict[str, Any]]:
        """What was trained of an attempt, as verl wrote it down."""
        asked = 'SELECT row, step, score, file, start, length FROM texts WHERE grp = ? AND "index" = ? ORDER BY row'
        rows = self._db.execute(asked, (group, index)).fetchall()
        found = []
        for row, step, score, file, start, length in rows:
            record = readers.line_at(self._place / file, start, length)
            text = {name: str(record.get(name, "")) for name in ("input", "output", "gts")}
            found.append(text | {"row": row, "step": step, "score": score})
        return found

    def _begin_anew(self) -> None:
        for table in ("sources", "attempts", "texts", "groups", "summaries"):
            self._db.execute(f"DELETE FROM {table}")
        self._open_sessions, self._turns = {}, {}
        self._rows_changed = True
        self.sources, self.summaries = Sources(self._db), Summaries(self._db)


def _of_texts(group: str, index: int, step: int, score: float) -> dict[str, Any]:
    """An attempt of which only what was trained is known."""
    unknown = dict.fromkeys((*_FACTS, "session", "file"))
    return unknown | {
        "key": f"{group}~{index}", "group": group, "index": index, "step": step, "score": score, "reward": score,
        "state": "trained", "drift": {},
    }  # fmt: skip
