"""Writes the records of a run and prints its lines. One writer per run; each record is one line, flushed at once.

metrics.jsonl      every metric of every step (also verl's)
steps.jsonl        the StepReport of every step
validation.jsonl   the ValidationReport of every set at every validation
curriculum.jsonl   the EpochReport of every epoch of a curriculum: what left the pool, and when
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from seamless_verl.observe.report import EpochReport, StepReport, ValidationReport, as_record, finite
from seamless_verl.observe.terminal import epoch_line, step_line, validation_line

STEPS, METRICS, VALIDATION, EPOCHS = "steps.jsonl", "metrics.jsonl", "validation.jsonl", "curriculum.jsonl"


class Reporter:
    """Args:
    folder: run folder, or ``None`` to print only.
    stream: where lines for people go.
    """

    def __init__(self, folder: Path | None, stream: TextIO) -> None:
        self._folder = folder
        self._stream = stream
        self._step_seconds: list[float] = []

    @classmethod
    def for_run(cls, run_dir: str | None) -> Reporter:
        return cls(Path(run_dir) if run_dir else None, sys.stdout)

    def step(self, report: StepReport, metrics: Mapping[str, Any]) -> None:
        self._step_seconds.append(report.step_s)
        recent = self._step_seconds[-10:]
        remaining = (report.total_steps - report.step) * sum(recent) / len(recent)
        self._append(STEPS, as_record(report))
        numbers = {key: _number(value) for key, value in metrics.items() if _is_number(value)}
        self._append(METRICS, {"step": report.step, **numbers})
        self.say(step_line(report, remaining))

    def validation(self, report: ValidationReport) -> None:
        self._append(VALIDATION, as_record(report))
        self.say(validation_line(report))

    def epoch(self, report: EpochReport) -> None:
        self._append(EPOCHS, as_record(report))
        self.say(epoch_line(report))

    def checkpoint(self, step: int) -> None:
        self.say(f"checkpoint of step {step} written")

    def say(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        if self._folder is None:
            return
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records of a JSONL file; a last line cut short by a crash is left out. A missing file has no records."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise
    return records


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, float)) or getattr(value, "size", None) == 1 or getattr(value, "ndim", None) == 0


def _number(value: Any) -> float | int | None:
    plain = value.item() if hasattr(value, "item") else value
    return finite(plain)  # type: ignore[no-any-return]
