"""Turns as bytes: whatever a record, an entry and an answer say, it is read back."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.proxy.calls import Answer, Token
from seamless_verl.proxy.journal.journal_format import Damaged, pack, unpack
from seamless_verl.proxy.session.flights import Served
from seamless_verl.trajectory.audit import LedgerEntry
from seamless_verl.trajectory.generation import FinishReason, VersionSpan
from seamless_verl.trajectory.messages import Message, MessageKey, Role, ToolCall
from seamless_verl.trajectory.segments import DriftReason, TurnRecord

_ANY: dict[type, st.SearchStrategy[Any]] = {
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    bytes: st.binary(max_size=16),
    int: st.integers(0, 2**31 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
}
_NAMED = {kind.__name__: kind for kind in _ANY}
_IDS = st.lists(_ANY[int], max_size=5).map(lambda ids: array("i", ids))
_LOG_PROBS = st.lists(_ANY[float], max_size=5).map(lambda values: array("d", values))


def _one(kind: Any, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    plain = {name: _ANY[_NAMED[known]] for name, known in kind.__annotations__.items() if known in _NAMED}
    return st.builds(kind, **{**plain, **fields})


def _some(one: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(one, max_size=3).map(tuple)


_SPANS = _some(_one(VersionSpan))
_REASONS = st.sampled_from(DriftReason)
_ENTRY = _one(LedgerEntry, token_ids=_IDS, log_probs=_LOG_PROBS, version_spans=_SPANS)
_RECORD = _one(
    TurnRecord,
    context_ids=_IDS,
    token_ids=_IDS,
    log_probs=_LOG_PROBS,
    version_spans=_SPANS,
    finish_reason=st.sampled_from(FinishReason),
    keys=_some(_one(MessageKey)),
    forked=st.none() | _REASONS,
    realigned=_some(_REASONS),
)
_MESSAGE = _one(Message, role=st.sampled_from(Role), parts=st.just(()), tool_calls=_some(_one(ToolCall)))
_TOKEN = _one(Token, alternatives=_some(st.tuples(_ANY[str], _ANY[float])))
_SERVED = _one(Served, answer=_one(Answer, message=_MESSAGE, tokens=_some(_TOKEN)), overrides=_some(_ANY[str]))


@given(_RECORD, _ENTRY, _SERVED)
def test_a_turn_is_read_back_as_it_was(record: TurnRecord, entry: LedgerEntry, served: Served) -> None:
    assert unpack(pack(record, entry, served)) == (record, entry, served)


@given(_RECORD, _ENTRY, _SERVED, st.data())
def test_a_changed_byte_is_noticed(record: TurnRecord, entry: LedgerEntry, served: Served, data: st.DataObject) -> None:
    packed = bytearray(pack(record, entry, served))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Damaged):
        unpack(bytes(packed))
