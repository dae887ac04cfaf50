"""The engine's invariants: no token is lost or made from nothing, no step is faster than the cost model allows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.decode_cost import DecodeCost
from seamless_verl.simulation.books import Account, Use
from seamless_verl.simulation.clock import Clock
from seamless_verl.simulation.replica import EnginePhysics, Replica, Request, slower
from tests.kernel.simulation.build import COST, ENGINE

SECOND = DecodeCost(floor_s=1.0, base_s=0.0, per_request_s=0.0, attention_base_s=0.0, attention_per_token_s=0.0)
ONE_A_SECOND = EnginePhysics(decode=SECOND, prefill_s_per_token=0.0, kv_tokens=10_000)


class Engine:
    """A replica with a clock; ``ends`` by owner."""

    def __init__(self, physics: EnginePhysics, *, oldest_first: bool = False) -> None:
        self.clock = Clock()
        self.account = Account(name="s", gpus=1, trainable=False)
        self.ends: dict[object, float] = {}
        self.replica = Replica("s", self.clock, physics, self.account, self._finished, oldest_first=oldest_first)
        self.replica.open()

    def _finished(self, request: Request) -> None:
        assert request.done == request.tokens
        self.ends[request.owner] = self.clock.now

    def until(self, at: float) -> None:
        self.clock.at(at, lambda: None)
        self.clock.run(lambda: self.clock.now >= at)
        self.replica.advance()

    def all_end(self, count: int) -> None:
        assert len(self.ends) == count or self.clock.run(lambda: len(self.ends) == count)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 150)), min_size=1, max_size=12),
    st.integers(0, 10_000),
    st.booleans(),
    st.sampled_from([600, 2000, 100_000]),
)
def test_interrupted_moved_and_served_again_every_request_gets_its_tokens_once(
    jobs: list[tuple[int, int]], seed: int, oldest_first: bool, room: int
) -> None:
    """Requests are taken away and brought back at random; the engine stops and goes on at random."""
    rng = random.Random(seed)
    engine = Engine(replace(ENGINE, kv_tokens=room, max_running=5), oldest_first=oldest_first)
    replica = engine.replica
    requests = [Request(n, context, tokens, age=(n, 0)) for n, (context, tokens) in enumerate(jobs)]
    for request in requests:
        replica.submit(request)
    for _ in range(12):
        engine.until(engine.clock.now + rng.uniform(0.0, 0.4))
        held = {"take": lambda: replica.take(rng.randint(0, 3)), "share": lambda: replica.share(rng.randint(1, 3))}
        taken = held.get(rng.choice(["take", "share", "all"]), replica.take_all)()
        assert all(0 <= request.done < request.tokens for request in taken)
        if rng.random() < 0.3:
            replica.close()
            replica.open()
        for request in taken:
            request.prefix = request.context if request.done else 0
            replica.submit(request)
        assert replica.num_running <= 5
        assert replica.load == len(jobs) - len(engine.ends)
    engine.all_end(len(jobs))
    replica.advance()
    assert replica.generated == pytest.approx(sum(tokens for _, tokens in jobs), abs=0.01)
    assert (replica.kv, replica.load) == (0, 0)
    assert sum(engine.account.seconds.values()) == pytest.approx(engine.clock.now)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 200)), min_size=1, max_size=10), st.floats(0.01, 5.0))
def test_no_more_is_generated_than_the_fastest_step_allows(jobs: list[tuple[int, int]], seconds: float) -> None:
    engine = Engine(ENGINE)
    for number, (context, tokens) in enumerate(jobs):
        engine.replica.submit(Request(number, context, tokens))
    engine.until(seconds)
    fastest = COST.step_s(1, 0)
    assert engine.replica.generated <= len(jobs) * seconds / fastest + 1e-6
    busy = engine.account.seconds[Use.GENERATE]
    assert engine.replica.generated <= len(jobs) * busy / fastest + 1e-6


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 200)), min_size=1, max_size=8), st.integers(1, 300))
def test_another_request_makes_nobody_faster(jobs: list[tuple[int, int]], tokens: int) -> None:
    alone, beside = Engine(ENGINE), Engine(ENGINE)
    for number, (context, length) in enumerate(jobs):
        for engine in (alone, beside):
            engine.replica.submit(Request(number, context, length))
    beside.replica.submit(Request("new", 50, tokens))
    alone.all_end(len(jobs))
    beside.all_end(len(jobs) + 1)
    assert all(alone.ends[number] <= beside.ends[number] + 1e-9 for number in range(len(jobs)))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.floats(1.0, 5.0))
def test_an_engine_that_is_slower_by_a_factor_decodes_for_as_much_longer(lengths: list[int], factor: float) -> None:
    usual, slow = Engine(ENGINE), Engine(ENGINE)
    slow.replica.set_slowdown(factor)
    for number, tokens in enumerate(lengths):
        for engine in (usual, slow):
            engine.replica.submit(Request(number, 100, tokens))
    for engine in (usual, slow):
        engine.all_end(len(lengths))
    ratio = slow.account.seconds[Use.GENERATE] / usual.account.seconds[Use.GENERATE]
    assert ratio == pytest.approx(factor, rel=1e-6)
    assert slow.account.seconds[Use.PREFILL] == pytest.approx(usual.account.seconds[Use.PREFILL])


def test_a_cost_model_that_is_slower_is_so_in_every_term() -> None:
    assert slower(COST, 3.0).step_s(40, 90_000) == pytest.approx(3.0 * COST.step_s(40, 90_000))
    assert slower(COST, 1.0) == COST


@given(st.integers(1, 60), st.floats(0.0, 50_000.0), st.floats(0.001, 500.0))
def test_steps_in_a_time_take_that_time(running: int, cached: float, seconds: float) -> None:
    engine = Engine(ENGINE)
    replica = engine.replica
    replica.num_running, replica.kv = running, cached
    assert replica._seconds_for(replica._steps_in(seconds)) == pytest.approx(seconds, rel=1e-6)


def test_a_slowdown_in_the_middle_by_hand() -> None:
    """Ten tokens at a second each; from 4 on each takes two: 4 + 6 x 2."""
    engine = Engine(ONE_A_SECOND)
    engine.replica.submit(Request("a", 1, 10))
    engine.until(4.0)
    engine.replica.set_slowdown(2.0)
    engine.all_end(1)
    assert engine.ends["a"] == pytest.approx(16.0, abs=1e-3)


def test_prefill_comes_first_and_holds_everybody_up() -> None:
    """Two seconds of prefill for b, in the middle of a's ten tokens."""
    engine = Engine(replace(ONE_A_SECOND, prefill_s_per_token=0.01))
    engine.replica.submit(Request("a", 100, 10))
    engine.until(5.0)
    engine.replica.submit(Request("b", 200, 3))
    engine.all_end(2)
    assert engine.ends["b"] == pytest.approx(5.0 + 2.0 + 3.0, abs=1e-3)
    assert engine.ends["a"] == pytest.approx(1.0 + 10.0 + 2.0, abs=1e-3)
    assert engine.account.seconds[Use.PREFILL] == pytest.approx(3.0)


def test_an_engine_without_requests_waits_for_work() -> None:
    engine = Engine(ONE_A_SECOND)
    engine.until(7.0)
    engine.replica.submit(Request("a", 1, 5))
    engine.all_end(1)
    assert engine.account.seconds[Use.WAIT_WORK] == pytest.approx(7.0)
    assert engine.account.seconds[Use.GENERATE] == pytest.approx(5.0, abs=1e-3)


def test_new_weights_make_everything_that_runs_prefill_again() -> None:
    engine = Engine(replace(ONE_A_SECOND, prefill_s_per_token=0.01))
    engine.replica.submit(Request("a", 100, 50))
    engine.until(21.0)  # a second of prefill, twenty tokens
    engine.replica.close()
    engine.until(30.0)  # whoever holds the slice meanwhile pays
    assert engine.account.seconds[Use.GENERATE] == pytest.approx(20.0)
    engine.replica.open()
    engine.all_end(1)
    assert engine.account.seconds[Use.PREFILL_AGAIN] == pytest.approx(1.2)
    assert engine.ends["a"] == pytest.approx(30.0 + 1.2 + 30.0, abs=1e-3)


def test_the_weights_of_the_first_token_stay_a_requests_version() -> None:
    engine = Engine(replace(ONE_A_SECOND, max_running=1))
    engine.replica.version = 3
    first, second = Request("a", 1, 10), Request("b", 1, 10)
    engine.replica.submit(first)
    engine.replica.submit(second)
    assert (first.version, second.version) == (3, None)
    engine.replica.version = 4
    engine.all_end(2)
    assert (first.version, second.version) == (3, 4)


def test_waiting_requests_are_taken_first_and_then_who_would_be_preempted() -> None:
    engine = Engine(replace(ONE_A_SECOND, max_running=2))
    for name in "abc":
        engine.replica.submit(Request(name, 1, 10))
    engine.until(1.0)
    assert [request.owner for request in engine.replica.take(2)] == ["c", "b"]
    assert engine.replica.num_running == 1


def test_a_newcomer_gets_waiting_requests_from_all_over_the_queue() -> None:
    engine = Engine(replace(ONE_A_SECOND, max_running=1))
    for number in range(9):
        engine.replica.submit(Request(number, 1, 10))
    assert [request.owner for request in engine.replica.share(4)] == [1, 3, 5, 7]
    assert [request.owner for request in engine.replica.waiting] == [2, 4, 6, 8]
    assert [request.owner for request in engine.replica.share(5)] == [
        8,
        6,
        4,
        2,
        0,
    ]  # more than wait: running ones, too


@pytest.mark.parametrize("runs", [True, False])
def test_who_is_given_up_leaves_its_seat_to_the_next(runs: bool) -> None:
    engine = Engine(replace(ONE_A_SECOND, max_running=1))
    requests = {name: Request(name, 1, 10) for name in "abc"}
    for request in requests.values():
        engine.replica.submit(request)
    engine.until(5.0)
    engine.replica.remove(requests["a" if runs else "b"])
    engine.all_end(2)
    assert engine.ends == pytest.approx({"b": 15.0, "c": 25.0} if runs else {"a": 10.0, "c": 20.0}, abs=1e-3)


def test_the_cache_of_an_old_turn_makes_room_for_requests_that_run() -> None:
    """A cache of 100: after a's turn its 60 tokens stay; b's 70 push them out, and a pays for its prefix again."""
    engine = Engine(replace(ONE_A_SECOND, prefill_s_per_token=0.01, kv_tokens=100))
    engine.replica.submit(Request("a", 50, 10))
    engine.all_end(1)
    engine.replica.submit(Request("b", 70, 5))
    engine.all_end(2)
    engine.replica.submit(Request("a", 65, 5, prefix=60))
    engine.until(engine.clock.now + 20.0)
    assert engine.account.seconds[Use.PREFILL_AGAIN] == pytest.approx(0.6)
