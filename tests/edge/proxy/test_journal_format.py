"""Turns as bytes: whatever a record, an entry and an answer say, it is read back."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.proxy.calls import Answer, Token
from seamless_verl.proxy.journal.turn_bytes import Damaged, pack, unpack
from seamless_verl.trajectory.generation import FinishReason, VersionSpan
from seamless_verl.trajectory.messages import Message, MessageKey, Role, ToolCall
from seamless_verl.trajectory.rows import LedgerEntry
from seamless_verl.trajectory.tokens import DriftReason, TurnRecord

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
_ANSWER = _one(Answer, message=_MESSAGE, tokens=_some(_TOKEN), overrides=_some(_ANY[str]))


@given(_RECORD, _ENTRY, _ANSWER)
def test_a_turn_is_read_back_as_it_was(record: TurnRecord, entry: LedgerEntry, answer: Answer) -> None:
    assert unpack(pack(record, entry, answer)) == (record, entry, answer)


@given(_RECORD, _ENTRY, _ANSWER, st.data())
def test_a_changed_byte_is_noticed(record: TurnRecord, entry: LedgerEntry, answer: Answer, data: st.DataObject) -> None:
    packed = bytearray(pack(record, entry, answer))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Damaged):
        unpack(bytes(packed))


_WRITTEN = bytes.fromhex(
    "6b9d202230b952fc93dc0013a26731c4020102a26730c301c408090000000a000000c40c050000000600000007000000c4180000000000"
    "000080000000000000e0bf000000000000f0bf9282a776657273696f6e07aa6e756d5f746f6b656e730282a776657273696f6e08aa6e75"
    "6d5f746f6b656e7301a473746f70c40174c40163c40173c40273629187a86964656e74697479c40169a7636f6e74656e74c40163a96172"
    "67756d656e7473c40161a9726561736f6e696e67c40172a863616c6c5f696473c4016bac69735f617373697374616e74c3ad726561736f"
    "6e696e675f656e64a0c40179c091b3617267756d656e74735f72657370656c6c6564a16497a26731c4017004c40c050000000600000007"
    "000000c4180000000000000080000000000000e0bf000000000000f0bf9282a776657273696f6e07aa6e756d5f746f6b656e730282a776"
    "657273696f6e08aa6e756d5f746f6b656e7301a084a6646967657374c4026464a6616e7377657289a26964a26731a76372656174656405"
    "a76d65737361676587a4726f6c65a9617373697374616e74a7636f6e74656e74a74772c3bc657a69a5706172747390aa746f6f6c5f6361"
    "6c6c739183a26964a131a46e616d65a166a9617267756d656e7473a27b7dac746f6f6c5f63616c6c5f6964a0a46e616d65a0a972656173"
    "6f6e696e67a0ad66696e6973685f726561736f6eaa746f6f6c5f63616c6c73ad70726f6d70745f746f6b656e7304b1636f6d706c657469"
    "6f6e5f746f6b656e7303ad6361636865645f746f6b656e7302a6746f6b656e739183a474657874a161a76c6f6770726f62cbbff0000000"
    "000000ac616c7465726e6174697665739192a162cbc000000000000000a973746f705f74657874a0a56d61746368a5636c65616ea96f76"
    "6572726964657391ad74656d70657261747572653d31"
)


def test_bytes_of_an_earlier_process_are_read_and_would_be_written_again() -> None:
    record, entry, answer = unpack(_WRITTEN)
    assert (record.context_ids, record.token_ids, record.log_probs[1]) == (array("i", [9, 10]), entry.token_ids, -0.5)
    assert [span.version for span in entry.version_spans] == [7, 8]
    assert (record.finish_reason, answer.message.content) == (FinishReason.STOP, "Grüezi")
    assert pack(record, entry, answer) == _WRITTEN
