"""Where a text occurs in a run: names and errors from the index, then conversations, then the text of trained rows.

    names ──► conversations that journals hold, latest first ──► verl's dumps, latest steps first
              └───────────── so many until the time is up; the answer says where to go on ─────┘

Invariant: nothing is indexed for it, and an answer takes about `LOOK_S`, however large the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from seamless_verl.observe.reporter import json_of
from seamless_verl.watch import readers

LOOK_S = 0.4
MOST = 50  # finds of one answer
_AROUND = 80  # characters that are shown on each side of a find
_PART_BYTES = 1 << 22

Known = dict[str, Any] | None
Turns = Callable[[str], Sequence[dict[str, Any]]]
"""The turns of a session's conversation; empty where they are gone."""


class Search:
    """One question.

    Args:
        turns_of: see `Turns`.
        clock: in seconds.
    """

    def __init__(self, text: str, turns_of: Turns, clock: Callable[[], float]) -> None:
        self._text = text.lower()
        self._turns_of = turns_of
        self._clock = clock
        self._until = clock() + LOOK_S
        self.finds: list[dict[str, Any]] = []

    def is_over(self) -> bool:
        """Whether the time for this answer is up."""
        return self._clock() >= self._until

    def look(self, places: Sequence[str | Path], start: int) -> int | None:
        """Look through sessions (their names) and dumps (their files), from number ``start`` on.

        Returns:
            Where to go on; ``None``: everything was looked through.
        """
        for number in range(start, len(places)):
            if number > start and (self.is_over() or len(self.finds) >= MOST):
                return number
            place = places[number]
            self.finds += self._in_session(place) if isinstance(place, str) else self._in_dump(place)
        return None

    def with_attempts(
        self, attempt: Callable[[str], Known], numbered: Callable[[str, int], Known]
    ) -> list[dict[str, Any]]:
        """The finds, each with its attempt; once where attempts of a group were given the same."""
        found: dict[Any, dict[str, Any]] = {}
        for find in self.finds:
            known = attempt(find["key"]) if "key" in find else numbered(find["group"], find["index"])
            if known is not None:
                same = known["group"], find["where"], find["before"], find["found"], find["after"]
                found.setdefault(same, {**find, "attempt": known})
        return list(found.values())

    def _in_session(self, session: str) -> Iterator[dict[str, Any]]:
        for turn in self._turns_of(session):
            called = " ".join(call["name"] for call in (turn["answer"] or {}).get("tool_calls", ()))
            for where, text in (("given", turn["given"]), ("answer", turn["text"]), ("tool called", called)):
                if (shown := excerpt(text, self._text)) is not None:
                    yield {"key": session, "turn": turn["ordinal"], "where": where, **shown}
                    break

    def _in_dump(self, file: Path) -> Iterator[dict[str, Any]]:
        # What of it stands in a line of JSON in any case: other letters may be there in either, or as numbers.
        needle = max(re.split(r"\\u[0-9a-f]{4}", json.dumps(self._text)[1:-1]), key=len).encode()
        end, found = 0, 0
        while (part := readers.new_lines(file, end, _PART_BYTES)).lines:
            end = part.end
            for start, line in part.lines:
                if needle not in line.lower():
                    continue
                for find in self._in_line(start, line):
                    yield find
                    found += 1
                if found >= MOST:
                    return

    def _in_line(self, start: int, line: bytes) -> Iterator[dict[str, Any]]:
        for text in readers.trained_texts(readers.Lines(lines=[(start, line)])):
            record = json_of(line) or {}
            for where in ("input", "output", "gts"):
                if (shown := excerpt(str(record.get(where, "")), self._text)) is not None:
                    yield {"group": text.group, "index": text.index, "where": where, **shown}
                    break


def excerpt(text: str, wanted: str) -> dict[str, str] | None:
    """The first place of ``wanted`` (in lower case) with what stands around it; ``None``: it is not there."""
    at = text.lower().find(wanted)
    if at < 0:
        return None
    stop = at + len(wanted)
    return {
        "before": ("…" if at > _AROUND else "") + text[max(0, at - _AROUND) : at],
        "found": text[at:stop],
        "after": text[stop : stop + _AROUND] + ("…" if len(text) > stop + _AROUND else ""),
    }
