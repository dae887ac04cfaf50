"""Errors a user can cause. Each names the key, the value and the fix; none needs a traceback to be understood."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SeamlessError(Exception):
    """Base of every error that seamless_verl raises on purpose."""


class ConfigError(SeamlessError):
    """A configuration value that cannot work.

    Args:
        key: dotted configuration key, as the user would write it on the command line.
        value: what the key holds.
        problem: why that cannot work, one clause.
        fix: what to write instead, one clause.
    """

    def __init__(self, key: str, value: object, problem: str, fix: str) -> None:
        super().__init__(f"{key}={value!s}: {problem}. Fix: {_sentence(fix)}")
        self.key = key
        self.value = value
        self.problem = problem
        self.fix = fix


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?")) else f"{text}."


class MachineError(SeamlessError):
    """The machine lacks something that the run needs (memory, disk, a device, a free port)."""

    def __init__(self, what: str, found: str, fix: str) -> None:
        super().__init__(f"{what}: {found}. Fix: {_sentence(fix)}")
        self.what = what
        self.found = found
        self.fix = fix


def meant(name: str, known: Iterable[str]) -> str:
    """The fix for an unknown name: the nearest known one, if any is near, and all known ones."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"write {near[0]}; known: {', '.join(names)}" if near else f"write one of {', '.join(names)}"
