"""Kill the process that serves; start another one on the same file; go on as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.proxy.client import ProxyAdmin, ProxyRefused
from seamless_verl.proxy.journal.sqlite_journal import SqliteJournal
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.session.handover import FolderSink
from seamless_verl.proxy.session.sessions import Session, SessionSpec
from seamless_verl.proxy.session.store import SessionStore
from seamless_verl.proxy.text.parsing import TagParser
from tests.fakes import serving

HI: list[Any] = [{"role": "user", "content": "hi"}]


def _words(prompt: str) -> str:
    return f"answer {prompt.count('<|im_end|>')}"


async def _serve(path: Path, port: int) -> None:
    """What the killed process runs: a real proxy on a fixed port, with its journal."""
    from seamless_verl.proxy.deploy.http_server import ProxyServer
    from seamless_verl.proxy.http.app import ProxyDeps, make_app
    from seamless_verl.proxy.text.chat_template import TokenizerRenderer
    from tests.fakes import ScriptedEngine, small_tokenizer

    tokenizer = small_tokenizer()
    renderer = TokenizerRenderer(tokenizer)
    journal = SqliteJournal(path)
    store = SessionStore()
    for session in journal.sessions():
        store.adopt(session)
    engine = ScriptedEngine(tokenizer, _words, delay_s=0.003, num_versions=2)
    deps = ProxyDeps(
        engine=engine,
        renderer=renderer,
        admin_key="admin-key",
        model="m",
        journal=journal,
        sessions=store,
    )
    await ProxyServer(make_app(deps), port=port).start()
    await asyncio.Event().wait()


def _start(path: Path, port: int) -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[3]
    return subprocess.Popen([sys.executable, "-m", "tests.edge.proxy.test_journal", str(path), str(port)], cwd=root)


async def _until_up(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        for _ in range(600):
            try:
                await http.get(f"{url}/healthz")
                return
            except httpx.TransportError:
                await asyncio.sleep(0.05)
    raise AssertionError("the proxy did not come up")


@pytest.mark.timeout(180)
async def test_kill_nine_under_load_loses_and_doubles_nothing(tmp_path: Path, unused_tcp_port: int) -> None:
    path, url = tmp_path / "journal.sqlite", f"http://127.0.0.1:{unused_tcp_port}"
    process = _start(path, unused_tcp_port)
    admin = ProxyAdmin(url, "admin-key")
    try:
        await _until_up(url)
        handles = [await admin.open_session(SessionSpec(group=str(number))) for number in range(8)]
        histories: list[list[Any]] = [list(HI) for _ in handles]

        async def talk(number: int) -> None:
            auth = {"authorization": f"Bearer {handles[number].api_key}"}
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=10, headers=auth) as http:
                while True:
                    body = {"model": "m", "messages": histories[number]}
                    try:
                        answer = await http.post("/v1/chat/completions", json=body)
                    except httpx.TransportError:
                        return  # the same request is the next one sent, as any client would
                    message = answer.json()["choices"][0]["message"]
                    histories[number] += [{"role": "assistant", "content": message["content"]}, *HI]

        for pause_s in (0.4, 0.55, 0.7):
            talks = [asyncio.create_task(talk(number)) for number in range(len(handles))]
            await asyncio.sleep(pause_s)
            process.send_signal(signal.SIGKILL)
            process.wait()
            await asyncio.gather(*talks)
            process = _start(path, unused_tcp_port)
            await _until_up(url)
        for handle, history in zip(handles, histories, strict=True):
            auth = {"authorization": f"Bearer {handle.api_key}"}
            async with httpx.AsyncClient(base_url=url, trust_env=False, headers=auth) as http:
                last = await http.post("/v1/chat/completions", json={"model": "m", "messages": history})
            assert last.headers["x-seamless-match"] == "clean"
            result = await admin.close_session(handle.id)
            assert result.audit.is_clean
            (row,) = result.rows  # an answer generated twice would be a branch
            assert len(row.turns) == len(history) // 2 + 1
    finally:
        await admin.close()
        process.kill()
        process.wait()


async def test_a_restored_session_continues_bit_exact(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "j.sqlite")
    async with serving(_words, journal=journal) as proxy:
        handle = await proxy.open(group="g", sampling={"temperature": 0.5}, metadata={"a": [1]})
        first = (await proxy.post(handle, {"model": "m", "messages": HI})).json()["choices"][0]["message"]
        (before,) = proxy.deps.sessions
        closed = await proxy.open()
        await proxy.post(closed, {"model": "m", "messages": HI})
        await proxy.admin.close_session(closed.id)
    await journal.close()
    journal = SqliteJournal(tmp_path / "j.sqlite")
    (restored,) = journal.sessions()
    assert (restored.id, restored.key_digest, restored.deadline) == (handle.id, before.key_digest, before.deadline)
    assert restored.spec == before.spec
    store = SessionStore()
    store.adopt(restored)
    async with serving(_words, journal=journal, sessions=store) as proxy:
        history = [*HI, {"role": "assistant", "content": first["content"]}, *HI]
        assert (await proxy.admin.view_session(handle.id))["generated_tokens"] == before.num_generated
        answer = await proxy.post(handle, {"model": "m", "messages": history})
        assert answer.headers["x-seamless-match"] == "clean"
        result = await proxy.admin.close_session(handle.id)
        assert result.audit.is_clean
        assert result.audit.num_generations == 2
        assert len(result.rows) == 1
    assert journal.sessions() == []
    await journal.close()


async def test_an_answer_that_died_on_the_way_is_given_again(tmp_path: Path) -> None:
    call = '<think>\nsince\n</think>\n\nlook <tool_call>{"name": "run", "arguments": {"a": "é"}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "run"}}]
    body = {"model": "m", "messages": HI, "tools": tools, "logprobs": True, "temperature": 0.3}
    journal = SqliteJournal(tmp_path / "j.sqlite")
    options: dict[str, Any] = {"parser": TagParser(("<think>", "</think>"))}
    async with serving(lambda prompt: call, journal=journal, **options) as proxy:
        handle = await proxy.open(sampling={"temperature": 1.0})
        first = await proxy.post(handle, body)
    await journal.close()
    journal, store = SqliteJournal(tmp_path / "j.sqlite"), SessionStore()
    for session in journal.sessions():
        store.adopt(session)
    async with serving(lambda prompt: "another answer", journal=journal, sessions=store, **options) as proxy:
        again = await proxy.post(handle, body)
        assert again.content == first.content
        assert again.headers["x-seamless-overrides"] == first.headers["x-seamless-overrides"] == "temperature=1.0"
        assert proxy.engine.requests == []
    await journal.close()


async def test_an_answer_that_was_continued_after_a_restart_is_not_given_again(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "j.sqlite")
    async with serving(_words, journal=journal) as proxy:
        handle = await proxy.open()
        first = (await proxy.post(handle, {"model": "m", "messages": HI})).json()["choices"][0]["message"]
    await journal.close()
    journal, store = SqliteJournal(tmp_path / "j.sqlite"), SessionStore()
    for session in journal.sessions():
        store.adopt(session)
    async with serving(_words, journal=journal, sessions=store) as proxy:
        assert (await proxy.post(handle, {"model": "m", "messages": [*HI, first, *HI]})).status_code == 200
        again = await proxy.post(handle, {"model": "m", "messages": HI})  # the agent starts over
        assert again.headers["x-seamless-match"] == "fork"
        assert len(proxy.engine.requests) == 2
        assert (await proxy.admin.close_session(handle.id)).audit.num_generations == 3
    await journal.close()


async def test_a_journal_that_cannot_be_written_keeps_the_answer_back(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    journal = SqliteJournal(path)
    async with serving(_words, journal=journal) as proxy:
        handle = await proxy.open()
        assert (await proxy.post(handle, {"model": "m", "messages": HI})).status_code == 200
        pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
        journal._db.execute(f"PRAGMA max_page_count = {pages}")  # the disk is full
        story = {"model": "m", "messages": [{"role": "user", "content": "x" * 40_000}]}
        answer = await proxy.post(handle, story)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "journal_failed")
        assert "full" in answer.json()["error"]["message"]
        assert len((await proxy.admin.view_session(handle.id))["turns"]) == 1
        journal._db.execute("PRAGMA max_page_count = 1000000")
        assert (await proxy.post(handle, story)).status_code == 200
        assert (await proxy.admin.close_session(handle.id)).audit.is_clean
    await journal.close()


async def test_rows_that_could_not_be_written_outlive_the_time_of_their_session(tmp_path: Path) -> None:
    journal, sink = SqliteJournal(tmp_path / "journal.sqlite"), FolderSink(tmp_path)
    async with serving(limits=Limits(expired_grace_s=0.0), journal=journal, sink=sink) as proxy:
        handle = await proxy.open()
        assert (await proxy.post(handle, {"model": "m", "messages": HI})).status_code == 200
        (tmp_path / "rows").rename(tmp_path / "away")
        with pytest.raises(ProxyRefused, match="They are kept"):
            await proxy.admin.close_session(handle.id, 1.0)
        proxy.deps.sessions.by_id(handle.id).deadline = 0.0
        await proxy.open()  # which looks for sessions whose time is over
        (tmp_path / "away").rename(tmp_path / "rows")
        await proxy.open()
        assert (tmp_path / "rows" / f"{handle.id}.jsonl").exists()
        result = await proxy.admin.close_session(handle.id)
        assert (result.reward, len(result.rows)) == (1.0, 1)
    await journal.close()


async def test_rows_that_nobody_can_write_keep_no_session_from_being_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, sink, written = SqliteJournal(tmp_path / "journal.sqlite"), FolderSink(tmp_path), list[str]()

    def write(session: Session, *_: object) -> None:
        written.append(session.id)
        raise ValueError("half a character")

    monkeypatch.setattr(sink, "write", write)
    admin = {"authorization": "Bearer admin-key"}
    async with serving(limits=Limits(expired_grace_s=0.0), journal=journal, sink=sink) as proxy:
        left = [(await proxy.open()).id for _ in range(3)]
        for name in left:
            assert (await proxy.http.post(f"/sessions/{name}/close", headers=admin)).status_code == 500
            proxy.deps.sessions.by_id(name).deadline = 0.0
        written.clear()
        for _ in left:
            await proxy.open()  # tries one of them, in turn
        assert written == left
        assert all(proxy.deps.sessions.by_id(name) for name in left)
        await proxy.server._app.state.handover.resume()  # type: ignore[attr-defined]
        assert written == left * 2
    await journal.close()


def test_a_file_that_is_no_journal_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but long enough to look at" * 40)
    with pytest.raises(ConfigError, match=r"proxy\.journal=.*notes\.txt: cannot be used as a journal"):
        SqliteJournal(path)
    with pytest.raises(ConfigError, match="cannot be used"):
        SqliteJournal(tmp_path / "no" / "such" / "folder")
    newer = tmp_path / "newer.sqlite"
    db = sqlite3.connect(newer)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConfigError, match="format 99"):
        SqliteJournal(newer)


def test_a_journal_without_a_write_ahead_log_is_refused() -> None:
    """As SQLite answers where it cannot keep one, e.g. in memory."""
    with pytest.raises(ConfigError, match="no write-ahead log can be kept there .journal_mode is memory"):
        SqliteJournal(Path(":memory:"))


if __name__ == "__main__":
    os.umask(0o077)
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2])))
