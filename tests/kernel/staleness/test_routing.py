"""Where requests go: most stale first, where it gains most, or nowhere yet."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.decode_cost import PUBLISHED, DecodeCost, EnginePace
from seamless_verl.staleness.routing import (
    EngineLoad,
    Hold,
    LeastRequests,
    MarginalGain,
    Migrate,
    MigrationRule,
    PendingRequest,
    Reckoned,
    ReplicaLoad,
    Route,
)

COST = PUBLISHED["7b-tp1"]


def load(
    replica: str, version: int = 0, running: int = 0, waiting: int = 0, kv: int = 0, room: int = 100_000
) -> ReplicaLoad:
    return ReplicaLoad(replica=replica, version=version, running=running, waiting=waiting, kv_tokens=kv, kv_room=room)


def request(name: str, version: int = 0, tokens: int = 1000) -> PendingRequest:
    return PendingRequest(request=name, version=version, tokens=tokens)


def test_the_most_stale_request_goes_first_and_to_the_oldest_version_that_may_take_it() -> None:
    policy = MarginalGain(cost=COST)
    replicas = [load("new", version=5), load("old", version=4)]
    decisions = policy.route([request("fresh", 5), request("stale", 3)], replicas)
    assert [(d.request, d.replica) for d in decisions if isinstance(d, Route)] == [("stale", "old"), ("fresh", "new")]


def test_equal_replicas_share_the_load() -> None:
    decisions = MarginalGain(cost=COST).route([request(f"r{i}") for i in range(10)], [load("a"), load("b")])
    counts = [sum(isinstance(d, Route) and d.replica == name for d in decisions) for name in "ab"]
    assert counts == [5, 5]


def test_a_replica_heavy_with_cached_tokens_gains_less_than_one_with_more_but_shorter_requests() -> None:
    replicas = [load("long", running=40, kv=1_200_000), load("short", running=44, kv=20_000)]
    (weighed,) = MarginalGain(cost=COST, mu=0.0).route([request("r")], replicas)
    (counted,) = LeastRequests().route([request("r")], replicas)
    assert isinstance(weighed, Route)
    assert isinstance(counted, Route)
    assert (weighed.replica, counted.replica) == ("short", "long")


def test_what_a_replica_measured_counts_more_than_the_published_model() -> None:
    """Two that are alike, until one of them was measured: each further request costs it a lot."""
    slow = EnginePace(decode=replace(COST, per_request_s=0.1, floor_s=0.0), prefill_s_per_token=0.0)
    unknown, other, full = load("a", running=8), load("b", running=9), load("full", running=64)
    measured = replace(unknown, pace=slow)
    for first, chosen in ((unknown, "a"), (measured, "b")):
        (decision,) = MarginalGain(cost=COST, mu=0.0).route([request("r")], [first, other])
        assert isinstance(decision, Route)
        assert decision.replica == chosen
    (only,) = MarginalGain(cost=COST, mu=1.0).route([request("r", 1)], [replace(measured, running=0, version=1), other])
    assert isinstance(only, Route), "the fast one is too old; the slow one is empty"
    assert [command.replica for command in MigrationRule().migrations([full, unknown], COST)] == ["full"]
    assert MigrationRule().migrations([full, measured], COST) == []


def test_a_request_is_held_back_rather_than_pushed_onto_a_full_replica() -> None:
    full = load("full", running=400, kv=3_000_000)
    (decision,) = MarginalGain(cost=COST, mu=0.3).route([request("r")], [full])
    assert isinstance(decision, Hold)
    assert "30%" in decision.reason
    (accepted,) = MarginalGain(cost=COST, mu=0.0).route([request("r")], [full])
    assert isinstance(accepted, Route)


@pytest.mark.parametrize("replica", [load("queue", waiting=1), load("no room", room=999), load("too old", version=-1)])
def test_no_request_goes_where_it_would_wait_or_may_not_run(replica: ReplicaLoad) -> None:
    (decision,) = MarginalGain(cost=COST).route([request("r")], [replica])
    assert isinstance(decision, Hold)


def test_room_is_counted_down_while_routing() -> None:
    decisions = MarginalGain(cost=COST).route([request("a"), request("b")], [load("only", room=1500)])
    assert [type(decision) for decision in decisions] == [Route, Hold]


def test_no_replica_is_given_more_than_it_decodes_at_a_time() -> None:
    only = ReplicaLoad(replica="a", version=0, running=1, waiting=0, kv_tokens=0, kv_room=9000, max_running=2)
    decisions = MarginalGain(cost=COST).route([request("a"), request("b")], [only])
    assert [type(decision) for decision in decisions] == [Route, Hold]


def test_least_requests_knows_only_versions_and_numbers() -> None:
    decisions = LeastRequests().route([request("r", 2)], [load("old", version=1), load("new", version=2)])
    assert [type(d) for d in decisions] == [Route]
    (held,) = LeastRequests().route([request("r", 3)], [load("old", version=1)])
    assert isinstance(held, Hold)


def test_among_equals_a_long_request_stays_and_others_go_to_what_is_lent() -> None:
    replicas = [replace(load("lent", running=1), lent=True), load("stays", running=1), load("busy", running=2)]

    def placed(*long: bool) -> list[str]:
        requests = [replace(request(f"r{i}"), long=value) for i, value in enumerate(long)]
        decisions = LeastRequests().route(requests, replicas)
        return [decision.replica for decision in decisions if isinstance(decision, Route)]

    assert placed(True) == ["stays"]
    assert placed(False) == ["lent"]
    assert placed(True, True, True) == ["stays", "lent", "busy"]  # level loads come first
    assert placed(False, False, True, False) == ["lent", "stays", "busy", "lent"]


def test_whoever_is_first_to_have_a_version_gets_no_more_than_its_share() -> None:
    old, new = [load("a", 3, running=4), load("b", 3, running=4)], load("c", 4, running=4)
    pending = [request(f"r{i}", 4) for i in range(6)]
    decisions = LeastRequests().route(pending, [*old, new])
    assert [type(decision) for decision in decisions] == [Route, Route, Hold, Hold, Hold, Hold]
    assert "share of 6" in decisions[-1].reason
    (one,) = LeastRequests(others=5).route(pending[:1], [*old, replace(new, running=5)])
    assert isinstance(one, Route), "the five that wait elsewhere count"
    assert isinstance(LeastRequests().route(pending[:1], [*old, replace(new, running=5)])[0], Hold)
    assert all(isinstance(d, Route) for d in LeastRequests().route([request("r", 3)] * 6, [*old, new]))
    assert all(isinstance(d, Route) for d in LeastRequests().route(pending, [replace(one, version=4) for one in old]))


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), st.booleans()), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=20),
)
def test_what_is_lent_never_makes_loads_less_level(
    replicas: list[tuple[int, int, bool]], requests: list[tuple[int, bool]]
) -> None:
    loads = [
        replace(load(f"s{i}", version=version, running=n), lent=lent) for i, (n, version, lent) in enumerate(replicas)
    ]
    counts = {load.replica: load.running for load in loads}
    pending = [replace(request(f"r{i}", version), long=long) for i, (version, long) in enumerate(requests)]
    for asked, decision in zip(pending, LeastRequests().route(pending, loads), strict=True):
        able = [load.replica for load in loads if load.version >= asked.version]
        share = -(-(sum(load.running for load in loads) + len(pending)) // len(loads))
        has_room = able and (min(counts[name] for name in able) < share or len(able) == len(loads))
        assert isinstance(decision, Route if has_room else Hold)
        if isinstance(decision, Route):
            assert counts[decision.replica] == min(counts[name] for name in able)
            assert decision.replica in able
            counts[decision.replica] += 1


def test_nothing_is_given_back_that_only_older_weights_could_take_over() -> None:
    rule = MigrationRule()
    queue, full = load("queue", version=4, running=10, kv=9000, waiting=4), load("full", 4, running=101, kv=400_000)
    for version, queues, loads in ((3, [], []), (4, ["queue"], ["full"])):
        free, idle = load("free", version, running=10, kv=9000), load("idle", version, running=1)
        assert [command.replica for command in rule.migrations([queue, free], COST)] == queues
        assert [command.replica for command in rule.migrations([full, idle], COST)] == loads


def test_queues_are_given_back_while_somebody_has_none() -> None:
    rule = MigrationRule()
    commands = rule.migrations([load("a", running=10, kv=9000, waiting=4), load("b", running=10, kv=9000)], COST)
    assert commands == [Migrate(replica="a", count=4, reason="4 waiting > 3")]
    assert rule.migrations([load("a", waiting=4), load("b", waiting=1)], COST) == []
    assert rule.migrations([load("a", waiting=3, running=1), load("b", running=1)], COST) == []


def test_a_starving_replica_takes_half_of_the_difference() -> None:
    (command,) = MigrationRule().migrations([load("full", running=101, kv=400_000), load("idle", running=1)], COST)
    assert (command.replica, command.count) == ("full", 50)
    assert MigrationRule().migrations([load("a", running=30, kv=9000), load("b", running=10, kv=9000)], COST) == []


def test_nothing_is_migrated_without_an_expected_gain() -> None:
    """Eight token/s, however many run: two replicas with five each are as fast as one with nine beside one with one."""
    serial = DecodeCost(floor_s=0.0, base_s=0.0, per_request_s=0.125, attention_base_s=0.0, attention_per_token_s=0.0)
    rule = MigrationRule(phi_throughput=0.5)
    assert rule.migrations([load("full", running=9), load("a", running=1)], serial) == []
    shared = replace(serial, floor_s=1.0, per_request_s=0.0)  # a step takes a second, however many run
    assert rule.migrations([load("full", running=9), load("a", running=1)], shared) == [], (
        "nine and one, or five and five"
    )


def test_of_equally_stale_requests_the_older_session_goes_first() -> None:
    younger, older = replace(request("y"), arrival=(2,)), replace(request("o"), arrival=(1, 9))
    decisions = MarginalGain(cost=COST).route([younger, older], [load("only", room=1000)])
    assert [(type(decision), decision.request) for decision in decisions] == [(Route, "o"), (Hold, "y")]


def test_a_staler_request_may_use_newer_weights_where_older_ones_gain_too_little() -> None:
    replicas = [load("full", version=1, running=400, kv=3_000_000), load("free", version=3)]
    (decision,) = MarginalGain(cost=COST).route([request("r", 1)], replicas)
    assert isinstance(decision, Route)
    assert (decision.replica, decision.reason.endswith("at version 3")) == ("free", True)


def test_a_request_that_was_refused_is_asked_again_once_a_load_changes() -> None:
    """Held while alone on a replica that shares nothing; what is placed there since makes its like worth placing."""
    shared = DecodeCost(floor_s=0.01, base_s=0.0, per_request_s=0.0, attention_base_s=0.0, attention_per_token_s=0.0)
    replicas = [load("small", room=100), load("large", version=1, room=5000)]
    requests = [request("big 1", 0, 4000), request("big 2", 0, 4000), request("small", 0, 50)]
    decisions = MarginalGain(cost=shared).route(requests, replicas)
    assert [type(decision) for decision in decisions] == [Route, Hold, Route]
    assert [d.replica for d in decisions if isinstance(d, Route)] == ["large", "small"]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 2), st.integers(0, 5000)), max_size=5),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2000)), max_size=12),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_every_request_gets_one_decision_that_its_replica_can_carry(
    replicas: list[tuple[int, int, int, int]], requests: list[tuple[int, int]], mu: float
) -> None:
    loads = [
        replace(load(f"s{i}", version=version, running=n, kv=100 * n, waiting=waiting, room=room), max_running=20)
        for i, (version, n, waiting, room) in enumerate(replicas)
    ]
    pending = [request(f"r{i}", version, tokens) for i, (version, tokens) in enumerate(requests)]
    decisions = MarginalGain(cost=COST, mu=mu).route(pending, loads)
    assert sorted(decision.request for decision in decisions) == sorted(one.request for one in pending)
    by_name = {one.request: one for one in pending}
    for replica in loads:
        given_to = [by_name[d.request] for d in decisions if isinstance(d, Route) and d.replica == replica.replica]
        assert all(one.version <= replica.version for one in given_to)
        assert sum(one.tokens for one in given_to) <= replica.kv_room
        if given_to:
            assert replica.waiting == 0
            assert replica.running + len(given_to) <= 20
    if mu == 0.0:  # liveness: what is held back does not fit anywhere, whatever it would gain
        for decision in decisions:
            if isinstance(decision, Hold):
                one = by_name[decision.request]
                able = [r for r in loads if r.version >= one.version and r.can_start(one.tokens)]
                taken = {d.replica for d in decisions if isinstance(d, Route)}
                assert all(r.replica in taken or COST.gain(r.running, r.kv_tokens, one.tokens) < 0 for r in able)


def test_a_migration_by_hand() -> None:
    """Ten token/s at most for a replica whose steps take 0.1 s alone and 0.1 s more per 10,000 cached tokens."""
    cost = DecodeCost(floor_s=0.1, base_s=0.0, per_request_s=0.0, attention_base_s=0.0, attention_per_token_s=1e-5)
    full, idle = load("full", running=21, kv=21_000), load("idle", running=1, kv=1000)
    (command,) = MigrationRule().migrations([full, idle], cost)
    # 21 / 0.31 + 1 / 0.11 = 77 token/s now; 11 / 0.21 + 11 / 0.21 = 105 with ten requests and 10,000 tokens moved
    assert (command.replica, command.count) == ("full", 10)
    assert command.reason == "68 token/s against 9 on idle; +28 expected"
    assert MigrationRule(phi_throughput=7.5).migrations([full, idle], cost) == [], "67.7 / 9.1 = 7.45"
    busy = replace(idle, waiting=1)
    assert MigrationRule().migrations([full, busy], cost) == [], "whoever has a queue starves of nothing"


@pytest.mark.parametrize(
    ("requests", "said", "then", "waiting"),
    [
        (10, None, None, 2),  # an engine that said nothing computes as many as it may
        (6, (4, 2, 0), 6, 2),  # its cache is full before that
        (7, (4, 2, 0), 6, 3),  # who came since waits behind them
        (4, (4, 2, 0), 6, 0),  # two have ended since
        (3, (4, 2, 0), 6, 0),
        (9, (6, 0, 0), 6, 1),  # there was no queue, and now more than it computes
        (1, (2, 6, 0), 3, 1),  # never more than there are
    ],
)
def test_the_engines_queue_counts_and_whoever_came_and_went_since(
    requests: int, said: tuple[int, int, int] | None, then: int | None, waiting: int
) -> None:
    told = (EngineLoad(*said), Reckoned(then or 0, 0)) if said else (None, None)
    assert Reckoned(requests, 0, *told).waiting(max_running=8) == waiting


def test_contexts_have_grown_since_they_were_placed_and_some_share_their_beginning() -> None:
    grown, shared = EngineLoad(3, 0, 5000), EngineLoad(3, 0, 1200)
    then = Reckoned(3, 3000)
    assert Reckoned(3, 3000).cached() == 3000
    assert Reckoned(3, 3000, grown, then).cached() == 5000
    assert Reckoned(4, 4500, grown, then).cached() == 6500
    assert Reckoned(2, 2000, shared, then).cached() == 200
    assert Reckoned(1, 1000, shared, then).cached() == 0, "the last one has what they shared; a second later it is told"
    assert Reckoned(0, 700, grown, then).cached() == 700, "whoever is about to come finds nobody"
