"""The engine in closed form against one that counts tokens one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.decode_cost import DecodeCost
from seamless_verl.simulation.books import Account, Use
from seamless_verl.simulation.clock import Clock
from seamless_verl.simulation.replica import EnginePhysics, Replica, Request
from tests.kernel.simulation.build import ENGINE


def _engine(
    physics: EnginePhysics, *, oldest_first: bool = False
) -> tuple[Clock, Account, Replica, dict[object, float]]:
    clock = Clock()
    ends: dict[object, float] = {}
    account = Account(name="s", gpus=1, trainable=False)

    def finished(request: Request) -> None:
        ends[request.owner] = clock.now

    replica = Replica("s", clock, physics, account, finished, oldest_first=oldest_first)
    replica.open()
    return clock, account, replica, ends


def _step_by_step(physics: EnginePhysics, jobs: list[tuple[int, int]]) -> dict[int, float]:
    """Ends of jobs (context, tokens) that all start at 0, one decode step after the other."""
    now = sum(context for context, _ in jobs) * physics.prefill_s_per_token
    left = {number: tokens for number, (_, tokens) in enumerate(jobs)}
    cached = {number: context for number, (context, _) in enumerate(jobs)}
    ends = {}
    while left:
        now += physics.decode.step_s(len(left), sum(cached[number] for number in left))
        for number in list(left):
            left[number] -= 1
            cached[number] += 1
            if not left[number]:
                ends[number] = now
                del left[number]
    return ends


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 400)), min_size=1, max_size=12))
def test_ends_are_those_of_single_steps(jobs: list[tuple[int, int]]) -> None:
    clock, account, replica, ends = _engine(ENGINE)
    for number, (context, tokens) in enumerate(jobs):
        replica.submit(Request(number, context, tokens))
    clock.run(lambda: len(ends) == len(jobs))
    expected = _step_by_step(ENGINE, jobs)
    for number in expected:
        assert ends[number] == pytest.approx(expected[number], rel=1e-3)
    assert sum(account.seconds.values()) == pytest.approx(clock.now)
    assert account.seconds[Use.PREFILL] == pytest.approx(sum(c for c, _ in jobs) * ENGINE.prefill_s_per_token)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 600), st.floats(0, 20)), min_size=2, max_size=30),
    st.integers(1000, 3000),
)
def test_a_full_cache_preempts_and_everybody_ends(jobs: list[tuple[int, int, float]], room: int) -> None:
    clock, account, replica, ends = _engine(replace(ENGINE, kv_tokens=room))
    for number, (context, tokens, at) in enumerate(jobs):
        clock.at(at, replica.submit, Request(number, context, tokens))
    fullest = 0.0

    def done() -> bool:
        nonlocal fullest
        fullest = max(fullest, replica.kv)
        return len(ends) == len(jobs)

    assert clock.run(done)
    assert fullest <= room + len(jobs)
    replica.advance()
    assert sum(account.seconds.values()) == pytest.approx(clock.now)
    assert replica.kv == 0
    assert replica.num_running == 0


def test_an_interrupted_request_keeps_its_tokens_and_pays_prefill_again() -> None:
    clock, account, replica, ends = _engine(ENGINE)
    replica.submit(Request("long", 100, 1000))
    clock.at(5.0, lambda: None)
    clock.run(lambda: clock.now >= 5.0)
    (request,) = replica.take_all()
    kept = request.done
    assert 0 < kept < 1000
    assert account.seconds[Use.PREFILL_AGAIN] == 0
    request.prefix = request.context
    replica.submit(request)
    clock.run(lambda: bool(ends))
    assert account.seconds[Use.PREFILL_AGAIN] == pytest.approx((100 + kept) * ENGINE.prefill_s_per_token)
    # Decoding alone takes as long as without the interrupt.
    assert account.seconds[Use.GENERATE] == pytest.approx(
        _step_by_step(replace(ENGINE, prefill_s_per_token=0.0), [(100, 1000)])[0], rel=1e-3
    )


def test_a_turn_that_follows_finds_its_prefix() -> None:
    clock, account, replica, ends = _engine(ENGINE)
    replica.submit(Request("a", 1000, 10))
    clock.run(lambda: len(ends) == 1)
    ends.clear()
    replica.submit(Request("a", 1010 + 50, 10, prefix=1010))
    clock.run(lambda: len(ends) == 1)
    assert account.seconds[Use.PREFILL] == pytest.approx(1050 * ENGINE.prefill_s_per_token)
    assert account.seconds[Use.PREFILL_AGAIN] == 0


@pytest.mark.parametrize(("oldest_first", "order"), [(False, [3, 2, 1]), (True, [3, 1, 2])])
def test_who_waits_is_served_by_age_or_as_it_came(oldest_first: bool, order: list[int]) -> None:
    clock, _, replica, ends = _engine(replace(ENGINE, max_running=1), oldest_first=oldest_first)
    for age in (3, 2, 1):
        replica.submit(Request(age, 10, 50, age=(age, 0)))
    clock.run(lambda: len(ends) == 3)
    assert sorted(ends, key=lambda age: ends[age]) == order


SECOND = DecodeCost(floor_s=1.0, base_s=0.0, per_request_s=0.0, attention_base_s=0.0, attention_per_token_s=0.0)


@pytest.mark.parametrize(("oldest_first", "last"), [(False, "old"), (True, "young")])
def test_a_full_cache_preempts_who_came_last_or_the_youngest_session(oldest_first: bool, last: str) -> None:
    """Two of 10 + 60 tokens in a cache of 100, a step takes a second: it is full after 40 steps. Who stays ends at 60;
    the other comes back then with 20 tokens to go."""
    physics = EnginePhysics(decode=SECOND, prefill_s_per_token=0.0, kv_tokens=100)
    clock, _, replica, ends = _engine(physics, oldest_first=oldest_first)
    for name, age in (("young", 2), ("old", 1)):
        replica.submit(Request(name, 10, 60, age=(age, 0)))
    clock.run(lambda: len(ends) == 2)
    (first,) = {"young", "old"} - {last}
    assert ends == {first: pytest.approx(60.0, abs=1e-3), last: pytest.approx(80.0, abs=1e-3)}
    assert replica.preemptions == 1


def _five_on_two_seats() -> tuple[Clock, Replica, dict[object, float]]:
    """A step takes a second. The sessions 3 and 4 run, 5 waits; 2 comes at 10, 1 at 20."""
    physics = EnginePhysics(decode=SECOND, prefill_s_per_token=0.0, kv_tokens=10_000, max_running=2)
    clock, _, replica, ends = _engine(physics, oldest_first=True)
    for at, age, tokens in ((0.0, 3, 30), (0.0, 4, 50), (0.0, 5, 10), (10.0, 2, 15), (20.0, 1, 40)):
        clock.at(at, replica.submit, Request(age, 10, tokens, age=(age, 0)))
    return clock, replica, ends


def test_a_seat_that_gets_free_goes_to_the_oldest_session() -> None:
    """The first one at 30, to 1; the next at 50, to 2; at 65 to 5."""
    clock, _, ends = _five_on_two_seats()
    clock.run(lambda: len(ends) == 5)
    assert ends == pytest.approx({3: 30.0, 4: 50.0, 2: 65.0, 1: 70.0, 5: 75.0}, abs=1e-3)


def test_new_weights_give_all_seats_to_the_oldest_sessions() -> None:
    """All are interrupted at 20. 1 and 2 get the seats; 3 has 10 tokens to go then, 4 has 30."""
    clock, replica, ends = _five_on_two_seats()
    clock.run(lambda: clock.now >= 20.0)
    replica.close()
    for request in replica.take_all():
        replica.submit(request)
    replica.open()
    clock.run(lambda: len(ends) == 5)
    assert ends == pytest.approx({2: 35.0, 3: 45.0, 1: 60.0, 5: 70.0, 4: 75.0}, abs=1e-3)
