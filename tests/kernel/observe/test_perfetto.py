"""The trace obeys the Chrome JSON format: what ui.perfetto.dev needs to open it."""

import json
from collections import defaultdict
from itertools import pairwise

from seamless_verl.observe.perfetto import trace, write_trace
from seamless_verl.observe.recording import Recording
from tests.kernel.observe.made_up import made_up_run

NEEDED = {
    "X": {"pid", "tid", "name", "ts", "dur"},
    "B": {"pid", "tid", "name", "ts"},
    "E": {"pid", "tid", "ts"},
    "i": {"pid", "name", "ts", "s"},
    "C": {"pid", "name", "ts", "args"},
    "M": {"pid", "name", "args"},
}


def entries() -> list[dict]:
    return list(trace(Recording(events=tuple(made_up_run()))))


def test_every_entry_has_what_its_phase_needs():
    for entry in entries():
        assert set(entry) >= NEEDED[entry["ph"]] | {"ph"}, entry
        assert entry.get("ts", 0.0) >= 0
        assert entry.get("dur", 0.0) >= 0
        assert entry.get("s", "t") in ("g", "p", "t")
        if entry["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in entry["args"].values())


def test_slices_of_a_thread_nest_or_follow_each_other():
    """Perfetto drops what overlaps without nesting."""
    threads = defaultdict(list)
    for entry in entries():
        if entry["ph"] == "X":
            threads[entry["pid"], entry["tid"]].append((entry["ts"], entry["ts"] + entry["dur"]))
    assert len(threads) == 6 + 1  # slices and the steps
    for spans in threads.values():
        spans.sort()
        for before, after in pairwise(spans):
            assert before[1] <= after[0] + 1e-3


def test_phases_begin_before_they_end_and_all_end():
    open_phases: list[str] = []
    for entry in entries():
        if entry["ph"] == "B":
            open_phases.append(entry["name"])
        elif entry["ph"] == "E":
            assert open_phases.pop() == entry["name"]
    assert open_phases == []


def test_pools_slices_and_trainer_have_names():
    names = {entry["args"]["name"] for entry in entries() if entry["ph"] == "M"}
    assert names >= {"trainer", "scheduler", "pool trainers", "pool rollouts", "trainers/3", "rollouts/1", "phases"}


def test_the_file_is_one_json_object(tmp_path):
    file = tmp_path / "trace.json"
    recording = Recording(events=tuple(made_up_run()))
    write_trace(recording, file)
    document = json.loads(file.read_text())
    assert document["traceEvents"] == json.loads(json.dumps(list(trace(recording))))
    assert document["displayTimeUnit"] == "ms"
