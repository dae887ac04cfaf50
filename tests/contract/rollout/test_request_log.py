"""What a rollout worker tells the trainer's scheduler about its requests."""

import asyncio
import time
from pathlib import Path

import pytest
from verl.workers.rollout.replica import TokenOutput

from seamless_verl.observe import flight
from seamless_verl.observe.recording import FLIGHT, FlightRecorder, read_recording
from seamless_verl.scheduling.cluster import Roofline
from seamless_verl.scheduling.events import Ending, RequestFinished, RequestStarted, SessionFinished, SliceFailed
from seamless_verl.scheduling.prediction.session_forecast import SessionBook
from seamless_verl.verl_adapter.rollout.request_log import FIRST_TOKEN, ReplicaCall, RequestLog


async def test_requests_belong_to_the_session_that_asks_or_that_was_named():
    log = RequestLog()
    assert log.take() == []  # from now on somebody wants to know
    named = asyncio.Event()

    async def agent():
        with log.session("g", 3):
            log.name("proxy-session")
            named.set()
            log.started("q1", "chat", "A", 10)
            log.finished("q1", 5, Ending.COMPLETED)
            await asyncio.sleep(0)

    async def proxy():  # another task, which knows no session
        await named.wait()
        log.started("q2", "proxy-session", "B", 20)
        log.started("q3", "stranger", "B", 1)

    await asyncio.gather(agent(), proxy())
    started = {event.request: event for event in log.take() if isinstance(event, RequestStarted)}
    assert (started["q1"].session, started["q1"].group, started["q1"].slice) == ("g_3", "g", "A")
    assert (started["q2"].session, started["q2"].context_tokens) == ("g_3", 20)
    assert (started["q3"].session, started["q3"].group) == ("stranger", "")
    log.started("q4", "proxy-session", "B", 1)  # the session has ended, and its name with it
    assert log.take()[-1].session == "proxy-session"


def test_sessions_end_also_when_they_fail_and_nothing_is_kept_before_somebody_asks():
    log = RequestLog()
    log.started("q", "r", "A", 1)
    assert log.take() == []
    try:
        with log.session("g", 0):
            raise RuntimeError
    except RuntimeError:
        pass
    (ended,) = log.take()
    assert isinstance(ended, SessionFinished)
    assert (ended.session, ended.cut) == ("g_0", False)
    with pytest.raises(asyncio.CancelledError), log.session("g", 1):
        raise asyncio.CancelledError
    assert [(event.session, event.cut) for event in log.take()] == [("g_1", True)]
    with log.session("of validation", 0, trained=False):
        pass
    (ended,) = log.take()
    book = SessionBook()
    book.observe(ended, Roofline())
    assert len(book.lengths) == 0, "what validation generates says nothing of how long training's answers are"


def test_it_rings_for_dead_servers_only():
    log = RequestLog()
    rung = []
    log.ring = lambda: rung.append(True)
    log.take()
    log.started("q", "r", "A", 1)
    log.finished("q", 1, Ending.INTERRUPTED)
    assert rung == []
    log.died("A", "killed")
    assert rung == [True]
    kinds = [type(event) for event in log.take()]
    assert kinds == [RequestStarted, RequestFinished, SliceFailed]


async def test_all_requests_of_a_session_are_as_old_as_the_session(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("seamless_verl.verl_adapter.rollout.request_log.time.time", lambda: now[0])
    log = RequestLog()
    with log.session("g", 0):
        log.name("first")
        now[0] = 200.0
        with log.session("g", 1):
            now[0] = 300.0
            log.name("second")
            assert log.began_ms("chat") == 200_000
        assert log.began_ms("chat") == log.began_ms("first") == 100_000
        assert log.began_ms("second") == 100_000  # its session is over: whoever asks now is this one
    assert log.began_ms("stranger") == 300_000


def test_the_recording_says_which_attempt_a_request_was_for(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, "rollout")
    with ReplicaCall(recorder, "session-1", prompt_tokens=3, resumed=True).recorded():
        current = ReplicaCall.current()
        assert current is not None
        current.routed("a:1")
    recorder.close()
    started = next(e for e in read_recording(tmp_path / FLIGHT).events if isinstance(e, flight.RequestStarted))
    assert (started.session, started.resumed) == ("session-1", True)


def test_the_recording_says_how_long_a_request_waited_and_the_agent_loop_is_not_told(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, "rollout")
    output = TokenOutput(token_ids=[1, 2], stop_reason="completed", extra_fields={FIRST_TOKEN: 0.25, "others": 1})
    with (call := ReplicaCall(recorder, "session-1", prompt_tokens=3, resumed=False)).recorded():
        time.sleep(0.05)  # for a replica to be chosen
        call.routed("a:1")
        call.answered(output)
    recorder.close()
    events = read_recording(tmp_path / FLIGHT).events
    (started,) = [event for event in events if isinstance(event, flight.RequestStarted)]
    (ended,) = [event for event in events if isinstance(event, flight.RequestEnded)]
    assert 0.05 <= started.waited_s < 10
    assert ended.first_token_s == 0.25
    assert output.extra_fields == {"others": 1}
