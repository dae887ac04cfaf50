"""How a vLLM engine ended, or why it did not start, in its last words.

Runs in the server's process, which shares its log with the engine.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import signal
import socket
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from seamless_verl.errors import SeamlessError

_TAIL_BYTES = 1 << 16
_LOOK_S = 1.0
_SIGNALLED = 128
_KILLED_CODES = {-signal.SIGKILL, _SIGNALLED + signal.SIGKILL}
_FAILED = re.compile(r"Failed core proc\(s\): (\{.*\})")  # what vLLM raises instead of the engine's error
_CODE = re.compile(r": (-?\d+)")
_USAGE = re.compile(r"^\S.*: error: (?P<error>.*)$", re.M)
_KILLED = "killed by SIGKILL, as by the kernel where memory runs out (see `dmesg`)"
# ``(EngineCore pid=7) ERROR 11-23 22:42:00 [core.py:900] ValueError: …``, also of its workers, with or without a level.
_WORDS = re.compile(
    r"^\((?:EngineCore|Worker)[^)]*\)\s(?:.*\]\s)?(?P<error>[A-Za-z_][\w.]*(?:Error|Exception|Exit)\b.*)$", re.M
)


def install(core_client: Any) -> None:
    """Have calls through ``vllm.v1.engine.core_client`` fail when the engine dies (0.24 and 0.27)."""
    client = core_client.AsyncMPClient
    original = client._call_utility_async
    if hasattr(original, "__wrapped__"):
        return  # vLLM may load its plug-ins more than once

    @functools.wraps(original)
    async def call_utility(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = asyncio.ensure_future(original(self, *args, **kwargs))
        try:
            while not (await asyncio.wait([call], timeout=_LOOK_S))[0]:
                if self.resources.engine_dead:
                    raise core_client.EngineDeadError
            return call.result()
        finally:
            call.cancel()

    client._call_utility_async = call_utility


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


class EngineNotStarted(SeamlessError):
    """A rollout replica without an engine; the message says why."""

    @classmethod
    def because(cls, error: BaseException, replica: int) -> EngineNotStarted:
        """``error``: what the server raised, which often only says that the engine's process ended."""
        log, kept = Path(os.path.realpath("/proc/self/fd/2")), os.environ.get("SEAMLESS_RAY_DIR")
        is_kept = kept is not None and log.is_relative_to(os.path.realpath(kept))  # copied into the run folder
        more = f"logs/{log.name}" if is_kept else f"{log} on {socket.gethostname()}"
        return cls(
            f"vLLM's engine did not start (rollout replica {replica}): {_why_not_started(error)}. Fix: mend what that "
            f"names (its settings are actor_rollout_ref.rollout.* and the engine_kwargs.vllm.* in it); more: {more}"
        )


def _why_not_started(error: BaseException) -> str:
    failed = _FAILED.search(str(error))
    if failed is not None and {int(code) for code in _CODE.findall(failed[1])} & _KILLED_CODES:
        return _KILLED
    logs = [_tail(descriptor) for descriptor in (2, 1)]
    if isinstance(error, SystemExit):  # argparse has printed why
        words = [match["error"] for log in logs for match in _USAGE.finditer(log)]
        return words[-1].strip() if words else f"exit code {error.code}"
    if failed is None:
        return f"{type(error).__name__}: {error}"
    return next((found for log in logs if (found := last_words(log))), str(error))


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
