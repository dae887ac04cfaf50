"""What counts as the same message, and the same spelling of it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.trajectory.messages import (
    AfterAddition,
    Image,
    Message,
    Role,
    ToolCall,
    canonical_json,
    key_of,
    transcript_of,
)
from tests.fakes import assistant, system, tool, user


def call(arguments: str, call_id: str = "c1", name: str = "run") -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (assistant("text"), assistant(" text\n")),
        (assistant("a\r\nb"), assistant("a\nb")),
        (assistant("", call('{"b": 1, "a": 2.0}')), assistant("", call('{"a":2,"b":1}'))),
        (assistant("", call("{}", "c1")), assistant("", call("{}", "other"))),
        (assistant("x", reasoning="because"), assistant("x")),
        (tool("out", "c1"), tool("out", "c2")),
    ],
)
def test_same_identity_in_another_spelling(one: Message, other: Message) -> None:
    assert key_of(one).identity == key_of(other).identity
    assert key_of(one) != key_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("a"), user("b")),
        (user("a"), system("a")),
        (user("a  b"), user("a b")),
        (assistant("", call('{"a": 1}')), assistant("", call('{"a": 2}'))),
        (assistant("", call('{"a": 1}')), assistant("", call('{"a": "1"}'))),
        (assistant("", call('{"a": true}')), assistant("", call('{"a": 1}'))),
        (assistant("", call("{}")), assistant("", call("{}", name="walk"))),
        (assistant("", call("{}"), call("{}")), assistant("", call("{}"))),
        (assistant("x"), assistant("x", call("{}"))),
        (Message(role=Role.USER, content="a", name="bob"), user("a")),
        (AfterAddition.of(user("a"), "b"), user("a")),
        (AfterAddition.of(user("a"), "b"), AfterAddition.of(user("a"), "b ")),
        (AfterAddition.of(user("a"), "b"), Message(role=Role.USER, content="a", name="behind")),
        (AfterAddition.of(assistant("", call("{}")), "b"), assistant("", call("{}"))),
    ],
)
def test_another_identity(one: Message, other: Message) -> None:
    assert key_of(one).identity != key_of(other).identity


def test_fields_cannot_run_into_each_other() -> None:
    assert (
        key_of(Message(role=Role.USER, name="ab", content="c")).identity
        != key_of(Message(role=Role.USER, name="a", content="bc")).identity
    )


@pytest.mark.parametrize(
    "text", ["", "not json", "{", "NaN", '{"a": Infinity}', "[" * 5000, "1" + "0" * 5000, '{"a": 1e999}']
)
def test_arguments_that_are_no_json_value_stand_for_themselves(text: str) -> None:
    assert canonical_json(text) == text


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(_JSON, st.sampled_from([None, 2]), st.booleans())
def test_canonical_json_ignores_how_a_value_is_written(value: object, indent: int | None, ascii_only: bool) -> None:
    written = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert canonical_json(written) == canonical_json(json.dumps(value, sort_keys=True))
    assert canonical_json(canonical_json(written)) == canonical_json(written)


@given(st.lists(st.text(max_size=5), max_size=6), st.integers(0, 6))
def test_a_known_beginning_saves_work_and_changes_nothing(texts: list[str], num_known: int) -> None:
    messages = tuple(user(text) for text in texts)
    known = transcript_of(messages[:num_known], ("{}",))
    afresh = transcript_of(messages, ("{}",))
    assert transcript_of(messages, ("{}",), known=known, num_known=len(known.messages)) == afresh


def test_tools_are_part_of_a_requests_name_but_not_of_its_chain() -> None:
    with_tools, without = transcript_of((user("a"),), ('{"x": 1}',)), transcript_of((user("a"),))
    assert with_tools.chain == without.chain
    assert with_tools.digest != without.digest
    assert transcript_of((user("a"),), ('{ "x":1 }',)).tools_digest == with_tools.tools_digest


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
