"""Costs are found again in requests made from them; estimates move time between two categories and nothing else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.observe import flight
from seamless_verl.observe.digest import digest, token_costs, with_first_tokens
from seamless_verl.observe.recording import Recording
from seamless_verl.observe.time_ledger import Category

PREFILL_S, DECODE_S = 0.001, 0.02
SHAPES = st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 500)), min_size=20, max_size=40)


def seconds_of(uncached: int, tokens: int) -> float:
    return PREFILL_S * uncached + DECODE_S * tokens


@given(SHAPES)
def test_the_costs_are_found_again(shapes):
    costs = token_costs((uncached, tokens, seconds_of(uncached, tokens)) for uncached, tokens in shapes)
    if len({uncached / tokens for uncached, tokens in shapes}) < 2:
        assert costs is None
    elif costs is not None:  # shapes may still be too much alike
        assert (costs.prefill_s, costs.decode_s) == pytest.approx((PREFILL_S, DECODE_S), rel=1e-3)


@pytest.mark.parametrize(
    "requests",
    [[(100, 10, 1.0), (50, 20, 1.0)], [(100, 10, 1.0)] * 50, [(n, 10, 5.0 - 0.01 * n) for n in range(50)], []],
    ids=["few", "alike", "longer prompts are faster", "none"],
)
def test_where_the_requests_do_not_tell_nothing_is_claimed(requests):
    assert token_costs(requests) is None


def recording(shapes, *, cached: int | None, resumed: bool) -> list[flight.FlightEvent]:
    """One request after the other on one slice; every fifth is resumed."""
    at = 1.0
    events: list[flight.FlightEvent] = [
        flight.RunStarted(at=0.0, name="x", policy="p", eta=1, bound=1, total_steps=1),
        flight.SliceAdded(
            at=0.0, slice="r", pool="rollout", devices=2, capabilities=("rollout",), state=flight.SliceState.ROLLOUT
        ),
    ]
    for number, (uncached, tokens) in enumerate(shapes):
        prompt = uncached + (cached or 0)
        again = resumed and number % 5 == 0
        events.append(flight.RequestStarted(at=at, request=str(number), slice="r", prompt_tokens=prompt, resumed=again))
        at += seconds_of(uncached, tokens)
        events.append(
            flight.RequestEnded(
                at=at, request=str(number), slice="r", tokens=tokens, finish="completed", cached_tokens=cached
            )
        )
        at += 0.5
    return [*events, flight.RunEnded(at=at, outcome="finished")]


def seconds_by_category(events) -> dict[Category, float]:
    (books,) = digest(Recording(events=tuple(events)), [], []).books
    return {category: seconds for category, seconds in books.seconds.items() if seconds}


MIXED = [(50 * n, 10 + n % 7) for n in range(30)]


def test_time_spent_prefilling_again_is_taken_from_generating():
    plain = seconds_by_category(recording(MIXED, cached=16, resumed=False))
    found = seconds_by_category(recording(MIXED, cached=16, resumed=True))
    again = sum(PREFILL_S * uncached for uncached, _ in MIXED[::5])
    assert found.pop(Category.PREFILL_AGAIN) == pytest.approx(again, rel=1e-3)
    assert found[Category.GENERATE] == pytest.approx(plain[Category.GENERATE] - again)
    assert sum(found.values()) + again == pytest.approx(sum(plain.values()))


def test_without_word_of_the_cache_it_stays_generating():
    assert Category.PREFILL_AGAIN not in seconds_by_category(recording(MIXED, cached=None, resumed=True))


@settings(max_examples=40)
@given(SHAPES)
def test_every_estimate_lies_within_its_request(shapes):
    events = recording(shapes, cached=0, resumed=True)
    told = with_first_tokens(events)
    assert [event.at for event in told] == sorted(event.at for event in told)
    spans: dict[str, list[float]] = {}
    for event in told:
        if isinstance(event, (flight.RequestStarted, flight.RequestEnded, flight.FirstToken)):
            spans.setdefault(event.request, []).append(event.at)
            if isinstance(event, flight.FirstToken):
                assert len(spans[event.request]) == 2, "after the start, before the end"
    assert len(told) - len(events) <= sum(number % 5 == 0 for number in range(len(shapes)))
