"""Statistics, records, the step line and the summary, on data small enough to check by hand."""

import contextlib
import io
import json
import math
import os
import pty
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.observe.reporter import (
    STEPS,
    VALIDATION,
    CurriculumProgress,
    EpochReport,
    Reporter,
    StepReport,
    ValidationReport,
    as_record,
    closing_lines,
    file_lines,
    read_records,
    step_line,
)
from seamless_verl.observe.summary import clustered_mean, difference, paired_difference, summarize


def step(number: int, **changes) -> StepReport:
    values = dict(
        step=number, total_steps=4, step_s=2.0, reward=0.5, pass_rate=0.25, tokens_per_s=1500.0, staleness_mean=0.5,
        staleness_max=1, rows=10, rollouts=8, rows_audited=10, audit_violations=0, max_logprob_diff=None,
        idle_share={"trainer": 0.5, "rollout": 0.25},
    )  # fmt: skip
    return StepReport(**{**values, **changes})


def validation(at: int, means: dict[str, float], name: str = "held_out") -> ValidationReport:
    estimate = clustered_mean({task: [mean] for task, mean in means.items()})
    return ValidationReport(
        step=at, name=name, metric="passed", mean=estimate.mean, low=estimate.low, high=estimate.high,
        tasks=estimate.tasks, rollouts=estimate.rollouts, task_means=means,
    )  # fmt: skip


def summary_of(steps, validations, first_step_s=0.5):
    return summarize(
        [as_record(r) for r in steps],
        [as_record(r) for r in validations],
        wall_s=1.0,
        time_to_first_step_s=first_step_s,
        start_up_s={},
    )


def test_rollouts_of_one_task_do_not_narrow_the_interval():
    few = clustered_mean({"a": [1.0], "b": [0.0]})
    many = clustered_mean({"a": [1.0] * 50, "b": [0.0] * 50})
    assert (few.low, few.high) == (many.low, many.high)
    assert many.rollouts == 100


def test_the_interval_of_a_known_sample():
    estimate = clustered_mean({"a": [0.0], "b": [1.0], "c": [0.0], "d": [1.0]})
    half = 1.959964 * math.sqrt((4 * 0.25 / 3) / 4)
    assert estimate.mean == 0.5
    assert estimate.high == pytest.approx(0.5 + half)


def test_pairing_removes_what_tasks_have_in_common():
    before = {"easy": 0.9, "hard": 0.1, "middle": 0.5}
    after = {task: mean + 0.05 for task, mean in before.items()}
    paired = paired_difference(before, after)
    assert paired.mean == pytest.approx(0.05)
    assert paired.high - paired.low < 1e-9
    unpaired = difference(*(clustered_mean({t: [m] for t, m in means.items()}) for means in (before, after)))
    assert unpaired.high - unpaired.low > 0.5


def test_means_without_data_are_refused():
    with pytest.raises(ValueError, match="at least one task"):
        clustered_mean({})
    with pytest.raises(ValueError, match="no task"):
        paired_difference({"a": 1.0}, {"b": 1.0})


@given(st.dictionaries(st.text(max_size=3), st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=2))
def test_the_mean_lies_within_its_interval_and_its_data(values):
    estimate = clustered_mean(values)
    assert estimate.low - 1e-12 <= estimate.mean <= estimate.high + 1e-12
    assert min(min(v) for v in values.values()) - 1e-12 <= estimate.mean <= max(max(v) for v in values.values()) + 1e-12


def test_the_step_line_shows_what_matters():
    line = step_line(step(2, max_logprob_diff=1e-6), remaining_s=61.0)
    for part in ("2/4", "reward 0.500", "pass 25%", "1.5k tok/s", "max 1", "rows/rollout 1.25", "trainer 50%", "1 min"):
        assert part in line
    assert "AUDIT" not in line


def test_what_people_write_is_told_as_they_wrote_it_and_what_moves_a_terminals_cursor_is_not():
    stream = io.StringIO()
    said = "日\u3000本 50\u00a0% 👩\u200d💻 e\u0301\tnew: \U0001faea"
    Reporter(None, stream).say(said)
    Reporter(None, stream).say("\x1b[2J\r\x9b1m\u202etxt\u2028\ud83d")
    assert stream.getvalue() == said + "\n" + r"\x1b[2J\r\x9b1m\u202etxt\u2028\ud83d" + "\n"


def test_a_curriculum_is_on_the_step_line_in_a_file_and_in_the_summary(tmp_path):
    stream = io.StringIO()
    reporter = Reporter(tmp_path, stream)
    reporter.epoch(
        EpochReport(
            step=6,
            epoch=0,
            stage="math",
            groups=8,
            all_correct=3,
            all_wrong=1,
            failed=0,
            removed=(4, 2, 7),
            readmitted=(),
            pool=5,
        )
    )
    progress = CurriculumProgress(stage="math", epochs_ended=1, pool=5, left=3)
    reporter.step(step(4, curriculum=progress), {})
    told = step(4, curriculum=progress).as_metrics()
    assert (told["curriculum/epochs_ended"], told["curriculum/pool_size"]) == (1, 5)
    assert "8 groups, 50% without advantage; 3 prompts left the pool, 0 came back, 5 remain" in stream.getvalue()
    assert "math: pool 5 (3 solved and taken out)" in stream.getvalue()
    assert [record["removed"] for record in read_records(tmp_path / "curriculum.jsonl")] == [[4, 2, 7]]
    summary = summary_of([step(3), step(4, curriculum=progress)], [])
    assert summary["curriculum"] == {"stage": "math", "epochs_ended": 1, "pool": 5, "left": 3}
    assert "1 epochs ended, now stage math with 5 prompts; 3 solved prompts" in "\n".join(closing_lines(summary, []))
    assert summary_of([step(3)], [])["curriculum"] is None


def test_what_is_left_counts_what_lies_between_the_steps_too():
    times, stream = iter(range(0, 1000, 22)), io.StringIO()  # steps of 10 s, and a validation after each
    reporter = Reporter(None, stream, lambda: next(times))
    for number in range(1, 15):
        reporter.step(step(number, step_s=10.0, total_steps=15), {})
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("2 min 20 s left")
    assert (lines[1][-17:], lines[-1][-9:]) == ("  4 min 46 s left", "22 s left")


def test_a_violation_cannot_be_overlooked():
    assert "AUDIT: 3 of 10 rows" in step_line(step(2, audit_violations=3), remaining_s=None)


def test_what_was_computed_once_is_told_where_it_is_asked_for():
    shared = step(2, row_tokens=8000, computed_tokens=2000, sharing_saved_s=3.25)
    assert "computed 25% of 8.0k tokens (saved 3.2 s)" in step_line(shared, remaining_s=None)
    assert "computed" not in step_line(step(2, row_tokens=8000), remaining_s=None)


def test_rows_that_come_out_otherwise_where_prefixes_are_shared_are_an_alarm(tmp_path):
    stream = io.StringIO()
    reporter = Reporter(tmp_path, stream)
    reporter.step(step(1), {"actor/shared_prefix/off": 0.004, "actor/shared_prefix/grad_norm_off": 0.02})
    assert "ALARM" not in stream.getvalue()
    reporter.step(step(2), {"actor/shared_prefix/off": 0.004, "actor/shared_prefix/grad_norm_off": 0.21})
    assert "ALARM: the actor computed two rows" in stream.getvalue()
    assert "norm by 21%" in stream.getvalue()
    reporter.step(step(3), {"critic/shared_prefix/off": float("nan"), "critic/shared_prefix/grad_norm_off": 0.0})
    assert "ALARM: the critic" in stream.getvalue()


def test_records_survive_the_way_through_the_file(tmp_path):
    reporter = Reporter(tmp_path, io.StringIO())
    reporter.step(step(1), {"actor/loss": float("nan"), "text": "not a number", "n": 3})
    assert read_records(tmp_path / STEPS) == [as_record(step(1))]
    assert read_records(tmp_path / "metrics.jsonl") == [{"step": 1, "actor/loss": None, "n": 3}]


def test_a_terminal_that_is_gone_does_not_end_the_training(tmp_path):
    owner, terminal = pty.openpty()
    os.close(owner)
    stream = os.fdopen(terminal, "w", buffering=1)
    Reporter(tmp_path, stream).step(step(1), {})
    with contextlib.suppress(OSError):
        stream.close()
    assert [record["step"] for record in read_records(tmp_path / STEPS)] == [1]


def test_lines_cut_short_by_a_crash_are_left_out_and_told_of_wherever_they_stand(tmp_path, caplog):
    path = tmp_path / "records.jsonl"
    path.write_text('{"step": 1}\n{"ste')
    assert read_records(path) == [{"step": 1}]
    path.write_text('{"step": 1}\n{"ste{"step": 2}\n17\n{"step": 3}\n')
    caplog.clear()
    assert read_records(path) == [{"step": 1}, {"step": 3}]
    assert caplog.messages == [f"{path}: line {number} is no record, and is left out" for number in (2, 3)]


def test_a_run_whose_machine_lost_its_power_goes_on_behind_the_last_whole_record(tmp_path):
    files = [tmp_path / name for name in (STEPS, "metrics.jsonl")]
    Reporter(tmp_path, io.StringIO()).step(step(1), {"n": 1})
    first = [path.read_bytes() for path in files]
    Reporter(tmp_path, io.StringIO()).step(step(2), {"n": 2})
    whole = [path.read_bytes() for path in files]
    for before, after in zip(first, whole, strict=True):
        assert after.startswith(before)
    for cut in (1, 5, len(whole[1]) - len(first[1])):  # of both last lines, the second only once as a whole
        for path, content in zip(files, whole, strict=True):
            path.write_bytes(content[:-cut])
        resumed = Reporter(tmp_path, io.StringIO())
        resumed.step(step(2), {"n": 2})
        assert [path.read_bytes() for path in files] == whole
        resumed.step(step(3), {"n": 3})
        assert [record["step"] for record in read_records(tmp_path / STEPS)] == [1, 2, 3]
    files[0].write_bytes(b"\0" * 9)  # nothing but a cut line
    Reporter(tmp_path, io.StringIO()).step(step(1), {})
    assert files[0].read_bytes() == first[0]


def test_a_resumed_run_counts_each_step_once_and_takes_the_first_and_last_validation():
    steps = [step(1), step(2, rows=99, audit_violations=1), step(2, rows=20), step(3, max_logprob_diff=2e-6)]
    validations = [
        validation(0, {"a": 0.0, "b": 0.5}),
        validation(2, {"a": 0.9, "b": 0.9}),
        validation(3, {"a": 0.5, "b": 1.0}),
    ]
    summary = summary_of(steps, validations)
    assert (summary["steps"], summary["rows"], summary["audit_violations"]) == (3, 40, 1)
    assert summary["max_logprob_diff"] == 2e-6
    assert summary["held_out_pass_rate_before"] == 0.25
    assert summary["held_out_pass_rate_after"] == 0.75
    assert summary["held_out_pass_rate_gain"] == pytest.approx(0.5)


def test_a_single_task_has_no_interval_and_breaks_nothing(tmp_path):
    reporter = Reporter(tmp_path, io.StringIO())
    for at, mean in ((0, 0.0), (3, 1.0)):
        reporter.validation(validation(at, {"only": mean}))
    records = read_records(tmp_path / "validation.jsonl")
    assert [record["low"] for record in records] == [None, None]
    summary = summarize([], records, wall_s=1.0, time_to_first_step_s=0.5, start_up_s={})
    assert summary["held_out_pass_rate_gain"] == 1.0
    assert summary["held_out_pass_rate_gain_ci"] == [None, None]
    assert "no interval" in "\n".join(closing_lines(summary, []))
    json.dumps(summary, allow_nan=False)


def test_idle_shares_are_weighted_by_the_length_of_the_step_and_unknown_stays_unknown():
    short = step(1, step_s=1.0, idle_share={"trainer": 1.0, "rollout": None})
    long = step(2, step_s=3.0, idle_share={"trainer": 0.0, "rollout": 0.5})
    assert summary_of([short, long], [])["idle_share"] == {"trainer": 0.25, "rollout": None}


@pytest.mark.parametrize(
    ("audited", "told"),
    [
        (10, "10 rows, 10 audited, 0 violations"),
        (0, "10 rows, 0 audited (verl's own agent loops leave no record to compare), 0 violations"),
        (4, "4 audited (the other 6 are of verl's own agent loops, which leave no record to compare), 0 violations"),
    ],
)
def test_the_end_of_a_run_says_which_rows_were_not_audited_and_why(audited, told):
    assert told in "\n".join(closing_lines(summary_of([step(1, rows_audited=audited)], []), []))


@pytest.mark.parametrize(("encoding", "said"), [("utf-8", "é █"), ("ascii", "\\xe9 \\u2588")])
def test_what_an_agent_says_cannot_end_the_run_nor_speak_to_the_terminal(encoding, said):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Reporter(None, terminal).say("é █\n\tx \ud83d\x1b]0;t\x07")
    assert terminal.buffer.getvalue().decode(encoding) == f"{said}\n\tx \\ud83d\\x1b]0;t\\x07\n"


def test_the_end_of_a_run_says_what_changed():
    validations = [validation(0, {"a": 0.0, "b": 0.5}), validation(3, {"a": 0.5, "b": 1.0})]
    text = "\n".join(closing_lines(summary_of([step(1)], validations), ["a note"]))
    for part in ("held out pass rate: 0.250 before, 0.750 after", "0 violations", "a note"):
        assert part in text


def test_a_run_that_only_validates_says_what_it_found():
    summary = summary_of([], [validation(4, {"a": 0.0, "b": 0.5})], first_step_s=None)
    assert summary["held_out_pass_rate_after"] == 0.25
    assert summary["held_out_pass_rate_after_rollouts"] == 2
    assert not {"held_out_pass_rate_before", "held_out_pass_rate_gain"} & summary.keys()
    low, high = summary["held_out_pass_rate_after_ci"]
    told = f"held out pass rate: 0.250 (95 % interval {low:+.3f} … {high:+.3f})"
    assert closing_lines(summary, []) == ["", told, "wall time 1 s"]


def test_the_end_of_a_run_points_to_files_that_are_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, steps = tmp_path / "run", [{"step": number} for number in (5, 6, 7, 6, 7, 8)]  # went on in a new folder, twice
    text = "\n".join(file_lines(run, str(run / "rows"), "run/checkpoints", steps))
    for part in (f"files: {run}\n", "  rows/         the", "  checkpoints/  to", "at rows/5.jsonl and rows/8.jsonl:"):
        assert part in text
    text = "\n".join(file_lines(run, "/data/rows", "checkpoints/p/e", steps))
    for part in ("  /data/rows/   the", f"  {tmp_path}/checkpoints/p/e/ to", "/data/rows/5.jsonl and /data/rows/8"):
        assert part in text
    text = "\n".join(file_lines(run, None, None, steps))
    assert "report" in text
    assert "rows" not in text
    assert "checkpoints" not in text
    assert "then at" not in "\n".join(file_lines(run, "rows", None, []))


def test_a_record_that_a_full_disk_cuts_short_is_left_out_so_that_the_next_life_of_a_run_can_be_read(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    reporter, report = Reporter(tmp_path, io.StringIO()), validation(0, {"a": 1.0, "b": 0.0})
    reporter.validation(report)
    room = (tmp_path / VALIDATION).stat().st_size + 10  # a limit on files writes short, as a full disk does
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(OSError, match="No space left on device"):
            reporter.validation(report)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    reporter.validation(report)
    assert read_records(tmp_path / VALIDATION) == 2 * [as_record(report)]
