"""Requests that are repeated because their answers were lost: as many as a session may have in flight at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from seamless_verl.proxy.calls import Answer
from seamless_verl.proxy.journal.sqlite_journal import SqliteJournal
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.session.flights import Arrival, FlightBoard, Served
from seamless_verl.trajectory.matching import Earlier
from seamless_verl.trajectory.messages import Message, Role
from tests.fakes import serving

RETRY = {"x-stainless-retry-count": "1"}


def _body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


async def test_all_samples_of_a_repeated_request_are_those_of_the_first() -> None:
    numbers = iter(range(100))
    async with serving(lambda prompt: f"answer {next(numbers)}") as proxy:
        handle = await proxy.open()
        first = await proxy.post(handle, _body("hi", n=16))
        again = await proxy.post(handle, _body("hi", n=16), **RETRY)
        assert again.json()["choices"] == first.json()["choices"]
        assert len(proxy.engine.requests) == 16
        assert (await proxy.admin.close_session(handle.id)).audit.num_generations == 16


@pytest.mark.parametrize("headers", [RETRY, {}])
async def test_parallel_requests_that_died_with_the_process_get_their_answers(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    """Twelve sub-agents of one session, all answered in the journal, none of them at the client."""
    numbers, tasks = iter(range(100)), [f"task {number}" for number in range(12)]
    journal = SqliteJournal(tmp_path / "j.sqlite")
    async with serving(lambda prompt: f"answer {next(numbers)}", journal=journal) as proxy:
        handle = await proxy.open()
        before = await asyncio.gather(*(proxy.post(handle, _body(task)) for task in tasks))
    await journal.close()
    journal = SqliteJournal(tmp_path / "j.sqlite")
    async with serving(lambda prompt: "another", journal=journal) as proxy:
        journal.resume(proxy.deps.sessions)
        after = await asyncio.gather(*(proxy.post(handle, _body(task), **headers) for task in tasks))
        assert [answer.json()["id"] for answer in after] == [answer.json()["id"] for answer in before]
        assert proxy.engine.requests == []
        assert (await proxy.admin.close_session(handle.id)).audit.num_generations == 12
    await journal.close()


async def test_a_session_that_was_out_of_memory_tells_second_samples_from_retries(tmp_path: Path) -> None:
    """More answers than are kept for retries, all delivered; each request unloads the session."""
    journal = SqliteJournal(tmp_path / "j.sqlite")
    async with serving(journal=journal, limits=Limits(max_resident_bytes=1)) as proxy:
        handle = await proxy.open(max_parallel=4)
        tasks = [f"task {number}" for number in range(20)]
        for task in tasks:
            assert (await proxy.post(handle, _body(task))).status_code == 200
        for task in (tasks[0], tasks[-1]):
            assert (await proxy.post(handle, _body(task))).status_code == 200
        assert len(proxy.engine.requests) == 22
        assert (await proxy.admin.stats())["sessions_spilled"] >= 20
        await proxy.post(handle, _body(tasks[-2]), **RETRY)
        assert len(proxy.engine.requests) == 22
    await journal.close()


def _served(name: str) -> Served:
    message = Message(role=Role.ASSISTANT, content=name)
    answer = Answer(
        id=name,
        created=0,
        message=message,
        finish_reason="stop",
        prompt_tokens=1,
        completion_tokens=1,
        cached_tokens=0,
    )
    return Served(digest=name.encode(), answer=answer, match="clean", overrides=())


def test_answers_that_may_be_asked_for_again_outlast_those_that_went_on() -> None:
    board = FlightBoard(max_parallel=8)  # keeps 16 of each

    def left(prefix: str, num: int) -> list[int]:
        return [n for n in range(num) if board.earlier(f"{prefix}{n}".encode()) is not Earlier.NONE]

    for number in range(20):
        board.record(_served(f"lost{number}"), Arrival.UNKNOWN)
    for number in range(12):
        board.record(_served(f"given{number}"), Arrival.DELIVERED)
    for number in range(40):
        board.record(_served(f"agent{number}"), Arrival.DELIVERED)
        board.continued(f"agent{number}")
    assert left("lost", 20) == list(range(4, 20))
    assert left("given", 12) == list(range(12))
    assert left("agent", 40) == list(range(32, 40))  # few: their clients have them
    for number in range(8):
        board.record(_served(f"later{number}"), Arrival.DELIVERED)
    assert left("given", 12) == list(range(4, 12))
    assert left("later", 8) == list(range(8))
    board.continued("lost19")  # it was not lost
    assert board.earlier(b"lost19") is Earlier.DELIVERED
    assert board.unknown() == {b"lost%d" % number for number in range(4, 19)}
