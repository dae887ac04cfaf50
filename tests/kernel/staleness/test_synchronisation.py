"""Who takes newer weights, in which order, and that nobody who needs them waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.config import WeightsConfig
from seamless_verl.errors import ConfigError
from seamless_verl.staleness.synchronisation import ReplicaWeights, Rolling, Together, synchronisation_of, too_slow


def replica(
    name: str, version: int | None, running: int = 8, waiting: int = 0, pulling: bool = False, failed: int = 0
) -> ReplicaWeights:
    return ReplicaWeights(
        replica=name, version=version, pulling=pulling, running=running, waiting=waiting, failed=failed
    )


def test_together_all_that_are_behind_pull_at_once() -> None:
    fleet = [replica("a", 3), replica("b", 4), replica("c", None), replica("d", 2, pulling=True)]
    assert [(pull.replica, pull.at_least) for pull in Together().pulls(4, fleet, None)] == [("a", 4), ("c", 4)]


@pytest.mark.parametrize(
    ("fleet", "wanted", "chosen", "reason"),
    [
        ([replica("a", 1), replica("b", None)], 4, "b", "it has no weights"),
        ([replica("a", 3, running=9), replica("b", 3, running=8)], 4, "b", "waits for version 4, which nobody has"),
        ([replica("a", 3), replica("b", 4)], 4, None, ""),  # somebody has it
        ([replica("a", 3), replica("b", 1)], None, "b", "it is 3 behind"),
        ([replica("a", 3, running=0), replica("b", 3)], None, "a", "it idles"),
        ([replica("a", 3, running=2), replica("b", 3)], None, "a", "it runs 2, the busiest 8"),
        ([replica("a", 3, running=2, waiting=1), replica("b", 3)], None, None, ""),  # StaleFlow: nothing waits
        ([replica("a", 1, pulling=True), replica("b", 1)], 4, None, ""),  # one at a time
        (
            [replica("a", None, failed=1), replica("b", 1)],
            None,
            "b",
            "it is 3 behind",
        ),  # it must not hold up the others
        ([replica("a", 1, failed=2), replica("b", 3, failed=1)], 4, "b", "which nobody has"),
    ],
)
def test_rolling_the_most_urgent_pulls(
    fleet: list[ReplicaWeights], wanted: int | None, chosen: str | None, reason: str
) -> None:
    pulls = Rolling(at_once=1, max_lag=3).pulls(4, fleet, wanted)
    assert [pull.replica for pull in pulls] == ([chosen] if chosen else [])
    assert all(reason in pull.reason and pull.at_least == 4 for pull in pulls)


def test_a_replica_that_has_just_pulled_gives_way_to_those_that_have_not() -> None:
    rule = Rolling()
    fleet = {"a": 0, "b": 0, "c": 0}
    order = []
    for newest in range(1, 7):
        (pull,) = rule.pulls(newest, [replica(name, version) for name, version in fleet.items()], None)
        fleet[pull.replica] = newest
        order.append(pull.replica)
    assert order == ["a", "b", "c"] * 2


def test_one_replica_is_enough_for_a_request_that_waits() -> None:
    pulls = Rolling(at_once=2, max_lag=5).pulls(4, [replica("a", 3), replica("b", 3)], 4)
    assert [pull.replica for pull in pulls] == ["a"]


REPLICAS = st.builds(
    ReplicaWeights,
    replica=st.text("abcdef", min_size=3, max_size=3),
    version=st.none() | st.integers(0, 6),
    pulling=st.booleans(),
    running=st.integers(0, 20),
    waiting=st.integers(0, 3),
)


@given(
    fleet=st.lists(REPLICAS, max_size=6, unique_by=lambda each: each.replica),
    at_once=st.integers(1, 3),
    max_lag=st.integers(1, 4),
    wanted=st.none() | st.integers(0, 6),
)
def test_never_too_many_and_never_nobody_where_somebody_must(
    fleet: list[ReplicaWeights], at_once: int, max_lag: int, wanted: int | None
) -> None:
    rule = synchronisation_of(WeightsConfig(sync="rolling", at_once=at_once, max_lag=max_lag))
    pulls = rule.pulls(6, fleet, wanted)
    assert pulls == rule.pulls(6, fleet[::-1], wanted), "the order in which replicas are named decides nothing"
    now = {each.replica for each in fleet if each.pulling}
    behind = [each for each in fleet if not each.pulling and (each.version is None or each.version < 6)]
    chosen = [pull.replica for pull in pulls]
    assert len(chosen) == len(set(chosen))
    assert set(chosen) <= {each.replica for each in behind}
    assert not chosen or len(chosen) + len(now) <= at_once
    if len(now) < at_once and not chosen:
        assert all(each.version is not None and 6 - each.version < max_lag and each.running for each in behind)
        assert wanted is None or not behind or any((each.version or 0) >= wanted for each in fleet)


def test_the_configuration_names_the_strategy() -> None:
    assert isinstance(synchronisation_of(WeightsConfig()), Together)
    assert synchronisation_of(WeightsConfig(sync="rolling", at_once=2, max_lag=3)) == Rolling(at_once=2, max_lag=3)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"sync": "roling"}, "seamless.weights.sync"),
        ({"cache": "drop"}, "seamless.weights.cache"),
        ({"at_once": 0}, "seamless.weights.at_once"),
        ({"max_lag": 1.5}, "seamless.weights.max_lag"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        WeightsConfig(**values)  # type: ignore[arg-type]
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("max_lag", "step_s", "needed"),
    [(1, 192.0, 1), (1, 121.0, 2), (2, 121.0, 1), (1, 1.0, 64), (1, 0.0, 64)],
)
def test_replicas_that_take_weights_more_slowly_than_they_come_are_told_what_to_set(
    max_lag: int, step_s: float, needed: int
) -> None:
    story = too_slow(WeightsConfig(sync="rolling", max_lag=max_lag), 64, [2.0, 4.0], step_s)
    assert story.endswith(f"(64 × 3 s, steps of {step_s:.0f} s): seamless.weights.at_once={needed}") == (needed > 1)
    assert bool(story) == (needed > 1)
    assert not too_slow(WeightsConfig(sync="rolling", at_once=needed, max_lag=max_lag), 64, [2.0, 4.0], step_s)
    assert not too_slow(WeightsConfig(sync="rolling"), 64, [], step_s)
