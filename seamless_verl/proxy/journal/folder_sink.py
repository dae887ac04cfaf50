"""Rows of closed sessions as files: ``rows/SESSION.jsonl`` or ``.parquet``, their pictures as ``images/DIGEST``.

Invariant: a file appears whole and on disk, or not at all, and a row's pictures before the row; writing a session again
replaces it by the same rows. ``cat rows/*.jsonl`` is the whole data set, with pictures by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from seamless_verl.proxy.session.handover import images_to_wire
from seamless_verl.proxy.session.sessions import Session
from seamless_verl.trajectory.rows import AuditReport, Row


class FolderSink:
    """A :class:`~seamless_verl.proxy.session.handover.RowSink`.

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
        """See :class:`~seamless_verl.proxy.session.handover.RowSink`."""
        self._write_images(session.id, session.images.files(rows))
        records = [_record(session, number, row, report) for number, row in enumerate(rows)]
        with _appearing(self._path(session.id), session.id) as part:
            if self._parquet:
                _write_parquet(part, records)
            else:
                part.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
        _sync(self._rows)

    def read(self, session_id: str) -> dict[str, Any] | None:
        """See :class:`~seamless_verl.proxy.session.handover.RowSink`."""
        path = self._path(session_id)
        if not path.exists():
            return None
        rows = _read_parquet(path) if self._parquet else _read_lines(path)
        shown = {digest for row in rows for digest in row.images}
        return {"rows": rows, **images_to_wire({digest: (self._images / digest).read_bytes() for digest in shown})}

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
