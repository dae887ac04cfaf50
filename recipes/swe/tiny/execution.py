"""Runs a generated function inside this process, under limits that do not depend on time; makes data, never grades.

The limits are executed lines and the size of values, not seconds, so that the same seed gives the same tasks on a busy
machine, and a bug that squares a number in a loop cannot eat the memory. Only code that
the generator wrote itself comes here; what a model wrote runs in ``sandbox``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

MAX_LINES = 400
MAX_BITS = 64
MAX_LENGTH = 1000
_FILE = "<generated>"


class LimitReached(BaseException):
    """Too many lines, or too large a variable; a ``BaseException`` so that no handler there swallows it."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a call gave: ``value`` when it returned, else ``error``, the exception's name (``Timeout`` at a limit)."""

    value: Any = None
    error: str | None = None

    def shown(self) -> str:
        return repr(self.value) if self.error is None else self.error

    def equals(self, expected: object) -> bool:
        return self.error is None and type(self.value) is type(expected) and bool(self.value == expected)


def load(lines: Sequence[str], function: str) -> Callable[..., Any] | str:
    """The function, or the name of the exception that compiling and executing the source raised.

    A function that the source does not define comes as one that raises ``ImportError``, as in the sandbox.
    """
    namespace: dict[str, Any] = {}
    try:
        exec(compile("\n".join(lines), _FILE, "exec"), namespace)
    except Exception as error:  # noqa: BLE001 - any exception of generated code is an outcome
        return type(error).__name__
    loaded: Callable[..., Any] = namespace.get(function, _missing)
    return loaded


def _missing(*arguments: object) -> None:
    raise ImportError


def _too_large(value: object) -> bool:
    if isinstance(value, int):
        return value.bit_length() > MAX_BITS
    return isinstance(value, str | list) and len(value) > MAX_LENGTH


def call(function: Callable[..., Any], arguments: Sequence[object], max_lines: int = MAX_LINES) -> Call:
    """Call with a copy of the arguments and at most ``max_lines`` executed lines."""
    left = max_lines

    def on_line(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left < 0 or any(map(_too_large, frame.f_locals.values())):
                raise LimitReached
        return on_line

    def on_call(frame: FrameType, event: str, argument: object) -> Any:
        return on_line if frame.f_code.co_filename == _FILE else None

    copied = [copy.copy(argument) for argument in arguments]
    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        value = function(*copied)
    except LimitReached:
        return Call(error="Timeout")
    except Exception as error:  # noqa: BLE001 - any exception of generated code is an outcome
        return Call(error=type(error).__name__)
    finally:
        sys.settrace(before)
    if "[...]" in repr(value):  # a list that holds itself; no such value leaves the sandbox
        return Call(error="RecursionError")
    return Call(value=value)
