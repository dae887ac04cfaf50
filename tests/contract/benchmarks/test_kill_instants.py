"""What `benchmarks.kill_instants` looks with: each look must be able to say no."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kill_instants
from benchmarks.instant_killer import (
    ENGINE,
    SERVER,
    TRAINER,
    WRITER,
    WRITING,
    Pulls,
    is_whole,
    mapped,
    publication_stage,
    stopped,
)
from seamless_verl.verl_adapter.weights import weight_store

WEIGHTS = [("a", torch.arange(5000.0)), ("b", torch.ones(3, 7))]


@pytest.mark.parametrize(
    ("names", "stage"),
    [
        ([], ""),
        (["held", "6.weights", "6.json"], ""),
        (["6.weights", "6.json", "7.weights.part"], "writing 7"),
        (["6.weights", "6.json", "7.weights"], "unlisted 7"),
        (["6.weights", "6.json", "7.weights", "7.json.part"], "unlisted 7"),
        (["6.weights", "7.weights", "7.json"], ""),
    ],
)
def test_the_stage_of_a_publication(names: list[str], stage: str) -> None:
    assert publication_stage(names) == stage


def test_a_version_is_whole_or_not(tmp_path: Path) -> None:
    manifest = weight_store.publish(tmp_path, 3, WEIGHTS)
    assert is_whole(manifest)
    assert is_whole(None)
    with open(manifest.file, "r+b") as stream:
        stream.seek(64)
        stream.write(b"\xff")
    assert not is_whole(manifest)
    os.truncate(manifest.file, 100)
    assert not is_whole(manifest)


def test_how_much_of_a_mapping_was_read(tmp_path: Path) -> None:
    file = tmp_path / "7.weights"
    file.write_bytes(bytes(1 << 22))
    assert mapped(os.getpid(), tmp_path) is None
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
        assert mapped(os.getpid(), tmp_path) == 0
        assert memory[: 1 << 20]
        assert 0 < (mapped(os.getpid(), tmp_path) or 0) < 1


def test_a_stopped_process_does_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        with stopped([child.pid]) as are_stopped:
            assert are_stopped
            before = Path(f"/proc/{child.pid}/stat").read_text().split()[13:15]
            time.sleep(0.05)
            assert Path(f"/proc/{child.pid}/stat").read_text().split()[13:15] == before
        child.kill()
    with stopped([child.pid]) as are_stopped:
        assert not are_stopped


def test_pulls_are_told_from_recordings_that_grow(tmp_path: Path) -> None:
    pulls, file = Pulls(tmp_path), tmp_path / "trainer-1.jsonl"
    lines = [{"clock_s": 10.0, "wall_s": 1010.0}, {"event": "PullBegan", "at": 11.0, "slice": "a"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event":"PullEn')
    pulls.look()
    assert [pulls.under_way(at) for at in (1010.5, 1011.5, 1061.5)] == [0, 1, 0]
    with file.open("a") as stream:
        stream.write('ded","at":12.0,"slice":"a","version":4}\n{"event":"PullEnded","at":13,"slice":"b","version":4}\n')
    pulls.look()
    assert pulls.under_way(1012.5) == 0
    assert pulls.by_all(1000.0, 3, frozenset()) == 4
    assert pulls.by_all(1000.0, 4, frozenset()) is None
    assert pulls.by_all(1012.5, 3, frozenset()) is None
    assert pulls.by_all(1000.0, 3, frozenset({"trainer-1.jsonl"})) is None


def test_forty_instants_of_every_kind() -> None:
    victims = Counter(instant.victim for instant in kill_instants.plan())
    assert (victims[SERVER] + victims[ENGINE], victims[WRITER] + victims[TRAINER]) == (24, 16)


def test_whatever_is_wrong_is_a_bar_missed() -> None:
    kill: dict[str, Any] = {
        "victim": WRITER,
        "stage": WRITING,
        "first": False,
        "whole": True,
        "cut": 0.5,
        "under_way": 0,
    }
    kill |= {"next_whole": True, "pulled": 3, "restarts": 1, "settled_s": 1.0}
    other = {**kill, "victim": ENGINE, "stage": "pull loading", "read": 0.5, "under_way": 1, "restarts": 0}
    fine = dict.fromkeys(("again", "holes", "unaudited", "violations", "left", "shared", "misses"), 0)
    fine |= {"kills": [kill, other], "steps": 9, "restarts": 1, "unwritten": 0, "replaced": 0}

    def missed(changes: dict[str, Any], of: dict[str, Any] | None = None) -> int:
        told = fine | ({"kills": [kill, other, of | changes]} if of else changes)
        return sum(record.holds is False for record in kill_instants.judged([told], 2))

    assert missed({}) == 0
    for key in ("again", "holes", "unaudited", "violations", "left", "shared"):
        assert missed({key: 1}) == 1, key
    assert missed({"kills": [kill]}) == 1
    for changes in ({"whole": False}, {"next_whole": False}, {"pulled": None}, {"restarts": 2}):
        assert missed(changes, kill) == 1, changes
    assert missed({"restarts": 1}, other) == 1
    assert missed({"under_way": 0}, other) == 1
    assert missed({"first": True}, other) == 1
