"""Anything happens to replicas of unlike versions: the bound holds, nothing is lost or doubled, and it goes on."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.unlike_replicas import World
from seamless_verl.config import WeightsConfig
from seamless_verl.decode_cost import PUBLISHED, EnginePace
from seamless_verl.staleness.affinity import MovePrice
from seamless_verl.staleness.cache_aware import CacheAware
from seamless_verl.staleness.routing import LeastRequests, MarginalGain

PICK = st.integers(0, 1 << 16)


COST = PUBLISHED["7b-tp1"]
# Prefilling is so dear that sessions wait for room rather than compute their contexts again.
ROUTERS: dict[str, LeastRequests | MarginalGain | CacheAware] = {
    "least_requests": LeastRequests(),
    "marginal_gain": MarginalGain(cost=COST),
    "cache_aware": CacheAware(pace=EnginePace(decode=COST, prefill_s_per_token=1.0), price=MovePrice()),
}


class Replicas(RuleBasedStateMachine):
    @initialize(
        eta=st.integers(0, 3),
        batch=st.integers(1, 3),
        at_once=st.integers(1, 2),
        max_lag=st.integers(1, 4),
        sync=st.sampled_from(["rolling", "rolling", "together"]),
        fewer=st.booleans(),
        router=st.sampled_from(sorted(ROUTERS)),
        cache_tokens=st.sampled_from([150, 350, 1000, 1 << 30]),  # a context has 100
    )
    def begin(
        self, eta: int, batch: int, at_once: int, max_lag: int, sync: str, fewer: bool, router: str, cache_tokens: int
    ) -> None:
        self.world = World(
            eta=eta,
            batch=batch,
            weights=WeightsConfig(sync=sync, at_once=at_once, max_lag=max_lag),
            router=ROUTERS[router],
            in_flight=max(1, eta) if fewer else None,
            cache_tokens=cache_tokens,
        )

    @rule()
    def admit(self) -> None:
        self.world.admit()

    @rule()
    def route(self) -> None:
        self.world.route()

    @precondition(lambda self: self.world.running())
    @rule(pick=PICK, ends=st.booleans())
    def generate(self, pick: int, ends: bool) -> None:
        running = self.world.running()
        number = running[pick % len(running)]
        self.world.end_turn(number) if ends else self.world.token(number)

    @precondition(lambda self: self.world.may_consume)
    @rule(pick=PICK)
    def consume(self, pick: int) -> None:
        self.world.consume(1 + pick % self.world.may_consume)

    @precondition(lambda self: self.world.may_publish)
    @rule()
    def publish(self) -> None:
        self.world.publish()

    @rule()
    def begin_pulls(self) -> None:
        self.world.begin_pulls()

    @precondition(lambda self: any(each.pulling for each in self.world.replicas.values()))
    @rule(pick=PICK, ending=st.sampled_from(["well", "well", "well", "failed", "broken"]))
    def end_pull(self, pick: int, ending: str) -> None:
        pulling = [name for name, each in self.world.replicas.items() if each.pulling]
        name = pulling[pick % len(pulling)]
        self.world.pulled(name) if ending == "well" else self.world.pull_failed(name, breaks=ending == "broken")

    @rule(pick=PICK)
    def leave_or_join(self, pick: int) -> None:
        name = f"r{pick % 3}"
        self.world.join(name) if self.world.replicas[name].away else self.world.leave(name)

    @precondition(lambda self: self.world.members)
    @rule(pick=PICK)
    def give_up(self, pick: int) -> None:
        self.world.give_up(sorted(self.world.members)[pick % len(self.world.members)])

    @invariant()
    def nothing_is_broken(self) -> None:
        if hasattr(self, "world"):
            self.world.check()
            assert not +self.world.broken

    def teardown(self) -> None:
        """Liveness: one replica is frozen at what it has, the others are there, and the run goes on."""
        if not hasattr(self, "world"):
            return
        for name in ("r1", "r2"):
            if self.world.replicas[name].away:
                self.world.join(name)
        assert self.world.settle(3, frozen="r0")
        self.world.check()
        assert not +self.world.broken


Replicas.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestReplicas = Replicas.TestCase


@pytest.mark.parametrize("max_lag", [1, 4])
def test_requests_that_nobody_may_begin_go_as_soon_as_one_replica_has_the_weights(max_lag: int) -> None:
    weights = WeightsConfig(sync="rolling", max_lag=max_lag)
    world = World(eta=0, batch=2, weights=weights, router=LeastRequests(), turns=1)
    while len(world.serving()) < 3:
        world.begin_pulls()
        for name in [name for name, each in world.replicas.items() if each.pulling]:
            world.pulled(name)
    assert world.settle(1)
    for name in world.replicas:  # all are of version 0 but the ones that pulled since
        assert world.replicas[name].version in (0, 1)
    world.admit()
    world.route()
    (name,) = world.begin_pulls() or [name for name, each in world.replicas.items() if each.pulling]
    world.pulled(name)
    world.route()
    placed = [session.on for session in world.sessions.values() if session.on]
    assert placed == [name] * 2, "of four, its share; who pulls next gets the others"
    assert world.settle(1)


def test_a_prompt_is_reserved_for_the_oldest_version_that_serves_if_a_step_has_room_for_it() -> None:
    weights = WeightsConfig(sync="rolling", max_lag=2)
    world = World(eta=1, batch=2, weights=weights, router=LeastRequests(), in_flight=1)
    assert world.settle(2)
    for name, version in (("r0", 1), ("r1", 2), ("r2", 2)):
        world.leave(name), world.join(name)
        world.published, newest = version, world.published
        world.pulled(name)
        world.published = newest
    for group in list(world.members):
        world.give_up(group)
    world.admit()
    assert set(world.floors.values()) == {1}
