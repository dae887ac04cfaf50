"""One buffer against plain lists: what is counted, which groups are handed out, which reservation may wait."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from seamless_verl.staleness.buffers import BufferState, StalenessBuffer


class AnyBuffer(RuleBasedStateMachine):
    """Keeps what the buffer should hold in lists, in the order in which it came."""

    @initialize(needed=st.integers(1, 4), surplus=st.integers(0, 3))
    def start(self, needed: int, surplus: int) -> None:
        self.buffer = StalenessBuffer(version=5, slots=needed + surplus, needed=needed)
        self.needed, self.slots = needed, needed + surplus
        self.finished: list[tuple[str, int, int]] = []  # group, version, tokens
        self.waiting: list[tuple[str, int]] = []
        self.taken = 0
        self.numbers = 0

    def free(self) -> int:
        return self.slots - self.taken - len(self.finished) - len(self.waiting)

    @precondition(lambda self: self.free())
    @rule(version=st.integers(3, 5), tokens=st.integers(0, 2))
    def occupy(self, version: int, tokens: int) -> None:
        self.numbers += 1
        self.buffer.add_occupied(f"g{self.numbers}", version, tokens)
        self.finished.append((f"g{self.numbers}", version, tokens))

    @precondition(lambda self: self.free())
    @rule(version=st.integers(3, 5))
    def reserve(self, version: int) -> None:
        self.numbers += 1
        self.buffer.add_reserved(f"g{self.numbers}", version)
        self.waiting.append((f"g{self.numbers}", version))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def unreserve(self, data: st.DataObject) -> None:
        self.buffer.remove_reserved(*self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1))))

    @precondition(lambda self: self.finished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        group, _, _ = self.finished.pop(data.draw(st.integers(0, len(self.finished) - 1)))
        del self.buffer.occupied[group]

    @precondition(lambda self: self.finished and self.taken < self.needed)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        trained = self.finished[: self.needed - self.taken]  # later ones are beyond the step's need
        count = data.draw(st.integers(1, len(trained)))
        longest = sorted(trained, key=lambda one: -one[2])[:count]  # stable: equally long ones as they came
        assert self.buffer.take_longest(count) == [(group, version) for group, version, _ in longest]
        self.finished = [one for one in self.finished if one not in longest]
        self.taken += count

    @rule()
    def look(self) -> None:
        """Nothing happens: all that is left when every slot was taken."""

    @invariant()
    def it_counts_as_the_lists_do(self) -> None:
        if not hasattr(self, "buffer"):
            return
        assert (self.buffer.num_free, self.buffer.num_reserved) == (self.free(), len(self.waiting))
        assert list(self.buffer.occupied.items()) == [(group, version) for group, version, _ in self.finished]
        assert list(self.buffer.reserved()) == sorted(self.waiting, key=lambda one: one[1])
        missing = max(0, self.needed - self.taken - len(self.finished))
        assert self.buffer.num_missing == missing
        states = {True: BufferState.OPEN, False: BufferState.STUCK}
        assert self.buffer.state is (states[self.free() > 0] if missing else BufferState.READY)

    @invariant()
    def the_oldest_reservation_that_may_wait_is_found(self) -> None:
        if not hasattr(self, "buffer"):
            return
        for version in (3, 4, 5, 6):
            fitting = sorted((one for one in self.waiting if one[1] >= version), key=lambda one: one[1])
            assert self.buffer.reserved_since(version) == (fitting[0][0] if fitting else None)


AnyBuffer.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyBuffer = AnyBuffer.TestCase


@pytest.mark.parametrize(
    ("finished", "waiting", "state"),
    [
        (0, 0, BufferState.OPEN),
        (1, 1, BufferState.OPEN),
        (1, 2, BufferState.STUCK),
        (0, 3, BufferState.STUCK),
        (2, 0, BufferState.READY),
        (2, 1, BufferState.READY),
    ],
)
def test_what_a_step_of_two_groups_with_three_slots_waits_for(finished: int, waiting: int, state: BufferState) -> None:
    buffer = StalenessBuffer(version=0, slots=3, needed=2)
    for number in range(finished):
        buffer.add_occupied(f"f{number}", 0, 1)
    for number in range(waiting):
        buffer.add_reserved(f"w{number}", 0)
    assert buffer.state is state


def test_what_is_handed_out_is_the_longest_of_the_batch_and_nothing_beyond_it() -> None:
    buffer = StalenessBuffer(version=0, slots=5, needed=3)
    for group, tokens in (("short", 1), ("long", 9), ("middle", 5), ("beyond", 99)):
        buffer.add_occupied(group, 0, tokens)
    assert buffer.take_longest(1) == [("long", 0)]
    assert buffer.take_longest(2) == [("middle", 0), ("short", 0)]
    assert list(buffer.occupied) == ["beyond"]
