"""Rows of closed sessions as files, one per session: ``rows/SESSION.jsonl`` or ``rows/SESSION.parquet``.

Invariant: a file appears whole and on disk, or not at all; writing a session again replaces it by the same rows.
``cat rows/*.jsonl`` is the whole data set.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from seamless_verl.proxy.sessions import Session
from seamless_verl.proxy.wire import ROW_FIELDS, row_to_wire
from seamless_verl.trajectory.audit import AuditReport
from seamless_verl.trajectory.rows import Row


class FolderSink:
    """A :class:`~seamless_verl.proxy.handover.RowSink`.

    Args:
        folder: made if missing.
        parquet: write Parquet (needs pyarrow) instead of JSON lines.
    """

    def __init__(self, folder: Path, *, parquet: bool = False) -> None:
        self._folder = folder
        self._parquet = parquet
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, session: Session, rows: tuple[Row, ...], report: AuditReport) -> None:
        """See :class:`~seamless_verl.proxy.handover.RowSink`."""
        records = [_record(session, number, row, report) for number, row in enumerate(rows)]
        path = self._path(session.id)
        part = path.with_suffix(path.suffix + ".part")
        try:
            if self._parquet:
                _write_parquet(part, records)
            else:
                part.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
            _sync(part)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        _sync(self._folder)

    def read(self, session_id: str) -> list[dict[str, Any]] | None:
        """See :class:`~seamless_verl.proxy.handover.RowSink`."""
        path = self._path(session_id)
        if not path.exists():
            return None
        records = _read_parquet(path) if self._parquet else _read_lines(path)
        return [{name: record[name] for name in ROW_FIELDS} for record in records]

    def _path(self, session_id: str) -> Path:
        return self._folder / f"{session_id}.{'parquet' if self._parquet else 'jsonl'}"


def _record(session: Session, number: int, row: Row, report: AuditReport) -> dict[str, Any]:
    """One row with whose it is; ``version_spans`` are ``[start, stop, version]``, ``turns`` as on the wire."""
    return {
        "session": session.id,
        "group": session.spec.group,
        "index": session.spec.index,
        "row": number,
        "reward": session.reward,
        "rewards": msgspec.json.encode(session.rewards).decode(),
        "metadata": msgspec.json.encode(dict(session.spec.metadata)).decode(),
        "violations": len(report.violations),
        **row_to_wire(row),
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
        ]
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(tables, schema=schema), path)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    tables: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return [{**record, "turns": msgspec.json.decode(record["turns"])} for record in tables]


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
