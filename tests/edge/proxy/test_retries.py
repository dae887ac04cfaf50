"""Requests that are repeated because their answers were lost: as many as a session may have in flight at once."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from seamless_verl.proxy.journal.sqlite_journal import SqliteJournal
from seamless_verl.proxy.limits import Limits
from tests.fakes import serving

FIRST_TRY, RETRY = {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}


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


@pytest.mark.parametrize("limits", [Limits(), Limits(max_resident_bytes=1)], ids=["in memory", "spilled"])
async def test_samples_asked_for_at_once_that_died_with_the_process_are_given_once_each(
    tmp_path: Path, limits: Limits
) -> None:
    numbers, num_asked, all_asked = iter(range(100)), itertools.count(1), asyncio.Event()
    journal = SqliteJournal(tmp_path / "j.sqlite")
    async with serving(lambda prompt: f"answer {next(numbers)}", journal=journal) as proxy:
        generate = proxy.engine.generate

        async def together(request: Any) -> Any:
            if next(num_asked) == 6:
                all_asked.set()
            await all_asked.wait()
            return await generate(request)

        proxy.engine.generate = together  # type: ignore[method-assign]
        handle = await proxy.open()
        before = await asyncio.gather(*(proxy.post(handle, _body("hi"), **FIRST_TRY) for _ in range(6)))
    await journal.close()
    journal = SqliteJournal(tmp_path / "j.sqlite")
    async with serving(lambda prompt: "another", journal=journal, limits=limits) as proxy:
        journal.resume(proxy.deps.sessions)
        after = await asyncio.gather(*(proxy.post(handle, _body("hi"), **RETRY) for _ in range(3)))
        after += [await proxy.post(handle, _body("hi"), **RETRY) for _ in range(3)]
        assert len({answer.json()["id"] for answer in before}) == 6
        assert {answer.json()["id"] for answer in after} == {answer.json()["id"] for answer in before}
        assert proxy.engine.requests == []
        assert len((await proxy.admin.close_session(handle.id)).rows) == 6
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
