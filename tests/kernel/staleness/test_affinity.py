"""When a conversation leaves its prefix, and that no route ever points to a replica that left."""

from __future__ import annotations

import random

import pytest

from seamless_verl.staleness.affinity import MovePrice, Newcomers, evening
from seamless_verl.staleness.cost_model import PUBLISHED
from seamless_verl.staleness.routing import ReplicaLoad

H100 = MovePrice(prefill_steps=700, request_tokens=700)


def moved(context: float, *, generating: float, price: MovePrice | None = None) -> int:
    """Of 100 conversations on two replicas, how many go to a third one that joins, each asking five times."""
    newcomers = Newcomers(price)
    newcomers.joined(["c"])
    homes = {f"s{n}": "ab"[n % 2] for n in range(100)}
    order = sorted(homes) * 5
    random.Random(0).shuffle(order)
    for name in order:
        here = list(homes.values())
        in_flight = {place: round(generating * here.count(place)) for place in "abc"}
        homes[name] = newcomers.place_of(homes[name], context, in_flight)
        newcomers.placed(name, homes[name])
    return sum(place == "c" for place in homes.values())


def test_long_contexts_stay_and_short_ones_spread() -> None:
    assert moved(16_000, generating=0.1) <= 10
    assert 22 <= moved(100, generating=1.0) <= 34, "a third of them is the even share"
    assert moved(16_000, generating=1.0) < moved(100, generating=1.0)
    assert moved(16_000, generating=0.0) == 0, "where nobody waits nothing is gained"


def test_where_prefill_is_cheap_more_move() -> None:
    dear = MovePrice(prefill_steps=7000, request_tokens=3700)
    assert moved(16_000, generating=0.5, price=dear) < moved(16_000, generating=0.5, price=H100)


def test_moving_pays_when_the_steps_that_it_saves_outweigh_two_prefills() -> None:
    """16,000 tokens prefilled twice in 30 us each: 0.96 s. A request of that size makes a step 0.62 ms longer, so over
    1,024 steps 0.63 s are saved for each request that is not beside it."""
    price = MovePrice(prefill_steps=30e-6 / 38e-9, request_tokens=10e-6 / 38e-9)
    assert price.pays(16_000, here=2, there=0)
    assert not price.pays(16_000, here=1, there=0)
    assert not price.pays(16_000, here=10, there=8), "the prefill delays eight others"
    assert price.pays(16_000, here=1, there=0, to_come=4096)


def test_a_price_follows_from_the_costs_of_a_replica() -> None:
    cost = PUBLISHED["7b-tp1"]
    price = MovePrice.of(cost, 2.4e-4)
    assert price.prefill_steps == pytest.approx(7164, rel=0.01)
    assert price.request_tokens == pytest.approx(3675, rel=0.01)


def test_nobody_moves_who_did_not_say_how_long_it_is_or_to_a_replica_that_does_not_serve() -> None:
    newcomers = Newcomers()
    newcomers.joined(["c"])
    for n in range(50):
        newcomers.placed(n, "a")
    busy = {"a": 50, "b": 0}
    assert newcomers.place_of("a", 100, busy | {"c": 0}) == "c"
    assert newcomers.place_of("a", None, busy | {"c": 0}) == "a"
    assert newcomers.place_of("a", 100, busy) == "a"
    newcomers.caches_lost()
    assert not newcomers
    assert newcomers.place_of("a", 100, busy | {"c": 0}) == "a", "after a publication the router places anew, not we"


def load(name: str, running: int, waiting: int = 0, context: int = 1000) -> ReplicaLoad:
    return ReplicaLoad(
        replica=name, version=0, running=running, waiting=waiting, kv_tokens=running * context, kv_room=10**9
    )


def test_what_waits_goes_to_a_newcomer_until_loads_are_level_and_what_runs_if_that_pays() -> None:
    dear = MovePrice(prefill_steps=1e6)
    assert evening([load("a", 8, 12), load("b", 8, 4), load("c", 0)], ["c"], dear) == {"a": 9, "b": 1}
    assert evening([load("a", 20), load("b", 20), load("c", 0)], ["c"], dear) == {}
    cheap = MovePrice(prefill_steps=1.0)
    assert evening([load("a", 20), load("b", 20), load("c", 0)], ["c"], cheap) == {"a": 7, "b": 6}
    assert evening([load("a", 20), load("b", 20)], ["c"], cheap) == {}
    assert evening([load("c", 0)], ["c"], cheap) == {}
