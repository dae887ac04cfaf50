"""The published hardware worked out by hand from its data sheet, and the scenarios of the published runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seamless_verl.decode_cost import PUBLISHED
from seamless_verl.simulation.agents import LogNormal
from seamless_verl.simulation.presets import CALIBRATED, COSTS, RUNS, Fitted, engine, preset, scenario

PLAIN = Fitted(decode=1.0, train_gpu_s_per_token=1e-4, attention=1.0, sigma=0.5)  # nothing is slower than on paper


def test_the_cache_by_hand() -> None:
    """Four H100 of 80 GB, of which 85 % are used: 272 GB, 70 of them weights. A token takes 10 layers x 2 heads x 256 x
    K and V x 2 bytes, on each of two devices that share a head."""
    assert engine(PLAIN).kv_tokens == (272_000_000_000 - 70_000_000_000) // (2 * 20_480)
    assert engine(PLAIN, 2).kv_tokens == (136_000_000_000 - 70_000_000_000) // 20_480
    assert engine(CALIBRATED).kv_tokens == engine(PLAIN).kv_tokens


def test_decoding_by_hand() -> None:
    """Reading 70 GB at 4 x 3.35 TB/s instead of 61 GB at 4 TB/s."""
    published, cost = PUBLISHED["30b-a3b-tp1"], engine(PLAIN).decode
    reading = (70 / 13.4) / (61 / 4.0)
    assert cost.floor_s == pytest.approx(published.floor_s * reading)
    assert cost.base_s == pytest.approx(published.base_s * reading)
    assert cost.attention_base_s == pytest.approx(published.attention_base_s * reading)
    assert cost.attention_per_token_s == pytest.approx(40_960 / 13.4e12)
    state_s = 30 * 32 * 128 * 128 * 8 / 13.4e12  # of the linear layers, read and written
    assert cost.per_request_s == pytest.approx(published.per_request_s * 148 / (4 * 989) + state_s)


def test_prefill_by_hand() -> None:
    """Two FLOP per active parameter and token, at 15 % of the peak."""
    assert engine(PLAIN).prefill_s_per_token == pytest.approx(6e9 / (0.15 * 4 * 989e12))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_what_the_decode_factor_adds_does_not_shrink_with_more_devices(size: int) -> None:
    slower = replace(PLAIN, decode=3.0)
    added = engine(slower, size).decode.floor_s - engine(PLAIN, size).decode.floor_s
    assert added == pytest.approx(2.0 * engine(PLAIN, 4).decode.floor_s)
    assert engine(slower, size).decode.per_request_s == engine(PLAIN, size).decode.per_request_s


def test_half_the_bandwidth_makes_attention_take_twice_as_long() -> None:
    half = engine(replace(PLAIN, attention=0.5)).decode
    assert half.attention_per_token_s == pytest.approx(2 * engine(PLAIN).decode.attention_per_token_s)


@pytest.mark.parametrize("name", sorted(RUNS))
def test_scenarios_of_published_runs(name: str) -> None:
    run, found = RUNS[name], scenario(RUNS[name], PLAIN, steps=16, seed=3)
    assert (found.batch, found.attempts, found.mini_batch) == (64, 8, 16)
    assert (found.steps, found.warm, found.seed, found.costs) == (16, 4, 3, COSTS)
    assert found.workload == LogNormal(mean=run.mean_answer, sigma=0.5, cap=32768)
    assert [pool.slices for pool in found.pools] == [2 * n for n in (run.trainer_nodes, run.rollout_nodes) if n]
    assert {pool.gpus for pool in found.pools} == {4}
    assert found.train.old_log_prob == (1 / 3 if run.decoupled else 0.0)
    assert (preset(name).steps, preset(name).warm) == (20, 5)


def test_training_on_the_published_hardware_by_hand() -> None:
    """Two trainer nodes: 16 GPUs; old log-probs are a third forward-and-backward more."""
    train = scenario(RUNS["separate_async"], PLAIN).train
    assert train.seconds(16_000_000, 16) == pytest.approx(2.0 + 100.0 * 4 / 3)
    switching = scenario(RUNS["switch"], PLAIN).train
    assert switching.seconds(16_000_000, 16) == pytest.approx(102.0)
