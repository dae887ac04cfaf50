"""One answered turn as bytes: record, ledger entry and answer, with a checksum.

Invariant: ``unpack(pack(turn)) == turn``; a changed byte is a :class:`Damaged`, never another turn.
"""

from __future__ import annotations

from array import array
from dataclasses import fields
from hashlib import blake2b
from operator import attrgetter
from typing import Any

import msgspec

from seamless_verl.proxy.session.flights import Served
from seamless_verl.trajectory.audit import LedgerEntry
from seamless_verl.trajectory.generation import FinishReason, VersionSpan
from seamless_verl.trajectory.messages import MessageKey
from seamless_verl.trajectory.segments import DriftReason, TurnRecord

VERSION = 2
_CHECKSUM_BYTES = 8


class Damaged(Exception):
    """Bytes that are not what was written."""


class _Record(msgspec.Struct, array_like=True):
    """The fields of :class:`TurnRecord`, in its order, arrays as bytes."""

    generation_id: str
    request_digest: bytes
    anchor: str
    anchor_is_given: bool
    num_cut: int
    context_ids: bytes
    token_ids: bytes
    log_probs: bytes
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    tools_digest: bytes
    chain: bytes
    spelled: bytes
    spelled_before: bytes
    keys: tuple[MessageKey, ...]
    system: bytes
    forked: DriftReason | None
    realigned: tuple[DriftReason, ...]
    detail: str


class _Entry(msgspec.Struct, array_like=True):
    """The fields of :class:`LedgerEntry`, likewise."""

    generation_id: str
    prompt_digest: bytes
    prompt_len: int
    token_ids: bytes
    log_probs: bytes
    version_spans: tuple[VersionSpan, ...]
    discarded: str


_record_values = attrgetter(*_Record.__struct_fields__)
_entry_values = attrgetter(*_Entry.__struct_fields__)
assert _Record.__struct_fields__ == tuple(spec.name for spec in fields(TurnRecord))
assert _Entry.__struct_fields__ == tuple(spec.name for spec in fields(LedgerEntry))


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, array):
        return value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} in a turn")


_encoder = msgspec.msgpack.Encoder(enc_hook=_bytes_of)
_decoder = msgspec.msgpack.Decoder(tuple[_Record, _Entry, Served])


def pack(record: TurnRecord, entry: LedgerEntry, served: Served) -> bytes:
    """A turn as it is written down."""
    body: bytes = _encoder.encode((_record_values(record), _entry_values(entry), served))
    return blake2b(body, digest_size=_CHECKSUM_BYTES).digest() + body


def unpack(data: bytes) -> tuple[TurnRecord, LedgerEntry, Served]:
    """A turn as it was.

    Raises:
        Damaged: the bytes changed since, or were written by another version of this program.
    """
    body = data[_CHECKSUM_BYTES:]
    if blake2b(body, digest_size=_CHECKSUM_BYTES).digest() != data[:_CHECKSUM_BYTES]:
        raise Damaged(f"its checksum differs ({len(data)} bytes)")
    try:
        record, entry, served = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise Damaged(f"it has another form: {error}") from error
    turn = {name: getattr(record, name) for name in _Record.__struct_fields__}
    turn["context_ids"] = array("i", record.context_ids)
    call = {name: getattr(entry, name) for name in _Entry.__struct_fields__}
    for values in (turn, call):
        values["token_ids"] = array("i", values["token_ids"])
        values["log_probs"] = array("d", values["log_probs"])
    return TurnRecord(**turn), LedgerEntry(**call), served
