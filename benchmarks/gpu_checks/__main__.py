"""One check, in a process of its own: ``python -m benchmarks.gpu_checks NUMBER PLATFORM FOLDER BESIDE``.

Writes FOLDER/outcome.json: ``{"records": […]}``, with ``"skipped": why`` where some or all of it could not run.
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu_checks.registry import BY_NUMBER, CannotRun, Context, PartlySkipped

OUTCOME = "outcome.json"


def main(number: str, platform: str, folder: str, beside: str) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what a check started is ended with it
    if platform not in ("gpu", "cpu"):
        sys.exit(f"error: {platform} is no platform, write gpu or cpu")
    context = Context(platform=platform, folder=Path(folder), beside=int(beside))
    outcome: dict[str, Any]
    try:
        outcome = {"records": [asdict(record) for record in BY_NUMBER[int(number)].function()(context)]}
    except CannotRun as error:
        told = error.records if isinstance(error, PartlySkipped) else []
        outcome = {"records": [asdict(record) for record in told], "skipped": str(error)}
    (context.folder / OUTCOME).write_text(json.dumps(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
