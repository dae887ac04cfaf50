"""Rewards of SRPO's recipes: accuracy, a little for the form, less for mixed languages. Accuracy alone decides what
counts as solved."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from typing import Any

_FORM = 0.1
_WRITTEN = re.compile(r"\s*<think>(?P<thought>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>\s*", re.DOTALL)
_TAG = re.compile(r"</?(?:think|answer)>")
_MIXED = 0.02  # a foreign name or term is no second language


def answer_of(text: str) -> str | None:
    """What stands between the answer's tags, if the text is one thought and one answer and nothing else."""
    found = _WRITTEN.fullmatch(text)
    return found["answer"] if found and len(_TAG.findall(text)) == 4 else None


def mixes_languages(text: str) -> bool:
    """Whether more than 2 % of the letters are of another script than most. Greek letters are mathematics; so are Latin
    ones in a text of another script, which this does not know."""
    letters = (letter for letter in text if letter.isalpha())
    scripts = Counter("LATIN" if one.isascii() else unicodedata.name(one, "?").split()[0] for one in letters)
    del scripts["GREEK"], scripts["MATHEMATICAL"]
    for kana in ("HIRAGANA", "KATAKANA"):
        scripts["CJK"] += scripts.pop(kana, 0)
    return scripts.total() > 0 and scripts.most_common(1)[0][1] < (1 - _MIXED) * scripts.total()


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> dict[str, float]:
    """verl's reward function signature, for the tiny tasks; ``solution_str`` is the decoded answer.

    Returns:
        ``score`` in [0, 1], ``acc`` (1 for the exact value) and ``form`` (1 for a thought and an answer in their tags).
    """
    answer = answer_of(solution_str)
    accuracy, form = float((answer or "").strip() == ground_truth), float(answer is not None)
    return {"score": (1 - _FORM) * accuracy + _FORM * form, "acc": accuracy, "form": form}
