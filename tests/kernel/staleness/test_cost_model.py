"""The decode model by hand, and its fit to measurements whose answer is known."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.errors import ConfigError
from seamless_verl.staleness.cost_model import PUBLISHED, DecodeCost, DecodeCostFit

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
    truth, rng, fit = PUBLISHED[name], random.Random(7), DecodeCostFit()
    for _ in range(3000):
        running = rng.randint(1, 200)
        kv_tokens = running * rng.randint(200, 8000)
        fit.observe(running, kv_tokens, truth.step_s(running, kv_tokens) * rng.gauss(1, 0.03))
    model = fit.fit()
    assert model is not None
    for running, kv_tokens in ((1, 500), (16, 60_000), (100, 100_000), (190, 1_200_000)):
        assert model.step_s(running, kv_tokens) == pytest.approx(truth.step_s(running, kv_tokens), rel=0.03)


def measured(fit: DecodeCostFit, cost: DecodeCost = KNEE) -> DecodeCost:
    for running, kv_tokens in product((1, 4, 8, 12, 20), (1000, 5000, 20_000)):
        fit.observe(running, kv_tokens, cost.step_s(running, kv_tokens))
    model = fit.fit()
    assert model is not None
    return model


def test_a_fit_to_exact_measurements_finds_the_coefficients() -> None:
    model = measured(DecodeCostFit(memory=1.0))
    assert model.floor_s == pytest.approx(0.010)
    assert model.base_s == pytest.approx(0.002)
    assert model.per_request_s == pytest.approx(0.001)
    assert model.attention_per_token_s == pytest.approx(1e-6)
    assert model.attention_base_s == 0, "it cannot be told from the floor and is in there"


def test_steps_of_one_measurement_weigh_as_many() -> None:
    once, often = DecodeCostFit(memory=1.0), DecodeCostFit(memory=1.0)
    for running, seconds, steps in ((2, 0.010, 3), (2, 0.030, 1), (6, 0.020, 2)):
        once.observe(running, 0, seconds, steps=steps)
        for _ in range(steps):
            often.observe(running, 0, seconds)
    one, other = once.fit(), often.fit()
    assert one is not None
    assert other is not None
    assert one.step_s(2, 0) == pytest.approx(0.015), "(3 * 10 + 30) / 4 ms"
    assert other.step_s(2, 0) == pytest.approx(0.015)
    assert one.step_s(6, 0) == pytest.approx(0.020)


def test_the_newest_measurement_of_a_level_outweighs_the_older_ones() -> None:
    fit = DecodeCostFit(memory=0.5)
    fit.observe(1, 0, 0.010)
    for seconds in (0.040, 0.010):  # with weights 1 and 2 of three: 20 ms
        fit.observe(4, 0, seconds)
    model = fit.fit()
    assert model is not None
    assert model.step_s(4, 0) == pytest.approx(0.020)


def test_weights_that_grow_beyond_all_numbers_do_not_show() -> None:
    """A memory of a tenth grows tenfold with each measurement: 1e400 after 400 of them."""
    fit = DecodeCostFit(memory=0.1)
    for _ in range(400):
        fit.observe(1, 0, 0.5)
    model = measured(fit)
    assert model.step_s(20, 20_000) == pytest.approx(KNEE.step_s(20, 20_000), rel=0.01)


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


def test_steps_that_get_shorter_with_load_are_taken_as_constant() -> None:
    fit = DecodeCostFit(memory=1.0)
    for running, seconds in ((1, 0.030), (2, 0.020), (3, 0.010)):
        fit.observe(running, 0, seconds)
    model = fit.fit()
    assert model is not None
    assert (model.per_request_s, model.attention_per_token_s) == (0, 0)
    assert [model.step_s(running, 0) for running in (1, 3)] == pytest.approx([0.020, 0.020])


def test_one_load_level_says_nothing_yet() -> None:
    fit = DecodeCostFit()
    fit.observe(4, 1000, 0.01)
    assert fit.fit() is None


@pytest.mark.parametrize("memory", [0.0, -1.0, 1.001, float("nan")])
def test_a_memory_that_cannot_be_is_refused(memory: float) -> None:
    with pytest.raises(ConfigError, match=r"fit_memory.*0\.999"):
        DecodeCostFit(memory=memory)
