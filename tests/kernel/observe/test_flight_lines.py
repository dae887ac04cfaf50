"""Every kind of event goes to a line and back; what is broken is named; what is unknown is left out."""

import json
import typing
from dataclasses import fields
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.observe import flight
from seamless_verl.observe.recording import (
    KINDS,
    FlightFormatError,
    FlightHeader,
    decode_event,
    decode_header,
    encode_event,
    encode_header,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBER = st.floats(-1e9, 1e9, allow_nan=False).map(lambda value: round(value, 6))


def values_of(hint) -> st.SearchStrategy:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if hint in (int, float, str, bool):
        return {int: st.integers(-(1 << 40), 1 << 40), float: NUMBER, str: TEXT, bool: st.booleans()}[hint]
    if typing.get_origin(hint) is tuple:
        return st.lists(values_of(typing.get_args(hint)[0]), max_size=3).map(tuple)
    if typing.get_origin(hint) is not None and type(None) in typing.get_args(hint):
        return st.none() | values_of(typing.get_args(hint)[0])
    if hint == float | None or hint == int | None:
        return st.none() | values_of(typing.get_args(hint)[0])
    return st.dictionaries(TEXT, st.integers(0, 9), max_size=2)


def events_of(kind) -> st.SearchStrategy:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{spec.name: values_of(hints[spec.name]) for spec in fields(kind)})


@given(st.one_of([events_of(kind) for kind in KINDS.values() if kind is not flight.FlightEvent]))
def test_every_kind_survives_the_way_to_a_line_and_back(event):
    line = encode_event(event)
    assert "\n" not in line
    assert decode_event(line) == event


def test_all_kinds_of_the_vocabulary_are_known_to_the_codec():
    named = {name for name, value in vars(flight).items() if isinstance(value, type)}
    assert set(KINDS) == named - {"Enum", "Phase", "SliceState", "Any", "Mapping"}


def test_the_header_is_checked():
    header = FlightHeader(writer="trainer", clock_s=5.0, wall_s=1e9, clock_domain="boot")
    assert decode_header(encode_header(header)) == header
    with pytest.raises(FlightFormatError, match="no header"):
        decode_header('{"step": 1}')
    later = json.dumps({**json.loads(encode_header(header)), "version": 2})
    with pytest.raises(FlightFormatError, match="version 2"):
        decode_header(later)


def test_what_a_later_writer_adds_is_left_out():
    assert decode_event('{"event":"CoffeeMade","at":1.0}') == "CoffeeMade"
    assert decode_event('{"event":"StepBegan","at":1.0,"step":2,"mood":"good"}') == flight.StepBegan(at=1.0, step=2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"event":"StepBegan","at":1.0}', "StepBegan: .*missing required field `step`"),
        ('{"event":"StepBegan","at":1.0,"step":"x"}', "StepBegan: .*step"),
        ('{"event":"StepBegan","at":"soon","step":1}', "StepBegan: .*at `..at`"),
        ('{"event":"PhaseBegan","at":1.0,"step":1,"phase":"lunch"}', "PhaseBegan: .*`..phase`"),
        ('{"at":1.0}', "no event"),
        ("[1]", "no event"),
    ],
)
def test_what_is_broken_is_named(line, message):
    with pytest.raises(FlightFormatError, match=message):
        decode_event(line)


def test_a_number_that_json_has_no_word_for_is_refused():
    with pytest.raises(ValueError):
        encode_event(flight.DecisionRealised(at=0.0, decision="a", realised_s=float("nan")))
