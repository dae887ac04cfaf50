"""What a run's own files say about attempts, as plain records; a file that grows is read on from where it ended.

    flight/*.jsonl     attempts that ended, by session
    rows/N.jsonl       what a step trained, by group and number of the attempt (verl's own dump: text and score)
    signals/N.*        what the trainer made of its tokens (`observe.token_signals`)
    rows/ID.jsonl      rows of a closed session (stand-alone proxy), with every token
    journal.sqlite     sessions under way, kept.sqlite those that are over (under the trainer)

Invariant: nothing is written, and no lock is held between calls. Lines that are cut short are read when they are whole.
No line vanishes without a word: bytes that are no UTF-8 become replacement characters, what is no record is counted.
"""

from __future__ import annotations

import shutil
import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from seamless_verl.observe import token_signals
from seamless_verl.observe.reporter import json_of, read_records
from seamless_verl.observe.token_signals import TokenSignals
from seamless_verl.proxy.calls import Answer
from seamless_verl.proxy.journal.sqlite_journal import check_format, read_sessions, read_turns, restore
from seamless_verl.proxy.journal.turn_bytes import Damaged, unpack
from seamless_verl.proxy.session.sessions import TASK, Session, SessionState
from seamless_verl.trajectory.generation import FinishReason, TrajectoryError
from seamless_verl.trajectory.rows import Row, trained_order
from seamless_verl.trajectory.tree import SessionTree

_MOST_BYTES = 1 << 24
_MOST_HELD = 1 << 25  # tokens of sessions under way
_MOST_NAME = 2000  # characters of a task's name or an error, which stand in every list


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFacts:
    """What is known of an attempt; ``None``: this source does not say.

    Attributes:
        index: number in its group.
        state: ``open``, ``expired``, ``closed``; ``given up`` where the trainer wanted no rows of it.
        cut: answers that ended at their limit of tokens.
        seams: places within answers at which new weights took over.
        oldest, newest: weight versions of its tokens.
        detail: what went wrong, in the runner's words.
        task: the data's name of the task.
        began, ended: seconds since 1970; ``latest``: when it got its last answer, or began.
    """

    session: str
    group: str
    index: int | None = None
    state: str | None = None
    reward: float | None = None
    seconds: float | None = None
    turns: int | None = None
    tokens: int | None = None
    rows: int | None = None
    status: str | None = None
    detail: str | None = None
    task: str | None = None
    drift: dict[str, int] | None = None
    cut: int | None = None
    seams: int | None = None
    oldest: int | None = None
    newest: int | None = None
    began: float | None = None
    ended: float | None = None
    latest: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedText:
    """One line of verl's dump of a step: where it stands in its file, for its text is read when it is shown."""

    group: str
    index: int
    row: int
    step: int
    score: float
    start: int
    length: int


@dataclass(slots=True, kw_only=True)
class Lines:
    """Whole lines of a file, each with where it begins.

    Attributes:
        end: where to read on.
        is_part: the file goes on beyond what one call takes.
        unread: lines that whoever took them could not read.
    """

    lines: list[tuple[int, bytes]] = field(default_factory=list)
    end: int = 0
    is_part: bool = False
    unread: int = 0


def new_lines(file: Path, start: int, most: int = _MOST_BYTES) -> Lines:
    """About ``most`` bytes, but one line at least, however long; nothing where ``most`` is 0."""
    size = file.stat().st_size
    if size <= start or not most:
        return Lines(end=start, is_part=size > start)
    with file.open("rb") as stream:
        stream.seek(start)
        data = stream.read(most)
        while b"\n" not in data and (more := stream.read(most)):
            data += more
    whole = data[: data.rfind(b"\n") + 1]
    found = Lines(end=start + len(whole), is_part=start + len(data) < size)
    at = start
    for line in whole.split(b"\n")[:-1]:
        found.lines.append((at, line))
        at += len(line) + 1
    return found


def ended_attempts(lines: Lines, offset_s: float) -> Iterator[AttemptFacts]:
    """Attempts in lines of a recording; what cannot be read is counted in ``lines``.

    Args:
        offset_s: from the writer's clock to seconds since 1970.
    """
    for _, line in lines.lines:
        if b'"SessionEnded"' not in line and b'"SessionGivenUp"' not in line:  # most lines are requests
            continue
        record = json_of(line) or {"event": "SessionEnded"}
        if record.get("event") not in ("SessionEnded", "SessionGivenUp"):
            continue
        try:
            yield _ended(record, offset_s)
        except (KeyError, TypeError, ValueError, AttributeError):
            lines.unread += 1


def _ended(record: dict[str, Any], offset_s: float) -> AttemptFacts:
    """Facts of an attempt, from the event that ended it.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is not as the recorder writes it.
    """
    ended = float(record["at"]) + offset_s
    index, given_up = int(record.get("index", -1)), record["event"] == "SessionGivenUp"
    return AttemptFacts(
        session=str(record["session"]),
        group=str(record["group"]),
        index=index if index >= 0 else None,
        state="given up" if given_up else "closed",
        reward=None if given_up else float(record["reward"]),
        seconds=float(record["seconds"]),
        turns=None if given_up else int(record["turns"]),
        rows=None if given_up else int(record["rows"]),
        status=str(record["status"])[:_MOST_NAME],
        detail=str(record.get("detail") or "")[:_MOST_NAME] or None,
        drift={str(reason): int(count) for reason, count in record.get("drift", {}).items()},
        ended=ended,
        began=ended - float(record["seconds"]),
    )


def clock_offset(file: Path) -> float:
    """From the clock of a recording's writer to seconds since 1970; 0 while its header is not whole."""
    with file.open("rb") as stream:
        header = json_of(stream.readline()) or {}
    return float(header.get("wall_s", 0.0)) - float(header.get("clock_s", 0.0))


def trained_texts(lines: Lines) -> Iterator[TrainedText]:
    """Rows of verl's dump; lines of another kind are left out, those that cannot be read are counted in ``lines``."""
    for start, line in lines.lines:
        record = _dumped(line)
        if record is not None and ("uid" not in record or "step" not in record):
            continue
        try:
            yield _trained({} if record is None else record, start, len(line))
        except (KeyError, TypeError, ValueError):
            lines.unread += 1


def _trained(record: dict[str, Any], start: int, length: int) -> TrainedText:
    parts = str(record["uid"]).rsplit("_", 2)
    group, index, row = parts if len(parts) == 3 and parts[1].isdecimal() else (str(record["uid"]), "0", "0")
    return TrainedText(
        group=group,
        index=int(index),
        row=int(row) if row.isdecimal() else 0,
        step=int(record["step"]),
        score=float(record.get("score") or 0.0),
        start=start,
        length=length,
    )


def _dumped(line: bytes) -> dict[str, Any] | None:
    """A line of verl's dump without its texts, which are most of it; whole where it is not as verl writes it."""
    try:
        return msgspec.structs.asdict(_DUMPED.decode(line))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return json_of(line)


class _Dumped(msgspec.Struct):
    uid: str
    step: int
    score: float | None = None


_DUMPED = msgspec.json.Decoder(_Dumped)


def signals(run: Path, attempt: Mapping[str, Any], rows: Sequence[Row], row: int) -> TokenSignals | None:
    """What the trainer made of the tokens of one of ``rows``; None: it is not trained (yet), or nothing is kept."""
    if attempt["step"] is None or attempt["index"] is None or not rows[row].num_trained:
        return None
    key = f"{attempt['group']}_{attempt['index']}_{trained_order(rows).index(rows[row])}"
    return token_signals.read(run / token_signals.FOLDER, attempt["step"], key)


def line_at(file: Path, start: int, length: int) -> dict[str, Any]:
    with file.open("rb") as stream:
        stream.seek(start)
        return json_of(stream.read(length)) or {}


def closed_session(file: Path) -> list[dict[str, Any]]:
    """The rows of a closed session; empty for a file of another kind."""
    with file.open("rb") as stream:
        if "token_ids" not in (json_of(stream.readline()) or {}):
            return []
    rows = [record for line in file.read_bytes().splitlines() if (record := json_of(line)) is not None]
    return rows if rows and all("token_ids" in row and "session" in row for row in rows) else []


def facts_of_rows(rows: list[dict[str, Any]]) -> AttemptFacts:
    first = rows[0]
    turns = {turn[0]: turn for row in rows for turn in row["turns"]}
    spans = [span for row in rows for span in row["version_spans"]]
    return AttemptFacts(
        session=str(first["session"]),
        group=str(first["group"]),
        index=int(first["index"]),
        state="closed",
        reward=first["reward"],
        turns=len(turns),
        tokens=sum(sum(row["mask"]) for row in rows),
        rows=len(rows),
        cut=sum(turn[4] == FinishReason.LENGTH.value for turn in turns.values()),
        seams=max(0, max(len(row["version_spans"]) - len(row["turns"]) for row in rows)),
        oldest=min((span[2] for span in spans), default=None),
        newest=max((span[2] for span in spans), default=None),
    )


def records(file: Path) -> list[dict[str, Any]]:
    """The whole records of a JSONL file that grows; read again only when it has changed."""
    return _records(file, *(file.stat().st_size, file.stat().st_mtime_ns) if file.exists() else (0, 0))


@lru_cache(maxsize=8)
def _records(file: Path, size: int, changed_ns: int) -> list[dict[str, Any]]:
    """Read the file; ``size`` and ``changed_ns`` are there for the cache only."""
    return read_records(file)


# ---------------------------------------------------------------- journals


@contextmanager
def journal(file: Path, scratch: Path) -> Iterator[sqlite3.Connection]:
    """A journal to read from, whatever the process that wrote it does or did.

    Args:
        scratch: gets a copy where SQLite cannot read the file without writing beside it.

    Raises:
        sqlite3.Error: it is no journal of this version, or damaged.
    """
    wal = file.with_name(f"{file.name}-wal")
    # Without a write-ahead log nobody has it open, and SQLite would make one to read it.
    db = _open(file, "immutable=1" if not wal.exists() else "mode=ro")
    try:
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        db.close()
        for source in (file, wal):
            shutil.copy(source, scratch / f"copied{source.name.removeprefix(file.stem)}")
        db = _open(scratch / f"copied{file.suffix}", "mode=rwc")
    try:
        check_format(db)
        db.text_factory = _text
        yield db
    finally:
        db.close()


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _open(file: Path, how: str) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(file.absolute()))}?{how}", uri=True, isolation_level=None, timeout=1.0)


def sessions_in(
    db: sqlite3.Connection, only: Iterable[str], held: dict[str, Turns] | None = None
) -> Iterator[AttemptFacts]:
    """Facts of sessions, from their turns; those that ``held`` has are read on."""
    held = {} if held is None else held
    for name in only:
        for session in read_sessions(db, name):
            yield _facts(session, held.setdefault(name, Turns()).read_on(db, name))
        if sum(turns.tree.num_stored_tokens for turns in held.values()) > _MOST_HELD:
            held.clear()


def kept_sessions(db: sqlite3.Connection, new: frozenset[str]) -> Iterator[AttemptFacts]:
    """Facts of sessions that are over: one that nobody closed was given up, with its attempt."""
    for facts in sessions_in(db, new):
        yield replace(facts, state="given up") if facts.state == SessionState.OPEN.value else facts


def num_turns(db: sqlite3.Connection) -> dict[str, int]:
    return dict(db.execute("SELECT session_id, count(*) FROM turns GROUP BY session_id"))


@dataclass(slots=True)
class Turns:
    """What the turns of a session come to, up to one that is damaged; ``number`` is the journal's of the last."""

    tree: SessionTree = field(default_factory=SessionTree)
    number: int = 0
    is_damaged: bool = False
    tokens: int = 0
    cut: int = 0
    seams: int = 0
    versions: set[int] = field(default_factory=set)
    last: float | None = None

    def read_on(self, db: sqlite3.Connection, session: str) -> Turns:
        """A session under way is looked at with each turn: no turn is read twice."""
        asked = "SELECT number, body FROM turns WHERE session_id = ? AND number > ? ORDER BY number"
        for number, body in () if self.is_damaged else db.execute(asked, (session, self.number)):
            self.number = number
            try:
                record, _, answer = unpack(bytes(body))
                self.tree.commit(replace(record, log_probs=array("f")))
            except (Damaged, TrajectoryError):
                self.is_damaged = True
                break
            self.tokens += len(record.token_ids)
            self.cut += record.finish_reason is FinishReason.LENGTH
            self.seams += len(record.version_spans) - 1
            self.versions |= {span.version for span in record.version_spans}
            self.last = float(answer.created)
        return self


def _facts(session: Session, turns: Turns) -> AttemptFacts:
    last = turns.last
    return AttemptFacts(
        session=session.id,
        group=session.spec.group,
        index=session.spec.index,
        state=session.state.value,
        reward=session.reward,
        turns=turns.tree.num_turns,
        tokens=turns.tokens,
        task=task[:_MOST_NAME] if isinstance(task := session.spec.metadata.get(TASK), str) else None,
        drift={reason.value: count for reason, count in turns.tree.drift.items()},
        cut=turns.cut,
        seams=turns.seams,
        oldest=min(turns.versions, default=None),
        newest=max(turns.versions, default=None),
        began=session.opened_at,
        ended=last if session.state is not SessionState.OPEN else None,
        latest=last if last is not None else session.opened_at,
    )


def whole_session(db: sqlite3.Connection, session_id: str) -> tuple[Session, list[Answer]] | None:
    """A session with its tree and its answers."""
    for session in read_sessions(db, session_id):
        images, bodies = read_turns(db, session_id)
        for image in images:
            session.images.add(image)
        return session, restore(session, bodies)
    return None
