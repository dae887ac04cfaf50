"""What every benchmark writes: a list of records ``{name, value, unit, bar, holds}`` with date, machine and command."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One figure. ``bar`` is what was asked of it, in words; ``holds`` is ``None`` where nothing was asked."""

    name: str
    value: float
    unit: str
    bar: str = ""
    holds: bool | None = None


def arguments(
    description: str, extend: Callable[[argparse.ArgumentParser], object] = lambda parser: None
) -> argparse.Namespace:
    """The options that all benchmarks share; ``extend`` adds a benchmark's own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="one repeat: shows that it works, not what it costs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to FILE")
    extend(parser)
    return parser.parse_args()


def machine(accelerator: str = "no accelerator") -> str:
    """What a record says of where it was taken."""
    memory = psutil.virtual_memory().total / (1 << 30)
    return f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, {platform.machine()}, {accelerator}"


def report(
    records: list[Record],
    file: Path | None,
    *,
    accelerator: str = "no accelerator",
    packages: Mapping[str, str] | None = None,
) -> int:
    """Print the records, write them where asked; 1 if one of them misses its bar.

    Args:
        accelerator: what of it took part.
        packages: versions by name, where the figures depend on them.
    """
    for record in records:
        verdict = {True: "holds", False: "MISSED", None: ""}[record.holds]
        print(f"{record.name:<52} {record.value:>10.4g} {record.unit:<8} {record.bar:<28} {verdict}")
    if file is not None:
        document = {
            "date": datetime.now(timezone.utc).date().isoformat(),
            "machine": machine(accelerator),
            "python": platform.python_version(),
            **({"packages": dict(packages)} if packages else {}),
            "command": f"python -m {_module()} {shlex.join(map(_without_place, sys.argv[1:]))}".strip(),
            "records": [asdict(record) for record in records],
        }
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(any(record.holds is False for record in records))


def _without_place(argument: str) -> str:
    """Where files lay on the machine that took the record helps nobody."""
    return Path(argument).name if argument.startswith("/") else argument


def _module() -> str:
    return ".".join(Path(sys.argv[0]).with_suffix("").parts[-2:])
