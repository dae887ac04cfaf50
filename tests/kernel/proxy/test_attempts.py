"""One request's attempt: which moves there are, what a repeated request gets, what is kept of answers."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import ExitStack
from dataclasses import replace

import pytest

from seamless_verl.proxy.calls import Answer, ApiError
from seamless_verl.proxy.session.attempts import Attempt, AttemptBoard, IllegalMove, State, Verdict, answer_digest
from seamless_verl.trajectory.messages import Message, Role

WAYS: dict[State, tuple[State, ...]] = {
    State.GENERATING: (),
    State.LANDING: (State.LANDING,),
    State.ANSWERED: (State.LANDING, State.ANSWERED),
    State.DELIVERED: (State.LANDING, State.ANSWERED, State.DELIVERED),
    State.CONTINUED: (State.LANDING, State.ANSWERED, State.CONTINUED),
    State.FAILED: (State.FAILED,),
    State.CANCELLED: (State.CANCELLED,),
}
LEGAL = {
    (State.GENERATING, State.LANDING),
    (State.GENERATING, State.FAILED),
    (State.GENERATING, State.CANCELLED),
    (State.LANDING, State.ANSWERED),
    (State.LANDING, State.FAILED),
    *itertools.product(
        (State.ANSWERED, State.DELIVERED, State.CONTINUED),
        (State.DELIVERED, State.CONTINUED),
    ),
}


def _in_state(state: State, num_waiting: int = 1) -> Attempt:
    attempt = Attempt(b"digest", 1)
    attempt.num_waiting = num_waiting
    for step in WAYS[state]:
        attempt.move(step)
    return attempt


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)))
def test_a_move_is_in_the_table_or_raises_with_its_story(before: State, after: State) -> None:
    attempt = _in_state(before)
    if (before, after) in LEGAL:
        attempt.move(after)
        assert attempt.state is after
    else:
        with pytest.raises(IllegalMove, match=f"{after.name}: .* {b'digest'.hex()} is {before.name}"):
            attempt.move(after)
        assert attempt.state is before


@pytest.mark.parametrize(
    ("state", "num_waiting", "said_nothing", "first_try", "retry"),
    [
        (State.GENERATING, 1, Verdict.JOIN, Verdict.NEW, Verdict.JOIN),
        (State.LANDING, 1, Verdict.JOIN, Verdict.NEW, Verdict.JOIN),
        (State.GENERATING, 0, Verdict.JOIN, Verdict.JOIN, Verdict.JOIN),
        (State.LANDING, 0, Verdict.JOIN, Verdict.JOIN, Verdict.JOIN),
        (State.ANSWERED, 0, Verdict.REPLAY, Verdict.REPLAY, Verdict.REPLAY),
        (State.ANSWERED, 1, Verdict.JOIN, Verdict.NEW, Verdict.JOIN),
        (State.DELIVERED, 0, Verdict.NEW, Verdict.NEW, Verdict.REPLAY),
        (State.CONTINUED, 0, Verdict.NEW, Verdict.NEW, Verdict.REPLAY),
        (State.FAILED, 1, Verdict.NEW, Verdict.NEW, Verdict.NEW),
        (State.CANCELLED, 1, Verdict.NEW, Verdict.NEW, Verdict.NEW),
    ],
)
def test_retries(state: State, num_waiting: int, said_nothing: Verdict, first_try: Verdict, retry: Verdict) -> None:
    attempt = _in_state(state, num_waiting)
    assert [attempt.verdict(count) for count in (None, 0, 1, 7)] == [said_nothing, first_try, retry, retry]


def _answers(name: str, num: int = 1) -> list[Answer]:
    return [
        Answer(
            id=f"{name}.{number}",
            created=0,
            message=Message(role=Role.ASSISTANT, content=name),
            finish_reason="stop",
            prompt_tokens=1,
            completion_tokens=1,
            cached_tokens=0,
            digest=answer_digest(name.encode(), number),
        )
        for number in range(num)
    ]


def test_answers_that_may_be_asked_for_again_outlast_those_that_went_on() -> None:
    board = AttemptBoard(max_parallel=8)  # keeps 16 of each

    def left(prefix: str, num: int) -> list[int]:
        return [n for n in range(num) if board.find(f"{prefix}{n}".encode(), 1, is_retry=False) is not None]

    for number in range(20):
        board.restore(_answers(f"lost{number}"), State.ANSWERED)
    for number in range(12):
        board.restore(_answers(f"given{number}"), State.DELIVERED)
    for number in range(40):
        board.restore(_answers(f"agent{number}"), State.DELIVERED)
        board.continued(f"agent{number}.0")
    assert left("lost", 20) == list(range(4, 20))
    assert left("given", 12) == list(range(12))
    assert left("agent", 40) == list(range(32, 40))  # few: their clients have them
    for number in range(8):
        board.restore(_answers(f"later{number}"), State.DELIVERED)
    assert left("given", 12) == list(range(4, 12))
    assert left("later", 8) == list(range(8))
    board.continued("lost19.0")  # it was not lost
    went_on = board.find(b"lost19", 1, is_retry=False)
    assert went_on is not None
    assert went_on.state is State.CONTINUED
    assert board.undelivered() == {f"lost{number}.0" for number in range(4, 19)}


def test_a_request_is_kept_with_all_of_its_answers_and_only_repeated_by_one_that_wants_as_many() -> None:
    board = AttemptBoard(max_parallel=4)  # keeps 8 answers of each kind
    for name in ("a", "b", "c"):
        board.restore(_answers(name, 3), State.DELIVERED)
    assert [board.find(name, 3, is_retry=False) is not None for name in (b"a", b"b", b"c")] == [False, True, True]
    assert board.find(b"c", 1, is_retry=False) is None
    board.restore(_answers("many", 100), State.DELIVERED)
    assert board.find(b"many", 100, is_retry=False) is not None  # the latest stays, however many answers it has


def test_each_retry_of_samples_that_were_asked_for_at_once_gets_one_that_nobody_has() -> None:
    board = AttemptBoard(max_parallel=4)
    for number in range(3):
        (sample,) = _answers("same")
        board.restore([replace(sample, id=f"{number}")], State.ANSWERED)
    given = []
    for left in ({"0", "1"}, {"0"}, set[str]()):
        attempt = board.find(b"same", 1, is_retry=True)
        assert attempt is not None
        given.append(attempt.answers[0].id)
        board.record(attempt, State.DELIVERED)
        assert board.undelivered() == left
    assert given == ["2", "1", "0"]
    again = board.find(b"same", 1, is_retry=True)
    assert again is not None
    assert again.answers[0].id == "0"  # all were delivered: the latest
    assert again.verdict(1) is Verdict.REPLAY


async def test_retries_of_requests_that_ran_too_long_for_their_clients_join_one_each() -> None:
    board, news = AttemptBoard(max_parallel=4), asyncio.Event()
    attempts = [Attempt(b"request", 1) for _ in range(3)]
    for attempt in attempts:
        board.launch(attempt, asyncio.sleep(60))
    with attempts[2].attended(news, orphan_grace_s=60.0), ExitStack() as joined:  # whose client is still there
        for wanted in (attempts[1], attempts[0]):
            assert board.find(b"request", 1, is_retry=False) is attempts[2]
            found = board.find(b"request", 1, is_retry=True)
            assert found is wanted
            joined.enter_context(found.attended(news, orphan_grace_s=60.0))
        assert board.find(b"request", 1, is_retry=True) is attempts[2]
    attempts[2].cancel()
    assert board.find(b"request", 1, is_retry=False) is attempts[1]
    await board.cancel_all()


async def test_what_is_landing_ends_with_its_answers_and_what_is_not_is_cancelled() -> None:
    board = AttemptBoard(max_parallel=4)
    may_end, num_ended = asyncio.Event(), itertools.count()

    async def land(attempt: Attempt) -> None:
        attempt.move(State.LANDING)
        await may_end.wait()
        attempt.answers = _answers(attempt.digest.decode())
        board.record(attempt, State.ANSWERED)

    landing, stuck = Attempt(b"landing", 1), Attempt(b"stuck", 1)
    board.launch(landing, land(landing), lambda: next(num_ended))
    board.launch(stuck, asyncio.sleep(60), lambda: next(num_ended))
    await asyncio.sleep(0)
    closing = asyncio.create_task(board.cancel_all())
    waiting = asyncio.create_task(landing.landed())
    await asyncio.sleep(0)
    assert stuck.state is State.CANCELLED
    assert not closing.done()
    may_end.set()
    await closing
    assert [answer.id for answer in await waiting] == ["landing.0"]
    assert (board.find(b"landing", 1, is_retry=False), board.find(b"stuck", 1, is_retry=False)) == (landing, None)
    assert next(num_ended) == 2
    with pytest.raises(ApiError, match="session was closed"):
        await stuck.landed()


async def test_whoever_joins_what_has_just_failed_is_told_why() -> None:
    board, attempt = AttemptBoard(max_parallel=4), Attempt(b"request", 1)

    async def fail() -> None:
        raise ApiError(503, "engine_unavailable", "away")

    board.launch(attempt, fail())
    for _ in range(3):
        await asyncio.sleep(0)
    assert (attempt.state, board.find(b"request", 1, is_retry=False)) == (State.FAILED, None)
    with pytest.raises(ApiError, match="away"):
        await attempt.landed()


async def test_each_departure_has_a_grace_period_of_its_own() -> None:
    board, attempt, news = AttemptBoard(max_parallel=4), Attempt(b"request", 1), asyncio.Event()
    board.launch(attempt, asyncio.sleep(60))
    with attempt.attended(news, orphan_grace_s=0.2):
        await asyncio.sleep(0)
    with attempt.attended(news, orphan_grace_s=60.0):  # a retry that leaves before the first period would have ended
        await asyncio.sleep(0)
    await asyncio.sleep(0.4)
    assert attempt.state is State.GENERATING
    with attempt.attended(news, orphan_grace_s=0.0):
        await asyncio.sleep(0)
    await asyncio.wait_for(attempt.ended(), 30)
    assert attempt.state is State.CANCELLED
