"""Marks of pictures among token ids, and what pictures mean for the identity of a message."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.trajectory.images import mark, numbers_in, plain
from seamless_verl.trajectory.messages import Image, Message, Role, key_of

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


def _seen(*parts: str | Image) -> Message:
    texts = "\n".join(part for part in parts if isinstance(part, str))
    return Message(role=Role.USER, content=texts, parts=parts)


def test_a_message_is_known_by_its_pictures_and_their_places() -> None:
    red, blue = Image(digest="red", token_ids=(-1,)), Image(digest="blue", token_ids=(-3,))
    known = key_of(_seen("a", red, "b")).identity
    assert key_of(_seen("a", red, " b\r\n")).identity == known
    others = [
        _seen("a", blue, "b"),
        _seen("a", "b", red),
        _seen(red, "a", "b"),
        _seen("a\nb", red),
        _seen("a", red, red, "b"),
        Message(role=Role.USER, content="a\nb"),
    ]
    identities = {key_of(other).identity for other in others}
    assert len(identities) == len(others)
    assert known not in identities
    assert key_of(_seen("a\nb", red, "c")).identity != key_of(_seen("a", red, "b\nc")).identity
