"""Where code broke, or stands: the lines of it that are the user's own.

A place is one line for people: ``/home/me/agent.py:41 in act: reply = client.ask(prompt)``. Standard library only,
since agents' processes import it.
"""

from __future__ import annotations

import importlib.util
import linecache
import re
import sysconfig
import traceback
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any

_MOST_PLACES = 3
_PACKAGE = Path(__file__).parent
# What is below one of these is not the user's, but for recipes, which are written as a user would write them.
_LIBRARIES = tuple(
    f"{folder}/" for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), _PACKAGE)
)
_INSTALLED = re.compile(r"/(site|dist)-packages(/|$)")  # of this environment, the one below it, the user's own folder
_CLONED = ("verl", "vllm", "torch", "ray")  # often clones, installed for editing
_FRAME = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>\S+)(?:\n\s+(?P<code>[^\n]+))?')
_OF_TRACEBACK = re.compile(r"File |Traceback|\^+|~+")


def error_in_words(error: BaseException) -> str:
    """Type and first line of the message: of the cause, where Ray has brought the error from another process."""
    cause = getattr(error, "cause", None)
    told = cause if isinstance(cause, BaseException) else error
    lines = str(told).strip().splitlines()
    return f"{type(told).__name__}: {lines[0]}" if lines else type(told).__name__


def places_of(error: BaseException, *, only_own: bool = False) -> tuple[str, ...]:
    """The user's own lines of a traceback, the innermost last.

    Also those of another process: Ray quotes its traceback in the message.

    Args:
        only_own: if no line is the user's, the answer is empty instead of the last lines of all.
    """
    found = list(_FRAME.finditer("".join(traceback.format_exception(error))))
    own = [frame for frame in found if is_own(frame["file"])]
    told = own if own or only_own else found
    places = [_place(frame["file"], int(frame["line"]), frame["name"], frame["code"]) for frame in told]
    return tuple(dict.fromkeys(places))[-_MOST_PLACES:]


def is_own(file: str) -> bool:
    """Whether a file is code of the user's, also that of a recipe."""
    if file.startswith(f"{_PACKAGE}/recipes/"):
        return True
    return not (is_installed(file) or file.startswith(("<", *_LIBRARIES, *_clones())))


def is_installed(path: str) -> bool:
    """Whether a file or a folder was put there by an installer."""
    return _INSTALLED.search(path) is not None


@cache
def _clones() -> tuple[str, ...]:
    """Folders of `_CLONED`, which are not imported."""
    folders = []
    for name in _CLONED:
        with suppress(ImportError, ValueError):  # of a module without a spec
            spec = importlib.util.find_spec(name)
            folders += [f"{Path(spec.origin).parent}/"] if spec is not None and spec.origin else []
    return tuple(folders)


def places_of_stack(frame: FrameType | None, *, only_own: bool = False) -> tuple[str, ...]:
    """Where a thread stands whose innermost frame is ``frame``; ``only_own`` as in `places_of`."""
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return _told(frames[::-1], only_own)


def places_of_coroutine(coroutine: Coroutine[Any, Any, Any] | None) -> tuple[str, ...]:
    """Where a coroutine waits that is suspended: what it awaits, down to the first that is no coroutine."""
    frames = []
    while isinstance(coroutine, CoroutineType) and coroutine.cr_frame is not None:
        frame = coroutine.cr_frame
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        coroutine = coroutine.cr_await
    return _told(frames)


def _told(frames: Sequence[tuple[str, int, str]], only_own: bool = False) -> tuple[str, ...]:
    own = [frame for frame in frames if is_own(frame[0])]
    return tuple(_place(*frame) for frame in (own if own or only_own else frames)[-_MOST_PLACES:])


def _place(file: str, line: int, name: str, code: str | None = None) -> str:
    text = code.strip() if code and not _OF_TRACEBACK.match(code.strip()) else linecache.getline(file, line).strip()
    return f"{file}:{line} in {name}" + (f": {text}" if text else "")
