"""Which weights made which token, where weights change under requests that go on.

    request  ──── 40 tokens of version 3 ────┤cut├──── 25 of version 4 ────┤cut├── 7 of version 5 ──► ended

Invariant: the spans of a request add up to its tokens, and each token has the version that its engine had when it was
made. Whoever cuts guarantees that no token is under way: the engine has stopped, and all it made has been counted.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

_ALL = sys.maxsize  # of its tokens, however many it has


class Seams:
    """Requests of one server, by the names they came with."""

    def __init__(self) -> None:
        self._cuts: dict[str, list[tuple[int, int]]] = {}  # request -> (tokens so far, version that made the last ones)

    def begin(self, request: str) -> None:
        """``request`` is handed to the engine."""
        self._cuts[request] = []

    def cut(self, version: int, so_far: Mapping[str, int], coming: frozenset[str] = frozenset()) -> None:
        """The weights change now; what was made since the last cut is of ``version``.

        Args:
            so_far: tokens of each request that the engine has. Who is neither here nor ``coming`` has ended already,
                and only has not been told yet.
            coming: requests that the engine does not have yet.
        """
        for request, cuts in self._cuts.items():
            if request not in coming:
                cuts.append((so_far.get(request, _ALL), version))

    def end(self, request: str, num_tokens: int, version: int) -> list[tuple[int, int]]:
        """``[(version, tokens), …]`` of a request that has ended; what came after the last cut is of ``version``."""
        spans = self.spans(request, 0, num_tokens, version)
        self.forget(request)
        return spans

    def spans(self, request: str, start: int, num_tokens: int, version: int) -> list[tuple[int, int]]:
        """The same of a request that goes on: of its first ``num_tokens``, without the first ``start``."""
        spans: list[tuple[int, int]] = []
        done = start
        for so_far, made_by in (*self._cuts.get(request, ()), (_ALL, version)):
            until = min(so_far, num_tokens)
            if until > done:
                spans.append((made_by, until - done))
                done = until
        return spans

    def forget(self, request: str) -> None:
        """``request`` has failed, or ended."""
        self._cuts.pop(request, None)
