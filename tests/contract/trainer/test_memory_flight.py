"""The trainer's process follows the run's book: devices become slices, wall time the recorder's clock."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from seamless_verl.memory.book import BOOK, Owner, SharedBook, this_process
from seamless_verl.observe.flight import SliceAdded, SliceState
from seamless_verl.verl_adapter.trainer.trainer_flight import MemoryFlight


def added(name: str, devices: int, *tags: str) -> SliceAdded:
    pool = name.split("/")[0]
    return SliceAdded(at=0.0, slice=name, pool=pool, devices=devices, capabilities=tags, state=SliceState.ROLLOUT)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (("train", "rollout"), ["trainers/0", "trainers/1", "rollouts/0", "rollouts/1"]),
        (("train",), ["trainers/0", "trainers/1", "rollouts/1", None]),  # the standalone replicas are the only ones
    ],
)
def test_devices_become_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tags: tuple[str, ...], expected: list[str | None]
) -> None:
    monkeypatch.setenv(BOOK, str(tmp_path / "memory.jsonl"))
    follower = MemoryFlight()
    for name in ("trainers/0", "trainers/1"):
        follower.add(added(name, 2, *tags))
    for name in ("rollouts/0", "rollouts/1"):
        follower.add(added(name, 2, "rollout"))
    follower.add(added("trainers/0", 2, *tags))  # one that returned
    ledger, owner = SharedBook(tmp_path / "memory.jsonl"), Owner(name="engine", process=this_process())
    for device in ("trainer/1", "trainer/2", "standing/4" if "rollout" in tags else "standing/2", "standing/7"):
        ledger.hold(owner, device, "weights", 5)
    found = {event.device: event.slice for event in follower.news(0.0)}
    assert list(found.values()) == [name for name in expected if name is not None]
    assert list(follower.news(0.0)) == []


def test_times_are_those_of_the_move_and_never_before_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BOOK, str(tmp_path / "memory.jsonl"))
    follower = MemoryFlight()
    follower.add(added("trainers/0", 1, "train"))
    assert list(follower.news(0.0)) == []  # no process has booked anything yet
    ledger, owner = SharedBook(tmp_path / "memory.jsonl"), Owner(name="trainer", process=this_process())
    before = time.time()
    ledger.hold(owner, "trainer/0", "parameters", 5)
    ledger.hold(owner, "trainer/0", "parameters", 6)
    follower.begin(100.0)
    first, second = follower.news(100.5 + time.time() - before)
    assert 100.0 <= first.at <= second.at <= 101.0
    assert (first.nbytes, second.nbytes) == (5, 6)


def test_where_no_book_is_kept_there_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BOOK, raising=False)
    assert list(MemoryFlight().news(0.0)) == []
