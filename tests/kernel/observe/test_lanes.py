"""Thinned lanes are small, cover the same time, and keep everything that is long enough to be seen."""

from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.observe.digest import Lane
from seamless_verl.observe.flight import SliceState
from seamless_verl.observe.page.lane_data import thin
from seamless_verl.observe.time_ledger import Category, Stretch

LENGTHS = st.lists(
    st.tuples(st.floats(0.001, 10.0), st.sampled_from(Category), st.booleans()), min_size=1, max_size=200
)


def lane_of(lengths, name: str = "s") -> Lane:
    stretches, at = [], 0.0
    for length, category, gap in lengths:
        at += 1.0 if gap else 0.0
        state = SliceState.ROLLOUT
        stretches.append(Stretch(account=(name, "p", 1), start=at, stop=at + length, state=state, category=category))
        at += length
    load = tuple((stretch.start, number % 5) for number, stretch in enumerate(stretches))
    return Lane(slice=name, pool="p", devices=1, stretches=tuple(stretches), load=load)


@given(LENGTHS, st.integers(4, 60))
def test_thinning_keeps_the_time_the_order_and_what_is_long(lengths, budget):
    lane = lane_of(lengths)
    (thinned,), grain = thin([lane], budget=budget)
    if grain == 0.0:
        assert thinned == lane
        return
    gaps = sum(before.stop < after.start for before, after in zip(lane.stretches, lane.stretches[1:], strict=False))
    assert len(thinned.stretches) <= 2 * budget + gaps
    assert thinned.stretches[0].start == lane.stretches[0].start
    assert thinned.stretches[-1].stop == lane.stretches[-1].stop
    for before, after in zip(thinned.stretches, thinned.stretches[1:], strict=False):
        assert before.stop <= after.start
    covered = sum(s.stop - s.start for s in thinned.stretches)
    assert abs(covered - sum(s.stop - s.start for s in lane.stretches)) < 1e-6
    for stretch in lane.stretches:
        if stretch.stop - stretch.start >= grain:
            assert stretch in thinned.stretches
    assert len(thinned.load) <= 2 * budget
    assert max((level for _, level in thinned.load), default=0) == max(level for _, level in lane.load)


def test_the_category_that_fills_most_of_a_joined_stretch_wins():
    short = [(0.01, Category.GENERATE, False), (0.002, Category.WAIT_DATA, False)] * 50
    (thinned,), grain = thin([lane_of(short)], budget=10)
    assert grain > 0.012
    assert {stretch.category for stretch in thinned.stretches} == {Category.GENERATE}
