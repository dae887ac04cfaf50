"""Token ids of ASCII text from a table of words, several times faster than the tokenizer that fills it.

A byte-level BPE tokenizer cuts text into words by a regular expression and merges inside words only, so that the ids of
a text are those of its words in a row::

    text ──special tokens──▶ stretches ──regular expression──▶ words ──table──▶ ids
                                                                 └─ not in it: ask the tokenizer, keep the answer

Invariant: the ids are the tokenizer's own. Text that is not printable ASCII (where two engines of regular expressions
could disagree), tokenizers of another build, and any that fail a comparison on short texts are left to the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# `tokenizers`' ByteLevel(use_regex=True): the expression of GPT-2.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MAX_WORDS = 1 << 16
_PIECES = ("a", "B", "7", " ", "\n", "\r", "\t", "'", "'s", "'LL", "_", "<", "://", "  ", "\n\n")
_CORE = ("ab", " ", "\n", "'s", "12", "-")


class WordCache:
    """See the module; made by :meth:`of`. Threads may share one: entries never change."""

    def __init__(self, backend: Tokenizer, words: Any, special: Any, special_ids: dict[str, int]) -> None:
        self._backend = backend
        self._find_words = words.findall
        self._split = special.split if special is not None else lambda text: [text]
        self._special_ids = special_ids
        self._ids: dict[str, list[int]] = {}

    @classmethod
    def of(cls, backend: Tokenizer) -> WordCache | None:
        """A table for this tokenizer; None where it cannot be the same."""
        try:
            import regex  # comes with transformers
        except ImportError:
            return None
        expression = _expression_of(backend)
        added = backend.get_added_tokens_decoder()
        if expression is None or any(
            token.lstrip or token.rstrip or token.single_word or token.normalized for token in added.values()
        ):
            return None
        try:
            words = regex.compile(expression)
        except regex.error:
            return None
        if words.groups:
            return None
        names = {token.content: number for number, token in added.items()}
        # The longest of several special tokens that begin at the same place wins, as in the tokenizer.
        ordered = sorted(names, key=len, reverse=True)
        special = regex.compile(f"({'|'.join(map(regex.escape, ordered))})") if names else None
        cache = cls(backend, words, special, names)
        return cache if cache._agrees(ordered[:2]) else None

    def encode(self, text: str) -> list[int] | None:
        """Ids without added special tokens; None when this text is the tokenizer's business."""
        if not text.isascii():
            return None
        ids: list[int] = []
        known = self._ids
        for stretch in self._split(text):
            special = self._special_ids.get(stretch)
            if special is not None:
                ids.append(special)
                continue
            words = self._find_words(stretch)
            if len("".join(words)) != len(stretch):
                return None
            for word in words:
                found = known.get(word)
                if found is None:
                    found = self._learn(word)
                    if found is None:
                        return None
                ids += found
        return ids

    def _learn(self, word: str) -> list[int] | None:
        if not all(letter.isprintable() or letter in "\n\r\t" for letter in word):
            return None
        if len(self._ids) >= _MAX_WORDS:
            self._ids.clear()
        ids: list[int] = self._backend.encode(word, add_special_tokens=False).ids
        self._ids[word] = ids
        return ids

    def _agrees(self, special: Iterable[str]) -> bool:
        pieces = (*_PIECES, *special)
        texts = ["".join(parts) for parts in (*product(pieces, pieces), *product(_CORE, repeat=3))]
        theirs = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return all(self.encode(text) == found.ids for text, found in zip(texts, theirs, strict=True))


def _expression_of(backend: Tokenizer) -> str | None:
    """How the tokenizer cuts text into words; None when that is not one regular expression before byte-level BPE."""
    if type(backend.model).__name__ != "BPE" or getattr(backend.model, "dropout", None):
        return None
    if backend.truncation is not None or backend.padding is not None or backend.pre_tokenizer is None:
        return None
    # On ASCII, Unicode's composed form changes nothing.
    if backend.normalizer is not None and type(backend.normalizer).__name__ != "NFC":
        return None
    cut: dict[str, Any] = json.loads(backend.pre_tokenizer.__getstate__())
    if cut["type"] == "Sequence" and len(cut["pretokenizers"]) == 2:
        split, last = cut["pretokenizers"]
        is_plain = split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
        expression = split.get("pattern", {}).get("Regex") if is_plain else None
        return expression if last["type"] == "ByteLevel" and not last["use_regex"] and _bare(last) else None
    return _GPT2 if cut["type"] == "ByteLevel" and cut["use_regex"] and _bare(cut) else None


def _bare(byte_level: dict[str, Any]) -> bool:
    return not byte_level["add_prefix_space"]
