"""Where requests go: most stale first, where it gains most, or nowhere yet."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.errors import ConfigError
from seamless_verl.staleness.cost_model import PUBLISHED, DecodeCost, DecodeCostFit
from seamless_verl.staleness.routing import (
    Hold,
    LeastRequests,
    MarginalGain,
    Migrate,
    MigrationRule,
    PendingRequest,
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


def test_the_published_model_by_hand() -> None:
    # 7B TP1, 64 requests over 100k tokens: 2.80 + 0.0335 * 100 = 6.15 ms attention; 2.70 + 0.1231 * 64 = 10.5784 ms
    assert COST.step_s(64, 100_000) == pytest.approx(0.0167284, rel=1e-6)
    assert COST.step_s(1, 0) == pytest.approx(0.0028 + 0.0064), "below the floor"
    assert COST.throughput(64, 100_000) == pytest.approx(3825.8, rel=1e-4)
    assert COST.throughput(0, 0) == 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_fit_to_noisy_measurements_predicts_within_a_few_percent(name: str) -> None:
    truth, rng, fit = PUBLISHED[name], random.Random(7), DecodeCostFit()
    for _ in range(3000):
        running = rng.randint(1, 200)
        kv_tokens = running * rng.randint(200, 8000)
        fit.observe(running, kv_tokens, truth.step_s(running, kv_tokens) * rng.gauss(1, 0.03))
    model = fit.fit()
    assert model is not None
    for running, kv_tokens in ((1, 500), (16, 60_000), (100, 100_000), (190, 1_200_000)):
        assert model.step_s(running, kv_tokens) == pytest.approx(truth.step_s(running, kv_tokens), rel=0.03)


def test_a_fit_forgets_the_machine_it_no_longer_runs_on() -> None:
    fit, rng = DecodeCostFit(memory=0.99), random.Random(1)
    for name in ("32b-tp2", "7b-tp1"):
        for _ in range(2000):
            running = rng.randint(1, 100)
            fit.observe(running, running * 1000, PUBLISHED[name].step_s(running, running * 1000))
    model = fit.fit()
    assert model is not None
    assert model.step_s(50, 50_000) == pytest.approx(COST.step_s(50, 50_000), rel=0.02)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 10**6), st.floats(1e-4, 1.0)), max_size=30))
def test_a_fit_to_anything_has_no_negative_time(measured: list[tuple[int, int, float]]) -> None:
    fit = DecodeCostFit()
    for running, kv_tokens, seconds in measured:
        fit.observe(running, kv_tokens, seconds)
    model = fit.fit()
    assert (model is None) == (len({running for running, _, _ in measured}) < 2)
    if model is not None:
        assert model.per_request_s >= 0
        assert model.attention_per_token_s >= 0


def test_one_load_level_says_nothing_yet() -> None:
    fit = DecodeCostFit()
    fit.observe(4, 1000, 0.01)
    assert fit.fit() is None
    with pytest.raises(ConfigError, match=r"fit_memory.*0\.999"):
        DecodeCostFit(memory=0.0)


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
    decisions = LeastRequests().route([request("r", 2)], [load("old", version=1), load("new", version=2, running=9)])
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
        assert isinstance(decision, Route if able else Hold)
        if isinstance(decision, Route):
            assert counts[decision.replica] == min(counts[name] for name in able)
            assert decision.replica in able
            counts[decision.replica] += 1


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
    # Per request the time is linear and nothing is shared: two replicas are as fast as one.
    serial = DecodeCost(floor_s=0.0, base_s=0.0, per_request_s=0.01, attention_base_s=0.0, attention_per_token_s=0.0)
    assert MigrationRule(phi_throughput=0.5).migrations([load("a", running=9), load("b", running=1)], serial) == []
