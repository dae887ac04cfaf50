"""Which files and types of ours a chat completion passes: a proxy that notes every call while it is asked to.

python -m benchmarks.house_trace OUT proxy …    # SIGUSR1: from here; SIGUSR2: up to here, written to OUT
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

import seamless_verl
from seamless_verl.cli import main

_PACKAGE = str(Path(seamless_verl.__file__).parent) + "/"


class Trace:
    """Files whose functions ran, and types of ours that were made, between the two signals."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.types: set[str] = set()
        self._on = False
        threading.setprofile(self.note)  # counts for threads that start later: pools have theirs before the request

    def note(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self._on:
            return
        code = frame.f_code
        if event == "return":
            self._note_values([arg])
        if event != "call":
            return
        if code.co_filename.startswith(_PACKAGE):
            self.files.add(code.co_filename.removeprefix(_PACKAGE))
            self._note_values(frame.f_locals.values())
        elif code.co_name == "__init__" and code.co_filename == "<string>":  # a dataclass
            self._note_type(type(frame.f_locals["self"]))
        if code.co_name == "__init__" and "self" in frame.f_locals:
            self._note_type(type(frame.f_locals["self"]))

    def _note_values(self, values: Any) -> None:
        """Structs and named tuples are made in C; they are seen where they are passed on, alone or in a list."""
        for passed in values:
            value = passed[0] if type(passed) in (list, tuple) and passed else passed
            if isinstance(value, msgspec.Struct) or (isinstance(value, tuple) and hasattr(value, "_fields")):
                self._note_type(type(value))

    def _note_type(self, kind: type) -> None:
        for base in _up_to_ours(kind):
            self.types.add(f"{base.__module__}.{base.__qualname__}")

    def begin(self, *_: object) -> None:
        self.files.clear()
        self.types.clear()
        self._on = True
        sys.setprofile(self.note)

    def stop(self) -> None:
        self._on = False
        sys.setprofile(None)

    def end(self, out: Path) -> None:
        self.stop()
        temporary = out.with_suffix(".part")
        temporary.write_text(json.dumps({"files": sorted(self.files), "types": sorted(self.types)}))
        temporary.replace(out)


def _up_to_ours(kind: type) -> Iterator[type]:
    if kind.__module__.startswith("seamless_verl.") and not issubclass(kind, BaseException):
        yield kind


if __name__ == "__main__":
    trace, out = Trace(), Path(sys.argv[1])
    signal.signal(signal.SIGUSR1, trace.begin)
    signal.signal(signal.SIGUSR2, lambda *_: trace.end(out))
    sys.argv = ["seamless-verl", *sys.argv[2:]]
    sys.exit(main())
