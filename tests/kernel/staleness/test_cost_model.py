"""The decode model by hand, and its fit to measurements whose answer is known."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.decode_cost import PUBLISHED, DecodeCost, EngineStep, fit_decode_cost, measured_pace

COST = PUBLISHED["7b-tp1"]
# 10 ms up to 8 requests, 1 ms for each further one, 1 us per cached token.
KNEE = DecodeCost(floor_s=0.010, base_s=0.002, per_request_s=0.001, attention_base_s=0.0, attention_per_token_s=1e-6)


def test_the_published_model_by_hand() -> None:
    # 7B TP1, 64 requests over 100k tokens: 2.80 + 0.0335 * 100 = 6.15 ms attention; 2.70 + 0.1231 * 64 = 10.5784 ms
    assert COST.step_s(64, 100_000) == pytest.approx(0.0167284, rel=1e-6)
    assert COST.step_s(1, 0) == pytest.approx(0.0028 + 0.0064), "below the floor"
    assert COST.throughput(64, 100_000) == pytest.approx(3825.8, rel=1e-4)
    assert COST.throughput(0, 0) == 0


def test_the_gain_of_one_more_request_by_hand() -> None:
    # 4 requests over 1,000 tokens: 11 ms. A fifth with 1,000 more: 12 ms. 5 / 0.012 - 4 / 0.011 = 53.03 token/s
    assert KNEE.gain(4, 1000, 1000) == pytest.approx(5 / 0.012 - 4 / 0.011)
    # A first one with 500 tokens: 1 / 0.0105
    assert KNEE.gain(0, 0, 500) == pytest.approx(95.238, rel=1e-4)
    # Beyond the floor, 18 requests over 10,000 tokens: 20 + 10 = 30 ms; a nineteenth with 90,000 makes all slower.
    assert KNEE.gain(18, 10_000, 90_000) == pytest.approx(19 / 0.121 - 18 / 0.030)
    assert KNEE.gain(18, 10_000, 90_000) < 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_fit_to_noisy_measurements_predicts_within_a_few_percent(name: str) -> None:
    truth, rng = PUBLISHED[name], random.Random(7)
    running = [rng.randint(1, 200) for _ in range(3000)]
    kv_tokens = [n * rng.randint(200, 8000) for n in running]
    step_s = [truth.step_s(n, kv) * rng.gauss(1, 0.03) for n, kv in zip(running, kv_tokens, strict=True)]
    model = fit_decode_cost(running, kv_tokens, step_s, [1] * 3000)
    assert model is not None
    for n, kv in ((1, 500), (16, 60_000), (100, 100_000), (190, 1_200_000)):
        assert model.step_s(n, kv) == pytest.approx(truth.step_s(n, kv), rel=0.03)


def fit(*measured: tuple[int, int, float, int]) -> DecodeCost:
    """Measurements are (running, cached tokens, seconds, steps)."""
    model = fit_decode_cost(*map(list, zip(*measured, strict=True)))  # type: ignore[arg-type]
    assert model is not None
    return model


def test_a_fit_to_exact_measurements_finds_the_coefficients() -> None:
    model = fit(
        *((n, kv, KNEE.step_s(n, kv), 1) for n, kv in product((1, 4, 8, 12, 20), (1000, 5000, 20_000))),
    )
    assert model.floor_s == pytest.approx(0.010)
    assert model.base_s == pytest.approx(0.002)
    assert model.per_request_s == pytest.approx(0.001)
    assert model.attention_per_token_s == pytest.approx(1e-6)
    assert model.attention_base_s == 0, "it cannot be told from the floor and is in there"


def test_a_measurement_of_many_steps_weighs_as_many() -> None:
    measured = ((2, 0, 0.010, 3), (2, 0, 0.030, 1), (6, 0, 0.020, 2))
    model = fit(*measured)
    assert model.step_s(2, 0) == pytest.approx(0.015), "(3 * 10 + 30) / 4 ms"
    assert model.step_s(6, 0) == pytest.approx(0.020)
    apart = fit(*((n, kv, seconds, 1) for n, kv, seconds, steps in measured for _ in range(steps)))
    assert apart.step_s(4, 0) == pytest.approx(model.step_s(4, 0))


def test_cached_tokens_that_grow_with_the_requests_are_not_told_from_them() -> None:
    """Each request has 1,000 tokens: seconds per token explain all, and nothing is left for the requests."""
    model = fit(*((n, 1000 * n, 0.005 + 0.001 * n, 1) for n in (1, 2, 4, 8)))
    assert (model.attention_per_token_s, model.per_request_s) == (pytest.approx(1e-6), 0)
    assert model.step_s(16, 16_000) == pytest.approx(0.021)


def test_steps_that_get_shorter_with_load_are_taken_as_constant() -> None:
    model = fit((1, 0, 0.030, 1), (2, 0, 0.020, 1), (3, 0, 0.010, 1))
    assert (model.per_request_s, model.attention_per_token_s) == (0, 0)
    assert [model.step_s(running, 0) for running in (1, 3)] == pytest.approx([0.020, 0.020])


def test_steps_that_get_shorter_with_cached_tokens_only_keep_what_a_request_costs() -> None:
    model = fit(*((n, kv, 0.010 + 0.002 * n - 1e-7 * kv, 1) for n, kv in product((1, 2, 3), (0, 1000))))
    assert model.attention_per_token_s == 0
    assert model.per_request_s == pytest.approx(0.002)
    assert model.step_s(2, 500) == pytest.approx(0.014 - 5e-5), "the mean over both lengths"


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 10**6), st.floats(1e-4, 1.0)), min_size=1, max_size=30))
def test_a_fit_to_anything_has_no_negative_time(measured: list[tuple[int, int, float]]) -> None:
    running, kv_tokens, step_s = map(list, zip(*measured, strict=True))
    model = fit_decode_cost(running, kv_tokens, step_s, [1] * len(measured))
    assert (model is None) == (len(set(running)) < 2)
    if model is not None:
        assert model.per_request_s >= 0
        assert model.attention_per_token_s >= 0
        assert model.step_s(1, 0) > 0


def test_one_load_level_says_nothing_yet() -> None:
    assert fit_decode_cost([4, 4], [1000, 2000], [0.01, 0.02], [1, 1]) is None
    assert fit_decode_cost([], [], [], []) is None


def test_the_pace_of_an_engine_is_read_from_its_steps() -> None:
    """5 ms and 1 ms per request; 0.2 ms per prefilled token. One step in ten waited for weights, one in ten prefilled a
    part of a prompt that is told later."""
    steps = []
    for number in range(400):
        running = 1 + number % 8
        seconds = 0.005 + 0.001 * running
        begun = number % 5 == 4
        prefilled = 100 + number if begun else 0
        seconds += 2e-4 * prefilled + (number % 10 == 3) * 2.0 + (number % 10 == 6) * 0.05
        steps.append(EngineStep(seconds, running, int(begun), prefilled))
    pace = measured_pace(steps)
    assert pace is not None
    assert pace.decode.step_s(4, 0) == pytest.approx(0.009, rel=0.05)
    assert pace.prefill_s_per_token == pytest.approx(2e-4, rel=0.05)
    assert pace.turn_tokens == pytest.approx(4.5 * 5)


def test_what_reading_the_cache_takes_is_read_from_steps_with_unlike_contexts() -> None:
    """5 ms, 1 ms per request, 0.1 ms per 1,000 cached tokens; one step in ten waited for weights."""
    rng = random.Random(0)
    steps = []
    for number in range(1200):
        running, begun = 1 + number % 6, int(number % 20 == 19)
        cached = running * rng.randrange(1_000, 60_000)
        seconds = 0.005 + 0.001 * running + 1e-7 * cached + (number % 10 == 3) * 2.0 + begun * 0.02
        steps.append(EngineStep(seconds, running, begun, 100 * begun, cached))
    pace = measured_pace(steps)
    assert pace is not None
    for running, cached in ((1, 1_000), (4, 20_000), (4, 200_000), (6, 300_000)):
        expected = 0.005 + 0.001 * running + 1e-7 * cached
        assert pace.decode.step_s(running, cached) == pytest.approx(expected, rel=0.1)
    assert pace.prefill_s_per_token == pytest.approx(2e-4, rel=0.1)


def test_many_short_prompts_beside_slower_steps_do_not_hide_what_long_ones_say() -> None:
    """Ten steps of 40 prompt tokens that took less than a step without, three of 1,000 that took 0.1 s more."""
    plain = [EngineStep(0.010 + 0.001 * (number % 2), 1 + number % 2, 0, 0) for number in range(100)]
    short, long = [EngineStep(0.009, 1, 1, 40)] * 10, [EngineStep(0.110, 1, 1, 1000)] * 3
    pace = measured_pace([*plain, *short, *long])
    assert pace is not None
    assert pace.prefill_s_per_token == pytest.approx(1e-4, rel=0.05)


def test_too_few_steps_or_steps_without_a_prompt_tell_no_pace() -> None:
    plain = [EngineStep(0.01 + 0.001 * (n % 2), 1 + n % 2, 0, 0) for n in range(100)]
    begun = [EngineStep(0.1, 1, 1, 500)]
    assert measured_pace([*plain[:40], *begun]) is None
    assert measured_pace(plain) is None
    assert measured_pace([*(EngineStep(0.01, 1, 0, 0) for _ in range(100)), *begun]) is None
    assert measured_pace([*plain, *begun]) is not None
