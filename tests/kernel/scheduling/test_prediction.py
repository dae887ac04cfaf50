"""Fits that find what generated the data, and plans whose projection can be worked out by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.cluster import Roofline, balance
from seamless_verl.scheduling.prediction.forecast import Trainer, bounded_value, end_of_training, next_end, value
from seamless_verl.scheduling.prediction.learned import DecodeModel, LengthModel
from seamless_verl.scheduling.prediction.projection import Capacity, NextBatch, Work, project, uniform
from seamless_verl.scheduling.prediction.session_forecast import SessionBook
from seamless_verl.scheduling.slices import Gpu, Hardware, Slice, SliceId, Switch, SwitchTimes, Tag

# floor, b, k, attn_b, attn_k of StaleFlow's cost model
PUBLISHED = {
    "7B TP1": (6.40e-3, 2.70e-3, 1.231e-4, 2.80e-3, 3.35e-8),
    "14B TP1": (1.230e-2, 4.91e-3, 2.441e-4, 1.966e-3, 1.165e-7),
    "32B TP2": (2.502e-2, 1.838e-2, 2.446e-4, 2e-10, 6.3e-8),
    "30B-A3B TP1": (1.151e-2, 9.79e-3, 1.249e-4, 8.67e-4, 7.28e-8),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_recovered_within_the_noise(name: str) -> None:
    floor, b, k, attn_b, attn_k = PUBLISHED[name]

    def truth(n: float, kv: float) -> float:
        return attn_b + attn_k * kv + max(floor, b + k * n)

    rng = random.Random(1)
    model = DecodeModel()
    for _ in range(600):
        n = rng.uniform(1, 128)
        kv = n * rng.uniform(500, 6000)
        model.observe(n=n, kv=kv, seconds_per_token=truth(n, kv) * rng.gauss(1, 0.05), tokens=300)
    for n in (2, 16, 48, 96, 128):
        kv = n * 3000
        assert model.step_s(n, kv) == pytest.approx(truth(n, kv), rel=0.10)


def test_before_load_varied_half_of_the_time_is_taken_to_grow_with_it() -> None:
    model = DecodeModel()
    for _ in range(50):
        model.observe(n=10, kv=0, seconds_per_token=0.02, tokens=300)
    assert model.step_s(10) == pytest.approx(0.02, rel=0.02)
    assert 0.010 < model.step_s(5) < 0.02 < model.step_s(20) < 0.040
    with pytest.raises(ValueError, match="no request"):
        DecodeModel().step_s(1)


def with_interruptions(overhead_s: float, prefill_s: float) -> DecodeModel:
    """Eight requests at a time, 10 ms a step; one in four was interrupted and prefilled 100 to 300 tokens again."""
    rng = random.Random(2)
    model = DecodeModel()
    for number in range(400):
        again = rng.randint(100, 300) if number % 4 == 0 else 0
        seconds = 100 * 0.01 + again * prefill_s + (overhead_s if again else 0.0)
        model.observe(n=8, kv=0, seconds_per_token=seconds / 100, tokens=100, prefilled=again)
    return model


def test_what_an_interruption_takes_is_no_price_of_the_few_tokens_that_are_prefilled_after_it() -> None:
    assert with_interruptions(0.0, 4e-4).prefill_s() == pytest.approx(4e-4, rel=0.05)
    dear = with_interruptions(1.0, 4e-4)
    assert dear.prefill_s() <= 1.01 * dear.step_s(8) / 8, "a token that is decoded beside seven others"


def test_the_chance_that_a_session_ends_soon() -> None:
    lengths = LengthModel()
    for total in (10, 20, 30, 40):
        lengths.observe(total)
    assert [lengths.ends_within(0, tokens) for tokens in (9, 10, 25, 40)] == [0.0, 0.25, 0.5, 1.0]
    assert lengths.ends_within(10, 10) == pytest.approx(1 / 3)
    assert [lengths.ends_within(40, tokens) for tokens in (9, 10)] == [0.0, 1.0], "longer than all before, by a quarter"
    with pytest.raises(ValueError, match="no session"):
        LengthModel().ends_within(0, 1)


def test_remaining_lengths_are_conditional_quantiles() -> None:
    lengths = LengthModel()
    for total in range(100, 1100, 100):  # 100 … 1000
        lengths.observe(total)
    assert lengths.remaining(0, 0.0) == 100
    assert lengths.remaining(0, 0.95) == 1000
    assert lengths.remaining(850, 0.0) == 50  # only 900 and 1000 got that far
    assert lengths.remaining(850, 0.9) == 150
    assert lengths.remaining(2000, 0.5) == 500  # longer than all before
    for _ in range(1024):
        lengths.observe(7)
    assert lengths.remaining(0, 0.99) == 7  # the old ones are forgotten
    assert len(lengths) == 1024


def work(remaining: list[float]) -> Work:
    """Each session is a group of its own."""
    return Work(
        remaining=remaining,
        contexts=[0.0] * len(remaining),
        groups=range(len(remaining)),
        homes=[None] * len(remaining),
        awaited=frozenset(),
        others=math.inf,
        weight=1.0,
        busy_share=1.0,
        step_s=lambda n, kv: n,
    )


def test_a_course_by_hand() -> None:
    """Two sessions of 10 and 30 tokens on one slice, a step takes n seconds: 10 x 2, then 20 x 1."""
    projection = project(work([10, 30]), [(0.0, uniform(1.0))])
    assert projection.ready_at == [20.0, 40.0]
    assert projection.tokens_by(20.0) == 20
    assert projection.tokens_by(30.0) == 30
    assert projection.tokens_by(99.0) == 40
    assert projection.when_ready(2) == 40.0
    assert projection.when_ready(3) == math.inf
    # a second slice joins after 10 s: 5 tokens each by then, the rest at 1 s per token (two slices, one session each)
    assert project(work([10, 30]), [(0.0, uniform(1.0)), (10.0, uniform(2.0))]).ready_at == [15.0, pytest.approx(25.0)]
    # nobody generates from 10 s on
    assert project(work([10, 30]), [(0.0, uniform(1.0)), (10.0, Capacity())]).ready_at == []


def test_a_course_of_unlike_slices_by_hand() -> None:
    """A slow slice (speed 0.5) generates alone; with two sessions a step takes 2 / 0.5 s, with one 1 / 0.5 s. A fast
    one (1.5) joins at 20 s, when each has 5 tokens, and takes the younger of the two, 1 / 1.5 s per token. At 27 s it
    leaves, and both are on the slow one again, with 1.5 and 14.5 tokens to come."""
    slow, fast = uniform(1.0, speed=0.5), uniform(1.0, speed=1.5)
    alone = project(work([10, 30]), [(0.0, slow)])
    assert alone.ready_at == [40.0, 80.0]
    joined = project(work([10, 30]), [(0.0, slow), (20.0, slow + fast), (27.0, slow)])
    assert joined.ready_at == [pytest.approx(27.0 + 1.5 * 4.0), pytest.approx(33.0 + 13.0 * 2.0)]
    assert joined.tokens_by(20.0) == 10
    assert joined.tokens_by(27.0) == pytest.approx(10 + 3.5 + 10.5)


def test_who_runs_on_a_slow_slice_stays_there_by_hand() -> None:
    both = uniform(1.0, speed=0.5) + uniform(1.0, speed=1.5)
    assert project(replace(work([9]), homes=[0.5]), [(0.0, both)]).ready_at == [9 / 0.5]
    assert project(work([9]), [(0.0, both)]).ready_at == [9 / 1.5]
    fast = uniform(1.0, speed=1.5)
    assert project(replace(work([9]), homes=[0.5]), [(0.0, fast)]).ready_at == [9 / 1.5]  # its slice is gone


def test_the_trainer_waits_for_groups_or_groups_for_the_trainer() -> None:
    projection = project(work([10, 30]), [(0.0, uniform(1.0))])
    trainer = Trainer(ready=0, minimum=1, batch=2, train_s=5.0)
    assert end_of_training(projection, trainer, free_at=0.0) == 45.0
    assert end_of_training(projection, trainer, free_at=38.0) == 48.0
    assert value(projection, trainer, 0.0, full_rate=2.0) == 45.0 - 40 / 2
    assert value(projection, Trainer(ready=0, minimum=1, batch=3, train_s=5.0), 0.0, 2.0) == math.inf


def test_what_the_next_batch_waits_for_by_hand() -> None:
    """Of 10, 30 and 50 tokens (a step takes n seconds) the first ends at 30; at 50 the others have 10 and 30 left, and
    sessions of 15 and 25 tokens join: 10 steps of 4 s, 5 of 3 s, 10 of 2 s, and 5 alone."""
    out = work([10, 30, 50])
    projection = project(out, [(0.0, uniform(1.0))])
    assert projection.ready_at == [30.0, 70.0, 90.0]
    next_batch = NextBatch(lengths=[15, 25], weight=1.0, context=0.0, capacity=uniform(1.0), train_s=60.0)
    assert next_end(out, projection, 50.0, next_batch) == 50.0 + 10 * 4 + 5 * 3 + 10 * 2 + 5 * 1
    assert next_end(out, projection, 95.0, next_batch) == 95.0  # nobody is left over
    trainer = Trainer(ready=0, minimum=1, batch=1, train_s=20.0)
    # this step takes 50 s, the next one 80 and 20 to train; were it 150 s old by now, both would take as long
    assert bounded_value(out, projection, trainer, 0.0, next_batch, 50.0) == 150.0
    assert bounded_value(out, projection, trainer, 0.0, next_batch, 0.0) == pytest.approx(
        100.0 + 75.0 * (0.3 / 9 + 0.5 / 729)
    )
    assert (
        bounded_value(out, projection, Trainer(ready=0, minimum=1, batch=4, train_s=1.0), 0.0, next_batch, 0.0)
        == math.inf
    )


def test_a_step_is_put_off_for_evenness_only_where_both_batches_are_nearly_in_step() -> None:
    """Two steps of 120 s, nobody is left over: the border between them moves."""
    nobody = work([])
    projection = project(nobody, [(0.0, uniform(1.0))])

    def worth(first_s: float) -> float:
        next_batch = NextBatch(lengths=[], weight=1.0, context=0.0, capacity=uniform(1.0), train_s=120.0 - first_s)
        return bounded_value(
            nobody, projection, Trainer(ready=1, minimum=1, batch=1, train_s=0.0), 0.0, next_batch, first_s
        )

    assert worth(10) > worth(15) > worth(20)  # 1 to 11, 7 and 5
    assert worth(30) < worth(40) < worth(60)  # 1 to 3, 2 and 1


def test_a_seat_that_gets_free_goes_to_the_head_of_the_queue_by_hand() -> None:
    """One slice, two seats: 10 and 30 run (2 s a step), then 20 and 5; with them or after them 5 that joined."""
    queue, one = work([10, 30, 5]), uniform(1.0, 2)
    projection = project(queue, [(0.0, one)])
    assert projection.ready_at == [20.0, 30.0, 45.0]
    assert projection.done_at == 45.0
    next_batch = NextBatch(lengths=[5], weight=1.0, context=0.0, capacity=one, train_s=0.0)
    assert next_end(queue, projection, 0.0, next_batch) == 20.0 + 10.0 + 10.0 + 10.0
    # A second slice has two more seats: nobody waits. It leaves at 5 s: who was admitted last waits for the first seat.
    assert project(queue, [(0.0, one + one)]).ready_at == [7.5, pytest.approx(12.5), pytest.approx(22.5)]
    one = uniform(1.0, 1)
    taken_back = project(work([20, 30, 12]), [(0.0, one + one), (5.0, one)])
    assert taken_back.ready_at == [5.0 + 15.0, 20.0 + 25.0, 45.0 + 12.0]


def test_who_sits_on_a_slice_that_goes_waits_for_a_seat_by_hand() -> None:
    """Old and young alike lose theirs; those that are left are not stopped for them."""
    four = replace(work([100.0, 10.0, 100.0, 10.0]), step_s=lambda n, kv: 1.0)
    projection = project(four, [(0.0, uniform(2.0, 4.0)), (0.0, uniform(1.0, 2.0))])
    assert projection.ready_at == [100.0, 100.0, 110.0, 110.0]


def test_seats_of_unlike_slices_by_hand() -> None:
    """A fast slice with one seat and a slow one with two: three sessions one after the other at 1/3 s a step, beside
    two at 2 s."""
    capacity = uniform(1.0, 1, speed=3.0) + uniform(1.0, 2)
    assert project(work([10] * 5), [(0.0, capacity)]).ready_at == pytest.approx([10 / 3, 20 / 3, 10.0, 20.0, 20.0])
    assert (uniform(1.0, 4) + uniform(1.0)).seats == math.inf  # not known of all
    assert capacity.part(0.5) == uniform(0.5, 0.5, speed=3.0) + uniform(0.5, 1.0)
    assert uniform(1.0).part(0.0) == Capacity()


def with_one_seat() -> tuple[Roofline, SessionBook, Slice]:
    roofline, book = Roofline(), SessionBook()
    slice_ = Slice(
        id=SliceId("a"), pool="p", gpus=(Gpu(node="n", index=0),), capabilities=frozenset({Tag.ROLLOUT}), seats=1
    )
    roofline.add(slice_)
    book.observe(ev.SliceAdded(at=0.0, slice=slice_), roofline)
    return roofline, book, slice_


def test_a_request_may_outlive_a_session_that_was_given_up() -> None:
    roofline, book, slice_ = with_one_seat()
    for name in ("r", "q"):
        book.observe(
            ev.RequestStarted(at=0.0, request=name, session="s", group="g", slice=slice_.id, context_tokens=0), roofline
        )
    book.observe(ev.SessionFinished(at=1.0, session="s", group="g"), roofline)
    for name in ("q", "r"):
        book.observe(ev.RequestFinished(at=2.0, request=name, tokens=10), roofline)
    assert (book.asking(), book.sessions) == (0, {})
    # One that was started anew under the same name gets nothing of what its predecessor still does.
    old = ev.RequestStarted(at=3.0, request="old", session="s", group="g", slice=slice_.id, context_tokens=0)
    book.observe(old, roofline)
    book.observe(ev.SessionFinished(at=4.0, session="s", group="g"), roofline)
    book.observe(replace(old, at=4.0, request="new"), roofline)
    book.observe(ev.RequestFinished(at=5.0, request="old", tokens=1000), roofline)
    assert book.sessions["s"].tokens == 0


def test_sessions_that_were_given_up_teach_no_lengths() -> None:
    roofline, book, slice_ = with_one_seat()
    for number in range(8):
        group = f"g{number}"
        book.observe(ev.GroupsSubmitted(at=0.0, groups=(group,), sessions=3), roofline)
        for name in (f"{group}_0", f"{group}_1", f"{group}_2"):
            whole = name.endswith("0")
            start = ev.RequestStarted(
                at=0.0, request=name, session=name, group=group, slice=slice_.id, context_tokens=0
            )
            book.observe(start, roofline)
            book.observe(ev.RequestFinished(at=0.0, request=name, tokens=1000 if whole else 10), roofline)
            book.observe(ev.SessionFinished(at=0.0, session=name, group=group, cut=not whole), roofline)
    assert (len(book.lengths), book.lengths.remaining(0.0, 0.0)) == (8, 1000.0)
    assert (book.likeness.share, book.sessions, book.open_members) == (0.0, {}, {})


def test_waiting_for_a_seat_is_not_decoding_time() -> None:
    roofline, book, slice_ = with_one_seat()
    for name in ("r", "q"):
        start = ev.RequestStarted(at=0.0, request=name, session=name, group="g", slice=slice_.id, context_tokens=0)
        book.observe(start, roofline)
    assert [book.place_of(book.sessions[name]) for name in ("r", "q")] == [-1, 2]
    book.observe(ev.RequestFinished(at=10.0, request="r", tokens=100), roofline)
    assert book.progress(book.sessions["q"], now=15.0)[0] == pytest.approx(50, rel=0.01)
    book.observe(ev.RequestFinished(at=20.0, request="q", tokens=100), roofline)
    assert book.decode.step_s(1) == pytest.approx(0.1, rel=0.01)
    assert book.asking() == 0


def test_steps_slow_down_with_the_cache_of_those_that_are_left() -> None:
    """Contexts of 5 and 20; a step takes as many seconds as there are tokens in the cache, half a step's growth in."""
    by_cache = replace(work([10, 30]), contexts=[5.0, 20.0], step_s=lambda n, kv: kv)
    first = 10 * (5 + 20 + 2 * 5)
    assert project(by_cache, [(0.0, uniform(1.0))]).ready_at == [first, first + 20 * (20 + 20)]


def test_a_limit_on_tokens_is_recognised() -> None:
    lengths = LengthModel()
    for total in (100, 500, 1000, 1000, 1000):
        lengths.observe(total)
    assert lengths.remaining(1010, 0.5) == 1.0  # a forecast that is a little ahead of the truth


def test_time_before_a_slice_was_awake_is_not_decoding_time() -> None:
    roofline = Roofline()
    slice_ = Slice(id=SliceId("a"), pool="p", gpus=(Gpu(node="n", index=0),), capabilities=frozenset({Tag.ROLLOUT}))
    roofline.add(slice_)
    book = SessionBook()
    start = ev.RequestStarted(at=0.0, request="r", session="s", group="g", slice=slice_.id, context_tokens=0)
    book.observe(start, roofline)
    book.observe(ev.SliceReady(at=90.0, slice=slice_.id, command=1, version=0), roofline)
    book.observe(ev.RequestFinished(at=100.0, request="r", tokens=100), roofline)
    assert book.decode.step_s(1) == pytest.approx(0.1, rel=0.01)


def test_a_request_that_outlives_new_weights_keeps_what_it_made_and_the_pause_is_not_decoding() -> None:
    roofline = Roofline()
    slice_ = Slice(id=SliceId("a"), pool="p", gpus=(Gpu(node="n", index=0),), capabilities=frozenset({Tag.ROLLOUT}))
    roofline.add(slice_)
    book = SessionBook()
    for name in ("r", "q"):
        start = ev.RequestStarted(at=0.0, request=name, session=name, group="g", slice=slice_.id, context_tokens=0)
        book.observe(start, roofline)
    book.observe(ev.WeightsPublished(at=50.0, version=1), roofline)
    book.observe(ev.SliceReady(at=80.0, slice=slice_.id, command=1, version=1), roofline)
    for name in ("r", "q"):
        book.observe(ev.RequestFinished(at=130.0, request=name, tokens=1000), roofline)
    assert book.decode.step_s(2) == pytest.approx(0.1, rel=0.01)
    book.observe(replace(start, at=200.0, context_tokens=1000), roofline)
    book.observe(ev.WeightsPublished(at=250.0, version=2), roofline)
    book.observe(ev.SliceReady(at=280.0, slice=slice_.id, command=2, version=2), roofline)
    step_s = book.decode.step_s(1, 1000)
    assert book.progress(book.sessions["q"], now=290.0) == pytest.approx((1000 + 60 / step_s, 1000 + 60 / step_s))


def hardware(name: str, flops: float, bandwidth: float) -> Slice:
    return Slice(
        id=SliceId(name),
        pool="p",
        gpus=(Gpu(node=name, index=0),),
        capabilities=frozenset(Tag),
        hardware=Hardware(flops=flops, bandwidth=bandwidth, memory=80e9),
    )


def test_the_roofline_ranks_by_facts_and_is_corrected_by_measurement() -> None:
    h100 = hardware("h100", 989e12, 3.35e12)
    h20 = hardware("h20", 148e12, 4.0e12)
    roofline = Roofline()
    roofline.add(h100)
    roofline.add(h20)
    assert balance(h100) > balance(h20)
    assert roofline.order([h20, h100], Tag.TRAIN) == ["h100", "h20"]
    assert roofline.order([h20, h100], Tag.ROLLOUT) == ["h20", "h100"]
    for _ in range(20):  # in truth the h20 takes three times as long per token
        roofline.measured(h20.id, expected_s=1.0, took_s=3.0)
        roofline.measured(h100.id, expected_s=1.0, took_s=1.0)
    assert roofline.order([h20, h100], Tag.ROLLOUT) == ["h100", "h20"]
    assert roofline.speed(h100.id) == pytest.approx(3 * roofline.speed(h20.id))


def test_a_slice_that_was_not_measured_yet_stands_on_the_scale_of_those_that_were() -> None:
    """Data sheets say 3 : 1. As long as only the fast pool was measured nothing says otherwise; then it turns out that
    the slow one takes twice as long per token, not three times."""
    fast = [hardware(f"h100/{number}", 989e12, 3.0e12) for number in range(2)]
    slow = [hardware(f"old/{number}", 312e12, 1.0e12) for number in range(2)]
    roofline = Roofline()
    for slice_ in (*fast, *slow):
        roofline.add(slice_)

    def speeds() -> list[float]:
        return [roofline.speed(slice_.id) for slice_ in (*fast, *slow)]

    assert speeds() == pytest.approx([1.5, 1.5, 0.5, 0.5])
    roofline.measured(fast[0].id, expected_s=0.8, took_s=1.0)
    assert speeds() == pytest.approx([1.5, 1.5, 0.5, 0.5])
    roofline.measured(fast[1].id, expected_s=0.8, took_s=1.0)
    assert speeds() == pytest.approx([1.5, 1.5, 0.5, 0.5])
    for slice_ in slow:
        roofline.measured(slice_.id, expected_s=0.8, took_s=2.0)
    assert speeds() == pytest.approx([4 / 3, 4 / 3, 2 / 3, 2 / 3])


def test_without_data_sheets_the_measured_ones_are_average_together() -> None:
    roofline = Roofline()
    names = [SliceId(name) for name in "abc"]
    for name in names:
        roofline.add(Slice(id=name, pool="p", gpus=(Gpu(node=name, index=0),), capabilities=frozenset({Tag.ROLLOUT})))
    roofline.measured(names[0], expected_s=5.0, took_s=1.0)
    assert [roofline.speed(name) for name in names] == pytest.approx([1.0, 1.0, 1.0])
    roofline.measured(names[1], expected_s=10.0, took_s=1.0)
    assert [roofline.speed(name) for name in names] == pytest.approx([2 / 3, 4 / 3, 1.0])


def test_speeds_are_found_although_the_order_of_seats_is_guessed_wrong() -> None:
    """Two slices with four seats each, one twice as fast. Of those that wait, any of the first twelve comes next."""
    rng = random.Random(3)
    roofline, book = Roofline(), SessionBook()
    step_s = {SliceId("a"): 0.008, SliceId("b"): 0.004}
    told: list[ev.Event] = []
    for name, seconds in step_s.items():
        slice_ = Slice(
            id=name, pool="p", gpus=(Gpu(node=name, index=0),), capabilities=frozenset({Tag.ROLLOUT}), seats=4
        )
        roofline.add(slice_)
        book.observe(ev.SliceAdded(at=0.0, slice=slice_), roofline)
        waiting = [f"{name}{number}" for number in range(120)]
        for request in waiting:
            told.append(
                ev.RequestStarted(at=0.0, request=request, session=request, group="g", slice=name, context_tokens=0)
            )
        free_at = [0.0] * 4
        while waiting:
            request, tokens = waiting.pop(rng.randrange(min(len(waiting), 12))), rng.randint(10, 200)
            seat = free_at.index(min(free_at))
            free_at[seat] += tokens * seconds
            told.append(ev.RequestFinished(at=free_at[seat], request=request, tokens=tokens))
    for event in sorted(told, key=lambda event: event.at):
        book.observe(event, roofline)
    for name, seconds in step_s.items():
        assert book.decode.step_s(4) / roofline.speed(name) == pytest.approx(seconds, rel=0.15)


def test_prefill_of_requests_that_were_moved_does_not_make_a_slice_slow() -> None:
    """Two slices, 10 ms a step, 0.1 ms per prefilled token. Half of what slice b gets are requests of long context,
    which are moved away again soon: 5 s of prefill for 0.2 s of decoding."""
    roofline, book = Roofline(), SessionBook()
    names = SliceId("a"), SliceId("b")
    for name in names:
        slice_ = Slice(id=name, pool="p", gpus=(Gpu(node=name, index=0),), capabilities=frozenset({Tag.ROLLOUT}))
        roofline.add(slice_)
        book.observe(ev.SliceAdded(at=0.0, slice=slice_), roofline)
    now = 0.0
    for number in range(80):
        context, tokens = (50_000, 20) if number % 4 == 3 else (100, 1000)
        name, request = names[number % 2], f"r{number}"
        book.observe(
            ev.RequestStarted(at=now, request=request, session=request, group="g", slice=name, context_tokens=context),
            roofline,
        )
        now += 0.01 * tokens + 1e-4 * context
        book.observe(ev.RequestFinished(at=now, request=request, tokens=tokens), roofline)
    assert [roofline.speed(name) for name in names] == pytest.approx([1.0, 1.0], abs=0.1)
    assert book.bare.prefill_s() == pytest.approx(1e-4, rel=0.1)
    assert len(set(roofline.kinds().values())) == 1


def test_slices_of_about_the_same_speed_are_of_one_kind() -> None:
    roofline = Roofline()
    speeds = {"a": 1.0, "b": 1.1, "c": 0.9, "d": 2.0, "e": 2.2}
    for name in speeds:
        roofline.add(
            Slice(id=SliceId(name), pool="p", gpus=(Gpu(node=name, index=0),), capabilities=frozenset({Tag.ROLLOUT}))
        )
    assert set(roofline.kinds().values()) == {1.0}
    for name, speed in speeds.items():
        roofline.measured(SliceId(name), expected_s=speed, took_s=1.0)
    kinds = roofline.kinds()
    assert kinds[SliceId("a")] == kinds[SliceId("b")] == kinds[SliceId("c")]
    assert kinds[SliceId("d")] == kinds[SliceId("e")] == pytest.approx(2.1 / 1.0 * kinds[SliceId("a")])
    assert sum(kinds.values()) == pytest.approx(len(speeds))  # on the scale of average slices


@pytest.mark.parametrize("seed", range(3))
def test_equal_slices_stay_equal_however_long_they_are_measured(seed: int) -> None:
    rng = random.Random(seed)
    roofline, book = Roofline(), SessionBook()
    free_at: dict[SliceId, list[float]] = {}
    for name in (SliceId("a"), SliceId("b")):
        slice_ = Slice(
            id=name, pool="p", gpus=(Gpu(node=name, index=0),), capabilities=frozenset({Tag.ROLLOUT}), seats=8
        )
        roofline.add(slice_)
        book.observe(ev.SliceAdded(at=0.0, slice=slice_), roofline)
        free_at[name] = [0.0] * 8
    told: list[tuple[float, int, ev.Event]] = []
    for number in range(4000):
        name = min(free_at, key=lambda name: min(free_at[name]))
        seat = free_at[name].index(min(free_at[name]))
        began, tokens = free_at[name][seat], rng.randint(10, 200)
        ended = free_at[name][seat] = began + tokens * 0.008 * rng.uniform(0.8, 1.2)
        request = str(number)
        told.append(
            (
                began,
                1,
                ev.RequestStarted(at=began, request=request, session=request, group="g", slice=name, context_tokens=0),
            )
        )
        told.append((ended, 0, ev.RequestFinished(at=ended, request=request, tokens=tokens)))
    for _, _, event in sorted(told, key=lambda entry: entry[:2]):
        book.observe(event, roofline)
    assert roofline.speed(SliceId("a")) == pytest.approx(1.0, abs=0.1)


def test_a_batch_with_room_for_few_others_waits_for_those_it_cannot_do_without() -> None:
    waits = replace(work([10, 20, 30, 40]), awaited=frozenset({3}), others=1)
    alone = project(work([10, 20, 30, 40]), [(0.0, uniform(4.0))])
    bound = project(waits, [(0.0, uniform(4.0))])
    assert alone.when_ready(2) < bound.when_ready(2) == alone.when_ready(4)
    assert bound.when_ready(3) == math.inf


def test_the_cache_of_growing_requests_is_seen_though_no_event_names_it() -> None:
    """Forty requests in lock-step on one slice; steps get slower as their caches grow, and only that."""
    book, roofline = SessionBook(), Roofline()
    alone = Slice(id=SliceId("a"), pool="p", gpus=(Gpu(node="n", index=0),), capabilities=frozenset({Tag.ROLLOUT}))
    roofline.add(alone)
    now = 0.0
    for turn in range(6):
        tokens = 500 * (1 + turn)
        for number in range(40):
            name = f"{turn}/{number}"
            started = ev.RequestStarted(
                at=now, request=name, session=name, group="g", slice=SliceId("a"), context_tokens=100
            )
            book.observe(started, roofline)
        now += tokens * (0.01 + 1e-7 * 40 * (100 + tokens / 2))
        for number in range(40):
            ended = ev.RequestFinished(at=now, request=f"{turn}/{number}", tokens=tokens, ending=ev.Ending.COMPLETED)
            book.observe(ended, roofline)
    for tokens in (500, 3000):
        kv = 40 * (100 + tokens / 2)
        assert book.decode.step_s(40, kv) == pytest.approx(0.01 + 1e-7 * kv, rel=0.1)


def test_a_switch_that_was_broken_off_lasts_at_least_so_long() -> None:
    costs, slice_id = SwitchTimes(), SliceId("a")
    assert costs.typical_s(Switch.TO_TRAIN) is None
    costs.begin(slice_id, Switch.TO_TRAIN, 10.0)
    costs.abandon(slice_id, 130.0)
    assert costs.typical_s(Switch.TO_TRAIN) == 120.0
    assert costs.typical_s(Switch.TO_ROLLOUT) is None
    costs.begin(slice_id, Switch.TO_TRAIN, 200.0)
    costs.end(slice_id, 205.0)
    assert costs.typical_s(Switch.TO_TRAIN) == 5.0
