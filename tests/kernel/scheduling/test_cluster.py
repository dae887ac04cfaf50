"""What policies read of a cluster: who is free, who may carry what, who must come back, who is fast."""

from __future__ import annotations

import pytest

from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.cluster import Cluster, Pending, Roofline, balance, ids, static_speed
from seamless_verl.scheduling.slices import (
    Gpu,
    Hardware,
    InvalidTransition,
    Order,
    Repair,
    Slice,
    SliceId,
    SliceState,
    Tag,
)
from tests.kernel.scheduling.world import BOTH, ROLLOUT, TRAIN, make_slice

IDLE, SERVES = SliceState.IDLE, SliceState.ROLLOUT


def cluster_of(**slices: tuple[frozenset[Tag], SliceState]) -> Cluster:
    cluster = Cluster()
    for name, (capabilities, state) in slices.items():
        cluster.add(make_slice(name, capabilities), state, 0 if state is SERVES else None)
    return cluster


def wants(tag: Tag = Tag.TRAIN, count: int = 1, minimum: int = 4) -> Pending:
    event = ev.AcquireRequested(at=0.0, request="step-1", tag=tag, count=count, minimum=minimum, batch=8)
    return Pending(event=event)


def names(found: object) -> list[str]:
    return [str(name) for name in ids(found)]  # type: ignore[arg-type]


def test_a_gpu_belongs_to_one_slice_and_a_name_to_one_slice() -> None:
    cluster = cluster_of(a=(BOTH, IDLE))
    with pytest.raises(InvalidTransition, match="b: a/0 already belongs to a"):
        cluster.add(Slice(id=SliceId("b"), pool="p", gpus=(Gpu(node="a", index=0),), capabilities=BOTH), IDLE, None)
    with pytest.raises(InvalidTransition, match="slice a is already known"):
        cluster.add(Slice(id=SliceId("a"), pool="p", gpus=(Gpu(node="n", index=7),), capabilities=BOTH), IDLE, None)
    with pytest.raises(InvalidTransition, match="no slice c; known: a"):
        cluster[SliceId("c")]
    with pytest.raises(InvalidTransition, match="no slice c; known: none"):
        Cluster()[SliceId("c")]
    with pytest.raises(InvalidTransition, match="RequestStarted: no slice c"):
        cluster.start_request(
            ev.RequestStarted(at=0.0, request="q", session="s", group="g", slice=SliceId("c"), context_tokens=1)
        )


def test_free_is_who_idles_can_do_it_is_not_held_and_is_not_being_restarted() -> None:
    cluster = cluster_of(a=(BOTH, IDLE), t=(TRAIN, IDLE), r=(ROLLOUT, IDLE), on=(BOTH, SERVES))
    assert names(cluster.idle(Tag.TRAIN)) == ["a", "t"]
    assert names(cluster.idle(Tag.ROLLOUT)) == ["a", "r"]
    cluster[SliceId("a")].holder = "validate"
    assert names(cluster.idle(Tag.TRAIN)) == ["t"]
    cluster[SliceId("t")].repair = Repair.UNDER_WAY
    assert names(cluster.idle(Tag.TRAIN)) == []
    cluster[SliceId("t")].repair = Repair.WANTED
    assert names(cluster.idle(Tag.TRAIN)) == ["t"]


def test_while_one_of_the_trainers_replicas_is_out_none_of_them_is_free_for_rollout() -> None:
    cluster = cluster_of(a=(BOTH, IDLE), b=(BOTH, IDLE), r=(ROLLOUT, IDLE))
    cluster[SliceId("b")].lose(1.0, ROLLOUT, "killed", restartable=True)
    assert names(cluster.awaited()) == ["b"]
    assert names(cluster.idle(Tag.ROLLOUT)) == ["r"]
    assert names(cluster.idle(Tag.TRAIN)) == ["a", "b"]
    assert cluster.may_carry(cluster[SliceId("a")], Tag.ROLLOUT), "when the other is back"
    cluster[SliceId("b")].give_up()
    assert not cluster.may_carry(cluster[SliceId("a")], Tag.ROLLOUT)
    assert cluster.may_carry(cluster[SliceId("r")], Tag.ROLLOUT)
    assert cluster.may_carry(cluster[SliceId("a")], Tag.TRAIN)


@pytest.mark.parametrize("restartable", [True, False])
def test_slices_that_take_weights_by_themselves_wait_for_none_that_is_out(restartable: bool) -> None:
    cluster = cluster_of(a=(BOTH, IDLE), b=(BOTH, IDLE))
    cluster.wakes_apart = True
    cluster[SliceId("b")].lose(1.0, ROLLOUT, "killed", restartable=restartable)
    assert names(cluster.idle(Tag.ROLLOUT)) == ["a"]
    assert cluster.may_carry(cluster[SliceId("a")], Tag.ROLLOUT)


@pytest.mark.parametrize("restartable", [True, False])
def test_what_is_lost_may_be_counted_on_only_if_it_comes_back(restartable: bool) -> None:
    cluster = cluster_of(a=(BOTH, IDLE), t=(TRAIN, IDLE))
    a = cluster[SliceId("a")]
    a.lose(1.0, BOTH, "killed", restartable=restartable)
    assert cluster.may_carry(a, Tag.TRAIN) is restartable
    assert not cluster.may_carry(cluster[SliceId("t")], Tag.ROLLOUT), "it never could"


def test_who_serves_already_may_go_on_though_another_replica_is_lost_for_good() -> None:
    cluster = cluster_of(a=(BOTH, SERVES), b=(BOTH, IDLE))
    cluster[SliceId("b")].lose(1.0, ROLLOUT, "killed", restartable=False)
    assert cluster.may_carry(cluster[SliceId("a")], Tag.ROLLOUT)


@pytest.mark.parametrize(
    ("ready", "in_flight", "due"), [(3, 5, False), (4, 4, True), (5, 0, True), (0, 0, True), (3, 0, True)]
)
def test_a_gang_is_due_with_its_minimum_or_when_nothing_more_comes(ready: int, in_flight: int, due: bool) -> None:
    cluster = Cluster(ready=ready, in_flight=in_flight)
    assert cluster.is_due(wants()) is due


def test_the_shortfall_is_what_is_lent_less_what_is_free_or_on_its_way_back() -> None:
    cluster = cluster_of(a=(BOTH, SERVES), b=(BOTH, SERVES), c=(BOTH, SERVES), t=(TRAIN, IDLE), r=(ROLLOUT, SERVES))
    assert names(cluster.shortfall(wants(count=1))) == []
    assert names(cluster.shortfall(wants(count=3))) == ["a", "b"]
    cluster[SliceId("a")].drain(1.0, Order(number=1, deadline=9.0, story="test"))
    assert names(cluster.shortfall(wants(count=3))) == ["b"]
    cluster[SliceId("b")].holder = "validate"
    assert names(cluster.shortfall(wants(count=3))) == ["c"]


def test_the_oldest_acquire_of_a_gang_is_the_trainers() -> None:
    cluster = Cluster()
    assert cluster.training_request() is None
    first, second, other = wants(), wants(), wants(Tag.ROLLOUT)
    cluster.pending = {"v": other, "1": first, "2": second}
    assert cluster.training_request() is first


def test_lent_and_generating_are_not_the_same() -> None:
    cluster = cluster_of(a=(BOTH, SERVES), b=(BOTH, IDLE), r=(ROLLOUT, SERVES))
    cluster[SliceId("b")].lend(1.0, Order(number=1, deadline=9.0, story="test"), None)
    assert names(cluster.lent()) == ["a", "b"]
    assert names(cluster.generating()) == ["a", "r"]


def test_tokens_count_where_they_were_made_unless_the_request_failed() -> None:
    cluster = cluster_of(a=(BOTH, SERVES), r=(ROLLOUT, SERVES))
    for number, (name, ending) in enumerate(("a", e) for e in ev.Ending):
        request = f"q{number}"
        cluster.start_request(
            ev.RequestStarted(at=0.0, request=request, session="s", group="g", slice=SliceId(name), context_tokens=1)
        )
        cluster.finish_request(ev.RequestFinished(at=1.0, request=request, tokens=10, ending=ending))
    assert cluster.generated == {"a": 20, "r": 0}
    cluster.finish_request(ev.RequestFinished(at=1.0, request="never began", tokens=10))
    assert cluster.running == {}


# ---------------------------------------------------------------- the roofline


def card(name: str, flops: float | None = None, bandwidth: float = 1e12, gpus: int = 1) -> Slice:
    hardware = None if flops is None else Hardware(flops=flops, bandwidth=bandwidth, memory=80e9)
    devices = tuple(Gpu(node=name, index=index) for index in range(gpus))
    return Slice(id=SliceId(name), pool="p", gpus=devices, capabilities=BOTH, hardware=hardware)


def roofline_of(*slices: Slice) -> Roofline:
    roofline = Roofline()
    for slice_ in slices:
        roofline.add(slice_)
    return roofline


def test_balance_and_speed_of_data_sheets() -> None:
    assert balance(card("a", 1000e12, 4e12)) == 250
    assert balance(card("a")) == 0.0
    assert static_speed(card("a", 1e12, 3e12, gpus=4)) == 12e12
    assert static_speed(card("a")) is None


def test_one_without_a_data_sheet_is_an_average_slice() -> None:
    roofline = roofline_of(card("a", 1e12, 1e12), card("b", 1e12, 3e12), card("c"))
    assert [roofline.speed(SliceId(name)) for name in "abc"] == pytest.approx([0.5, 1.5, 1.0])


def test_ties_are_ordered_by_name_on_every_machine() -> None:
    slices = [card(name, 1e12) for name in ("c", "a", "b")]
    for tag in Tag:
        assert roofline_of(*slices).order(slices, tag) == ["a", "b", "c"]


def test_of_equal_balance_the_slower_one_trains() -> None:
    slow, fast = card("slow", 1e14, 1e12), card("fast", 2e14, 2e12)
    roofline = roofline_of(slow, fast)
    assert roofline.order([slow, fast], Tag.TRAIN) == ["slow", "fast"]
    assert roofline.order([slow, fast], Tag.ROLLOUT) == ["fast", "slow"]


def test_what_was_measured_long_ago_fades() -> None:
    a, b = card("a"), card("b")
    roofline = roofline_of(a, b)
    for _ in range(10):
        roofline.measured(a.id, expected_s=1.0, took_s=1.0)
        roofline.measured(b.id, expected_s=1.0, took_s=4.0)
    before = roofline.speed(b.id)
    for _ in range(150):
        roofline.measured(b.id, expected_s=1.0, took_s=1.0)
    assert before == pytest.approx(0.4)
    assert roofline.speed(b.id) == pytest.approx(1.0, abs=0.05)


def test_kinds_are_worked_out_anew_when_something_was_measured_or_joined() -> None:
    a, b = card("a"), card("b")
    roofline = roofline_of(a, b)
    assert roofline.kinds() == {"a": 1.0, "b": 1.0}
    roofline.measured(a.id, expected_s=2.0, took_s=1.0)
    roofline.measured(b.id, expected_s=1.0, took_s=1.0)
    assert roofline.kinds() == pytest.approx({"a": 4 / 3, "b": 2 / 3})
    roofline.add(card("c"))
    assert roofline.kinds()[SliceId("c")] == pytest.approx(1.0)


def test_what_can_do_nothing_else_comes_first() -> None:
    cluster = cluster_of(both=(BOTH, IDLE), train=(TRAIN, IDLE), roll=(ROLLOUT, IDLE))
    assert names(cluster.by_priority(cluster.idle(Tag.TRAIN), Tag.TRAIN)) == ["train", "both"]
    assert names(cluster.by_priority(cluster.idle(Tag.ROLLOUT), Tag.ROLLOUT)) == ["roll", "both"]
