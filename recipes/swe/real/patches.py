"""Unified diffs as a list of per-file sections, so that a grader can keep a part of a patch and refuse the rest.

Invariant: the texts of all sections joined are the input, apart from leading prose before the first header.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch

_GIT_HEADER = re.compile(r"^diff --git (\"?)a/(?P<old>.+?)\1 (\"?)b/(?P<new>.+?)\3$")
_FILE_LINE = re.compile(r"^(?:---|\+\+\+) (?P<path>\"(?:[^\"\\]|\\.)*\"|[^\t\n]+)")
_RENAME = re.compile(r"^(?:rename|copy) (?:from|to) (?P<path>.+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePatch:
    """The part of a diff that is about one file.

    Attributes:
        paths: every path the section names (old and new name), relative to the repository.
        text: the section as it stood in the diff, line ends included.
    """

    paths: frozenset[str]
    text: str


def split_patch(patch: str) -> tuple[FilePatch, ...]:
    """Cut a diff (``git diff`` or plain ``---``/``+++``) into one section per file."""
    lines = patch.splitlines(keepends=True)
    starts = _section_starts(lines)
    ends = [*starts[1:], len(lines)][: len(starts)]
    return tuple(
        FilePatch(paths=_paths(lines[start:end]), text="".join(lines[start:end]))
        for start, end in zip(starts, ends, strict=True)
    )


def touched_paths(patch: str) -> frozenset[str]:
    """Every path a diff names."""
    return frozenset(path for section in split_patch(patch) for path in section.paths)


def without_paths(patch: str, patterns: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """Drop the sections that touch a path matching one of ``patterns``.

    Args:
        patch: the diff.
        patterns: shell patterns; one without ``/`` is matched against the file name, else against the whole path. A
            leading ``/`` stands for the repository's root, also before a name without a folder.

    Returns:
        The rest of the diff, and the dropped paths in order.
    """
    wanted = tuple(patterns)
    kept: list[str] = []
    dropped: list[str] = []
    for section in split_patch(patch):
        if hit := matching(section.paths, wanted):
            dropped.extend(hit)
        else:
            kept.append(section.text)
    return "".join(kept), tuple(dropped)


def matching(paths: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The paths that match one of ``patterns`` (as in `without_paths`), in order."""
    wanted = tuple(patterns)
    return sorted(path for path in paths if any(_matches(path, pattern) for pattern in wanted))


def looks_like_patch(text: str) -> bool:
    """True where ``text`` holds at least one file section."""
    return bool(split_patch(text))


def _matches(path: str, pattern: str) -> bool:
    if pattern.startswith("/"):
        return fnmatch(f"/{path}", pattern)
    return fnmatch(path if "/" in pattern else path.rsplit("/", 1)[-1], pattern)


def _section_starts(lines: list[str]) -> list[int]:
    git = [index for index, line in enumerate(lines) if line.startswith("diff --git ")]
    if git:
        return git
    return [
        index
        for index, (line, following) in enumerate(itertools.pairwise(lines))
        if line.startswith("--- ") and following.startswith("+++ ")
    ]


def _paths(lines: list[str]) -> frozenset[str]:
    found: set[str] = set()
    for line in lines:
        if line.startswith("@@"):
            break
        if match := _FILE_LINE.match(line):
            path = _unquote(match["path"].rstrip())
            if path != "/dev/null":
                found.add(re.sub(r"^[ab]/", "", path, count=1))
        elif match := _RENAME.match(line.rstrip("\n")):
            found.add(_unquote(match["path"]))
    # A pure mode change, an empty new file and a binary file have no ---/+++ lines.
    if not found and (match := _GIT_HEADER.match(lines[0].rstrip("\n"))):
        found.update((_unescape(match["old"]), _unescape(match["new"])))
    return frozenset(found)


def _unquote(path: str) -> str:
    return _unescape(path[1:-1]) if len(path) > 1 and path[0] == path[-1] == '"' else path


def _unescape(path: str) -> str:
    """Undo git's C-style quoting, where non-ASCII bytes are octal escapes of UTF-8."""
    if "\\" not in path:
        return path
    return (
        path.encode("latin-1", "replace")
        .decode("unicode_escape")
        .encode("latin-1", "replace")
        .decode("utf-8", "replace")
    )
