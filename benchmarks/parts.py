"""Long benchmarks in pieces: what one run has measured, the next run of the same command takes over.

python -m benchmarks.crash --resume /tmp/crash.json --minutes 8      again and again, until it reports
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

UNFINISHED = 75  # sysexits' EX_TEMPFAIL: run it again


def extend(parser: argparse.ArgumentParser) -> None:
    """The options of a benchmark that can be run in pieces."""
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep what is measured here, and go on from it")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin nothing new after this long")


class Parts:
    """Measurements by name, each a list of JSON values in the order in which they were taken."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._file: Path | None = options.resume
        self._until = time.monotonic() + 60 * float(options.minutes)
        known = self._file is not None and self._file.exists()
        self._taken: dict[str, list[Any]] = json.loads(self._file.read_text()) if known and self._file else {}

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() > self._until

    def of(self, name: str) -> list[Any]:
        return self._taken.setdefault(name, [])

    def add(self, name: str, value: Any) -> None:
        self.of(name).append(value)
        if self._file is not None:
            self._file.write_text(json.dumps(self._taken))

    def pause(self) -> int:
        """What ``main`` returns when time ran out."""
        print(f"not finished: run the same command again ({self._file or 'nothing is kept without --resume'})")
        sys.stdout.flush()
        return UNFINISHED
