"""Which ends are worth another start, and how often."""

import contextlib
import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl import main
from seamless_verl.config import SuperviseConfig
from seamless_verl.errors import ConfigError
from seamless_verl.run.restarts import WITHIN_S, End, Exit, Restarts, RunBroken, exit_of, obstacle, visible

DEATHS = (Exit.DIED, 128 + signal.SIGKILL, 128 + signal.SIGSEGV)
ENDS = (0, Exit.FAILED, 2, 128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM, 255)


def named(name, *bases):
    return type(name, bases or (Exception,), {})


ActorDied = named("ActorDiedError", named("RayActorError"))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RunBroken("rollout replica 0 died: ActorDiedError"), Exit.DIED),
        (ActorDied(), Exit.DIED),
        (named("RayTaskError(EngineDeadError)", named("EngineDeadError"))(), Exit.DIED),
        (named("GangRefused")("step-3/1: nobody is left to generate"), Exit.DIED),
        (named("RayTaskError(OutOfMemoryError)", named("OutOfMemoryError", RuntimeError))(), Exit.OUT_OF_MEMORY),
        (MemoryError(), Exit.OUT_OF_MEMORY),
        (RunBroken("trainer worker 0 died: OutOfMemoryError: node low on memory"), Exit.OUT_OF_MEMORY),
        (ValueError("of the user's"), Exit.FAILED),
        (ValueError("killed: an OutOfMemoryError, says a text"), Exit.FAILED),
        (ConfigError("k", 1, "is wrong", "write 2"), Exit.FAILED),
        (named("AuditFailed")("3 rows"), Exit.FAILED),
    ],
)
def test_the_exit_code_tells_deaths_and_memory_from_errors(error, code):
    assert exit_of(error) is code


def test_what_a_death_was_caused_by_counts_and_what_happened_beside_it_does_not():
    broken = RunBroken("trainer worker 0 died: ActorDiedError")
    broken.__cause__ = named("OutOfMemoryError")()
    assert exit_of(broken) is Exit.OUT_OF_MEMORY
    error = ValueError("of the user's")
    error.__context__ = ActorDied()
    assert exit_of(error) is Exit.FAILED


def died(at, step=1, code=Exit.DIED, why_not=""):
    return End(code=code, at=at, step=step, obstacle=why_not)


def test_the_reason_names_the_cause_and_the_count():
    restarts = Restarts(2)
    first = restarts.after(died(0.0))
    assert (first.restart, first.reason) == (True, "a process of the run died; restart 1 of 2 within an hour")
    second = restarts.after(died(1.0, code=128 + signal.SIGKILL))
    assert second.reason == "the trainer's process was ended by SIGKILL; restart 2 of 2 within an hour"
    third = restarts.after(died(2.0))
    assert not third.restart
    assert "seamless.supervise.restarts" in third.reason
    assert restarts.after(died(WITHIN_S, step=2)).restart, "the first was an hour ago"


def test_a_run_that_dies_again_and_again_without_a_new_step_is_given_up_however_slowly():
    restarts, day = Restarts(2), 24 * 3600.0
    assert restarts.after(died(0, step=4)).restart
    assert restarts.after(died(day, step=5)).restart, "it came further"
    assert restarts.after(died(2 * day, step=3)).restart, "and fell back to its checkpoint"
    again = restarts.after(died(3 * day, step=5, code=Exit.OUT_OF_MEMORY))
    limit = "2 restarts that bring no step after 5 are what seamless.supervise.restarts allows"
    assert (again.restart, again.reason) == (False, f"memory ran out; not restarted: {limit}")


def test_where_the_step_is_not_known_only_the_hour_counts():
    restarts = Restarts(1)
    for hour, code in enumerate([Exit.DIED, Exit.DIED, Exit.OUT_OF_MEMORY, Exit.OUT_OF_MEMORY]):
        assert restarts.after(died(hour * WITHIN_S, step=None, code=code)).restart
    assert not restarts.after(died(3.5 * WITHIN_S, step=None)).restart


def test_memory_that_runs_out_twice_at_a_step_will_do_so_again():
    restarts = Restarts(9)
    assert restarts.after(died(0, step=4, code=Exit.OUT_OF_MEMORY)).restart
    assert restarts.after(died(1, step=5, code=Exit.OUT_OF_MEMORY)).restart, "it came further"
    assert restarts.after(died(2, step=5)).restart
    assert restarts.after(died(3, step=5, code=Exit.OUT_OF_MEMORY)).restart
    again = restarts.after(died(4, step=5, code=Exit.OUT_OF_MEMORY))
    assert (again.restart, again.reason) == (False, "memory ran out; not restarted: the second time after step 5")


def test_a_run_that_would_not_be_continued_is_not_started_again():
    verdict = Restarts(3).after(died(0, why_not="there is no checkpoint"))
    assert (verdict.restart, verdict.reason) == (
        False,
        "a process of the run died; not restarted: there is no checkpoint",
    )
    assert obstacle(resume_mode="auto", save_freq=-1, has_checkpoint=True) == ""
    assert obstacle(resume_mode="auto", save_freq=10, has_checkpoint=False) == ""
    assert "trainer.save_freq=-1" in obstacle(resume_mode="auto", save_freq=-1, has_checkpoint=False)
    assert "trainer.resume_mode=disable" in obstacle(resume_mode="disable", save_freq=10, has_checkpoint=True)


def test_users_do_not_see_the_codes_that_are_for_the_supervisor():
    assert [visible(code) for code in (0, 1, 130, 137, Exit.DIED, Exit.OUT_OF_MEMORY)] == [0, 1, 130, 137, 1, 1]


@given(
    most=st.integers(0, 4),
    ends=st.lists(
        st.tuples(
            st.sampled_from([*DEATHS, *ENDS, Exit.OUT_OF_MEMORY]), st.floats(0, 9000), st.none() | st.integers(0, 9)
        ),
        max_size=40,
    ),
)
def test_never_too_often_never_against_the_user_and_always_while_there_is_room(most, ends):
    restarts, at, begun, furthest, in_vain = Restarts(most), 0.0, [], -1, 0
    for code, later, step in ends:
        at += later
        if code not in ENDS and step is not None and step > furthest:
            furthest, in_vain = step, 0
        within = [one for one in begun if at - one < WITHIN_S]
        verdict = restarts.after(End(code=code, at=at, step=step))
        if code in ENDS:
            assert not verdict.restart
            assert verdict.reason == ""
        if code in DEATHS:
            assert verdict.restart is (len(within) < most and in_vain < most)
        if verdict.restart:
            begun.append(at)
            in_vain += step is not None
            assert len(within) < most
            assert in_vain <= most


@pytest.mark.parametrize("value", [-1, 1.5, True, "3"])
def test_a_number_of_restarts_that_is_none_is_refused(value):
    with pytest.raises(ConfigError, match=r"seamless\.supervise\.restarts"):
        SuperviseConfig(restarts=value)


def test_a_pipe_that_is_gone_does_not_keep_a_run_from_starting_again():
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    main._say("the trainer died; it starts again", stream)
    with contextlib.suppress(OSError):
        stream.close()
