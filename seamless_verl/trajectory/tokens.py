"""Token ids of a conversation: packed, as paths that grow, and with marks where pictures stand.

A path is immutable, and each step of a conversation costs only what it adds::

    (empty) ◀── prompt 1 ◀── answer 1 ◀── context 2 ◀── answer 2
                                 ▲──────── context 3                 shares everything before it

To a model a picture is a run of placeholder tokens, all of one id, so that two pictures of one size read alike. Here
the placeholders of each picture carry negative numbers of its own: trees and audits tell pictures apart by comparing
tokens. Engines and rows get the model's ids::

    picture 1     <start>  -3  -4  -4  -4  <end>        -3 where it begins, -4 in the rest of it

Invariants: a path reads like the flat list of its ids, and its digest is that list's, however it came to be;
``plain(mark(ids, placeholder, number), placeholder) == ids``, and ``numbers_in`` names the pictures of a prompt in
their order, also where one stands there twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from typing import overload

_NODE_BYTES = 450  # a node, its array's head, and the digest's state that every second one keeps


def pack_ids(ids: Sequence[int]) -> array[int]:
    """Token ids in four bytes each; an array that is one already is taken as it is, since none is ever changed."""
    return ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)


class TokenPath(Sequence[int]):
    """A sequence of token ids that knows what it continues. Two are equal only if they are the same object.

    Reading near the end is cheap, however long the path; :meth:`flat` and iteration take all of it.
    """

    __slots__ = ("_before", "_ids", "_length", "_num_nodes", "_state")

    def __init__(self, before: TokenPath | None, ids: array[int]) -> None:
        """Made by :meth:`of` and :meth:`then` only; ``before`` is None for the empty path."""
        self._before = before
        self._ids = ids
        self._length: int = len(ids) + (0 if before is None else before._length)
        self._num_nodes: int = 0 if before is None else before._num_nodes + 1
        self._state: blake2b | None = None

    @classmethod
    def of(cls, ids: Sequence[int]) -> TokenPath:
        """Any ids as a path; one that is a path already stays what it is."""
        return ids if isinstance(ids, TokenPath) else EMPTY.then(pack_ids(ids))

    def then(self, ids: array[int]) -> TokenPath:
        """This path and ``ids``, which nobody may change any more."""
        return TokenPath(self, ids) if ids else self

    def without(self, num: int) -> TokenPath:
        """This path less its last ``num`` ids."""
        node = self
        while node._before is not None and num >= len(node._ids):
            num -= len(node._ids)
            node = node._before
        return TokenPath(node._before, node._ids[: len(node._ids) - num]) if num else node

    def chunks(self) -> list[array[int]]:
        """All ids, in the pieces in which they came."""
        return self._chunks_from(0)[0]

    def flat(self) -> array[int]:
        """All ids in one array."""
        return _joined(self.chunks())

    def since(self, earlier: TokenPath) -> array[int] | None:
        """The ids that follow ``earlier``, if this path continues it; None if it does not, or cuts it elsewhere.

        Takes the time of what is new, not of what both begin with, where the one grew out of the other.
        """
        added: list[array[int]] = []
        node: TokenPath | None = self
        while node is not None and node._length > earlier._length:
            added.append(node._ids)
            node = node._before
        known: TokenPath | None = earlier
        while node is not known:
            if node is None or known is None or node._ids != known._ids:
                return None
            node, known = node._before, known._before
        added.reverse()
        return _joined(added)

    def digest(self) -> bytes:
        """16 bytes that name the ids: BLAKE2b of all of them, four bytes each in the machine's order.

        The state before the last piece is kept, since the next prompt of a conversation begins with that.
        """
        unhashed = [self]
        node = self._before
        while node is not None and node._state is None:
            unhashed.append(node)
            node = node._before
        state = blake2b(digest_size=16) if node is None or node._state is None else node._state.copy()
        while len(unhashed) > 1:
            state.update(unhashed.pop()._ids)
        if self._before is not None:
            self._before._state = state.copy()
        state.update(self._ids)
        return state.digest()

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes, also what it shares with others."""
        return self._ids.itemsize * self._length + _NODE_BYTES * self._num_nodes

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.chunks())

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> array[int]: ...
    def __getitem__(self, at: int | slice) -> int | array[int]:
        if isinstance(at, slice):
            start, stop, step = at.indices(self._length)
            if step != 1:
                return self.flat()[at]
            chunks, skipped = self._chunks_from(min(start, stop))
            return _joined(chunks)[start - skipped : stop - skipped]
        place = at + self._length if at < 0 else at
        if not 0 <= place < self._length:
            raise IndexError(f"token {at} of a path of {self._length}")
        chunks, skipped = self._chunks_from(place)
        return chunks[0][place - skipped]

    def _chunks_from(self, start: int) -> tuple[list[array[int]], int]:
        """The last pieces, as many as reach back to ``start``, and how many ids stand before them."""
        chunks: list[array[int]] = []
        node = self
        while node._before is not None and node._length > start:
            chunks.append(node._ids)
            node = node._before
        chunks.reverse()
        return chunks, node._length


def _joined(chunks: Sequence[array[int]]) -> array[int]:
    if len(chunks) == 1:
        return chunks[0]
    ids = array("i")
    for chunk in chunks:
        ids.extend(chunk)
    return ids


EMPTY = TokenPath(None, array("i"))


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
