"""What `benchmarks.multiplexing` writes of its rounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from benchmarks.multiplexing import _beside


def rounds(*seconds: float) -> list[Any]:
    return [SimpleNamespace(mean_s=one) for one in seconds]


def test_every_round_is_written_and_the_best_and_the_worst_of_them() -> None:
    found = {
        "ours greedy": rounds(4.0, 5.0, 2.0),
        "verl sync": rounds(8.0, 4.0, 3.0),
        "verl apart": rounds(6.0, 9.0, 9.0),
    }
    records = _beside(found, ["verl sync", "verl apart"], "")
    assert [(one.name.strip(), one.value) for one in records[1:]] == [
        ("in its worst round", 0.8),
        ("in its best round", 1.5),
        ("in round 1", 1.5),
        ("in round 2", 0.8),
        ("in round 3", 1.5),
    ]
    assert records[0].value == 1.5
