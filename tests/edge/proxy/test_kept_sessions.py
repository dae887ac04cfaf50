"""What a journal forgets is kept whole for who looks later, within its bound; and a proxy goes on where that fails."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest

from seamless_verl.proxy.client import ProxyAdmin
from seamless_verl.proxy.journal.kept_sessions import KEPT, KeepingJournal
from seamless_verl.proxy.journal.sqlite_journal import read_sessions, read_turns, restore
from seamless_verl.proxy.session import handover
from seamless_verl.proxy.session.sessions import SessionSpec
from seamless_verl.trajectory.rows import Row, build_rows
from tests.fakes import Served, serving


def _journal(folder: Path, max_bytes: int = 1 << 20) -> KeepingJournal:
    return KeepingJournal(folder / "journal.sqlite", max_bytes=max_bytes)


async def _attempt(proxy: Served, group: str, turns: int = 2) -> tuple[str, tuple[Row, ...]]:
    """A session from its opening until its rows were taken."""
    admin: ProxyAdmin = proxy.admin
    session = await admin.open_session(SessionSpec(group=group, index=3))
    said = [{"role": "user", "content": f"hi {group}"}]
    for _ in range(turns):
        answer = await proxy.http.post(
            "/v1/chat/completions",
            json={"model": "tiny", "messages": said},
            headers={"Authorization": f"Bearer {session.api_key}"},
        )
        said = [*said, answer.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
    result = await admin.close_session(session.id, 0.5, {})
    await admin.delete_session(session.id)  # what a client does with rows that have arrived
    return session.id, result.rows


def _names(folder: Path) -> list[str]:
    db = sqlite3.connect(folder / KEPT)
    try:
        return [name for (name,) in db.execute("SELECT id FROM kept ORDER BY number")]
    finally:
        db.close()


async def test_a_forgotten_session_is_kept_with_its_reward_and_the_same_rows(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    async with serving(journal=journal) as proxy:
        session_id, rows = await _attempt(proxy, "task")
        assert [found.id for found in journal.sessions()] == []
    db = sqlite3.connect(tmp_path / KEPT)
    (session,) = read_sessions(db)
    images, bodies = read_turns(db, session_id)
    answers = restore(session, bodies)
    db.close()
    await journal.close()

    assert (session.id, session.spec.group, session.spec.index, session.reward) == (session_id, "task", 3, 0.5)
    assert build_rows(session.tree) == rows
    assert [answer.message.content for answer in answers] == ["ok", "ok"]
    assert not images


async def test_the_oldest_leave_when_the_file_is_full(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    async with serving(journal=journal) as proxy:
        await _attempt(proxy, "one")
    await journal.close()
    db = sqlite3.connect(tmp_path / KEPT)
    (size,) = db.execute("SELECT num_bytes FROM kept").fetchone()
    db.close()

    journal = _journal(tmp_path, max_bytes=int(2.5 * size))  # the next process on the same file
    async with serving(journal=journal) as proxy:
        ids = [(await _attempt(proxy, str(number)))[0] for number in range(3)]
    await journal.close()
    assert _names(tmp_path) == ids[1:]


async def test_sessions_that_expired_are_kept_whole_however_many_look_for_them_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, forgotten = _journal(tmp_path), list[str]()
    forget = journal.forgotten

    async def told(session_id: str, summary: bytes) -> None:
        forgotten.append(session_id)
        await forget(session_id, summary)

    monkeypatch.setattr(journal, "forgotten", told)
    async with serving(journal=journal) as proxy:
        opened = [await proxy.open() for _ in range(40)]
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        for session in opened:
            assert (await proxy.post(session, body)).status_code == 200
        monkeypatch.setattr(handover, "time", SimpleNamespace(time=lambda: math.inf))
        ends = proxy.server._app.state.handover  # type: ignore[attr-defined]
        await asyncio.gather(*(ends.reap() for _ in range(8)))
    await journal.close()
    assert sorted(forgotten) == sorted(session.id for session in opened)
    with contextlib.closing(sqlite3.connect(tmp_path / KEPT)) as db:
        assert db.execute("SELECT count(*) FROM sessions").fetchone() == (40,)
        assert db.execute("SELECT count(*) FROM turns").fetchone() == (40,)


async def test_what_is_kept_stays_when_a_session_is_forgotten_twice(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    async with serving(journal=journal) as proxy:
        session_id, _ = await _attempt(proxy, "task")
        await journal.forgotten(session_id, b"")
    await journal.close()
    with contextlib.closing(sqlite3.connect(tmp_path / KEPT)) as db:
        assert db.execute("SELECT count(*) FROM turns").fetchone() == (2,)


async def test_a_file_that_cannot_be_used_costs_a_line_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / KEPT).write_bytes(b"no database" * 100)
    journal = _journal(tmp_path)
    async with serving(journal=journal) as proxy:
        _, rows = await _attempt(proxy, "task")
        assert len(rows) == 1
        assert journal.sessions() == []
    await journal.close()
    assert "not kept" in caplog.text
    assert "file is not a database" in caplog.text


async def test_a_file_that_fails_later_costs_a_line_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = _journal(tmp_path)
    async with serving(journal=journal) as proxy:
        await _attempt(proxy, "one")
        db = sqlite3.connect(tmp_path / KEPT)
        db.execute("DROP TABLE kept")
        db.close()
        for group in ("two", "three"):
            assert len((await _attempt(proxy, group))[1]) == 1
        assert journal.sessions() == []
    await journal.close()
    assert caplog.text.count("not kept") == 1
