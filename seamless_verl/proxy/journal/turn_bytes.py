"""How a turn, and a part of an unfinished answer, are written down in the journal.

Invariant: ``unpack(pack(turn)) == turn``; a changed byte is a :class:`Damaged`, never another turn.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields
from hashlib import blake2b
from operator import attrgetter
from typing import Any, Literal, TypeVar, get_type_hints

import msgspec

from seamless_verl.proxy.calls import Answer
from seamless_verl.trajectory.generation import FinishReason, Generation, UnfinishedPart, VersionSpan
from seamless_verl.trajectory.rows import LedgerEntry
from seamless_verl.trajectory.tokens import TurnRecord, pack_ids

VERSION = 2  # of the bytes of a turn
_CHECKSUM_BYTES = 8
_ARRAYS: Mapping[str, Literal["i", "d"]] = {"context_ids": "i", "token_ids": "i", "log_probs": "d"}
_Kind = TypeVar("_Kind", TurnRecord, LedgerEntry)


class Damaged(Exception):
    """Bytes that are not what was written."""


_NAMES = {kind: tuple(spec.name for spec in fields(kind)) for kind in (TurnRecord, LedgerEntry)}


def _shape(kind: type[TurnRecord] | type[LedgerEntry]) -> Any:
    """A record as it is written: its values in the order of its fields, arrays as their bytes."""
    hints = get_type_hints(kind, localns={"array": {int: bytes, float: bytes}})  # Python 3.11 has no array[int]
    shape: Any = tuple[tuple(hints[name] for name in _NAMES[kind])]  # type: ignore[misc]
    return shape


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, array):
        return value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} in a turn")


def _read(kind: type[_Kind], values: Sequence[Any]) -> _Kind:
    named = dict(zip(_NAMES[kind], values, strict=True))
    arrays = {name: array(code, named[name]) for name, code in _ARRAYS.items() if name in named}
    return kind(**{**named, **arrays})


_record_values = attrgetter(*_NAMES[TurnRecord])
_entry_values = attrgetter(*_NAMES[LedgerEntry])
_encoder = msgspec.msgpack.Encoder(enc_hook=_bytes_of)

# An answer is a map of maps: what its response says beside it stands around it.
_BESIDE = {"digest": bytes, "match": str, "overrides": tuple[str, ...]}
_SAID = {name: kind for name, kind in get_type_hints(Answer).items() if name not in _BESIDE}
_Said: Any = msgspec.defstruct("_Said", list(_SAID.items()))
_Served: Any = msgspec.defstruct(
    "_Served", [("digest", bytes), ("answer", _Said), ("match", str), ("overrides", tuple[str, ...])]
)
_said_values = attrgetter(*_SAID)
_shapes: Any = (_shape(TurnRecord), _shape(LedgerEntry), _Served)
_decoder = msgspec.msgpack.Decoder(tuple[_shapes])
_part_decoder = msgspec.msgpack.Decoder(tuple[bytes, bytes, bytes, bytes, tuple[VersionSpan, ...]])


def pack(record: TurnRecord, entry: LedgerEntry, answer: Answer) -> bytes:
    """A turn as it is written down: its record, its ledger entry and its answer, with a checksum."""
    served = _Served(answer.digest, _Said(*_said_values(answer)), answer.match, answer.overrides)
    return _checked((_record_values(record), _entry_values(entry), served))


def pack_part(part: UnfinishedPart) -> bytes:
    """Tokens of an unfinished answer as they are written down, with a checksum."""
    tokens = part.tokens
    ids, log_probs = pack_ids(tokens.token_ids), array("d", tokens.log_probs)
    return _checked((part.digest, part.prompt, ids, log_probs, tokens.version_spans))


def unpack_part(answer: str, start: int, data: bytes) -> UnfinishedPart:
    """They as they were.

    Raises:
        Damaged: as `unpack`.
    """
    digest, prompt, ids, log_probs, spans = _decoded(data, _part_decoder)
    tokens = Generation(
        token_ids=array("i", ids),
        log_probs=array("d", log_probs),
        version_spans=spans,
        finish_reason=FinishReason.ABORTED,
    )
    return UnfinishedPart(answer=answer, digest=digest, prompt=prompt, start=start, tokens=tokens)


def _checked(values: tuple[Any, ...]) -> bytes:
    body: bytes = _encoder.encode(values)
    return blake2b(body, digest_size=_CHECKSUM_BYTES).digest() + body


def _decoded(data: bytes, decoder: Any) -> Any:
    body = data[_CHECKSUM_BYTES:]
    if blake2b(body, digest_size=_CHECKSUM_BYTES).digest() != data[:_CHECKSUM_BYTES]:
        raise Damaged(f"its checksum differs ({len(data)} bytes)")
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise Damaged(f"it has another form: {error}") from error


def unpack(data: bytes) -> tuple[TurnRecord, LedgerEntry, Answer]:
    """A turn as it was.

    Raises:
        Damaged: the bytes changed since, or were written by another version of this program.
    """
    record, entry, served = _decoded(data, _decoder)
    said = {name: getattr(served.answer, name) for name in _SAID}
    answer = Answer(**said, **{name: getattr(served, name) for name in _BESIDE})
    return _read(TurnRecord, record), _read(LedgerEntry, entry), answer
