"""The bound, the slots and the order, over whatever may happen to groups in flight."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from seamless_verl.errors import ConfigError
from seamless_verl.staleness.protocol import ConsumedGroup, EntryState, ProtocolError, StalenessProtocol


class Anything(RuleBasedStateMachine):
    """Replicas of several versions reserve; groups finish in any order, fail, are filtered; the trainer takes."""

    @initialize(
        eta=st.integers(0, 3),
        batch_size=st.integers(1, 5),
        redundancy=st.sampled_from([1.0, 1.0, 1.5, 2.0]),
        fewer=st.sampled_from([None, None, 0.0, 0.4, 1.0]),
        repair=st.booleans(),
        first=st.integers(0, 3),
    )
    def start(
        self, eta: int, batch_size: int, redundancy: float, fewer: float | None, repair: bool, first: int
    ) -> None:
        self.start_with(eta, batch_size, redundancy, fewer, repair, first)

    def start_with(
        self, eta: int, batch_size: int, redundancy: float, fewer: float | None, repair: bool, first: int
    ) -> None:
        in_flight = None if fewer is None else max(1.0, eta + 1 - fewer)
        self.protocol = StalenessProtocol(
            eta=eta, batch_size=batch_size, version=first, redundancy=redundancy, in_flight=in_flight, repair=repair
        )
        self.eta, self.batch_size, self.redundancy, self.repair = eta, batch_size, redundancy, repair
        self.in_flight = eta + 1 if in_flight is None else in_flight
        self.version = first  # of the weights being trained, counted apart from the protocol's own
        self.taken = 0
        self.reserved: dict[str, int] = {}
        self.occupied: dict[str, int] = {}
        self.consumed: Counter[str] = Counter()
        self.numbers = 0

    @precondition(lambda self: self.protocol.capacity(self.version))
    @rule(lags=st.lists(st.integers(0, 4), min_size=1, max_size=8))
    def reserve_some(self, lags: list[int]) -> None:
        for lag in lags:
            self.reserve(lag)

    def reserve(self, lag: int) -> None:
        group, version = f"g{self.numbers}", self.version - lag
        self.numbers += 1
        if not self.protocol.capacity(version):
            return  # nobody submits what is not admitted
        buffer = self.protocol.reserve(group, version)
        assert buffer is not None
        if buffer is not None:
            assert version <= self.version <= buffer <= version + self.eta
            assert self.protocol.reserve(group, version) == buffer
            self.reserved[group] = version

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), fresher=st.integers(0, 3))
    def occupy(self, data: st.DataObject, fresher: int) -> None:
        group = data.draw(st.sampled_from(sorted(self.reserved)))
        version = min(self.reserved.pop(group) + fresher, self.version)
        buffer = self.protocol.occupy(group, version)
        assert self.version <= buffer <= version + self.eta
        self.occupied[group] = version

    @precondition(lambda self: self.reserved or self.occupied)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.reserved | self.occupied)))
        self.reserved.pop(group, None)
        self.occupied.pop(group, None)
        self.protocol.abort(group)
        with pytest.raises(ProtocolError, match="not in flight"):
            self.protocol.abort(group)

    @precondition(lambda self: self.protocol.num_available)
    @rule(data=st.data())
    def consume(self, data: st.DataObject) -> None:
        self.take(data.draw(st.integers(1, self.protocol.num_available)))

    def take(self, count: int) -> None:
        consumption = self.protocol.consume(count)
        assert len(consumption.groups) == count
        for entry in consumption.groups:
            assert entry.version == self.occupied.pop(entry.group)
            assert entry.buffer == self.version
            assert 0 <= entry.staleness <= self.eta
            self.consumed[entry.group] += 1
        self.taken += count
        if self.taken == self.batch_size:
            self.version, self.taken = self.version + 1, 0
        assert not consumption.surplus or (self.redundancy > 1 and not self.taken)
        for group in consumption.surplus:
            assert (self.reserved.pop(group, None) is None) != (self.occupied.pop(group, None) is None)

    @precondition(lambda self: self.reserved and not self.taken)
    @rule()
    def restart(self) -> None:
        """Goes on from a checkpoint; everything that follows must not notice."""
        again = StalenessProtocol(
            eta=self.eta,
            batch_size=self.batch_size,
            redundancy=self.redundancy,
            in_flight=self.protocol.in_flight,
            repair=self.repair,
        )
        again.restore(json.loads(json.dumps(self.protocol.state())))
        assert again.state() == self.protocol.state()
        self.protocol = again

    @invariant()
    def nothing_is_lost_or_taken_twice(self) -> None:
        if not hasattr(self, "protocol"):
            return
        assert self.protocol.version == self.version
        assert all(times == 1 for times in self.consumed.values())
        assert self.protocol.num_in_flight == len(self.reserved) + len(self.occupied)
        for group in self.reserved:
            assert self.protocol.state_of(group) is EntryState.RESERVED
        for group in self.occupied:
            assert self.protocol.state_of(group) is EntryState.OCCUPIED

    @invariant()
    def no_slot_leaks(self) -> None:
        if not hasattr(self, "protocol"):
            return
        slots = math.ceil(self.in_flight * math.ceil(self.batch_size * self.redundancy))
        assert self.protocol.num_in_flight + self.taken <= slots
        assert self.protocol.capacity(self.version) == slots - self.taken - self.protocol.num_in_flight

    @invariant()
    def no_legal_swap_remains(self) -> None:
        """With repair, no finished group waits behind a reservation that could have waited for a later step."""
        if not hasattr(self, "protocol") or not self.repair or self.redundancy > 1:
            return
        buffers = list(self.protocol._buffers)
        for index, buffer in enumerate(buffers):
            for later in buffers[index + 1 :]:
                if later.occupied:
                    assert not buffer.num_free
                    assert buffer.reserved_since(later.version - self.eta) is None

    @invariant()
    def a_step_that_gets_no_more_prompts_names_whom_it_waits_for(self) -> None:
        if not hasattr(self, "protocol") or not self.repair or self.redundancy > 1:
            return
        missing, named = self.batch_size - self.taken - self.protocol.num_available, self.protocol.stuck()
        assert set(named) <= self.reserved.keys()
        assert missing or not named
        if not self.protocol.capacity(self.version):
            assert len(named) >= missing

    def teardown(self) -> None:
        """Liveness: when everything in flight has finished and prompts keep coming, every step gets its batch."""
        if not hasattr(self, "protocol"):
            return
        for _ in range(2 * (self.eta + 1)):
            while self.protocol.capacity(self.version):
                self.reserve(0)
            while self.reserved:
                group = next(iter(self.reserved))
                version = self.reserved.pop(group)
                self.protocol.occupy(group)
                self.occupied[group] = version
            assert self.protocol.num_available == self.batch_size - self.taken
            self.take(self.protocol.num_available)


class Repaired(Anything):
    """With repair and no redundancy: elsewhere the invariants about swaps seldom look."""

    @initialize(
        eta=st.integers(1, 3),
        batch_size=st.integers(1, 5),
        fewer=st.sampled_from([None, None, 0.0, 0.4, 1.0]),
        first=st.integers(0, 3),
    )
    def start(self, eta: int, batch_size: int, fewer: float | None, first: int) -> None:  # type: ignore[override]
        self.start_with(eta, batch_size, 1.0, fewer, True, first)


for _machine in (Anything, Repaired):
    _machine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestAnything, TestRepaired = Anything.TestCase, Repaired.TestCase


def test_eta_zero_is_synchronous() -> None:
    protocol = StalenessProtocol(eta=0, batch_size=2)
    assert [protocol.reserve(group, 0) for group in "abc"] == [0, 0, None]
    protocol.occupy("b")
    assert protocol.stuck() == ("a",)
    protocol.occupy("a")
    assert [entry.group for entry in protocol.consume(2).groups] == ["b", "a"]
    assert protocol.reserve("c", 0) is None, "weights of version 1 are not out yet"
    assert protocol.reserve("c", 1) == 1


def test_reservations_go_late_and_finished_groups_early() -> None:
    protocol = StalenessProtocol(eta=1, batch_size=2)
    assert [protocol.reserve(group, 0) for group in "abcd"] == [1, 1, 0, 0]
    assert protocol.occupy("a") == 0, "c, reserved for step 0, moved into the slot that a had in step 1"
    assert protocol.occupy("b") == 0
    assert protocol.consume(2).groups == (
        ConsumedGroup(group="a", version=0, buffer=0),
        ConsumedGroup(group="b", version=0, buffer=0),
    )
    assert (protocol.capacity(0), protocol.capacity(1)) == (0, 2)


def test_without_repair_the_finished_group_waits_behind_the_reserved_one() -> None:
    protocol = StalenessProtocol(eta=1, batch_size=1, repair=False)
    assert [protocol.reserve(group, 0) for group in "ab"] == [1, 0]
    assert protocol.occupy("a") == 1
    assert protocol.stuck() == ("b",)


def test_repair_repeats_until_no_legal_swap_remains() -> None:
    protocol = StalenessProtocol(eta=2, batch_size=1, version=1)
    assert protocol.reserve("late", 1) == 3
    assert protocol.reserve("mid", 0) == 2
    assert protocol.reserve("early", -1) == 1
    protocol.occupy("mid")
    assert protocol.stuck() == ("early",), "early may not wait for step 2: it started with version -1"
    assert protocol.occupy("late") == 3

    chained = StalenessProtocol(eta=2, batch_size=1, version=1)
    chained.reserve("late", 1), chained.reserve("mid", 1), chained.reserve("early", 0)
    assert chained.occupy("late") == 1, "mid moved from 2 to 3 and early from 1 to 2"


def test_a_failed_group_returns_its_slot_and_finished_ones_move_up() -> None:
    protocol = StalenessProtocol(eta=1, batch_size=1)
    protocol.reserve("a", 0), protocol.reserve("b", -1)
    protocol.occupy("a")
    assert protocol.num_available == 0
    protocol.abort("b")
    assert protocol.num_available == 1
    assert protocol.capacity(0) == 1


def test_a_failed_groups_slot_is_repaired_before_finished_groups_move_up() -> None:
    protocol = StalenessProtocol(eta=2, batch_size=1)
    protocol.reserve("fails", -1), protocol.reserve("early", -1), protocol.reserve("late", 0)
    assert protocol.occupy("late") == 2, "nobody may wait for step 2 in its place"
    protocol.abort("fails")
    assert protocol.num_available == 1, "early waits for step 1 now, and late is in step 0"


def test_mini_batches_are_handed_out_before_the_batch_is_complete() -> None:
    protocol = StalenessProtocol(eta=0, batch_size=4)
    for group in "abcd":
        protocol.reserve(group, 0)
    protocol.occupy("c"), protocol.occupy("a")
    assert [entry.group for entry in protocol.consume(2).groups] == ["c", "a"]
    assert protocol.version == 0
    with pytest.raises(ProtocolError, match="handed out 2 of its 4"):
        protocol.consume(3)
    with pytest.raises(ProtocolError, match="0 groups of step 0"):
        protocol.consume(1)


def test_surplus_of_batch_redundancy_moves_on_or_is_named() -> None:
    protocol = StalenessProtocol(eta=0, batch_size=2, redundancy=1.5)
    for group in "abc":
        protocol.reserve(group, 0)
    protocol.occupy("a"), protocol.occupy("b")
    assert protocol.consume(2).surplus == ("c",)
    assert protocol.num_in_flight == 0

    lagging = StalenessProtocol(eta=1, batch_size=2, redundancy=1.5)
    for number in range(6):
        lagging.reserve(f"g{number}", 0)
    lagging.occupy("g0"), lagging.occupy("g1")
    assert lagging.consume(2).surplus == ("g5",), "step 1 is full of g2, g3 and g4"


def test_misuse_tells_the_story() -> None:
    protocol = StalenessProtocol(eta=1, batch_size=1, version=3)
    with pytest.raises(ProtocolError, match=r"version=4.*newest weights are of version 3"):
        protocol.reserve("a", 4)
    protocol.reserve("a", 3)
    protocol.occupy("a")
    with pytest.raises(ProtocolError, match="it is occupied"):
        protocol.occupy("a")
    with pytest.raises(ProtocolError, match="it is not in flight"):
        protocol.occupy("b")
    protocol.reserve("c", 3)
    with pytest.raises(ProtocolError, match="started with version 2, was reserved for 3"):
        protocol.occupy("c", 2)


def test_a_state_taken_under_other_settings_or_within_a_step_is_refused() -> None:
    protocol = StalenessProtocol(eta=1, batch_size=2)
    state = protocol.state()
    for other, key in (
        (StalenessProtocol(eta=2, batch_size=2), r"eta=2.*taken with 1"),
        (StalenessProtocol(eta=1, batch_size=4), r"train_batch_size=4.*taken with 2"),
        (StalenessProtocol(eta=1, batch_size=2, redundancy=1.5), r"redundancy=1\.5.*taken with 1"),
    ):
        with pytest.raises(ConfigError, match=key):
            other.restore(state)
    protocol.reserve("a", 0), protocol.occupy("a"), protocol.consume(1)
    with pytest.raises(ProtocolError, match="handed out 1"):
        protocol.state()


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"eta": -1}, "seamless.staleness.eta"),
        ({"eta": 1.5}, "seamless.staleness.eta"),
        ({"eta": True}, "seamless.staleness.eta"),
        ({"batch_size": 0}, "data.train_batch_size"),
        ({"redundancy": 0.9}, "seamless.staleness.redundancy"),
        ({"redundancy": float("nan")}, "seamless.staleness.redundancy"),
        ({"in_flight": 0.5}, "seamless.staleness.in_flight"),
        ({"in_flight": 2.5}, "seamless.staleness.in_flight"),
        ({"in_flight": float("nan")}, "seamless.staleness.in_flight"),
        ({"in_flight": True}, "seamless.staleness.in_flight"),
    ],
)
def test_bad_arguments_name_the_key(arguments: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        StalenessProtocol(**({"eta": 1, "batch_size": 4} | arguments))  # type: ignore[arg-type]


def test_fewer_batches_in_flight_than_the_bound_allows() -> None:
    """Two of four legal batches: short groups are trained at once, a long one may wait until it is eta versions old."""
    protocol = StalenessProtocol(eta=3, batch_size=2, in_flight=2)
    for group in ("long", "a", "b", "c"):
        protocol.reserve(group, 0)
    assert protocol.capacity(0) == 0
    ages = []
    for version in range(3):
        for group in [name for name, state in protocol.groups() if state is EntryState.RESERVED and name != "long"][:2]:
            protocol.occupy(group)
        ages += [one.staleness for one in protocol.consume(1).groups]
        assert protocol.capacity(version) == 0  # what is admitted now would have the old version
        ages += [one.staleness for one in protocol.consume(1).groups]
        assert protocol.capacity(version + 1) == 2
        for number in range(2):
            protocol.reserve(f"{version}/{number}", version + 1)
    assert list(protocol.awaited()) == ["long"]  # the bound keeps it out of any later step
    protocol.occupy("long"), protocol.occupy(next(name for name, _ in protocol.groups() if name != "long"))
    assert max(one.staleness for one in protocol.consume(2).groups) == 3
    assert sum(ages) / len(ages) <= 1


def test_the_longest_of_what_is_finished_is_trained_first_and_nothing_else_changes() -> None:
    protocol = StalenessProtocol(eta=0, batch_size=4, redundancy=1.5)
    for group in "abcdef":
        protocol.reserve(group, 0)
    protocol.occupy("a", tokens=10), protocol.occupy("b", tokens=30), protocol.occupy("c", tokens=30)
    copy = StalenessProtocol(eta=0, batch_size=4, redundancy=1.5)
    copy.restore(json.loads(json.dumps(protocol.state())))
    for same in (protocol, copy):
        assert [entry.group for entry in same.consume(2).groups] == ["b", "c"]
        same.occupy("d", tokens=5), same.occupy("e", tokens=99)  # five of the four that are needed
        last = same.consume(2)
        assert [entry.group for entry in last.groups] == ["a", "d"], "e is beyond what the step needs"
