"""What is told of attempts that fail or hang, and how often."""

import pytest

from seamless_verl.observe.failures import AttemptBook, AttemptLog, alarm


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def log_of(clock: Clock) -> AttemptLog:
    return AttemptLog(clock, lambda error: (f"{type(error).__name__}: {error}", ("agent.py:4 in act",)))


def fail(log: AttemptLog, task: str, error: Exception, *, validation: bool = False) -> None:
    with pytest.raises(type(error)), log.attempt(task, validation=validation, where=tuple):
        raise error


def test_the_first_failure_of_a_kind_is_told_with_its_lines_and_the_others_are_counted() -> None:
    log, book = log_of(Clock()), AttemptBook()
    with log.attempt("train/0", validation=False, where=tuple):
        pass
    for number in range(1, 6):
        fail(log, f"train/{number}", KeyError(number))
    told = book.take(log.take(1.0))
    assert told[:2] == ["an attempt of training failed (task train/1): KeyError: 1", "    agent.py:4 in act"]
    assert len(told) == 3
    fail(log, "train/9", KeyError(9))
    assert book.take(log.take(1.0)) == [], "known"
    fail(log, "train/9", OSError("disk"))
    assert book.take(log.take(1.0))[0].endswith("OSError: disk")
    assert book.close_step() == (8, 7)
    assert book.close_step() == (0, 0)
    story = book.story(validation=False)
    assert story.splitlines() == [
        "7 of 8 attempts failed:",
        "  6 × KeyError: 1 (tasks train/1, train/2, train/3, …)",
        "      agent.py:4 in act",
        "  1 × OSError: disk (tasks train/9)",
        "      agent.py:4 in act",
    ]


def test_what_differs_in_a_number_is_one_kind_and_that_there_are_too_many_is_said_once() -> None:
    log, book = log_of(Clock()), AttemptBook()
    told = []
    for error in (*(f"worker {4711 + number} ended (exit 1)" for number in range(9)), "KeyError: 'x'"):
        with log.attempt("train/1", validation=False, where=tuple):
            log.failed(error)
        told += book.take(log.take(1.0))
    said = [line for line in told if not line.startswith(" ")]
    assert [line.split("): ")[1] for line in said] == ["worker 4711 ended (exit 1)", "KeyError: 'x'"]
    for letter in "abcdefgh":
        fail(log, "train/1", type(f"Error{letter}", (Exception,), {})(""))
    said = [line for line in book.take(log.take(1.0)) if not line.startswith(" ")]
    assert [line.split("): ")[-1][:6] for line in said[:6]] == [f"Error{letter}" for letter in "abcdef"]
    assert said[6:] == ["attempts fail in more than 8 ways; further ones are counted, not told"]


def test_failures_of_a_validation_are_no_part_of_the_step_nor_of_its_story() -> None:
    log, book = log_of(Clock()), AttemptBook()
    fail(log, "val/0", KeyError(1), validation=True)
    assert book.take(log.take(1.0))[0].startswith("an attempt of validation failed (task val/0)")
    assert book.close_step() == (0, 0)
    assert book.story(validation=False) == ""
    assert book.story(validation=True).startswith("1 of 1 attempts failed:\n  1 × KeyError: 1 (tasks val/0)")


def test_a_failure_that_the_runner_reports_counts_although_its_rows_are_trained() -> None:
    log = log_of(Clock())
    with log.attempt("train/3", validation=False, where=tuple):
        log.failed("ValueError: no such tool")
    news = log.take(1.0)
    assert (news.ended, news.failed) == ((1, 0), (1, 0))
    assert (news.failures[0].task, news.failures[0].error) == ("train/3", "ValueError: no such tool")


def test_what_is_cancelled_was_surplus_and_counts_as_nothing() -> None:
    log = log_of(Clock())
    with pytest.raises(GeneratorExit), log.attempt("train/3", validation=False, where=tuple):
        raise GeneratorExit
    assert log.take(1.0).ended == (0, 0)


def test_attempts_that_are_late_are_told_once_per_place_from_when_they_had_their_place() -> None:
    clock = Clock()
    log, book = log_of(clock), AttemptBook()
    with log.attempt("train/3", validation=False, where=lambda: ("agent.py:7 in think",)):
        clock.now = 100.0
        log.begins_now()
        clock.now = 110.0
        assert book.take(log.take(10.0)) == []
        clock.now = 111.0
        told = book.take(log.take(10.0))
        assert told[0].endswith("(task train/3) has been under way for 11 s; it waits in:")
        assert told[1] == "    agent.py:7 in think"
        assert book.take(log.take(10.0)) == []
        log.agent_ended()
        assert log.take(10.0).hanging[0].reward
    assert log.take(10.0).hanging == ()


@pytest.mark.parametrize(("ended", "failed", "rings"), [(0, 0, False), (10, 2, False), (10, 3, True)])
def test_more_than_a_fifth_rings(ended: int, failed: int, rings: bool) -> None:
    assert (alarm(3, ended, failed) is not None) == rings


def test_a_note_is_told_once_whichever_workers_say_it() -> None:
    book, workers = AttemptBook(), [AttemptLog(lambda: 0.0, lambda error: ("", ())) for _ in range(2)]
    for log in workers:
        log.note("the template moves")
    assert [line for log in workers for line in book.take(log.take(1.0))] == ["the template moves"]
    assert [line for log in workers for line in book.take(log.take(1.0))] == []
