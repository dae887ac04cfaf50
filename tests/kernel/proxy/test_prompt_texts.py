"""Prompts as JSON, written on from what is known of their session."""

from __future__ import annotations

import json
from array import array

from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.proxy.engines.vllm_http import PromptTexts
from seamless_verl.trajectory.tokens import TokenPath

_IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 12), _IDS), max_size=30), st.integers(0, 5000))
def test_whatever_a_prompt_grew_from_its_text_says_its_ids_and_memory_is_bounded(
    moves: list[tuple[str, int, list[int]]], max_bytes: int
) -> None:
    texts, prompts = PromptTexts(max_bytes), {"a": TokenPath.of(()), "b": TokenPath.of(())}
    for session, cut, added in moves:
        path = prompts[session]
        path = prompts[session] = path.without(min(cut, len(path))).then(array("i", added))
        assert json.loads(b"".join(texts.encode(session, path))) == list(path)
        assert 0 <= texts.num_bytes <= max_bytes


def test_only_what_is_new_is_written(monkeypatch) -> None:
    from seamless_verl.proxy.engines import vllm_http

    written: list[int] = []
    plain = vllm_http._items
    monkeypatch.setattr(vllm_http, "_items", lambda ids: written.append(len(ids)) or plain(ids))
    texts, begun = PromptTexts(), TokenPath.of(range(1000))
    for path in (begun, begun.then(array("i", range(10))), begun.then(array("i", range(10)))):
        texts.encode("s", path)
    assert written == [1000, 10]


def test_a_session_that_has_ended_takes_no_memory() -> None:
    texts = PromptTexts()
    for session in ("a", "b"):
        texts.encode(session, TokenPath.of(range(100)))
    texts.forget("a")
    texts.forget("unknown")
    one = texts.num_bytes
    texts.forget("b")
    assert (one > 0, texts.num_bytes) == (True, 0)
    assert json.loads(b"".join(texts.encode("a", TokenPath.of(range(3))))) == [0, 1, 2]
