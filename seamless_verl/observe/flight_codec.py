"""Recorded events as lines of JSON and back. Pure: no file, no clock.

    {"format": "seamless_verl.flight", "version": 1, "writer": "trainer-1234", "clock": {…}}      the header
    {"event": "PhaseBegan", "at": 12.345678, "phase": "update_actor", "step": 3}                  one line per event

A reader of version 1 leaves out kinds and fields that it does not know: a later 1.x writer may add some.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import Any

from seamless_verl.errors import SeamlessError
from seamless_verl.observe import flight

FORMAT, VERSION = "seamless_verl.flight", 1

Decoder = Callable[[Any], Any]


class FlightFormatError(SeamlessError):
    """A line is not what the format says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightHeader:
    """First line of a recording.

    Attributes:
        writer: process that wrote it; one file has one writer.
        clock_s: reading of the clock that stamps ``at``, taken together with ``wall_s``.
        wall_s: seconds since 1970.
        clock_domain: clocks of the same domain agree (the boot id of a machine); empty: compare by ``wall_s``.
        virtual: time was simulated.
    """

    writer: str
    clock_s: float
    wall_s: float
    clock_domain: str = ""
    virtual: bool = False


def encode_header(header: FlightHeader) -> str:
    return json.dumps(
        {"format": FORMAT, "version": VERSION, **{f.name: getattr(header, f.name) for f in fields(header)}}
    )


def decode_header(line: str) -> FlightHeader:
    """Raises:
    FlightFormatError: not a recording, or of a later version.
    """
    try:
        plain = json.loads(line)
    except json.JSONDecodeError:
        plain = None
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise FlightFormatError("is not a flight recording: its first line is no header")
    if plain.get("version") != VERSION:
        raise FlightFormatError(f"is of version {plain.get('version')}; this installation reads version {VERSION}")
    names = {spec.name for spec in fields(FlightHeader)}
    return FlightHeader(**{key: value for key, value in plain.items() if key in names})


def encode_event(event: flight.FlightEvent) -> str:
    """One line without its end. Times are kept to the microsecond; numbers that are not finite are refused."""
    kind = type(event)
    plain: dict[str, Any] = {"event": kind.__name__, "at": round(event.at, 6)}
    for name in _FIELDS[kind]:
        plain[name] = getattr(event, name)
    return _ENCODE(plain)


def decode_event(line: str) -> flight.FlightEvent | str:
    """The event, or the name of a kind that is not known here.

    Raises:
        json.JSONDecodeError: the line was cut.
        FlightFormatError: a known kind without a field that it needs, or with an impossible value.
    """
    plain = json.loads(line)
    name = plain.get("event") if isinstance(plain, dict) else None
    if not isinstance(name, str):
        raise FlightFormatError(f"no event: {line[:80]}")
    kind = KINDS.get(name)
    if kind is None:
        return name
    values: dict[str, Any] = {}
    for key, (decode, required) in _DECODERS[kind].items():
        if key in plain:
            try:
                values[key] = decode(plain[key])
            except (TypeError, ValueError) as error:
                raise FlightFormatError(f"{name}.{key} = {plain[key]!r}: {error}") from error
        elif required:
            raise FlightFormatError(f"{name} without {key}: {line[:80]}")
    return kind(**values)


def _kinds() -> dict[str, type[flight.FlightEvent]]:
    found = (value for value in vars(flight).values() if isinstance(value, type))
    return {kind.__name__: kind for kind in found if issubclass(kind, flight.FlightEvent)}


def _decoder(hint: Any) -> Decoder:
    """From plain JSON to the annotated type; the types that events use, and no more."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = _decoder(next(argument for argument in arguments if argument is not type(None)))
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        inner = _decoder(arguments[0])
        return lambda value: tuple(inner(item) for item in value)
    if origin is not None:  # a mapping
        return _mapping
    if issubclass(hint, Enum):
        return typing.cast(Decoder, hint)
    return float if hint is float else _exactly(hint)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("is no object")
    return value


def _exactly(kind: type) -> Decoder:
    def decode(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError(f"is no {kind.__name__}")
        return value

    return decode


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} has no place in a recording")


_ENCODE = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False, default=_plain).encode
KINDS = _kinds()
_FIELDS = {kind: [spec.name for spec in fields(kind) if spec.name != "at"] for kind in KINDS.values()}
_DECODERS: dict[type[flight.FlightEvent], dict[str, tuple[Decoder, bool]]] = {
    kind: {
        spec.name: (
            _decoder(typing.get_type_hints(kind)[spec.name]),
            spec.default is MISSING and spec.default_factory is MISSING,
        )
        for spec in fields(kind)
    }
    for kind in KINDS.values()
}
