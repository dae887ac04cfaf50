"""What fits on a device and what does not, whatever its users do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from seamless_verl.memory.book import Ended, Held, MemoryBook, Needed, OutOfMemory, Owner, Phase, size
from tests.fakes import by_purpose

TRAINER, ENGINE = Owner(name="trainer", process="1 100"), Owner(name="engine", process="2 200")
MIB = 1 << 20


def needed(owner: Owner, what: str, nbytes: int, *phases: Phase, device: str = "trainer/0") -> Needed:
    return Needed(at=0.0, device=device, owner=owner, what=what, nbytes=nbytes, phases=frozenset(phases))


def held(owner: Owner, what: str, nbytes: int, device: str = "trainer/0") -> Held:
    return Held(at=0.0, device=device, owner=owner, what=what, nbytes=nbytes)


def shared_device(weights: int = MIB, cache: int = 100 * MIB, *, stays: bool = False) -> MemoryBook:
    """What a trainer under FSDP2 with Adam and its replica need."""
    book, more = MemoryBook(), (Phase.SYNC, Phase.ROLLOUT) if stays else ()
    book.enter(needed(TRAINER, "parameters", weights, Phase.TRAIN, Phase.SYNC, *more))
    book.enter(needed(TRAINER, "gradients", weights, Phase.TRAIN))
    book.enter(needed(TRAINER, "optimizer", 2 * weights, Phase.TRAIN, *more))
    book.enter(needed(ENGINE, "weights", weights, Phase.SYNC, Phase.ROLLOUT))
    book.enter(needed(ENGINE, "kv_cache", cache, Phase.ROLLOUT))
    return book


def take(book: MemoryBook, *entries: Held) -> None:
    for entry in entries:
        book.check(entry)
        book.enter(entry)


def training() -> list[Held]:
    parts = {"parameters": MIB, "gradients": MIB, "optimizer": 2 * MIB}
    return [held(TRAINER, what, nbytes) for what, nbytes in parts.items()]


@pytest.mark.parametrize("cache", [MIB // 2, 2 * MIB, 3 * MIB, 100 * MIB])
def test_phases_fit_one_after_the_other(cache: int) -> None:
    book = shared_device(cache=cache)
    take(book, *training())
    take(book, held(TRAINER, "gradients", 0), held(TRAINER, "optimizer", 0))
    take(book, held(ENGINE, "weights", MIB))  # parameters are still there, which the transfer needs
    take(book, held(TRAINER, "parameters", 0), held(ENGINE, "kv_cache", cache))
    assert book.used("trainer/0") == MIB + cache
    take(book, held(ENGINE, "weights", 0), held(ENGINE, "kv_cache", 0), *training())


def test_an_engine_does_not_wake_beside_a_trainer_that_is_resident() -> None:
    book = shared_device()
    take(book, *training(), held(ENGINE, "weights", MIB))
    with pytest.raises(OutOfMemory) as refused:
        book.check(held(ENGINE, "kv_cache", 100 * MIB))
    story = str(refused.value)
    assert "trainer/0: engine wants 100.0 MiB for kv_cache, and 96.5 MiB of 101.5 MiB are free" in story
    for part in ("parameters of trainer (process 1) 1.0 MiB", "optimizer of trainer (process 1) 2.0 MiB"):
        assert part in story
    assert "weights of engine (process 2) 1.0 MiB" in story


@pytest.mark.parametrize("left", ["parameters", "gradients", "optimizer"])
def test_nothing_of_the_trainers_may_stay_beside_an_engine_that_is_awake(left: str) -> None:
    book = shared_device()
    take(book, *[entry for entry in training() if entry.what == left], held(ENGINE, "weights", MIB))
    with pytest.raises(OutOfMemory, match=left):
        book.check(held(ENGINE, "kv_cache", 100 * MIB))


def test_what_is_not_offloaded_has_its_place() -> None:
    book = shared_device(stays=True)
    take(book, held(TRAINER, "parameters", MIB), held(TRAINER, "optimizer", 2 * MIB))
    take(book, held(ENGINE, "weights", MIB), held(ENGINE, "kv_cache", 100 * MIB))


def test_a_trainer_does_not_come_back_beside_an_engine_that_is_awake() -> None:
    book = shared_device()
    take(book, held(ENGINE, "weights", MIB), held(ENGINE, "kv_cache", 100 * MIB))
    with pytest.raises(OutOfMemory, match=r"trainer wants 1\.0 MiB for parameters"):
        book.check(held(TRAINER, "parameters", MIB))
    book.enter(Ended(at=1.0, process=ENGINE.process))  # killed: its memory is free, and it needs nothing any more
    take(book, *training())


def test_a_given_capacity_is_what_there_is_and_devices_are_apart() -> None:
    book = MemoryBook(capacity=10)
    take(book, held(ENGINE, "weights", 10, "standing/0"), held(ENGINE, "weights", 10, "standing/1"))
    with pytest.raises(OutOfMemory):
        book.check(held(TRAINER, "parameters", 1, "standing/0"))
    assert by_purpose(book.holdings()) == {"weights": 20}


def test_where_nobody_says_what_it_needs_everything_fits() -> None:
    take(MemoryBook(), held(TRAINER, "parameters", 1 << 60))


def test_holding_less_always_fits() -> None:
    book = MemoryBook(capacity=10)
    book.enter(held(TRAINER, "parameters", 20))  # it has happened
    take(book, held(TRAINER, "parameters", 15))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=5), st.data())
def test_the_needs_of_each_phase_fit_and_the_largest_with_another_need_does_not(
    sizes: list[int], data: st.DataObject
) -> None:
    phases = [data.draw(st.frozensets(st.sampled_from(Phase), min_size=1)) for _ in sizes]
    book = MemoryBook()
    for number, (nbytes, when) in enumerate(zip(sizes, phases, strict=True)):
        book.enter(needed(TRAINER, str(number), nbytes, *when))
    capacity = book.capacity("trainer/0")
    assert capacity is not None
    totals = {phase: sum(n for n, when in zip(sizes, phases, strict=True) if phase in when) for phase in Phase}
    assert max(totals.values()) <= capacity
    largest = max(totals, key=lambda phase: totals[phase])
    for nbytes, when in zip(sizes, phases, strict=True):
        if largest not in when:
            assert totals[largest] + nbytes > capacity


def test_sizes_are_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1536, 3 << 30)] == ["0 bytes", "1023 bytes", "1.5 KiB", "3.0 GiB"]


class Books(RuleBasedStateMachine):
    """Processes that hold, let go and die, in any order, beside the plainest count of the same."""

    def __init__(self) -> None:
        super().__init__()
        self.book = MemoryBook(capacity=100)
        self.count: dict[tuple[str, str, str], int] = {}

    @rule(
        device=st.sampled_from(["a", "b"]),
        process=st.sampled_from(["1 1", "1 2", "2 1"]),
        what=st.sampled_from(["weights", "cache"]),
        nbytes=st.integers(0, 80),
    )
    def hold(self, device: str, process: str, what: str, nbytes: int) -> None:
        entry = held(Owner(name="x", process=process), what, nbytes, device)
        others = sum(n for key, n in self.count.items() if key[0] == device and key != (device, process, what))
        try:
            self.book.check(entry)
        except OutOfMemory:
            assert others + nbytes > 100
            return
        assert others + nbytes <= 100
        self.book.enter(entry)
        self.count[device, process, what] = nbytes

    @rule(process=st.sampled_from(["1 1", "1 2", "2 1"]))
    def end(self, process: str) -> None:
        self.book.enter(Ended(at=0.0, process=process))
        self.count = {key: nbytes for key, nbytes in self.count.items() if key[1] != process}

    @invariant()
    def counts_agree(self) -> None:
        for device in ("a", "b"):
            assert self.book.used(device) == sum(n for key, n in self.count.items() if key[0] == device) <= 100
        assert self.book.processes() == {key[1] for key, nbytes in self.count.items() if nbytes}


TestBooks = Books.TestCase
