"""The file of an index: in the first folder where it can be written and no other server has it; anew if it is old."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path


def opened(folders: Sequence[Path], name: str, schema: str, version: int) -> tuple[Path, sqlite3.Connection]:
    """Args:
        folders: where it may lie, the best first.
        schema: makes its tables, and notes the version.

    Raises:
        sqlite3.OperationalError: it can lie nowhere.
    """
    for folder in folders:
        try:
            return folder / name, _opened(folder / name, schema, version)
        except sqlite3.Error:
            continue
    raise sqlite3.OperationalError(f"no index can be written in {' or '.join(map(str, folders))}")


def _opened(where: Path, schema: str, version: int) -> sqlite3.Connection:
    db = _connect(where)
    try:
        if db.execute("PRAGMA user_version").fetchone()[0] != version:
            db.close()
            where.unlink(missing_ok=True)
            db = _connect(where)
            db.executescript(schema)
        db.execute("PRAGMA synchronous = OFF")  # it can be made again
        db.execute("PRAGMA cache_size = -65536")  # KiB
        # Held from here on, so that another server of this run makes an index of its own.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("BEGIN EXCLUSIVE")
        db.execute("COMMIT")
    except sqlite3.Error:
        db.close()
        raise
    return db


def _connect(where: Path) -> sqlite3.Connection:
    return sqlite3.connect(where, isolation_level=None, check_same_thread=False, timeout=0.5)
