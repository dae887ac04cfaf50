"""One parquet file of tasks in the columns of verl's ``RLHFDataset``, written in row groups.

Rows: ``data_source``, ``prompt`` (one user message: the problem statement), ``agent_name``, ``reward_model`` (unused by
the agent loop, required by verl), ``extra_info`` = ``{index, split, task}`` with the task as `SweTask.to_json` text.
The prompt is what verl measures lengths on; the agent's own prompt is the harness's.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from seamless_verl.errors import MachineError
from seamless_verl.recipes.swe.real.task import SweTask

ROWS_PER_GROUP = 256
DATA_SOURCE = "seamless_swe"
AGENT_NAME = "seamless_agent"


class SplitWriter:
    """Writes one split under a temporary name; `publish` gives it the final one.

    Args:
        folder: where ``<split>.parquet`` goes; ``None`` counts and digests without writing.
        split: ``train`` or ``val``.
    """

    def __init__(self, folder: Path | None, split: str) -> None:
        self._split = split
        self._final = folder / f"{split}.parquet" if folder is not None else None
        self._partial = folder / f".{split}.parquet.partial" if folder is not None else None
        self._pending: list[dict[str, Any]] = []
        self._writer: Any = None
        self._hash = hashlib.sha256()
        self._num_rows = 0

    @property
    def num_rows(self) -> int:
        """Rows added so far."""
        return self._num_rows

    @property
    def digest(self) -> str:
        """SHA-256 over the tasks' JSON, in order."""
        return self._hash.hexdigest()

    def add(self, task: SweTask) -> None:
        """Append a task; the file grows by whole row groups."""
        text = task.to_json()
        self._hash.update(text.encode() + b"\n")
        if self._partial is not None:
            self._pending.append(row(task, text, index=self._num_rows, split=self._split))
            if len(self._pending) >= ROWS_PER_GROUP:
                self._write_group()
        self._num_rows += 1

    def publish(self) -> None:
        """Complete the file. A split without rows leaves no file, and removes the one of an earlier run."""
        if self._partial is None or self._final is None:
            return
        if self._pending:
            self._write_group()
        if self._writer is None:
            self._final.unlink(missing_ok=True)
            return
        self._writer.close()
        self._writer = None
        self._partial.replace(self._final)

    def discard(self) -> None:
        """Drop what was not published; does nothing after `publish`."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._partial is not None:
            self._partial.unlink(missing_ok=True)

    def _write_group(self) -> None:
        pyarrow, parquet = _pyarrow()
        assert self._partial is not None
        if self._writer is None:
            self._partial.parent.mkdir(parents=True, exist_ok=True)
            self._writer = parquet.ParquetWriter(self._partial, _schema(pyarrow))
        self._writer.write_table(pyarrow.Table.from_pylist(self._pending, schema=_schema(pyarrow)))
        self._pending.clear()


def row(task: SweTask, task_json: str, *, index: int, split: str) -> dict[str, Any]:
    """One row; ``task_json`` is ``task.to_json()``, handed in because the caller has it."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": task.agent_view().problem_statement}],
        "agent_name": AGENT_NAME,
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"index": index, "split": split, "task": task_json},
    }


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MachineError("pyarrow", f"not installed ({error})", "pip install pyarrow (verl brings it)") from error
    return pyarrow, pyarrow.parquet


def _schema(pyarrow: Any) -> Any:
    text = pyarrow.string()
    return pyarrow.schema(
        [
            ("data_source", text),
            ("prompt", pyarrow.list_(pyarrow.struct([("role", text), ("content", text)]))),
            ("agent_name", text),
            ("reward_model", pyarrow.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pyarrow.struct([("index", pyarrow.int64()), ("split", text), ("task", text)])),
        ]
    )
