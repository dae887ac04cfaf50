"""Paths of token ids against the flat lists that they stand for, and marks of pictures among them."""

from __future__ import annotations

from array import array
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.trajectory import tokens
from seamless_verl.trajectory.tokens import EMPTY, TokenPath, mark, numbers_in, plain

_IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5)
# Which of the paths made so far goes on, how many of its last ids are left out, what follows, and whether it is hashed.
_MOVES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8), _IDS, st.booleans()), max_size=25)


def _grown(moves: list[tuple[int, int, list[int], bool]]) -> list[tuple[TokenPath, list[int]]]:
    """A tree of paths, each with its ids as a list; some are hashed while it grows."""
    known: list[tuple[TokenPath, list[int]]] = [(EMPTY, [])]
    for which, cut, added, is_hashed in moves:
        path, ids = known[which % len(known)]
        cut = min(cut, len(ids))
        known.append((path.without(cut).then(array("i", added)), [*ids[: len(ids) - cut], *added]))
        if is_hashed:
            known[-1][0].digest()
    return known


@given(_MOVES)
def test_however_it_grew_a_path_reads_and_hashes_like_its_list(moves: list[tuple[int, int, list[int], bool]]) -> None:
    for path, ids in _grown(moves):
        assert (list(path), path.flat().tolist(), len(path)) == (ids, ids, len(ids))
        assert [token for chunk in path.chunks() for token in chunk] == ids
        assert path.digest() == blake2b(array("i", ids).tobytes(), digest_size=16).digest()
        assert path.digest() == path.digest()


@given(_MOVES, st.integers(-12, 12), st.integers(-12, 12), st.sampled_from([1, 1, 1, 2, -1]))
def test_any_slice_is_the_lists(
    moves: list[tuple[int, int, list[int], bool]], start: int, stop: int, step: int
) -> None:
    path, ids = _grown(moves)[-1]
    assert path[start:stop:step].tolist() == ids[start:stop:step]
    assert path[start:].tolist() == ids[start:]
    if -len(ids) <= start < len(ids):
        assert path[start] == ids[start]
    else:
        with pytest.raises(IndexError):
            path[start]


@given(_MOVES)
def test_what_is_new_is_told_and_never_made_up(moves: list[tuple[int, int, list[int], bool]]) -> None:
    known = _grown(moves)
    for path, ids in known:
        for earlier, begun in known:
            added = path.since(earlier)
            # It may miss a common beginning that is cut in other pieces, but what it says is so.
            assert added is None or begun + added.tolist() == ids


@given(_IDS, _IDS, _IDS)
def test_growth_is_recognised_also_where_the_same_step_was_made_twice(
    one: list[int], two: list[int], on: list[int]
) -> None:
    """A prompt is sent first and joins the tree later, as another object with the same ids."""
    answered = TokenPath.of(one)
    sent, joined = answered.then(array("i", two)), answered.then(array("i", two))
    added = joined.then(array("i", on)).since(sent)
    assert added is not None
    assert added.tolist() == on


def test_a_turn_hashes_what_it_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting:
        def __init__(self, state: blake2b) -> None:
            self.state = state

        def copy(self) -> Counting:
            return Counting(self.state.copy())

        def update(self, ids: array[int]) -> None:
            hashed.append(len(ids))
            self.state.update(ids)

        def digest(self) -> bytes:
            return self.state.digest()

    hashed: list[int] = []
    monkeypatch.setattr(tokens, "blake2b", lambda digest_size: Counting(blake2b(digest_size=digest_size)))
    monkeypatch.setattr(tokens, "EMPTY", TokenPath(None, array("i")))
    answered = TokenPath.of(range(100_000))
    answered.digest()
    for turn in range(5):
        hashed.clear()
        answered.then(array("i", range(7))).digest()  # the prompt as it is sent
        answered = answered.then(array("i", range(7))).then(array("i", [turn] * 20))  # as it joins the tree
    assert sum(hashed) <= 40


def test_a_path_of_a_thousand_turns_is_let_go_without_recursion() -> None:
    path = EMPTY
    for _ in range(100_000):
        path = path.then(array("i", [1]))
    assert len(path) == 100_000
    assert path[-3:].tolist() == [1, 1, 1]
    del path


PAD = 5
EXPANSIONS = st.lists(st.sampled_from([PAD, 6, 7]), max_size=6).map(lambda ids: [*ids, PAD])


@given(st.lists(st.tuples(st.integers(0, 1000), EXPANSIONS, st.lists(st.integers(6, 99), max_size=3)), max_size=8))
def test_marks_tell_pictures_apart_and_come_off_again(prompt: list[tuple[int, list[int], list[int]]]) -> None:
    marked: list[int] = []
    sent: list[int] = []
    for number, expansion, text in prompt:
        marked += [*mark(expansion, PAD, number), *text]
        sent += [*expansion, *text]
    assert list(plain(marked, PAD)) == sent
    assert list(numbers_in(marked)) == [number for number, _, _ in prompt]


@given(EXPANSIONS, st.integers(0, 1000), st.integers(0, 1000))
def test_two_pictures_never_read_alike(expansion: list[int], one: int, other: int) -> None:
    assert (mark(expansion, PAD, one) == mark(expansion, PAD, other)) == (one == other)
