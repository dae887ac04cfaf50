"""Ending the generations of a prompt where they are (StaleFlow's treatment of stragglers), one register per process.

    trainer ─ cut_groups ─► cut ─► abort the attempts under way ─► the client keeps their tokens and asks for no more

What a multi-turn agent asks for after that gets a single token each time, so that it comes to its end soon.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class Cutting:
    """See the module; groups are prompts, by uid."""

    def __init__(self) -> None:
        self._cut: set[str] = set()
        self._under_way: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)

    @contextmanager
    def attempt(self, group: str, abort: Callable[[], None]) -> Iterator[None]:
        """An attempt to generate for ``group`` is under way; ``abort`` ends it with the tokens it has."""
        self._under_way[group].append(abort)
        try:
            yield
        finally:
            self._under_way[group].remove(abort)
            if not self._under_way[group]:
                del self._under_way[group]

    def cut(self, groups: Sequence[str]) -> None:
        """End these; an attempt that its replica has not begun yet is not reached, cut again for it."""
        for group in groups:
            self._cut.add(group)
            for abort in self._under_way.get(group, ()):
                abort()

    def is_cut(self, group: str) -> bool:
        return group in self._cut

    def forget(self, group: str) -> None:
        """``group`` has ended."""
        self._cut.discard(group)


cutting = Cutting()
