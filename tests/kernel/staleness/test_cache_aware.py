"""Sessions that keep their cache: the oldest do, the others wait, nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.decode_cost import DecodeCost, EnginePace
from seamless_verl.staleness.affinity import MovePrice
from seamless_verl.staleness.cache_aware import CacheAware, Residents
from seamless_verl.staleness.routing import Hold, PendingRequest, ReplicaLoad, Route

# A step takes 10 ms and 1 ms more for each request; a prefilled token 1 ms.
DEAR = EnginePace(
    decode=DecodeCost(floor_s=0, base_s=0.01, per_request_s=1e-3, attention_base_s=0, attention_per_token_s=0),
    prefill_s_per_token=1e-3,
    turn_tokens=100,
)
CHEAP = EnginePace(decode=DEAR.decode, prefill_s_per_token=1e-6, turn_tokens=100)
POLICY = CacheAware(pace=DEAR, price=MovePrice())


def load(name: str, running: int = 1, kept: int = 0, version: int = 0, pace: EnginePace | None = None) -> ReplicaLoad:
    """With a cache of 1,000 tokens."""
    return ReplicaLoad(
        replica=name,
        version=version,
        running=running,
        waiting=0,
        kv_tokens=100,
        kv_room=900,
        max_running=16,
        kept=kept,
        pace=pace,
    )


def ask(name: str, tokens: int = 100, arrival: int = 0, near: str = "", version: int = 0) -> PendingRequest:
    return PendingRequest(request=name, version=version, tokens=tokens, arrival=(arrival,), near=near)


def place(policy: CacheAware, request: PendingRequest, *loads: ReplicaLoad) -> str | None:
    (decision,) = policy.route([request], loads)
    return decision.replica if isinstance(decision, Route) else None


def test_a_session_begins_where_its_context_fits_beside_those_that_are_there() -> None:
    assert place(POLICY, ask("q", tokens=600), load("a", kept=301), load("b", running=3, kept=300)) == "b"
    assert place(POLICY, ask("q", tokens=600), load("a", kept=301), load("b", running=3, kept=301)) is None
    assert place(POLICY, ask("q", tokens=599), load("a", kept=301), load("b", running=3, kept=301)) == "a"


def test_a_replica_with_nothing_to_do_takes_whoever_comes() -> None:
    assert place(POLICY, ask("q"), load("a", running=0, kept=990), load("b")) == "a"


def test_where_prefilling_costs_less_than_a_small_batch_nobody_waits() -> None:
    """100 tokens of a turn beside one other request: 1.2 s for both, 200 tokens. Two contexts of 500 tokens cost 1 s in
    between, or 1 ms: 91 tokens/s or 167, where the one alone makes 91."""
    assert place(POLICY, ask("q", tokens=510), load("a", kept=900)) is None
    assert place(POLICY, ask("q", tokens=490), load("a", kept=900)) == "a"
    assert place(POLICY, ask("q", tokens=510), load("a", kept=900, pace=CHEAP)) == "a", "as it was measured there"


def test_nobody_overtakes_whoever_waits_for_room() -> None:
    requests = [ask("young", tokens=10, arrival=2), ask("old", tokens=600, arrival=1)]
    decisions = {each.request: each for each in POLICY.route(requests, [load("a", kept=850)])}
    assert isinstance(decisions["old"], Hold)
    assert isinstance(decisions["young"], Hold)


def test_a_group_stays_together_until_its_replica_has_too_many_more_requests() -> None:
    prompts = ask("q", tokens=400, near="a")
    assert place(POLICY, prompts, load("a", running=2), load("b", running=1)) == "a"
    assert place(POLICY, prompts, load("a", running=9), load("b", running=1)) == "b"
    assert place(POLICY, prompts, load("a", running=2, kept=950), load("b", running=1)) == "b", "no room"
    assert place(POLICY, ask("q", tokens=400, near="gone"), load("a", running=2), load("b", running=1)) == "b"
    assert (
        place(POLICY, ask("q", tokens=400, near="a", version=3), load("a", version=2), load("b", version=3)) == "b"
    ), "too old"


def test_whoever_is_first_to_have_a_version_gets_its_share_of_all_that_need_it() -> None:
    requests = [ask(f"q{n}", tokens=1, arrival=n, version=4) for n in range(6)]
    decisions = POLICY.route(requests, [load("old", running=2, version=3), load("new", running=2, version=4)])
    assert sum(isinstance(each, Route) for each in decisions) == 3, "of ten requests both have five then"


def test_the_youngest_lose_their_places_when_contexts_grow_but_not_while_they_run() -> None:
    residents = Residents()
    for name in ("first", "second", "third", "fourth"):
        residents.placed(name, "g", "a", 200)
    assert residents.grown("first", 400, 1000, runs=lambda name: False) == []
    assert residents.grown("second", 400, 1000, runs=lambda name: name == "fourth") == ["third", "second"]
    assert residents.kept("a") == 600, "the one that asks, too; now there is room again"
    assert residents.grown("second", 500, 1000, runs=lambda name: False) == [], "it has no place"
    assert residents.near("third", "g") == "a", "it may still be there"


def test_who_gives_way_is_not_sent_back_to_its_prefix_nor_to_its_groups() -> None:
    residents = Residents()
    for name in ("stays", "moves"):
        residents.placed(name, "g", "a", 200)
    residents.moved("moves")
    assert (residents.kept("a"), residents.near("moves", "g"), residents.near("new", "g")) == (200, "", "a")
    residents.placed("moves", "g", "b", 200)
    residents.displaced("moves")
    assert residents.near("moves", "g") == "b", "it has a prefix again"


def test_what_ended_or_left_keeps_nothing() -> None:
    residents = Residents()
    residents.placed("s", "g", "a", 300)
    residents.placed("t", "g", "b", 200)
    residents.placed("s", "g", "b", 310)
    assert (residents.kept("a"), residents.kept("b")) == (0, 510)
    residents.over(["s", "never seen"])
    assert residents.kept("b") == 200
    residents.left(["b"])
    assert (residents.kept("b"), residents.near("t", "g")) == (0, "")
    residents.placed("t", "g", "a", 200)
    residents.caches_lost()
    assert (residents.kept("a"), residents.near("t", "g")) == (0, "")


SESSIONS = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 6), st.integers(0, 300)), min_size=1, max_size=25)


@given(
    sessions=SESSIONS,
    replicas=st.integers(1, 3),
    cache=st.integers(100, 1500),
    choose=st.randoms(use_true_random=False),
)
def test_every_session_comes_to_its_end_and_no_cache_keeps_more_than_it_holds(
    sessions, replicas, cache, choose
) -> None:
    """Each is (prompt, turns, tokens that a turn adds). Agents ask, requests end, in any order; some contexts alone are
    larger than the cache."""
    residents, homes = Residents(), dict[int, str]()
    contexts = {n: prompt for n, (prompt, _, _) in enumerate(sessions)}
    turns = {n: count for n, (_, count, _) in enumerate(sessions)}
    running: dict[int, str] = {}
    held: set[int] = set()
    names = [f"r{n}" for n in range(replicas)]

    def loads() -> list[ReplicaLoad]:
        found = []
        for name in names:
            here = [contexts[n] for n, place in running.items() if place == name]
            room = max(0, cache - sum(here))
            found.append(
                ReplicaLoad(
                    replica=name,
                    version=0,
                    running=len(here),
                    waiting=0,
                    kv_tokens=sum(here),
                    kv_room=room,
                    kept=residents.kept(name),
                )
            )
        return found

    def start(n: int, name: str) -> None:
        homes[n] = running[n] = name
        residents.placed(n, None, name, contexts[n])

    def route() -> None:
        asks = [ask(str(n), contexts[n], residents.began(n), residents.near(n, None)) for n in held]
        for decision in POLICY.route(asks, loads()):
            if isinstance(decision, Route):
                held.remove(int(decision.request))
                start(int(decision.request), decision.replica)

    for _ in range(4000):
        asking = [n for n in turns if n not in running and n not in held]
        if not asking and not running:
            break
        if asking and choose.random() < 0.6:
            n = choose.choice(asking)
            asked = homes.get(n, "")
            for lost in residents.grown(n, contexts[n], cache, runs=lambda other: other in running):
                homes.pop(lost)
            idle = [other for other, place in homes.items() if place == asked and other not in running]
            assert residents.kept(asked) <= cache or not idle, "who has no request in flight gives way"
            if n in homes:
                start(n, homes[n])
            else:
                held.add(n)
                route()
        elif running:
            n = choose.choice(sorted(running))
            del running[n]
            contexts[n] += sessions[n][2]
            turns[n] -= 1
            if not turns[n]:
                del turns[n]
                homes.pop(n)
                residents.over([n])
            route()
        for name in names:
            idle = [n for n, place in homes.items() if place == name and n not in running]
            assert residents.kept(name) >= sum(contexts[n] - sessions[n][2] for n in idle)
        if held:
            assert running or not turns, "somebody waits, and nobody is served"
    assert not turns, "they have all ended"


@pytest.mark.parametrize("tokens", [0, 5000])
def test_a_context_that_no_cache_holds_is_served_alone(tokens) -> None:
    assert place(POLICY, ask("q", tokens=tokens), load("a", running=0)) == "a"
