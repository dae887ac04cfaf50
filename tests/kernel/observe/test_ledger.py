"""The books add up for any events in any order, and each second is on the right page."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.observe.flight import (
    BatchProgress,
    FirstToken,
    FlightEvent,
    Phase,
    PhaseBegan,
    PhaseEnded,
    RequestEnded,
    RequestStarted,
    RunEnded,
    RunStarted,
    SliceAdded,
    SliceMoved,
    SliceRemoved,
    SliceState,
    StepBegan,
)
from seamless_verl.observe.time_ledger import Category, Ledger, Stretch, idle_shares

C = Category


def added(at: float, name: str, state: SliceState, devices: int = 1, address: str = "") -> SliceAdded:
    return SliceAdded(
        at=at, slice=name, pool="p", devices=devices, capabilities=("rollout",), state=state, address=address
    )


def request(at: float, name: str, where: str, resumed: bool = False) -> RequestStarted:
    return RequestStarted(
        at=at, request=name, slice=where, prompt_tokens=1, resumed=resumed, first_token_follows=resumed
    )


def done(at: float, name: str, where: str) -> RequestEnded:
    return RequestEnded(at=at, request=name, slice=where, tokens=1, finish="completed")


def began(at: float, phase: Phase) -> PhaseBegan:
    return PhaseBegan(at=at, phase=phase, step=1)


def ended(at: float, phase: Phase) -> PhaseEnded:
    return PhaseEnded(at=at, phase=phase, step=1)


def spent(events: list[FlightEvent], until: float) -> dict[str, dict[Category, float]]:
    """Seconds above zero by slice."""
    ledger = Ledger()
    for event in events:
        ledger.handle(event)
    return {
        books.slice: {category: seconds for category, seconds in books.seconds.items() if seconds}
        for books in ledger.books(until)
    }


def test_a_rollout_slice_generates_while_a_request_is_out():
    events = [
        added(0.0, "r", SliceState.ROLLOUT, address="10.0.0.1:80"),
        request(1.0, "a", "10.0.0.1:80"),
        request(2.0, "b", "10.0.0.1:80"),
        done(3.0, "a", "10.0.0.1:80"),
        done(6.0, "b", "10.0.0.1:80"),
    ]
    assert spent(events, 10.0) == {"r": {C.WAIT_DATA: 5.0, C.GENERATE: 5.0}}


def test_prefilling_again_lasts_until_the_first_token():
    events = [
        added(0.0, "r", SliceState.ROLLOUT),
        request(0.0, "a", "r"),
        request(1.0, "b", "r", resumed=True),
        FirstToken(at=1.5, request="b", slice="r"),
        done(2.0, "a", "r"),
        done(3.0, "b", "r"),
    ]
    assert spent(events, 3.0) == {"r": {C.GENERATE: 2.5, C.PREFILL_AGAIN: 0.5}}


def test_the_training_gang_follows_the_innermost_phase():
    events = [
        added(0.0, "t", SliceState.TRAINING, devices=8),
        began(1.0, Phase.WAIT_FOR_BATCH),
        ended(3.0, Phase.WAIT_FOR_BATCH),
        began(3.0, Phase.UPDATE_ACTOR),
        began(4.0, Phase.CHECKPOINT),
        ended(6.0, Phase.CHECKPOINT),
        ended(8.0, Phase.UPDATE_ACTOR),
        began(8.0, Phase.SYNC_WEIGHTS),
        ended(9.0, Phase.SYNC_WEIGHTS),
    ]
    assert spent(events, 9.0) == {"t": {C.OTHER: 1.0, C.WAIT_DATA: 2.0, C.TRAIN: 3.0, C.CHECKPOINT: 2.0, C.SYNC: 1.0}}


def test_waiting_for_the_last_tenth_is_waiting_for_stragglers_on_every_slice_without_work():
    events = [
        added(0.0, "t", SliceState.TRAINING),
        added(0.0, "idle", SliceState.ROLLOUT),
        added(0.0, "busy", SliceState.ROLLOUT),
        request(0.0, "a", "busy"),
        began(0.0, Phase.WAIT_FOR_BATCH),
        BatchProgress(at=2.0, ready=8, needed=10),
        BatchProgress(at=3.0, ready=9, needed=10),
        ended(7.0, Phase.WAIT_FOR_BATCH),
        BatchProgress(at=8.0, ready=10, needed=10),  # nobody waits any more
    ]
    books = spent(events, 10.0)
    assert books["t"] == {C.WAIT_DATA: 3.0, C.WAIT_STRAGGLER: 4.0, C.OTHER: 3.0}
    assert books["idle"] == {C.WAIT_DATA: 6.0, C.WAIT_STRAGGLER: 4.0}
    assert books["busy"] == {C.GENERATE: 10.0}


def test_a_slice_that_is_lent_and_taken_back():
    events = [
        added(0.0, "t", SliceState.TRAINING),
        began(0.0, Phase.WAIT_FOR_BATCH),
        SliceMoved(at=1.0, slice="t", state=SliceState.WAKING),
        SliceMoved(at=2.0, slice="t", state=SliceState.ROLLOUT, tag="rollout"),
        request(2.0, "a", "t"),
        SliceMoved(at=4.0, slice="t", state=SliceState.DRAINING, tag="rollout"),
        done(5.0, "a", "t"),
        SliceMoved(at=6.0, slice="t", state=SliceState.TRAINING, tag="train"),
        ended(6.0, Phase.WAIT_FOR_BATCH),
        began(6.0, Phase.UPDATE_ACTOR),
    ]
    assert spent(events, 8.0) == {"t": {C.WAIT_DATA: 1.0, C.SWITCH: 2.0, C.GENERATE: 3.0, C.TRAIN: 2.0}}


def test_a_failed_slice_forgets_its_requests():
    events = [
        added(0.0, "r", SliceState.ROLLOUT),
        request(0.0, "a", "r"),
        SliceMoved(at=1.0, slice="r", state=SliceState.FAILED),
        SliceMoved(at=3.0, slice="r", state=SliceState.ROLLOUT),
    ]
    assert spent(events, 4.0) == {"r": {C.GENERATE: 1.0, C.FAILED: 2.0, C.WAIT_DATA: 1.0}}


def test_the_time_between_a_kill_and_the_continuation_belongs_to_nobody():
    start = RunStarted(at=0.0, name="x", policy="disaggregated", eta=1, bound=1, total_steps=9)
    ledger = Ledger()
    for event in [
        start,
        added(0.0, "r", SliceState.ROLLOUT),
        StepBegan(at=5.0, step=1),
        RunStarted(at=100.0, name="x", policy="disaggregated", eta=1, bound=1, total_steps=9),
        added(100.0, "r", SliceState.ROLLOUT),
        RunEnded(at=107.0, outcome="finished"),
    ]:
        ledger.handle(event)
    assert [books.wall_s for books in ledger.books(500.0)] == [5.0 + 7.0]
    assert ledger.books(500.0)[0].seconds[C.WAIT_DATA] == 12.0


@pytest.mark.parametrize(
    ("ready", "needed", "straggling"),
    [
        (0, 1, False),
        (1, 1, True),
        (1, 2, True),
        (2, 4, False),
        (3, 4, True),
        (17, 20, False),
        (18, 20, True),
        (25, 9, True),
    ],
)
def test_the_last_tenth_of_a_batch_is_at_least_its_last_group_but_never_all_of_it(ready, needed, straggling):
    events = [
        added(0.0, "t", SliceState.TRAINING),
        began(0.0, Phase.WAIT_FOR_BATCH),
        BatchProgress(at=0.0, ready=ready, needed=needed),
    ]
    assert spent(events, 1.0) == {"t": {C.WAIT_STRAGGLER if straggling else C.WAIT_DATA: 1.0}}


def test_idle_shares_are_of_the_window_and_weighted_by_devices():
    ledger = Ledger()
    for event in [added(0.0, "a", SliceState.ROLLOUT, devices=3), added(0.0, "b", SliceState.ROLLOUT, devices=1)]:
        ledger.handle(event)
    before = ledger.books(5.0)  # idle until here, which does not count
    ledger.handle(request(6.0, "x", "a"))
    ledger.handle(done(7.0, "x", "a"))
    assert idle_shares(before, ledger.books(9.0)) == {"p": pytest.approx((3 * 3 + 1 * 4) / 16)}
    assert idle_shares((), ()) == {}


NAMES, ADDRESSES, REQUESTS = ("s0", "s1", "s2"), ("", "a1"), ("q0", "q1", "q2")
TIME = st.integers(0, 40).map(lambda tick: tick / 4)
EVENTS = st.one_of(
    st.builds(added, TIME, st.sampled_from(NAMES), st.sampled_from(SliceState), st.integers(1, 8)),
    st.builds(SliceMoved, at=TIME, slice=st.sampled_from(NAMES), state=st.sampled_from(SliceState)),
    st.builds(SliceRemoved, at=TIME, slice=st.sampled_from(NAMES)),
    st.builds(request, TIME, st.sampled_from(REQUESTS), st.sampled_from(NAMES), st.booleans()),
    st.builds(FirstToken, at=TIME, request=st.sampled_from(REQUESTS), slice=st.sampled_from(NAMES)),
    st.builds(done, TIME, st.sampled_from(REQUESTS), st.sampled_from(NAMES)),
    st.builds(began, TIME, st.sampled_from(Phase)),
    st.builds(ended, TIME, st.sampled_from(Phase)),
    st.builds(BatchProgress, at=TIME, ready=st.integers(0, 12), needed=st.just(10)),
    st.builds(RunEnded, at=TIME, outcome=st.just("finished")),
)


@settings(max_examples=150)
@given(st.lists(EVENTS, max_size=40))
def test_the_books_add_up_and_no_second_is_counted_twice(events):
    """Also for events out of order, of slices never added, and for phases that end twice."""
    stretches: list[Stretch] = []
    ledger = Ledger(stretches.append)
    for event in events:
        ledger.handle(event)
    wall: dict[str, float] = defaultdict(float)
    for books in ledger.books(10.0):
        assert sum(books.seconds.values()) == pytest.approx(books.wall_s, abs=1e-9)
        assert min(books.seconds.values()) >= 0.0
        wall[books.slice] += books.wall_s
    drawn: dict[str, float] = defaultdict(float)
    reached: dict[str, float] = {}
    for stretch in stretches:
        assert reached.get(stretch.account[0], 0.0) <= stretch.start < stretch.stop
        reached[stretch.account[0]] = stretch.stop
        drawn[stretch.account[0]] += stretch.stop - stretch.start
    assert {name: seconds for name, seconds in wall.items() if seconds} == pytest.approx(drawn)


@settings(max_examples=80)
@given(st.lists(EVENTS, max_size=40))
def test_the_total_is_wall_times_devices(events):
    """Counted here from additions and removals alone, for events in order."""
    events.sort(key=lambda event: event.at)
    ledger = Ledger()
    open_since: dict[str, tuple[float, int]] = {}
    total = 0.0
    for event in events:
        ledger.handle(event)
        ended = list(open_since) if isinstance(event, RunEnded) else [getattr(event, "slice", "")]
        if isinstance(event, (SliceAdded, SliceRemoved, RunEnded)):
            for name in ended:
                since, devices = open_since.pop(name, (event.at, 0))
                total += devices * (event.at - since)
        if isinstance(event, SliceAdded):
            open_since[event.slice] = event.at, event.devices
    total += sum(devices * (10.0 - since) for since, devices in open_since.values())
    assert sum(b.devices * sum(b.seconds.values()) for b in ledger.books(10.0)) == pytest.approx(total)


@settings(max_examples=80)
@given(st.lists(EVENTS, max_size=30))
def test_each_moment_has_the_category_that_a_look_at_all_events_before_it_gives(events):
    """An oracle that remembers nothing: for each quarter second it replays everything up to then."""
    events = [
        *(added(0.0, name, SliceState.ROLLOUT) for name in NAMES),
        *(event for event in sorted(events, key=lambda e: e.at) if not isinstance(event, (SliceAdded, SliceRemoved))),
    ]
    events = [event for event in events if not isinstance(event, RunEnded)]
    stretches: list[Stretch] = []
    ledger = Ledger(stretches.append)
    for event in events:
        ledger.handle(event)
    ledger.books(10.0)
    for tick in range(40):
        moment = tick / 4 + 0.125
        past = [event for event in events if event.at <= moment]
        for name in NAMES:
            (found,) = {s.category for s in stretches if s.account[0] == name and s.start <= moment < s.stop}
            assert found is looked_up(past, name), (moment, name)


def looked_up(past: list[FlightEvent], name: str) -> Category:
    state = next((e.state for e in reversed(past) if isinstance(e, SliceMoved) and e.slice == name), SliceState.ROLLOUT)
    open_phases: list[Phase] = []
    straggling = False
    for event in past:
        if isinstance(event, PhaseBegan):
            open_phases.append(event.phase)
            straggling = straggling and event.phase is not Phase.WAIT_FOR_BATCH
        elif isinstance(event, PhaseEnded) and event.phase in open_phases:
            while open_phases.pop() is not event.phase:
                pass
        elif isinstance(event, BatchProgress):
            straggling = event.ready >= 9  # of ten
        straggling = straggling and Phase.WAIT_FOR_BATCH in open_phases
    waiting = Category.WAIT_STRAGGLER if straggling else Category.WAIT_DATA
    if state is SliceState.TRAINING:
        if not open_phases:
            return Category.OTHER
        special = {
            Phase.WAIT_FOR_BATCH: waiting, Phase.SYNC_WEIGHTS: Category.SYNC, Phase.SWITCH: Category.SWITCH,
            Phase.VALIDATE: Category.VALIDATION, Phase.CHECKPOINT: Category.CHECKPOINT,
        }  # fmt: skip
        return special.get(open_phases[-1], Category.TRAIN)
    if state in (SliceState.SYNCING, SliceState.WAKING, SliceState.IDLE, SliceState.FAILED):
        return {
            SliceState.SYNCING: Category.SYNC, SliceState.WAKING: Category.SWITCH,
            SliceState.FAILED: Category.FAILED, SliceState.IDLE: waiting,
        }[state]  # fmt: skip
    out: dict[str, bool] = {}
    for event in past:
        if isinstance(event, SliceMoved) and event.slice == name:
            if event.state in (SliceState.TRAINING, SliceState.FAILED):
                out.clear()
        elif isinstance(event, RequestStarted) and event.slice == name:
            out.setdefault(event.request, event.resumed and event.first_token_follows)
        elif isinstance(event, FirstToken) and event.slice == name and event.request in out:
            out[event.request] = False
        elif isinstance(event, RequestEnded) and event.slice == name:
            out.pop(event.request, None)
    if out:
        return Category.PREFILL_AGAIN if any(out.values()) else Category.GENERATE
    return Category.SWITCH if state is SliceState.DRAINING else waiting
