"""What an answer means, and what of an unfinished one may be shown: properties that hold for every text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.proxy.attempt.drafts import Draft
from seamless_verl.proxy.engine import TokenChunk
from seamless_verl.proxy.session.attempts import Attempt
from seamless_verl.proxy.text.chat_template import TokenizerRenderer
from seamless_verl.proxy.text.parsing import StopCutter, TagParser, find_stop, keeps_special_tokens
from seamless_verl.proxy.text.tokenizer import TextDecoder
from seamless_verl.trajectory.messages import Message, Role
from tests.fakes import scripted_generation, small_tokenizer

TOOLS = [{"type": "function", "function": {"name": "run"}}]
_PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '{"name": "run", "arguments": {}}',
        "\n",
        " ",
        "a",
        "<",
        "é😀",
    ]
)
_TEXTS = st.lists(_PIECES | st.text(max_size=4), max_size=12).map("".join)


def _pieces(text: str, cuts: Sequence[int]) -> list[str]:
    at = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    return [text[start:stop] for start, stop in itertools.pairwise(at)]


@settings(max_examples=400, deadline=None)
@given(_TEXTS, st.lists(st.integers(0, 200), max_size=20), st.booleans(), st.booleans(), st.booleans())
def test_what_is_shown_early_is_a_prefix_of_what_is_said_in_the_end(
    text: str, cuts: list[int], thinks: bool, thinking: bool, tools: bool
) -> None:
    parser = TagParser(("<think>", "</think>") if thinks else None)
    offered = TOOLS if tools else ()
    settler = parser.settler(offered, thinking=thinking)
    shown = [settler.feed(piece) for piece in _pieces(text, cuts)]
    said = parser.parse(text, offered, thinking=thinking, call_prefix="c")
    assert said.reasoning.startswith("".join(reasoning for reasoning, _ in shown))
    assert said.content.startswith("".join(content for _, content in shown))


@settings(max_examples=300, deadline=None)
@given(_TEXTS, st.lists(st.integers(0, 200), max_size=20), st.lists(_PIECES | st.text("ab<", min_size=1), max_size=3))
def test_a_stop_string_is_never_shown(text: str, cuts: list[int], stops: list[str]) -> None:
    cutter = StopCutter(stops)
    shown = "".join(cutter.feed(piece) for piece in _pieces(text, cuts))
    assert text[: find_stop(text, stops)[0]].startswith(shown)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40), st.lists(st.integers(0, 400), max_size=20), st.data())
def test_early_text_is_a_prefix_of_the_whole_text_for_any_ids(text: str, noise: list[int], data: st.DataObject) -> None:
    tokenizer = small_tokenizer()

    def decode(ids: Sequence[int]) -> str:
        decoded: str = tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=True)
        return decoded

    ids = tokenizer.encode(text, add_special_tokens=False)
    at = data.draw(st.integers(0, len(ids)))
    ids = [*ids[:at], *(token % len(tokenizer) for token in noise), *ids[at:]]
    decoder = TextDecoder(decode)
    shown = "".join(decoder.feed([token]) for token in ids)
    assert decode(ids).startswith(shown)


_CUT = [0xE2, 0x82]  # a euro sign without its last byte
_EURO = [*_CUT, 0xAC]


@lru_cache(maxsize=1)
def _falls_back_to_bytes() -> TokenizerRenderer:
    """A vocabulary as Llama 2 and Mistral have it: ids 0 to 255 are single bytes."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["\u2581a", "b", "\u2581", "</s>", "<|shown to nobody|>"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + at for at, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(words[3:])
    make: Any = PreTrainedTokenizerFast
    return TokenizerRenderer(make(tokenizer_object=tokenizer, eos_token="</s>"))


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from([_EURO, _CUT, [0xE2], [10], [256], [257], [258], [260]]), max_size=30), st.data())
def test_bytes_are_shown_once_their_run_is_over(pieces: list[list[int]], data: st.DataObject) -> None:
    codec, ids = _falls_back_to_bytes(), [token for piece in pieces for token in piece]
    draft = Draft(Attempt(b"", 1), 0, codec, None, (), show_tokens=False)
    rest = list(ids)
    while rest:
        num = data.draw(st.integers(1, len(rest)))
        draft.feed(TokenChunk(token_ids=rest[:num], log_probs=[0.0] * num))
        rest = rest[num:]
    message = Message(role=Role.ASSISTANT, content=codec.decode(ids))
    draft.check(scripted_generation([*ids, 259]), message)  # or the client is told that the stream differs


def test_a_long_run_of_bytes_only_waits_for_its_end() -> None:
    codec = _falls_back_to_bytes()
    decoder = TextDecoder(codec.decode, codec.open_ids)
    shown = [decoder.feed([token]) for token in [256, *_EURO * 50, 257, 256]]
    assert [text for text in shown if text] == ["a", "\N{EURO SIGN}" * 50 + "b", " a"]


def test_plain_text_is_shown_at_once() -> None:
    settler = TagParser().settler((), thinking=False)
    assert settler.feed("one ") == ("", "one ")
    settler = TagParser().settler(TOOLS, thinking=False)
    assert [settler.feed(piece)[1] for piece in ("one", " two <tool", "s> three")] == ["one", " two", " <tools> three"]


@pytest.mark.timeout(20)  # the time was quadratic: some minutes
@pytest.mark.parametrize("again", ["<tool_call>{", "<tool_call>  {}  ", "<tool_call>", "<tool_call>{}}}"])
def test_calls_that_never_end_are_content_whatever_their_number(again: str) -> None:
    call, text = '<tool_call>{"name": "run"}</tool_call>', again * (2_000_000 // len(again))
    said = TagParser().parse(f"so: {call}{text}", TOOLS, thinking=False, call_prefix="c")
    assert ([called.name for called in said.tool_calls], said.content) == (["run"], f"so: {text}".rstrip())


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("<think>\nwhy\n</think>\n\nyes", False, "why", "yes"),
        ("why\n</think>\n\nyes", True, "why", "yes"),
        ("<think>why", False, "why", ""),  # cut short by max_tokens
        ("why not", True, "why not", ""),
        ("no tags", False, "", "no tags"),
        ("a </think> b", False, "", "a </think> b"),
    ],
)
def test_reasoning(text: str, thinking: bool, reasoning: str, content: str) -> None:
    said = TagParser(("<think>", "</think>")).parse(text, (), thinking=thinking, call_prefix="c")
    assert (said.reasoning, said.content) == (reasoning, content)


@pytest.mark.parametrize(("special", "kept"), [(("[THINK]", "[/THINK]", "<|im_end|>"), True), (("<|im_end|>",), False)])
def test_reasoning_between_special_tokens_is_told_from_the_answer(special: tuple[str, ...], kept: bool) -> None:
    tokenizer, parser = small_tokenizer(special=special), TagParser(("[THINK]", "[/THINK]"))
    assert keeps_special_tokens(parser, tokenizer) is kept
    assert not keeps_special_tokens(TagParser(), tokenizer)
    renderer = TokenizerRenderer(tokenizer, keep_special_tokens=kept)
    text = renderer.decode(tokenizer.encode("[THINK]so[/THINK]hello", add_special_tokens=False))
    said = parser.parse(text, [], thinking=False, call_prefix="call_")
    assert (said.reasoning, said.content) == ("so", "hello")
