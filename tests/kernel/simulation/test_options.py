"""``--set`` on a scenario: values that act together, and pools that take over the speed of those they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.simulation.options import apply
from seamless_verl.simulation.presets import preset
from seamless_verl.simulation.replica import slower
from seamless_verl.simulation.scenario import Pool
from seamless_verl.simulation.search import candidates
from tests.kernel.simulation.build import scenario


def _slower(pool: Pool, factor: float) -> Pool:
    return replace(pool, engine=replace(pool.engine, decode=slower(pool.engine.decode, factor)))


def test_the_order_of_assignments_does_not_matter() -> None:
    pools = (
        "resources=[{name: trainers, nodes: 1, gpus_per_node: 8, capabilities: [train]}, "
        "{name: rollouts, nodes: 3, gpus_per_node: 8, capabilities: [rollout]}]"
    )
    base = preset("separate_async")
    one, other = (apply(base, order) for order in ((pools, "decode.slowdown=2"), ("decode.slowdown=2", pools)))
    assert one == other
    assert one.pools[1].engine.decode.floor_s == 2 * base.pools[1].engine.decode.floor_s
    assert [(pool.slices, pool.trains, pool.rolls_out) for pool in one.pools] == [(2, True, False), (6, False, True)]


def test_declared_pools_are_as_fast_as_those_of_their_name_or_role() -> None:
    base = scenario("predictive")
    trainers, rollouts = base.pools
    base = replace(base, pools=(trainers, _slower(rollouts, 3.0)))
    told = "{name: %s, nodes: 1, gpus_per_node: 8, capabilities: [%s]}"
    for names in (("trainers", "rollouts"), ("a", "b")):
        pools = ", ".join(told % pair for pair in zip(names, ("train, rollout", "rollout"), strict=True))
        made = apply(base, [f"resources=[{pools}]"])
        assert [pool.engine for pool in made.pools] == [pool.engine for pool in base.pools]
    for candidate in candidates(base, ["greedy"], 16):
        assert [pool.engine for pool in candidate.scenario.pools] == [
            base.pools[pool.name == "rollouts"].engine for pool in candidate.scenario.pools
        ]


def test_a_batch_of_another_size_keeps_mini_batches_that_divide_it() -> None:
    base = scenario("predictive", batch=16, mini_batch=4)
    assert [apply(base, [f"data.train_batch_size={n}"]).mini_batch for n in (32, 16, 9, 10, 7, 2)] == [8, 4, 1, 2, 1, 1]


_SIZE = "rollout.tensor_model_parallel_size"


@pytest.mark.parametrize("size", [2, 8])
def test_slices_of_another_size_share_what_is_read_and_computed(size: int) -> None:
    base = preset("separate_async")
    resized = apply(base, [f"actor_rollout_ref.{_SIZE}={size}"])
    assert resized.gpus == base.gpus
    assert [pool.slices * size for pool in resized.pools] == [pool.slices * 4 for pool in base.pools]
    before, after = base.pools[0].engine, resized.pools[0].engine
    assert after.prefill_s_per_token * size == pytest.approx(before.prefill_s_per_token * 4)
    assert after.decode.per_request_s * size == pytest.approx(before.decode.per_request_s * 4)
    # Two KV heads: from two devices on, each of them keeps one head of every token.
    assert after.decode.attention_per_token_s == pytest.approx(before.decode.attention_per_token_s)
    # A step is shorter on more devices, but not by as much: launches and all-reduces stay.
    ratio = after.decode.step_s(64, 64_000) / before.decode.step_s(64, 64_000)
    assert min(1.0, 4 / size) < ratio < max(1.0, 4 / size)


def test_declared_pools_are_cut_into_slices_of_the_size_asked_for() -> None:
    pools = "resources=[{name: all, nodes: 1, gpus_per_node: 8, capabilities: [train, rollout]}]"
    [pool] = apply(preset("separate_async"), ["scheduler.policy=colocated", pools, f"{_SIZE}=2"]).pools
    assert (pool.slices, pool.gpus) == (4, 2)


@pytest.mark.parametrize(("size", "told"), [("1", "write one of 2, 4, 8"), ("two", f"write e.g. {_SIZE}=2")])
def test_sizes_that_cannot_be_are_refused(size: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        apply(preset("separate_async"), [f"{_SIZE}={size}"])


def test_of_two_sizes_the_last_one_counts() -> None:
    twice = apply(preset("separate_async"), [f"{_SIZE}=2", f"{_SIZE}=8"])
    assert twice == apply(preset("separate_async"), [f"{_SIZE}=8"])


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_recording_shows_one_size_only(gpus: int) -> None:
    recorded = scenario("predictive")
    recorded = replace(recorded, pools=tuple(replace(pool, gpus=gpus) for pool in recorded.pools))
    with pytest.raises(ConfigError, match="start from --preset"):
        apply(recorded, [f"{_SIZE}=2"])
