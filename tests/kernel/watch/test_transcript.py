"""Where attempts of a group part: the turn, and how far into it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.watch.transcript import Said, parted, shared


def _said(units: str, *answers: tuple[int, int, int]) -> list[Said]:
    return [Said(units=units, answers=answers)]


FIRST = _said("prompt-ANSWER-seen-MORE", (7, 13, 0), (19, 23, 1))


@pytest.mark.parametrize(
    ("units", "answers", "told"),
    [
        ("prompt-ANOTHER", ((7, 14, 0),), (9, "answer", 0, 2)),
        ("prompt-ANSWER-else-MORE", ((7, 13, 0), (19, 23, 1)), (14, "given", 1, 1)),
        ("prompt-ANSWER", ((7, 13, 0),), (13, "end", 0, 0)),
        ("prompt-ANSWER-seen-MORE", ((7, 13, 0), (19, 23, 1)), (23, "same", 1, 0)),
        ("Prompt", (), (0, "end", None, 0)),
    ],
)
def test_the_place_is_told_by_turn_and_token(units, answers, told) -> None:
    (one,) = parted([("a", FIRST), ("b", _said(units, *answers))], str, "token")["parted"]
    assert (one["at"], one["place"], one["turn"], one["into"]) == told


def test_of_several_rows_those_that_share_most_are_compared_and_both_sides_are_shown() -> None:
    rows = [*_said("a sub-agent of it", (2, 5, 3)), *_said("prompt-ANSWER-seen-LESS", (7, 13, 0), (19, 23, 1))]
    found = parted([("gone", []), ("a", FIRST), ("b", rows)], str, "token")
    (one,) = found["parted"]
    assert (found["first"], found["missing"], one["key"]) == ("a", ["gone"], "b")
    assert (one["turn"], one["into"]) == (1, 0)
    assert (one["before"], one["first"], one["this"]) == ("ANSWER-seen-"[-12:], "MORE", "LESS")


def test_of_nothing_there_is_no_first() -> None:
    assert parted([("a", []), ("b", [])], str, "token") == {
        "unit": "token", "first": None, "parted": [], "missing": ["a", "b"],
    }  # fmt: skip


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_what_two_lists_share_is_found_by_halves(one: list[int], other: list[int]) -> None:
    expected = 0
    while expected < min(len(one), len(other)) and one[expected] == other[expected]:
        expected += 1
    assert shared(one, other) == expected
