"""Sessions of a group are alike: what is learnt of it, and what it does to the quantiles that plans assume."""

from __future__ import annotations

import random

import pytest

from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.cluster import Roofline
from seamless_verl.scheduling.prediction.learned import Likeness
from seamless_verl.scheduling.prediction.session_forecast import SessionBook
from seamless_verl.scheduling.slices import SliceId
from seamless_verl.simulation.agents import Bimodal, Constant, LogNormal, Workload


def taught(workload: Workload, groups: int = 128) -> Likeness:
    likeness, rng = Likeness(), random.Random(3)
    for _ in range(groups):
        likeness.observe([trajectory[0].answer for trajectory in workload.group(rng, 8)])
    return likeness


@pytest.mark.parametrize("shared", [0.0, 0.3, 0.5, 0.9])
def test_the_share_that_a_group_has_in_common_is_found(shared: float) -> None:
    lengths = LogNormal(mean=8000, sigma=0.9, cap=10**6, shared=shared)
    assert taught(lengths).share == pytest.approx(shared, abs=0.1)


def test_members_without_anything_in_common_are_taken_for_independent() -> None:
    assert taught(Bimodal(short=4_000, long=28_000, long_share=0.2)).share < 0.1
    assert taught(Constant(answer=500)).share == 0.0
    assert taught(LogNormal(mean=8000, sigma=0.9, cap=10**6, shared=0.9), groups=7).share == 0.0  # too few to tell


def quantiles(share: float, groups: int = 128, size: int = 8) -> list[list[float]]:
    """Of groups that were submitted and have not begun."""
    book = SessionBook()
    book.likeness.share = share
    names = tuple(f"g{number}" for number in range(groups))
    book.observe(ev.GroupsSubmitted(at=0.0, groups=names, sessions=size), Roofline())
    found = book.next_quantiles(names, size)
    return [next(found) for _ in range(groups)]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_lengths_of_all_sessions_together_are_distributed_as_before(share: float) -> None:
    every = sorted(u for group in quantiles(share) for u in group)
    for decile in range(1, 10):
        assert every[decile * len(every) // 10] == pytest.approx(decile / 10, abs=0.05)


def test_alike_groups_may_be_short_as_a_whole() -> None:
    def early(share: float) -> float:
        groups = quantiles(share)
        return sum(max(group) < 0.5 for group in groups) / len(groups)

    assert early(0.0) == 0.0  # eight quantiles that are spread evenly
    assert 0.05 < early(0.5) < early(0.9) < 0.5


def test_a_session_that_begins_has_the_quantile_of_its_group() -> None:
    book = SessionBook()
    book.likeness.share = 0.95
    names = tuple(f"g{number}" for number in range(16))
    book.observe(ev.GroupsSubmitted(at=0.0, groups=names, sessions=4), Roofline())
    for name in names:
        for member in range(4):
            session = f"{name}/{member}"
            started = ev.RequestStarted(
                at=0.0, request=session, session=session, group=name, slice=SliceId("a/0"), context_tokens=10
            )
            book.observe(started, Roofline())
    spread = [max(found) - min(found) for found in ([book.sessions[f"{n}/{m}"].u for m in range(4)] for n in names)]
    assert sum(spread) / len(spread) < 0.3  # 0.6 if they were spread evenly
