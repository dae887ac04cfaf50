"""The recorder writes what it is given, drops what it cannot keep up with, and fails without hurting anybody."""

import json
import subprocess
import sys
import threading

from seamless_verl.observe.flight import EventsLost, RunEnded, RunStarted, StepBegan
from seamless_verl.observe.recording import FLIGHT, FlightRecorder, read_recording
from seamless_verl.observe.run_folder import write_report


def test_events_of_several_threads_arrive_each_in_its_order(tmp_path):
    recorder = FlightRecorder(tmp_path, "trainer")

    def work(first: int) -> None:
        for number in range(first, first + 500):
            recorder.record(StepBegan(at=recorder.now(), step=number))

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    recording = read_recording(tmp_path / FLIGHT)
    steps = [event.step for event in recording.events]
    for first in (0, 1000, 2000):
        assert [step for step in steps if first <= step < first + 1000] == list(range(first, first + 500))
    (writer,) = recording.writers
    assert writer.startswith("trainer-")


def test_half_a_surrogate_pair_is_a_question_mark_on_the_page(tmp_path):
    recorder = FlightRecorder(tmp_path, "trainer")
    recorder.record(RunStarted(at=0.0, name="x", policy="", eta=1, bound=1, total_steps=1))
    recorder.record(RunEnded(at=1.0, outcome="RunBroken", detail="é \ud83d"))
    recorder.close()
    assert "RunBroken: é ?" in write_report(tmp_path).read_text(encoding="utf-8")


def test_what_is_recorded_after_the_end_is_nowhere(tmp_path):
    recorder = FlightRecorder(tmp_path, "trainer")
    recorder.record(StepBegan(at=0.0, step=1))
    recorder.close()
    recorder.record(StepBegan(at=1.0, step=2))
    recorder.close()
    assert [event.step for event in read_recording(tmp_path / FLIGHT).events] == [1]


def test_without_a_folder_nothing_is_started_and_nothing_kept():
    before = threading.active_count()
    recorder = FlightRecorder(None, "trainer")
    recorder.record(StepBegan(at=0.0, step=1))
    assert threading.active_count() == before
    recorder.close()


def test_what_does_not_fit_into_the_queue_is_counted(tmp_path):
    recorder = FlightRecorder(tmp_path, "trainer", most_waiting=10)
    for number in range(5000):  # faster than the thread, which looks every fifth of a second
        recorder.record(StepBegan(at=recorder.now(), step=number))
    recorder.close()
    events = read_recording(tmp_path / FLIGHT).events
    lost = sum(event.count for event in events if isinstance(event, EventsLost))
    kept = sum(isinstance(event, StepBegan) for event in events)
    assert kept + lost == 5000
    assert lost > 0


def test_a_folder_that_cannot_be_written_is_complained_about_once(tmp_path):
    (tmp_path / FLIGHT).write_text("a file where the folder should be")
    complaints: list[str] = []
    told = threading.Event()

    def complain(message: str) -> None:
        complaints.append(message)
        told.set()

    recorder = FlightRecorder(tmp_path, "trainer", complain=complain)
    assert told.wait(10)
    for number in range(100):
        recorder.record(StepBegan(at=0.0, step=number))
    recorder.close()
    assert len(complaints) == 1
    assert "the run goes on" in complaints[0]


FULL_DISK = """
import resource, sys
from pathlib import Path
from seamless_verl.observe.flight import StepBegan
from seamless_verl.observe.recording import FlightRecorder

resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # writes beyond it fail as on a full disk
recorder = FlightRecorder(Path(sys.argv[1]), "trainer", complain=lambda message: print(message))
for number in range(1000):
    recorder.record(StepBegan(at=float(number), step=number))
recorder.close()
for number in range(1000):
    recorder.record(StepBegan(at=float(number), step=number))
print("the run went on")
"""


def test_a_full_disk_ends_the_recording_and_not_the_run(tmp_path):
    answer = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    complaint, last = answer.stdout.splitlines()
    assert "flight recorder has stopped" in complaint
    assert "OSError" in complaint
    assert last == "the run went on"
    recording = read_recording(tmp_path / FLIGHT)
    steps = [event.step for event in recording.events]
    assert steps == list(range(len(steps)))
    assert len(steps) > 50
    assert recording.torn


NO_MORE_THREADS = """
import resource, sys, threading
from pathlib import Path
from seamless_verl.observe.flight import StepBegan
from seamless_verl.observe.recording import FlightRecorder

threading.stack_size(1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
recorder = FlightRecorder(Path(sys.argv[1]), "trainer", complain=lambda message: print(message))
recorder.record(StepBegan(at=0.0, step=1))
recorder.close()
print("the run went on")
"""


def test_a_process_that_may_have_no_more_threads_runs_without_a_recording(tmp_path):
    answer = subprocess.run(
        [sys.executable, "-c", NO_MORE_THREADS, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    complaint, last = answer.stdout.splitlines()
    assert "can't start new thread" in complaint
    assert last == "the run went on"


def test_a_disk_that_hangs_holds_up_neither_the_run_nor_its_end(tmp_path, monkeypatch):
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(self, stream) -> None:
        hangs.set()
        goes_on.wait(30)

    monkeypatch.setattr(FlightRecorder, "_drain", hang)
    recorder = FlightRecorder(tmp_path, "trainer", most_waiting=100)
    assert hangs.wait(10)
    for number in range(1000):
        recorder.record(StepBegan(at=0.0, step=number))
    recorder.close(patience_s=0.05)
    assert not goes_on.is_set()
    goes_on.set()


def test_text_that_is_no_unicode_is_kept(tmp_path):
    recorder = FlightRecorder(tmp_path, "trainer")
    recorder.record(RunEnded(at=0.0, outcome="\ud800 ü"))
    recorder.close()
    (event,) = read_recording(tmp_path / FLIGHT).events
    assert event.outcome == "\ud800 ü"


def test_an_event_that_cannot_be_written_ends_the_recording_loudly(tmp_path):
    complaints: list[str] = []
    recorder = FlightRecorder(tmp_path, "trainer", complain=complaints.append)
    recorder.record(StepBegan(at=0.0, step=1))
    recorder.record(StepBegan(at=float("nan"), step=2))
    recorder.close()
    assert len(complaints) == 1
    assert "ValueError" in complaints[0]


def test_a_process_that_just_exits_leaves_a_whole_recording(tmp_path):
    code = (
        "import sys; from pathlib import Path; from seamless_verl.observe.flight import StepBegan\n"
        "from seamless_verl.observe.recording import FlightRecorder\n"
        "recorder = FlightRecorder(Path(sys.argv[1]), 'trainer')\n"
        "recorder.record(StepBegan(at=0.0, step=7))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=True)
    (file,) = (tmp_path / FLIGHT).iterdir()
    assert json.loads(file.read_text().splitlines()[-1]) == {"event": "StepBegan", "at": 0.0, "step": 7}
