"""The table of words gives the tokenizer's own ids, on the ways in which model families cut text."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from seamless_verl.proxy.text.tokenizer import WordCache

# The expressions that these model families publish in their tokenizer.json.
EXPRESSIONS = {
    "gpt2": None,
    "qwen": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|im|>", "<think>"]


@lru_cache(maxsize=8)
def tokenizer(family: str) -> Tokenizer:
    made = Tokenizer(models.BPE())
    expression = EXPRESSIONS[family]
    if expression is None:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        made.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(expression), behavior="isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(
        ["def f(self, value):\n    return self.value's\n\n", "I'LL it's 1234 a://b.c/d\r\n\t\tif x:", "user assistant"]
        * 4,
        trainer,
    )
    return made


@pytest.mark.parametrize("family", EXPRESSIONS)
def test_the_ids_are_the_tokenizers_own(family: str) -> None:
    backend = tokenizer(family)
    cache = WordCache.of(backend)
    assert cache is not None
    pieces = st.sampled_from(
        [*SPECIAL, "<|im", "'s", "'LL", "self", " value", "  ", "\n\n", "\r\n", "\t", "12345", "://", "é", "\x1c", "ſ"]
    )
    texts = st.lists(st.one_of(pieces, st.text(st.characters(max_codepoint=126), max_size=6)), max_size=12)

    @settings(max_examples=150, deadline=None)
    @given(texts)
    def same(parts: list[str]) -> None:
        text = "".join(parts)
        found = cache.encode(text)
        assert found is None or found == backend.encode(text, add_special_tokens=False).ids
        plain = all(letter.isprintable() or letter in "\n\r\t" for letter in text)
        assert (found is not None) == (text.isascii() and plain)

    same()


def test_what_cuts_otherwise_is_left_to_the_tokenizer() -> None:
    prefixed = Tokenizer.from_str(tokenizer("gpt2").to_str())
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    lower = Tokenizer.from_str(tokenizer("gpt2").to_str())
    lower.normalizer = normalizers.Lowercase()
    eager = Tokenizer.from_str(tokenizer("gpt2").to_str())
    eager.add_special_tokens([AddedToken("<tool>", lstrip=True)])
    white = Tokenizer.from_str(tokenizer("gpt2").to_str())
    white.pre_tokenizer = pre_tokenizers.Whitespace()
    assert [WordCache.of(other) for other in (prefixed, lower, eager, white)] == [None] * 4


def test_an_expression_that_two_engines_read_differently_is_found_out() -> None:
    """Oniguruma anchors ``^`` at every line, Python's `regex` at the text's beginning only."""
    backend = Tokenizer.from_str(tokenizer("gpt2").to_str())
    split = pre_tokenizers.Split(Regex(r"^.|[^\n]+|\n"), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    assert WordCache.of(backend) is None
