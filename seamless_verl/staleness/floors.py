"""Which weights each replica has, and the floor of a request: the oldest version that may make its first token.

    floor 4   a (3)  b (4)  c (5)  ──►  b or c; if none: the request waits, and 4 is wanted

A fresh prompt's floor is the version that it was reserved for, a later turn's the version of its session's first token
(V_traj). Invariant: a request is only given a replica whose version is its floor or newer, so no trajectory begins with
older weights than its reservation allows. A replica whose version is not known may be given any request: so it is where
all replicas take new weights together, and one without weights keeps its gate closed until it has the newest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from seamless_verl.staleness.protocol import StalenessProtocol

UNTOLD = 1 << 30
"""Version of a replica whose version is not known."""


class ServingVersions:
    """Versions of the replicas on a router, and the floors that requests wait for."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}
        self._oldest = UNTOLD
        self._waiting: Counter[int] = Counter()

    def tell(self, replicas: Iterable[str], version: int) -> None:
        """``replicas`` generate with ``version`` from now on, or as soon as they are on the router."""
        self._told |= dict.fromkeys(replicas, version)
        self._oldest = min(self._told.values(), default=UNTOLD)

    def forget(self, replicas: Iterable[str]) -> None:
        """``replicas`` left; others may come under the same names."""
        for replica in replicas:
            self._told.pop(replica, None)
        self._oldest = min(self._told.values(), default=UNTOLD)

    def of(self, replica: str) -> int:
        return self._told.get(replica, UNTOLD)

    def oldest(self, replicas: Iterable[str]) -> int | None:
        """The oldest version among ``replicas``; None where none of theirs is known."""
        return min((self._told[replica] for replica in replicas if replica in self._told), default=None)

    def able(self, floor: int, loads: Mapping[str, int]) -> Mapping[str, int]:
        """Those of ``loads`` that may begin a request with this floor; ``loads`` itself if all may."""
        if floor <= self._oldest:
            return loads
        return {replica: load for replica, load in loads.items() if self.of(replica) >= floor}

    def waits(self, floor: int) -> None:
        """One more request waits for a replica that may begin it, with this floor."""
        self._waiting[floor] += 1

    def waits_no_more(self, floor: int) -> None:
        self._waiting[floor] -= 1
        if not self._waiting[floor]:
            del self._waiting[floor]

    def wanted(self, replicas: Iterable[str], held: Iterable[int] = ()) -> int | None:
        """The highest floor that is waited for, or among ``held``, and that none of ``replicas`` serves."""
        best = max((self.of(replica) for replica in replicas), default=-1)
        return max((floor for floor in (*self._waiting, *held) if floor > best), default=None)


def reserve_between(protocol: StalenessProtocol, group: str, oldest: int, newest: int) -> int | None:
    """Reserve for ``oldest``, so that any replica may begin the group; where no step has room for one so old, for the
    next version, up to ``newest``, and replicas that are older must leave it alone.

    Returns:
        As `StalenessProtocol.reserve`.
    """
    for version in range(min(newest, max(oldest, newest - protocol.eta)), newest + 1):
        buffer = protocol.reserve(group, version)
        if buffer is not None:
            return buffer
    return None
