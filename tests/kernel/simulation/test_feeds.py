"""Admission rules: each as published, by hand, and of all: no group is lost, trained twice or older than allowed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.simulation.agents import Attempt, Group, Turn
from seamless_verl.simulation.regimes import BatchPerStep, Bounded, Bucket, Draw, Feed, Quota
from seamless_verl.staleness.protocol import StalenessProtocol

FEEDS: dict[str, Callable[[Draw, int, int], Feed]] = {
    "verl": lambda draw, batch, eta: BatchPerStep(draw, batch, warmup=eta),
    "verl wait": lambda draw, batch, eta: BatchPerStep(draw, batch, warmup=eta, oldest=eta + 1),
    "areal": lambda draw, batch, eta: Quota(draw, batch, eta=eta),
    "roll": lambda draw, batch, eta: Bucket(draw, batch, alpha=eta),
    "protocol": lambda draw, batch, eta: Bounded(draw, StalenessProtocol(eta=eta, batch_size=batch)),
}


class Source:
    """Groups of one attempt; ``drawn`` in their order."""

    def __init__(self) -> None:
        self.drawn: list[Group] = []

    def __call__(self, version: int) -> Group:
        group = Group(len(self.drawn), version, 0.0)
        group.attempts = [Attempt(group, 0, (Turn(prompt=1, answer=1),))]
        self.drawn.append(group)
        return group


def end(feed: Feed, group: Group, version: int) -> None:
    group.attempts[0].version = version
    feed.finish(group)


def names(groups: list[Group]) -> list[str]:
    return [group.name for group in groups]


def test_verl_submits_a_batch_per_step_and_the_warm_up_once() -> None:
    feed = BatchPerStep(Source(), 3, warmup=2)
    assert len(feed.step_begins(0)) == 9
    assert feed.published(1) == []
    assert [len(feed.step_begins(version)) for version in (1, 2)] == [3, 3]
    assert (feed.in_flight, feed.finished) == (15, 0)


def test_verl_takes_the_oldest_prompts_of_those_that_are_whole() -> None:
    feed = BatchPerStep(Source(), 2, warmup=0)
    first, second = feed.step_begins(0), feed.step_begins(1)
    for group in (second[0], first[1], second[1]):
        end(feed, group, group.reserved)
    taken, surplus = feed.take(2)
    assert names(taken) == names([first[1], second[0]])
    assert surplus == []
    assert (feed.available, feed.in_flight) == (1, 1)


def test_verl_waits_for_a_prompt_that_would_be_too_old() -> None:
    """A bound of one version: what was submitted with version 0 must be whole before version 1's batch is used."""
    feed = BatchPerStep(Source(), 1, warmup=1, oldest=2)
    old, other = feed.step_begins(0)
    end(feed, other, 0)
    assert feed.available == 1
    feed.step_begins(1)
    assert (feed.available, feed.finished) == (0, 1)
    end(feed, old, 0)
    assert feed.available == 2  # the next one under way is of version 1


def test_areal_counts_groups_against_the_version() -> None:
    """The N-th may start while floor((N - 1) / B) <= v + eta."""
    source = Source()
    feed = Quota(source, 4, eta=1)
    assert [len(feed.published(version)) for version in (0, 1, 1, 4)] == [8, 4, 0, 12]
    for number in range(len(source.drawn)):
        assert number // 4 <= 4 + 1


def test_areal_takes_groups_as_they_end() -> None:
    feed = Quota(Source(), 2, eta=0)
    one, two = feed.published(0)
    for group in (two, one):
        end(feed, group, 0)
    assert names(feed.take(2)[0]) == names([two, one])


def test_roll_fills_its_bucket_and_gives_the_old_up() -> None:
    feed = Bucket(Source(), 2, alpha=1)
    first = feed.published(0)
    assert len(first) == 4
    assert feed.published(1) == []
    end(feed, first[0], 0)
    end(feed, first[1], 1)
    assert names(feed.take(1)[0]) == ["g0"]
    assert feed.to_discard(1) == []
    assert names(feed.to_discard(2)) == ["g2", "g3"]  # g1 is whole and its first token of version 1
    assert names(feed.to_discard(3)) == ["g1"]
    assert (feed.in_flight, feed.finished) == (0, 0)
    assert len(feed.published(3)) == 4


def test_the_protocol_reserves_what_the_bound_admits_and_hands_out_the_groups() -> None:
    feed = Bounded(Source(), StalenessProtocol(eta=1, batch_size=2))
    groups = feed.published(0)
    assert len(groups) == 4
    assert feed.published(0) == []
    for group in groups[:2]:
        end(feed, group, 0)
    assert (feed.available, feed.in_flight) == (2, 2)
    taken, surplus = feed.take(2)
    assert sorted(names(taken)) == ["g0", "g1"]
    assert surplus == []
    assert len(feed.published(1)) == 2
    assert set(feed.awaited()) <= {"g2", "g3"}


@given(
    st.sampled_from(sorted(FEEDS)),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 8),
    st.integers(0, 10_000),
)
def test_no_group_is_lost_taken_twice_or_older_than_allowed(
    name: str, batch: int, eta: int, steps: int, seed: int
) -> None:
    rng, source = random.Random(seed), Source()
    feed = FEEDS[name](source, batch, eta)
    running: list[Group] = []
    whole: list[Group] = []
    trained: list[tuple[int, Group]] = []

    def check() -> None:
        assert feed.in_flight == len(running)
        assert feed.available <= feed.finished <= len(whole)  # the protocol counts those of the batch that it fills
        assert feed.finished == len(whole) or name == "protocol"

    running += feed.published(0)
    for version in range(steps):
        running += feed.step_begins(version)
        check()
        while feed.available < batch:
            whole.append(running.pop(rng.randrange(len(running))))
            end(feed, whole[-1], version)
            check()
        taken, surplus = feed.take(batch)
        assert len(taken) == batch
        trained += [(version, group) for group in taken]
        gone = {group.name for group in (*taken, *surplus, *feed.to_discard(version + 1))}
        assert gone <= {group.name for group in (*running, *whole)}
        running = [group for group in running if group.name not in gone]
        whole = [group for group in whole if group.name not in gone]
        running += feed.published(version + 1)
        check()
    assert len({group.name for _, group in trained}) == len(trained)
    if name == "protocol":
        assert all(version - group.reserved <= eta for version, group in trained)
    if name == "roll":
        assert all(version - group.version <= eta for version, group in trained)
        assert feed.in_flight + feed.finished <= (1 + eta) * batch
    if name == "verl wait":
        assert all(version - group.reserved <= eta for version, group in trained)


@pytest.mark.parametrize("name", sorted(FEEDS))
def test_a_feed_without_groups_has_none(name: str) -> None:
    feed = FEEDS[name](Source(), 3, 1)
    assert (feed.available, feed.finished, feed.in_flight) == (0, 0, 0)
    assert feed.to_discard(5) == []
