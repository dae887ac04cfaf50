"""An answer that was not finished goes on where it was, whoever held it: a proxy that died, an attempt that failed."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from seamless_verl.proxy.client import SessionHandle, SessionResult
from seamless_verl.proxy.engine import Ability, EngineUnavailable
from seamless_verl.proxy.journal.sqlite_journal import SqliteJournal
from seamless_verl.proxy.session.store import SessionStore
from seamless_verl.trajectory.rows import RowSpan
from tests.fakes import Served, serving

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
KEPT = 4


def _script(prompt: str) -> str:
    return "the quick brown fox says hello"


@asynccontextmanager
async def _on(path: Path) -> AsyncIterator[Served]:
    """A proxy on a journal, with what an earlier one left in it."""
    journal, store = SqliteJournal(path), SessionStore()
    journal.resume(store)
    async with serving(_script, journal=journal, sessions=store, abilities=frozenset({Ability.TOP_LOGPROBS})) as proxy:
        yield proxy
    await journal.close()


async def _killed_in_mid_answer(tmp_path: Path, **wishes: Any) -> tuple[SessionHandle, Path]:
    """The journal of a proxy, as it is on disk while the engine goes on with an answer of which it told a part."""
    async with _on(tmp_path / "j.sqlite") as proxy:
        handle = await proxy.open()
        proxy.engine.keeps, proxy.engine.delay_s = KEPT, 600.0
        asking = asyncio.create_task(proxy.post(handle, {**BODY, **wishes}))
        await proxy.engine.started.wait()
        copy = tmp_path / "later.sqlite"
        (session,) = proxy.deps.sessions
        await proxy.deps.journal.updated(session)  # written behind the part
        for end in ("", "-wal"):
            shutil.copy(tmp_path / f"j.sqlite{end}", f"{copy}{end}")
        asking.cancel()
    return handle, copy


def _num_parts(path: Path) -> int:
    with sqlite3.connect(path) as db:
        return int(db.execute("SELECT count(*) FROM unfinished").fetchone()[0])


def _spans(result: SessionResult) -> tuple[RowSpan, ...]:
    (row,) = result.rows
    assert result.audit.is_clean
    return row.version_spans


async def test_after_the_death_of_a_proxy_an_answer_keeps_its_tokens_and_their_versions(tmp_path: Path) -> None:
    handle, copy = await _killed_in_mid_answer(tmp_path)
    async with _on(copy) as proxy:
        answer = (await proxy.post(handle, BODY)).json()
        assert answer["choices"][0]["message"]["content"] == _script("")
        (request,) = proxy.engine.requests
        assert request.resume_from is not None
        assert len(request.resume_from.token_ids) == KEPT
        assert _num_parts(copy) == 0, "it is in the journal as a whole"
        first, rest = _spans(await proxy.admin.close_session(handle.id))
    assert (first.version, first.stop - first.start, rest.version) == (3, KEPT, 9)


async def test_another_request_begins_its_own_answer(tmp_path: Path) -> None:
    handle, copy = await _killed_in_mid_answer(tmp_path)
    async with _on(copy) as proxy:
        await proxy.post(handle, {**BODY, "messages": [{"role": "user", "content": "ho"}]})
        await proxy.post(handle, {**BODY, "temperature": 0.5})
        assert [request.resume_from for request in proxy.engine.requests] == [None, None]
        await proxy.admin.close_session(handle.id)
    assert _num_parts(copy) == 0, "the session is over"


async def test_alternatives_are_not_kept_so_an_answer_with_them_begins_again(tmp_path: Path) -> None:
    wishes = {"logprobs": True, "top_logprobs": 2}
    handle, copy = await _killed_in_mid_answer(tmp_path, **wishes)
    async with _on(copy) as proxy:
        answer = (await proxy.post(handle, {**BODY, **wishes})).json()
        assert [request.resume_from for request in proxy.engine.requests] == [None]
        assert len(answer["choices"][0]["logprobs"]["content"]) > KEPT
        assert (await proxy.admin.close_session(handle.id)).audit.is_clean


async def test_a_damaged_part_is_not_gone_on_from(tmp_path: Path) -> None:
    handle, copy = await _killed_in_mid_answer(tmp_path)
    with sqlite3.connect(copy) as db:
        db.execute("UPDATE unfinished SET body = CAST(substr(body, 1, length(body) - 1) || x'00' AS BLOB)")
    async with _on(copy) as proxy:
        await proxy.post(handle, BODY)
        assert [request.resume_from for request in proxy.engine.requests] == [None]
        assert len(_spans(await proxy.admin.close_session(handle.id))) == 2, "both versions of the fake's whole answer"


async def test_an_engine_that_fails_in_mid_answer_goes_on_with_it_when_asked_again() -> None:
    async with serving(_script) as proxy:
        handle = await proxy.open()
        proxy.engine.keeps, proxy.engine.failure = KEPT, EngineUnavailable("no replica is left")
        assert (await proxy.post(handle, BODY)).status_code == 503
        proxy.engine.failure = None
        assert (await proxy.post(handle, BODY)).status_code == 200
        earlier = proxy.engine.requests[-1].resume_from
        assert earlier is not None
        assert len(earlier.token_ids) == KEPT
        assert len(_spans(await proxy.admin.close_session(handle.id))) == 2


async def test_a_second_sample_asked_for_meanwhile_is_one_of_its_own() -> None:
    async with serving(_script) as proxy:
        handle = await proxy.open()
        proxy.engine.keeps, proxy.engine.delay_s = KEPT, 600.0
        first = asyncio.create_task(proxy.post(handle, BODY))
        await proxy.engine.started.wait()
        proxy.engine.delay_s = 0.0
        other = await proxy.post(handle, BODY, **{"x-stainless-retry-count": "0"})
        assert other.status_code == 200
        assert [request.resume_from for request in proxy.engine.requests] == [None, None]
        assert len({request.request_id for request in proxy.engine.requests}) == 2
        first.cancel()


class _NoRoomForParts(SqliteJournal):
    def _queue(self, statements: list[Any]) -> asyncio.Future[None]:
        is_part = "INTO unfinished" in statements[0][0]
        return super()._queue([("INSERT INTO nowhere VALUES (1)", ())] if is_part else statements)


async def test_a_part_that_cannot_be_written_costs_a_line_in_the_log_and_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = _NoRoomForParts(tmp_path / "j.sqlite")
    async with serving(_script, journal=journal, delay_s=0.1) as proxy:
        handle = await proxy.open()
        proxy.engine.keeps = KEPT
        assert (await proxy.post(handle, BODY)).status_code == 200
        assert (await proxy.admin.close_session(handle.id)).audit.is_clean
    await journal.close()
    assert "an answer is begun again" in caplog.text
