"""Which conversations leave the replica that holds their prefix, when another one joins with an empty cache.

    weights published   every cache is empty: all conversations are placed anew
    a replica joins     conversations stay with their prefix; new ones, and those that gain by it, go to the newcomer
    a replica leaves    its conversations are placed anew, all others stay

A conversation that moves has its whole context prefilled again, and once more when the newcomer leaves. What it gains
is decode steps among fewer requests. Both are measured in readings of a cached token, so that neither the size of the
model nor the number of GPUs matters, only their ratio.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from seamless_verl.decode_cost import DecodeCost, EnginePace
from seamless_verl.staleness.routing import ReplicaLoad

# Tokens that a conversation generates before the newcomer is taken back: two turns of an agent, or twenty seconds of an
# answer. More would move more of them; how long a loan lasts is not known where requests are routed.
_STAY_TOKENS = 1024
_PREFILLS_PER_MOVE = 2  # on the newcomer, and elsewhere when that leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePrice:
    """What prefilling costs on a replica, compared with decoding. The defaults lie between an H100 (about 700) and an
    H20 (about 7,000), for dense models of 7 to 14 billion parameters.

    Attributes:
        prefill_steps: decode steps that read a cached token in the time that prefilling it takes.
        request_tokens: cached tokens whose reading makes a step longer by as much as one more request does.
    """

    prefill_steps: float = 2000.0
    request_tokens: float = 2000.0

    @classmethod
    def of(cls, decode: DecodeCost, prefill_s_per_token: float) -> MovePrice:
        """For a replica whose costs are known; reading a token takes no less than a thousandth of prefilling it."""
        read_s = max(decode.attention_per_token_s, 1e-4 * prefill_s_per_token, 1e-12)
        return cls(prefill_steps=prefill_s_per_token / read_s, request_tokens=decode.per_request_s / read_s)

    def told_by(self, pace: EnginePace | None) -> MovePrice:
        """The price by a replica's own ``pace``, where that is known; else this one."""
        return self if pace is None else MovePrice.of(pace.decode, pace.prefill_s_per_token)

    def pays(self, context: float, here: float, there: float, to_come: float = _STAY_TOKENS) -> bool:
        """Whether a conversation should leave a replica with ``here`` other requests for one with ``there``.

        Args:
            context: tokens that it must have in the cache.
            to_come: tokens that it will generate there.
        """
        gained = to_come * (here - there) * (context + self.request_tokens)
        return gained > _PREFILLS_PER_MOVE * self.prefill_steps * context * (there + 1)


class Newcomers:
    """Replicas that joined while the caches of the others were valid, and where conversations are since then.

    A conversation moves at most once for each replica that joins. Loads are compared by conversations, not by requests
    that happen to run at the moment: while a conversation waits for a tool it runs nowhere, and yet comes back.
    """

    def __init__(self, price: MovePrice | None = None) -> None:
        self._price = price or MovePrice()
        self._joined: set[str] = set()
        self._seen: dict[object, str] = {}  # conversation -> replica, those that asked since somebody joined
        self._on: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._joined)

    def joined(self, replicas: Iterable[str]) -> None:
        """``replicas`` serve now, with empty caches."""
        self._joined.update(replicas)

    def left(self, replicas: Iterable[str]) -> None:
        gone = set(replicas)
        self._joined -= gone
        self._seen = {name: place for name, place in self._seen.items() if place not in gone} if self._joined else {}
        self._on = Counter(self._seen.values())

    def emptied(self, replicas: Iterable[str]) -> None:
        """``replicas`` took new weights one by one, as all others do: none of them is a newcomer any more."""
        self.left(self._joined.intersection(replicas))

    def caches_lost(self) -> None:
        """All replicas lost their caches: no conversation loses anything by moving, so there are no newcomers."""
        self._joined.clear()
        self._seen.clear()
        self._on.clear()

    def place_of(
        self, home: str, context: float | None, in_flight: Mapping[str, int], pace: EnginePace | None = None
    ) -> str:
        """Where the next turn of a conversation goes whose prefix ``home`` holds.

        Args:
            context: tokens of it; None: unknown, then it stays.
            in_flight: requests of each replica that serves.
            pace: what ``home`` takes.
        """
        serving = [name for name in self._joined if name in in_flight]
        if not serving or context is None or home in self._joined:
            return home
        requests, conversations = sum(in_flight.values()), sum(self._on[name] for name in in_flight)
        busy = min(requests / conversations, 1.0) if conversations else 0.0  # share of conversations that generate
        newcomer = min(serving, key=lambda name: (self._on[name], name))
        if self._price.told_by(pace).pays(context, busy * self._on[home], busy * self._on[newcomer]):
            return newcomer
        return home

    def placed(self, conversation: object, replica: str) -> None:
        """``conversation`` asks, and ``replica`` serves it."""
        if not self._joined:
            return
        before = self._seen.get(conversation)
        if before is not None:
            self._on[before] -= 1
        self._seen[conversation] = replica
        self._on[replica] += 1


def requests_to_move(
    loads: Iterable[ReplicaLoad], newcomers: Iterable[str], price: MovePrice, to_come: float = _STAY_TOKENS
) -> dict[str, int]:
    """How many requests the others give to replicas that joined, of those that run or wait on them.

    What waits has nothing in the cache and goes until loads are level. What runs goes as long as that pays for one of
    mean length.
    """
    on = {load.replica: load for load in loads}
    requests = {name: load.running + load.waiting for name, load in on.items()}
    free = sorted(name for name in newcomers if name in on)
    full = sorted(name for name in on if name not in free)
    given: Counter[str] = Counter()
    while full and free:
        source = max(full, key=lambda name: requests[name])
        target = min(free, key=lambda name: requests[name])
        here, there = requests[source] - 1, requests[target]
        context = on[source].kv_tokens / max(on[source].running, 1)
        waits, own = given[source] < on[source].waiting, price.told_by(on[source].pace)
        if here <= there or not (waits or own.pays(context, here, there, max(to_come, context))):
            break
        given[source] += 1
        requests[source] -= 1
        requests[target] += 1
    return dict(given)


def queued_to_move(count: int, waiting: int) -> list[int]:
    """Which of ``waiting`` requests in a queue move to a replica with free seats: old and young alike, so that both
    queues hold what is urgent. None if more have to move than wait: then the last ``count`` of all do.

    Returns:
        Places in the queue, ascending.
    """
    return [index * waiting // count for index in range(count)] if count < waiting else []
