"""Files of several processes become one stream on one clock; a torn end is counted, a broken middle refused."""

import pytest

from seamless_verl.errors import MachineError
from seamless_verl.observe import recording
from seamless_verl.observe.flight import (
    WORKER_DIED,
    RequestEnded,
    RequestStarted,
    StepBegan,
    StepEnded,
    WeightsPublished,
    WorkerDied,
)
from seamless_verl.observe.recording import (
    FlightFormatError,
    FlightHeader,
    Recording,
    encode_event,
    encode_header,
    read_recording,
    write_recording,
)


def header(writer: str, clock_s: float, wall_s: float, domain: str = "") -> FlightHeader:
    return FlightHeader(writer=writer, clock_s=clock_s, wall_s=wall_s, clock_domain=domain)


def test_processes_of_one_machine_are_aligned_although_the_wall_clock_was_set_meanwhile(tmp_path):
    write_recording(tmp_path / "a.jsonl", header("a", 100.0, 5000.0, "boot"), [StepBegan(at=101.0, step=1)])
    # Ten seconds later by the monotonic clock, an hour later by a wall clock that was moved.
    write_recording(tmp_path / "b.jsonl", header("b", 110.0, 8610.0, "boot"), [WeightsPublished(at=111.5, version=1)])
    recording = read_recording(tmp_path)
    assert recording.events == (StepBegan(at=0.0, step=1), WeightsPublished(at=10.5, version=1))
    assert recording.origin_s == 5001.0
    assert recording.writers == {"a": 1, "b": 1}


def test_machines_are_aligned_by_their_wall_clocks(tmp_path):
    write_recording(tmp_path / "a.jsonl", header("a", 100.0, 5000.0, "one"), [StepEnded(at=103.0, step=1)])
    write_recording(tmp_path / "b.jsonl", header("b", 7.0, 5000.0, "two"), [StepBegan(at=9.0, step=1)])
    assert read_recording(tmp_path).events == (StepBegan(at=0.0, step=1), StepEnded(at=1.0, step=1))


def test_events_of_the_same_moment_keep_the_order_in_which_they_were_written(tmp_path):
    events = [StepBegan(at=1.0, step=number) for number in range(20)]
    write_recording(tmp_path / "a.jsonl", header("a", 1.0, 1.0), events)
    assert [event.step for event in read_recording(tmp_path).events] == list(range(20))


def test_a_last_line_cut_short_is_left_out_and_named(tmp_path):
    file = tmp_path / "a.jsonl"
    write_recording(file, header("a", 0.0, 0.0), [StepBegan(at=0.0, step=1), StepBegan(at=1.0, step=2)])
    whole = file.read_text()
    for cut in range(1, len(encode_event(StepBegan(at=1.0, step=2))) + 1):
        file.write_text(whole[:-cut])
        recording = read_recording(tmp_path)
        assert recording.events == (StepBegan(at=0.0, step=1),)
        assert recording.torn == ("a.jsonl",)


def test_a_header_cut_short_is_a_file_without_events(tmp_path):
    (tmp_path / "a.jsonl").write_text(encode_header(header("a", 0.0, 0.0))[:20])
    (tmp_path / "b.jsonl").write_text("")
    assert read_recording(tmp_path) == Recording(events=(), torn=("a.jsonl",))


def test_a_broken_line_inside_is_named(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(encode_header(header("a", 0.0, 0.0)) + '\n{"event":"Ste\n{"event":"StepBegan","at":1.0,"step":1}\n')
    with pytest.raises(FlightFormatError, match=r"a\.jsonl, line 2"):
        read_recording(tmp_path)
    file.write_text("something else\n")
    with pytest.raises(FlightFormatError, match=r"a\.jsonl is not a flight recording"):
        read_recording(tmp_path)


def test_kinds_of_a_later_writer_are_counted(tmp_path):
    file = tmp_path / "a.jsonl"
    write_recording(file, header("a", 0.0, 0.0), [StepBegan(at=0.0, step=1)])
    with file.open("a") as stream:
        stream.write('{"event":"CoffeeMade","at":1.0}\n' * 2)
    recording = read_recording(tmp_path)
    assert (len(recording.events), recording.unknown) == (1, {"CoffeeMade": 2})


def test_what_a_dead_rollout_worker_had_not_ended_ends_with_it(tmp_path):
    def started(at, request):
        return RequestStarted(at=at, request=request, slice="a:1", prompt_tokens=3)

    ended = RequestEnded(at=2.0, request="r1", slice="a:1", tokens=5, finish="completed")
    for writer, events in {
        "rollout-0a-host-7-0": [started(1.0, "r1"), started(1.5, "r2"), ended],
        "rollout-0b-host-8-0": [started(1.0, "r3")],
        "trainer-host-6-0": [StepBegan(at=0.0, step=1), WorkerDied(at=3.0, writer="rollout-0a")],
    }.items():
        write_recording(tmp_path / f"{writer}.jsonl", header(writer, 0.0, 0.0, "boot"), events)
    ends = [event for event in read_recording(tmp_path).events if isinstance(event, RequestEnded)]
    assert ends == [ended, RequestEnded(at=3.0, request="r2", slice="a:1", tokens=0, finish=WORKER_DIED)]


def test_a_recording_that_would_not_fit_into_memory_is_refused_with_what_to_do(tmp_path, monkeypatch):
    write_recording(tmp_path / "trainer.jsonl", FlightHeader(writer="w", clock_s=0.0, wall_s=0.0), [])
    monkeypatch.setattr(recording, "_MEMORY", 1 << 60)
    with pytest.raises(MachineError, match=r"all of it is read at once .* MiB are free.* seamless-verl watch shows"):
        read_recording(tmp_path)
