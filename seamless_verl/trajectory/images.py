"""Pictures among token ids.

To a model a picture is a run of placeholder tokens, all of one id, so that two pictures of one size read alike. Here
the placeholders of each picture carry negative numbers of its own, as radix caches of inference engines do: trees and
audits tell pictures apart by comparing tokens, and know nothing else of them. Engines and rows get the model's ids.

::

    picture 1     <start>  -3  -4  -4  -4  <end>        -3 where it begins, -4 in the rest of it

Invariant: ``plain(mark(ids, number)) == ids``, and ``numbers_in`` tells the pictures of a prompt in their order, also
where one stands there twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


def mark(token_ids: Sequence[int], placeholder: int, number: int) -> tuple[int, ...]:
    """The ids of one picture, its placeholders marked with its ``number`` (from 0)."""
    first, rest = -2 * number - 1, -2 * number - 2
    marked = [rest if token == placeholder else token for token in token_ids]
    if rest in marked:
        marked[marked.index(rest)] = first
    return tuple(marked)


def plain(token_ids: Sequence[int], placeholder: int) -> array[int]:
    """The model's own ids."""
    return array("i", [placeholder if token < 0 else token for token in token_ids])


def numbers_in(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Pictures in the order in which they begin."""
    return tuple((-token - 1) // 2 for token in token_ids if token < 0 and token % 2)
