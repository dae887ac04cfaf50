"""Workloads: limits that no draw exceeds, means that they promise, and what the attempts at one prompt share."""

from __future__ import annotations

import math
import random
from statistics import correlation, fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.simulation.agents import (
    Agentic,
    Bimodal,
    Constant,
    LogNormal,
    Replay,
    Turn,
    Workload,
    lognormal_mu,
)

CONSTANT = st.builds(Constant, answer=st.integers(1, 50_000), prompt=st.integers(0, 4000))
LOGNORMAL = st.builds(
    LogNormal,
    mean=st.floats(50, 900),
    sigma=st.floats(0.05, 2.5),
    cap=st.integers(1000, 9000),
    shared=st.floats(0, 1),
    prompt=st.integers(0, 500),
)
BIMODAL = st.builds(
    Bimodal, short=st.integers(5, 4000), long=st.integers(5, 30_000), long_share=st.floats(0, 1), prompt=st.just(7)
)
AGENTIC = st.builds(
    Agentic,
    turns=st.floats(1, 20),
    max_turns=st.integers(1, 30),
    answer=st.floats(1, 3000),
    observation=st.integers(0, 900),
    tool_s=st.floats(0.01, 100),
    answer_sigma=st.floats(0, 2),
    shared=st.floats(0, 1),
    max_answer=st.integers(1, 4096),
)
ANY = st.one_of(CONSTANT, LOGNORMAL, BIMODAL, AGENTIC)


@given(ANY, st.integers(0, 99), st.integers(1, 9))
def test_no_trajectory_exceeds_the_limit_and_every_answer_has_a_token(work: Workload, seed: int, attempts: int) -> None:
    group = work.group(random.Random(seed), attempts)
    assert len(group) == attempts
    for trajectory in group:
        assert trajectory
        assert sum(turn.prompt + turn.answer for turn in trajectory) <= work.max_context
        assert all(turn.answer >= 1 and turn.prompt >= 0 and turn.tool_s >= 0.0 for turn in trajectory)


@given(ANY, st.integers(0, 99))
def test_the_same_seed_draws_the_same_groups(work: Workload, seed: int) -> None:
    one, other = random.Random(seed), random.Random(seed)
    assert [work.group(one, 3) for _ in range(3)] == [work.group(other, 3) for _ in range(3)]


def test_constant_answers_are_all_alike() -> None:
    work = Constant(answer=70, prompt=30)
    assert work.group(random.Random(1), 3) == [(Turn(prompt=30, answer=70),)] * 3
    assert work.max_context == 100


@pytest.mark.parametrize(("sigma", "cap"), [(0.3, 4000), (0.9, 4000), (1.5, 8000)])
def test_the_mean_of_cut_lengths_is_the_one_asked_for(sigma: float, cap: int) -> None:
    work = LogNormal(mean=1200.0, sigma=sigma, cap=cap, shared=0.0)
    rng = random.Random(5)
    lengths = [turn.answer for _ in range(4000) for (turn,) in work.group(rng, 4)]
    assert fmean(lengths) == pytest.approx(1200.0, rel=0.04)
    assert max(lengths) <= cap


def test_the_location_by_hand() -> None:
    """Far below the cap nothing is cut: the mean is exp(mu + sigma² / 2)."""
    assert lognormal_mu(100.0, 0.5, 1e9) == pytest.approx(math.log(100.0) - 0.125, abs=1e-6)
    assert lognormal_mu(100.0, 0.5, 120.0) > lognormal_mu(100.0, 0.5, 1e9)  # what is cut must come from elsewhere


@pytest.mark.parametrize(("mean", "cap"), [(100.0, 100.0), (200.0, 100.0), (0.0, 100.0)])
def test_a_mean_that_the_cap_forbids_is_refused(mean: float, cap: float) -> None:
    with pytest.raises(ValueError, match="needs a cap above it"):
        lognormal_mu(mean, 0.5, cap)


@pytest.mark.parametrize(("shared", "low", "high"), [(0.0, -0.1, 0.1), (0.5, 0.4, 0.6), (1.0, 0.999, 1.0)])
def test_attempts_at_one_prompt_are_as_alike_as_said(shared: float, low: float, high: float) -> None:
    work, rng = LogNormal(mean=500.0, sigma=0.6, cap=10**6, shared=shared), random.Random(3)
    groups = [work.group(rng, 2) for _ in range(3000)]
    logs = [[math.log(attempt[0].answer) for attempt in group] for group in groups]
    assert low <= correlation([one for one, _ in logs], [other for _, other in logs]) <= high + 1e-9


def test_two_modes_come_as_often_as_said_and_spread_by_a_fifth() -> None:
    work, rng = Bimodal(short=100, long=1000, long_share=0.25), random.Random(2)
    answers = [turn.answer for _ in range(2000) for (turn,) in work.group(rng, 4)]
    long = [answer for answer in answers if answer > 500]
    assert len(long) / len(answers) == pytest.approx(0.25, abs=0.02)
    assert min(long) >= 800
    assert max(long) <= 1200
    assert min(answers) >= 80
    assert max(answer for answer in answers if answer <= 500) <= 120


def test_only_the_first_turn_brings_the_task() -> None:
    work, rng = Agentic(turns=6, max_turns=9, answer=50, observation=20, tool_s=2.0, prompt=300), random.Random(4)
    for attempt in work.group(rng, 50):
        assert [turn.prompt for turn in attempt] == [300, *[20] * (len(attempt) - 1)]


def test_mean_turns_answers_and_tools_of_agents() -> None:
    work = Agentic(turns=5, max_turns=200, answer=100, observation=20, tool_s=3.0, shared=0.0, max_answer=10**6)
    rng = random.Random(8)
    turns = [attempt for _ in range(1500) for attempt in work.group(rng, 2)]
    assert fmean(len(attempt) for attempt in turns) == pytest.approx(5.0, rel=0.06)
    every = [turn for attempt in turns for turn in attempt]
    assert fmean(turn.answer for turn in every) == pytest.approx(100.0, rel=0.05)
    assert fmean(turn.tool_s for turn in every) == pytest.approx(3.0, rel=0.08)


def test_recorded_groups_come_in_their_order_again_and_again() -> None:
    groups = [[(Turn(prompt=1, answer=group * 10 + index),) for index in range(2)] for group in range(3)]
    work, rng = Replay(groups), random.Random(0)
    drawn = [[attempt[0].answer for attempt in work.group(rng, 3)] for _ in range(4)]
    assert drawn == [[0, 1, 0], [10, 11, 10], [20, 21, 20], [0, 1, 0]]
    assert work.max_context == 22
