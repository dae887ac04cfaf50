"""Which shard has which session: the shard's name is the beginning of every session id and of every key it makes.

Invariant: a session never moves. A shard that is added takes its share of *new* sessions only; one that retires takes
no new ones and keeps its own until they end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

KEY_PREFIX = "sk-seamless-"
_OWNER = re.compile(rf"(?:{KEY_PREFIX})?(\d{{1,6}})-")


def prefix_of(shard: int) -> str:
    """Begins the ids and (after ``KEY_PREFIX``) the keys of a shard's sessions."""
    return f"{shard}-"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressBook:
    """The whole table.

    Attributes:
        addresses: base URL by shard.
        retired: shards that take no new sessions.
    """

    addresses: Mapping[int, str]
    retired: frozenset[int] = field(default_factory=frozenset)

    def owner(self, session_or_key: str) -> int | None:
        """The shard of a session id or a key, by its name alone; None when no shard of ours made it."""
        found = _OWNER.match(session_or_key)
        shard = int(found.group(1)) if found is not None else -1
        return shard if shard in self.addresses else None

    def place(self, token: str) -> int:
        """The shard for a new session (rendezvous hashing): a further shard takes an even share from all others.

        Raises:
            LookupError: every shard has retired.
        """
        open_ones = [shard for shard in self.addresses if shard not in self.retired]
        if not open_ones:
            raise LookupError("no shard takes new sessions")
        return max(open_ones, key=lambda shard: blake2b(f"{shard}:{token}".encode(), digest_size=8).digest())

    def with_shard(self, shard: int, address: str) -> AddressBook:
        """The table after a shard was added."""
        return AddressBook(addresses={**self.addresses, shard: address}, retired=self.retired - {shard})
