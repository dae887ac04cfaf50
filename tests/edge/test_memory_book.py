"""One book of memory for several processes of a machine, some of which are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from seamless_verl.memory.book import OutOfMemory, Owner, Phase, SharedBook, entries, is_alive, this_process
from tests.fakes import by_purpose

HOLDER = """
import sys
from pathlib import Path
from seamless_verl.memory.book import Owner, Phase
from seamless_verl.memory.book import SharedBook, this_process
ledger, owner = SharedBook(Path(sys.argv[1]), 100), Owner(name="engine", process=this_process())
ledger.need(owner, "trainer/0", "weights", 60, {Phase.ROLLOUT})
ledger.hold(owner, "trainer/0", "weights", 60)
print("held", flush=True)
sys.stdin.read()
"""


def ours() -> Owner:
    return Owner(name="trainer", process=this_process())


@contextmanager
def holder(file: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


def test_what_another_process_holds_does_not_fit_twice_and_is_free_when_it_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "memory.jsonl"
    ledger = SharedBook(file, 100)
    with holder(file) as process:
        with pytest.raises(OutOfMemory, match=f"weights of engine .process {process.pid}. 60 bytes"):
            ledger.hold(ours(), "trainer/0", "parameters", 50)
        ledger.hold(ours(), "trainer/0", "parameters", 40)
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        ledger.hold(ours(), "trainer/0", "parameters", 100)
    assert by_purpose(ledger.look().holdings()) == {"parameters": 100}
    ledger.close()


def test_half_a_line_of_a_writer_that_died_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "memory.jsonl"
    first, second = SharedBook(file), SharedBook(file)
    first.hold(ours(), "a", "parameters", 1)
    with file.open("ab") as torn:
        torn.write(b'{"at": 1.0, "device": "a", "own')
    second.hold(ours(), "a", "gradients", 2)
    assert by_purpose(first.look().holdings()) == {"parameters": 1, "gradients": 2}
    assert len(list(entries(file.read_bytes()))) == 2


def test_a_capacity_that_follows_from_needs_is_the_same_for_all(tmp_path: Path) -> None:
    file = tmp_path / "memory.jsonl"
    first, second = SharedBook(file), SharedBook(file)
    first.need(ours(), "a", "parameters", 10, {Phase.TRAIN})
    second.need(ours(), "a", "weights", 20, {Phase.ROLLOUT})
    assert first.look().capacity("a") == second.look().capacity("a") == 25
    first.hold(ours(), "a", "parameters", 10)
    with pytest.raises(OutOfMemory):
        second.hold(ours(), "a", "weights", 20)


def test_holding_the_same_again_writes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "memory.jsonl"
    ledger = SharedBook(file)
    ledger.hold(ours(), "a", "parameters", 0)
    assert file.stat().st_size == 0
    ledger.hold(ours(), "a", "parameters", 1)
    written = file.stat().st_size
    ledger.hold(ours(), "a", "parameters", 1)
    assert file.stat().st_size == written


def test_a_number_that_came_again_is_another_process() -> None:
    number, _, start = this_process().partition(" ")
    assert is_alive(f"{number} {start}")
    assert not is_alive(f"{number} {int(start) - 1}")
