"""Where the attempts of a group part from the first of them: at which turn, and after how many tokens. Pure.

Attempts are compared by the tokens of their rows, or, where those are gone, by the text that verl wrote down. Of
several rows the two that share most are compared: a sub-agent's row says nothing about another attempt's main row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seamless_verl.trajectory.rows import Row
from seamless_verl.watch.transcript import shared

_BEFORE, _AFTER = 12, 40  # tokens
_LETTERS = 4  # of a token, about


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Of one attempt, one of its rows.

    Attributes:
        units: its tokens, or letters where tokens are gone.
        answers: ``(first unit, one after the last, turn)`` of each answer in it.
    """

    units: Sequence[Any]
    answers: tuple[tuple[int, int, int], ...] = ()


def of_rows(rows: Sequence[Row], ordinals: Mapping[str, int]) -> list[Said]:
    """Args:
    ordinals: of each answer, by its id.
    """
    return [
        Said(
            units=row.token_ids,
            answers=tuple((turn.start, turn.stop, ordinals[turn.generation_id]) for turn in row.turns),
        )
        for row in rows
    ]


def ordinals_of(rows: Sequence[Row]) -> dict[str, int]:
    """Turns of rows whose session is gone, numbered as they come."""
    found: dict[str, int] = {}
    for row in rows:
        for turn in row.turns:
            found.setdefault(turn.generation_id, len(found))
    return found


def parted(attempts: Sequence[tuple[str, Sequence[Said]]], decode: Callable[[Any], str], unit: str) -> dict[str, Any]:
    """Args:
        attempts: keys, and what is left of each; in the order of the group.
        decode: units to text.
        unit: ``token`` or ``character``.

    Returns:
        ``unit``, ``first`` (its key; ``None``: nothing is left of any), ``parted`` (an entry per other attempt of which
        something is left), ``missing`` (keys of those of which nothing is).
    """
    known = [(key, said) for key, said in attempts if said]
    missing = [key for key, said in attempts if not said]
    if not known:
        return {"unit": unit, "first": None, "parted": [], "missing": missing}
    (first, base), *others = known
    around = (_BEFORE, _AFTER) if unit == "token" else (_BEFORE * _LETTERS, _AFTER * _LETTERS)
    return {
        "unit": unit,
        "first": first,
        "parted": [{"key": key, **_parting(base, said, decode, around)} for key, said in others],
        "missing": missing,
    }


def _parting(
    base: Sequence[Said], other: Sequence[Said], decode: Callable[[Any], str], around: tuple[int, int]
) -> dict[str, Any]:
    pairs = [(shared(one.units, two.units), one, two) for one in base for two in other]
    at, one, two = max(pairs, key=lambda pair: pair[0])
    before, after = around
    place, turn, into = _place(at, two)
    if at == len(one.units) == len(two.units):
        place = "same"
    return {
        "at": at,
        "place": place,
        "turn": turn,
        "into": into,
        "before": decode(two.units[max(0, at - before) : at]),
        "first": decode(one.units[at : at + after]),
        "this": decode(two.units[at : at + after]),
    }


def _place(at: int, said: Said) -> tuple[str, int | None, int]:
    """Whether that unit is in an ``answer`` or in what was ``given`` before one; of which turn, and how far in it."""
    begin = 0
    for start, stop, turn in said.answers:
        if at < start:
            return "given", turn, at - begin
        if at < stop:
            return "answer", turn, at - start
        begin = stop
    return "end", said.answers[-1][2] if said.answers else None, 0


def of_texts(texts: Sequence[Mapping[str, Any]]) -> list[Said]:
    """Of verl's dump: what was answered and observed, without the prompt that all of a group share."""
    return [Said(units=text["output"]) for text in texts if text.get("output")]
