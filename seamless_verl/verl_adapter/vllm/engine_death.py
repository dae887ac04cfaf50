"""How a vLLM engine ended, in its last words. Runs in the server's process, which shares its log with the engine."""

from __future__ import annotations

import os
import re
import signal
import stat
from collections.abc import Iterable
from typing import Any

_TAIL_BYTES = 1 << 16
_SIGNALLED = 128
_KILLED = "killed by SIGKILL, as by the kernel where memory runs out (see `dmesg`)"
# ``(EngineCore pid=7) ERROR 11-23 22:42:00 [core.py:900] ValueError: …``, also of its workers, with or without a level.
_WORDS = re.compile(
    r"^\((?:EngineCore|Worker)[^)]*\)\s(?:.*\]\s)?(?P<error>[A-Za-z_][\w.]*(?:Error|Exception|Exit)\b.*)$", re.M
)


def engine_died(server: Any) -> str | None:
    """How the engine of this server ended, for people; None: it lives, as engines that do not say are taken to do."""
    engine = getattr(server, "engine", None)
    if not getattr(engine, "errored", False):
        return None
    exits = list(_exits(engine))
    if _KILLED in exits:  # without a word
        return _KILLED
    words = next((found for descriptor in (2, 1) if (found := last_words(_tail(descriptor)))), None)
    return (", ".join(exits) or "it is gone") + (f"; its last words: {words}" if words else "")


def last_words(log: str) -> str | None:
    """The last error that an engine's process wrote to its server's log."""
    found = [match["error"] for match in _WORDS.finditer(log)]
    return found[-1].strip() if found else None


def _exits(engine: Any) -> Iterable[str]:
    manager = getattr(getattr(getattr(engine, "engine_core", None), "resources", None), "engine_manager", None)
    for process in getattr(manager, "processes", ()):
        code = process.exitcode
        if code is not None and code > _SIGNALLED:  # told by a stand-in of the nursery, as a shell does
            code = _SIGNALLED - code
        if code == -signal.SIGKILL:
            yield _KILLED
        elif code not in (None, -signal.SIGTERM):  # vLLM ends the others with SIGTERM
            yield f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _tail(descriptor: int) -> str:
    """The end of the file that this process writes to; "" where it is none."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return ""
    with open(f"/proc/self/fd/{descriptor}", "rb") as log:
        log.seek(max(0, status.st_size - _TAIL_BYTES))
        return log.read().decode("utf-8", "replace")
