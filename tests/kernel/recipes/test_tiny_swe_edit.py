"""The edit language and the texts of the turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.recipes.swe.tiny import edit

TEXT = st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=("Cs",)))
FILES = st.lists(TEXT, min_size=1, max_size=12)


@given(lines=FILES, data=st.data())
def test_an_edit_replaces_one_line_and_nothing_else(lines: list[str], data: st.DataObject) -> None:
    number = data.draw(st.integers(1, len(lines)))
    text = data.draw(TEXT)
    edited = edit.apply_edit(lines, f"{number}|{text}")
    assert edited == [*lines[: number - 1], text, *lines[number:]]


@given(lines=FILES, data=st.data())
def test_edit_between_is_undone_by_apply(lines: list[str], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(lines) - 1))
    other = [*lines[:index], lines[index] + "x", *lines[index + 1 :]]
    assert edit.apply_edit(lines, edit.edit_between(lines, other)) == other


@given(lines=FILES, answer=st.text())
def test_any_answer_is_an_edit_or_nothing(lines: list[str], answer: str) -> None:
    edited = edit.apply_edit(lines, answer)
    assert edited is None or len(edited) == len(lines)


@pytest.mark.parametrize("answer", ["", "1", "|x", "0|x", "3|x", "-1|x", "1|x\n", "1|x\n2|y", " 1|x", "x|1", "99999|x"])
def test_what_is_no_edit(answer: str) -> None:
    assert edit.apply_edit(["a", "b"], answer) is None


def test_the_original_is_left_alone() -> None:
    lines = ["a", "b"]
    edit.apply_edit(lines, "1|c")
    assert lines == ["a", "b"]


def test_texts_of_a_turn() -> None:
    failure = edit.failure("f(1)", "x" * 40, "2")
    assert failure == "f(1) gave " + "x" * 24 + " not 2"
    outcome = edit.outcome(failure, 3, 5)
    assert outcome == f"FAIL {failure}\n3/5 passed"
    assert edit.outcome(None, 5, 5) == "5/5 passed"
    assert edit.user_message(["a", "b"], "5/5 passed") == "1|a\n2|b\n5/5 passed"
    assert edit.user_message(["a"], "0/1 passed", bad_edit=True) == "bad edit\n1|a\n0/1 passed"
