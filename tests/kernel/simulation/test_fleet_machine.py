"""A fleet under whatever may happen to its slices: no request is lost or served twice, no second is charged twice.

Slices come, go and take weights, requests come and are given up, in any order and at any time. Whatever was done
before, a fleet whose slices serve again ends every request with exactly its tokens.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from seamless_verl.config import RouterConfig
from seamless_verl.decode_cost import DecodeCost
from seamless_verl.simulation.books import Use
from seamless_verl.simulation.clock import Clock
from seamless_verl.simulation.replica import EnginePhysics, Request
from seamless_verl.staleness.router import router_of
from tests.kernel.simulation.build import make_fleet

COST = DecodeCost(floor_s=0.1, base_s=0.05, per_request_s=0.02, attention_base_s=0.0, attention_per_token_s=1e-4)
ENGINE = EnginePhysics(decode=COST, prefill_s_per_token=1e-3, kv_tokens=2_000, max_running=3)
GAINS = RouterConfig(policy="marginal_gain", migrate=True)
NAMES = ("a", "b", "c")
names = st.sampled_from(NAMES)


class Machine(RuleBasedStateMachine):
    """``on``: by request that was started and not stopped, the slice that it was started on."""

    settings = RouterConfig(oldest_first=False)

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.on: dict[int, str] = {}
        self.asked: list[Request] = []
        self.ended: list[Request] = []
        self.given_up: list[Request] = []
        self.version = 0
        self.fleet = make_fleet(
            self.clock,
            router=router_of(self.settings, cost=COST, prefill_s_per_token=ENGINE.prefill_s_per_token),
            rebalance=True,
            started=self._started,
            stopped=self._stopped,
            finished=self.ended.append,
        )
        for name in NAMES:
            self.fleet.add(name, gpus=1, trainable=True, physics=ENGINE)

    def _started(self, request: Request, name: str) -> None:
        assert id(request) not in self.on
        self.on[id(request)] = name

    def _stopped(self, request: Request, name: str, finished: bool) -> None:
        assert self.on.pop(id(request)) == name
        assert not finished or request.done == request.tokens

    @property
    def open(self) -> list[Request]:
        return [r for r in self.asked if r not in self.ended and r not in self.given_up]

    # ---------------------------------------------------------------- what may happen

    @rule(context=st.integers(1, 300), tokens=st.integers(1, 200), count=st.integers(1, 5))
    def submit(self, context: int, tokens: int, count: int) -> None:
        numbers = range(len(self.asked), len(self.asked) + count)
        requests = [Request(f"s{number}", context, tokens, age=(number, 0)) for number in numbers]
        self.asked += requests
        self.fleet.submit(requests)

    @rule(name=names)
    def serve(self, name: str) -> None:
        if not self.fleet.units[name].serving:
            self.fleet.units[name].serve(self.version)
            self.fleet.joined(name)
        self.fleet.even_out()

    @rule(name=names, use=st.sampled_from([Use.SWITCH, Use.TRAIN, Use.FAILED, Use.WAIT_DATA]))
    def leave(self, name: str, use: Use) -> None:
        self.fleet.units[name].turn_to(Use.SWITCH)  # so that nothing is placed there again
        self.fleet.vacate(name)
        self.fleet.units[name].turn_to(use)

    @rule()
    def new_weights(self) -> None:
        """Whoever serves stops, shares what it had with the others, and serves again after the load."""
        self.version += 1
        loading = [name for name, unit in self.fleet.units.items() if unit.serving]
        for name in loading:
            self.fleet.units[name].turn_to(Use.SYNC)
        self.fleet.spread(loading, self.version)
        self._pass(0.5)
        for name in loading:
            self.fleet.units[name].serve(self.version)
        self.fleet.even_out()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(range(len(self.open))))
        self.given_up.append(self.open[request])
        self.fleet.withdraw(self.given_up[-1])

    @rule(name=names, factor=st.sampled_from([0.5, 1.0, 3.0]))
    def slow_down(self, name: str, factor: float) -> None:
        self.fleet.units[name].charge()
        self.fleet.units[name].replica.set_slowdown(factor)

    @rule(seconds=st.floats(0.01, 30.0))
    def wait(self, seconds: float) -> None:
        self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        end = self.clock.now + seconds
        self.clock.at(end, lambda: None)
        self.clock.run(lambda: self.clock.now >= end)

    # ---------------------------------------------------------------- what holds at any time

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        replicas = [unit.replica for unit in self.fleet.units.values()]
        placed = [request for request in self.open if request.replica is not None]
        assert len(placed) == sum(replica.load for replica in replicas) == len(self.on)
        assert len(self.open) - len(placed) == self.fleet.num_held
        for request in placed:
            assert request.replica is not None
            assert self.on[id(request)] == request.replica.name
            assert request.alive != (request in request.replica.waiting)

    @invariant()
    def nothing_is_held_where_somebody_serves(self) -> None:
        if any(unit.accepting for unit in self.fleet.units.values()) and self.settings.policy == "least_requests":
            assert self.fleet.num_held == 0

    @invariant()
    def engines_keep_to_their_seats_and_their_cache(self) -> None:
        for unit in self.fleet.units.values():
            assert 0 <= unit.replica.num_running <= ENGINE.max_running
            assert -1e-6 <= unit.replica.kv <= ENGINE.kv_tokens + ENGINE.max_running

    @invariant()
    def every_second_is_charged_once(self) -> None:
        for account in self.fleet.accounts():
            assert abs(sum(account.seconds.values()) - self.clock.now) < 1e-6

    def teardown(self) -> None:
        for name in NAMES:
            self.serve(name)
        self.clock.run(lambda: not self.open)
        assert self.open == []
        assert self.on == {}
        made = sum(unit.replica.generated for unit in self.fleet.units.values())
        assert sum(request.tokens for request in self.ended) <= made + 1e-3
        assert made <= sum(request.tokens for request in [*self.ended, *self.given_up]) + 1e-3


class Migrating(Machine):
    settings = GAINS


class KeepingCaches(Machine):
    """Sessions are never told to have ended: nobody may wait for their room for ever."""

    settings = RouterConfig(policy="cache_aware")

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), more=st.integers(1, 400), tokens=st.integers(1, 200))
    def next_turn(self, data: st.DataObject, more: int, tokens: int) -> None:
        last = data.draw(st.sampled_from(self.ended))
        busy = {request.owner for request in self.open}
        if last.owner not in busy:
            context = last.context + last.tokens
            again = Request(last.owner, context + more, tokens, prefix=context, age=last.age)
            self.asked.append(again)
            self.fleet.submit([again])


TestFleet = Machine.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestCacheAwareFleet = KeepingCaches.TestCase
TestCacheAwareFleet.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestMigratingFleet = Migrating.TestCase
TestMigratingFleet.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
