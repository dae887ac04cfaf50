"""Which scenarios can be: tags against what a system needs, numbers against each other; and what follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.errors import ConfigError
from seamless_verl.simulation.agents import Constant
from seamless_verl.simulation.regimes import REGIMES
from seamless_verl.simulation.scenario import Pool, Scenario, SwitchCosts, TrainPhysics, divisor
from tests.kernel.simulation.build import ENGINE, scenario

TRAIN = Pool(name="train", slices=2, gpus=4, trains=True, rolls_out=False, engine=ENGINE)
BOTH = replace(TRAIN, name="both", rolls_out=True)
ROLLOUT = Pool(name="rollout", slices=3, gpus=2, trains=False, engine=ENGINE)
LAYOUTS = {
    "apart": (TRAIN, ROLLOUT),
    "shared": (BOTH, ROLLOUT),
    "together": (BOTH,),
    "training only": (TRAIN,),
    "rollout only": (ROLLOUT,),
}
TAKE_TURNS = ("verl_sync", "verl_colocate_async", "verl_colocate_async_wait", "colocated")
LEND_ALL = ("seamlessflow", "greedy", "predictive")  # lend even where nobody stands by


def of(system: str, pools: tuple[Pool, ...], **changes: object) -> Scenario:
    return replace(scenario("colocated"), system=system, pools=pools, **changes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("system", sorted(REGIMES))
def test_tags_that_a_system_can_be_run_with(system: str, layout: str) -> None:
    if system in TAKE_TURNS:
        possible = layout == "together"
    elif system in LEND_ALL:
        possible = layout in ("apart", "shared", "together")
    else:
        possible = layout in ("apart", "shared")
    if possible:
        assert of(system, LAYOUTS[layout]).pools == LAYOUTS[layout]
    else:
        with pytest.raises(ConfigError, match=r"no pool can train|all train and roll out|slices that only generate"):
            of(system, LAYOUTS[layout])


def test_devices_gang_and_standing_slices_by_hand() -> None:
    made = of("greedy", (TRAIN, replace(BOTH, slices=1), ROLLOUT))
    assert made.gpus == 2 * 4 + 1 * 4 + 3 * 2
    assert [pool.name for pool in made.gang] == ["train", "both"]
    assert [pool.name for pool in made.standing] == ["rollout"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mini_batch": 3}, r"ppo_mini_batch_size=3: does not divide data.train_batch_size=8. Fix: write 2"),
        ({"warm": 6}, r"warm=6: must be below steps=6"),
        ({"warm": -1}, r"warm=-1: must be below"),
        ({"workload": Constant(answer=388_001, prompt=0)}, r"a replica of trainers has a cache for 400000 tokens"),
        ({"in_flight": 2.5}, r"in_flight"),
        ({"in_flight": 0.5}, r"in_flight"),
        ({"system": "areal", "in_flight": 1.5}, r"areal admits by its own rule"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        replace(scenario("greedy"), **changes)


def test_the_longest_context_may_fill_97_percent_of_the_cache() -> None:
    assert scenario("greedy", workload=Constant(answer=387_999, prompt=1)).workload.max_context == 388_000


@given(st.integers(1, 500), st.integers(1, 600))
def test_a_divisor_divides_and_no_larger_one_would_do(whole: int, wanted: int) -> None:
    found = divisor(whole, wanted)
    assert whole % found == 0
    assert 1 <= found <= wanted
    assert not any(whole % part == 0 for part in range(found + 1, min(whole, wanted) + 1))


@given(st.integers(0, 10**7), st.integers(1, 10**7), st.integers(1, 64))
def test_training_time_grows_with_tokens_and_is_shared_by_devices(tokens: int, more: int, gpus: int) -> None:
    train = TrainPhysics(gpu_s_per_token=1e-4, old_log_prob=1 / 3, update_s=2.0)
    assert train.seconds(0, gpus) == 2.0
    assert train.seconds(tokens + more, gpus) > train.seconds(tokens, gpus)
    work_s = train.seconds(tokens, 1) - 2.0
    assert train.seconds(tokens, gpus) - 2.0 == pytest.approx(work_s / gpus, abs=1e-9)


@pytest.mark.parametrize("system", sorted(REGIMES))
def test_who_stops_the_world_hands_nothing_over_beforehand(system: str) -> None:
    costs = SwitchCosts(wake=1.0, drain=1.0, load=1.0, push=9.0)
    made = replace(scenario(system), costs=costs)
    rules = REGIMES[system]
    assert made.push_s(rules) == (0.0 if rules.stop_the_world or rules.colocated else 9.0)
