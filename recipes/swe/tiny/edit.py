"""The edit language and what the agent shows the model; standard library only, shared by the agent and the generator.

The model sees a listing, ``LINE|TEXT`` per line, and the outcome of the tests; it answers with one such line, which
replaces that line of the file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

BAD_EDIT = "bad edit"
_EDIT = re.compile(r"(\d{1,4})\|([^\r\n]*)")
SHOWN_VALUE_CHARS = 24


def listing(lines: Sequence[str]) -> str:
    """The file with 1-based line numbers."""
    return "\n".join(f"{number}|{line}" for number, line in enumerate(lines, 1))


def apply_edit(lines: Sequence[str], answer: str) -> list[str] | None:
    """The file after the model's answer, or ``None`` when the answer is no edit of an existing line."""
    match = _EDIT.fullmatch(answer)
    if match is None or not 1 <= int(match[1]) <= len(lines):
        return None
    edited = list(lines)
    edited[int(match[1]) - 1] = match[2]
    return edited


def edit_between(old: Sequence[str], new: Sequence[str]) -> str:
    """The answer that turns ``old`` into ``new``, which must differ in one line at least; the first one is taken."""
    index = next(i for i, (before, after) in enumerate(zip(old, new, strict=True)) if before != after)
    return f"{index + 1}|{new[index]}"


def failure(call: str, got: str, expected: str) -> str:
    """One failed test: ``got`` is the repr of the value or the name of the exception."""
    return f"{call} gave {got[:SHOWN_VALUE_CHARS]} not {expected}"


def outcome(first_failure: str | None, passed: int, total: int) -> str:
    """What a test run says: the first failure, if any, and the score."""
    score = f"{passed}/{total} passed"
    return score if first_failure is None else f"FAIL {first_failure}\n{score}"


def user_message(lines: Sequence[str], tests_outcome: str, *, bad_edit: bool = False) -> str:
    """A user turn: the listing, then what the tests say; led by ``BAD_EDIT`` when the last answer was no edit."""
    text = f"{listing(lines)}\n{tests_outcome}"
    return f"{BAD_EDIT}\n{text}" if bad_edit else text
