"""``seamless-verl proxy`` over a server that speaks vLLM's wire; the server is the only part that is not real."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import re
import resource
import shutil
import sqlite3
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.traffic import model_folder
from seamless_verl.errors import ConfigError
from seamless_verl.proxy.client import ProxyRefused
from seamless_verl.proxy.deploy import standalone
from seamless_verl.proxy.deploy.standalone import StandaloneConfig, _sink
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.session.sessions import SessionSpec
from seamless_verl.proxy.text.tokenizer import FolderTokenizer
from tests.fakes import CHATML, small_tokenizer
from tests.standalone import KEY, Mock, Standalone, chat, refused, save_tokenizer

HI = [{"role": "user", "content": "hi"}]
ADMIN = {"authorization": f"Bearer {KEY}"}
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def mock(folder: Path) -> AsyncIterator[Mock]:
    server = Mock(folder)
    yield server
    server.stop()


async def _proxy(mock: Mock, scratch: Path, *options: str) -> Standalone:
    proxy = Standalone(scratch, await mock.start(), mock.folder, *options)
    await asyncio.to_thread(proxy.start)
    return proxy


async def test_it_records_a_session_to_the_folder_and_forgets_it(mock: Mock, tmp_path: Path) -> None:
    proxy = await _proxy(mock, tmp_path)
    admin = proxy.admin()
    try:
        assert KEY not in proxy.said
        handle = await admin.open_session(SessionSpec(group="g", index=3, metadata={"a": 1}))
        history = list(HI)
        for turn in range(3):
            if turn == 2:  # its user's trainer has loaded new weights
                assert (await admin.pause())["quiet"]
                await admin.resume(version=5)
            answer = await chat(proxy.url, handle.api_key, history)
            assert answer.status_code == 200, answer.text
            history += [answer.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
        result = await admin.close_session(handle.id, 0.5)
        assert result.audit.is_clean
    finally:
        await admin.close()
        assert proxy.stop() == 0
    (row,) = proxy.rows()
    assert (row["group"], row["index"], row["reward"], row["session"]) == ("g", 3, 0.5, handle.id)
    assert row["token_ids"] == list(result.rows[0].token_ids)
    assert row["mask"].count(1) == 3 * 256
    assert [version for _, _, version in row["version_spans"]] == [0, 0, 5]
    assert (proxy.record / "weight_version").read_text() == "5\n"
    database = sqlite3.connect(proxy.record / "journal.sqlite")
    assert database.execute("SELECT (SELECT count(*) FROM sessions), (SELECT count(*) FROM turns)").fetchone() == (0, 0)
    database.close()
    assert handle.api_key not in proxy.log.read_text()


def test_rows_as_parquet_are_refused_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    nobody: dict[str, Any] = {"engine": "", "model": "", "tokenizer": "", "host": "", "port": 0, "admin_key": ""}
    with pytest.raises(ConfigError, match="--rows=parquet: needs pyarrow"):
        _sink(StandaloneConfig(record=tmp_path, parquet=True, **nobody))


async def test_rows_as_parquet(mock: Mock, tmp_path: Path) -> None:
    import pyarrow.parquet

    proxy = await _proxy(mock, tmp_path, "--rows", "parquet")
    admin = proxy.admin()
    handle = await admin.open_session(SessionSpec(group="g"))
    assert (await chat(proxy.url, handle.api_key, HI)).status_code == 200
    result = await admin.close_session(handle.id, 1.0)
    await admin.close()
    assert proxy.stop() == 0
    (row,) = pyarrow.parquet.read_table(proxy.record / "rows" / f"{handle.id}.parquet").to_pylist()
    assert row["token_ids"] == list(result.rows[0].token_ids)
    assert row["log_probs"] == list(result.rows[0].log_probs)


async def test_sigterm_lets_answers_under_way_finish(mock: Mock, tmp_path: Path) -> None:
    proxy = await _proxy(mock, tmp_path)
    admin = proxy.admin()
    handle = await admin.open_session(SessionSpec())
    mock.latency_s = 3.0
    asking = asyncio.create_task(chat(proxy.url, handle.api_key, HI))
    async with httpx.AsyncClient(base_url=proxy.url, trust_env=False) as http:
        while b"seamless_proxy_in_flight 1.0" not in (await http.get("/metrics")).content:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
    stopping = asyncio.create_task(asyncio.to_thread(proxy.stop))
    assert (await asking).status_code == 200
    assert await stopping == 0
    await asyncio.to_thread(proxy.start)
    assert "1 sessions found" in proxy.said
    after = proxy.admin()
    result = await after.close_session(handle.id)
    assert result.audit.num_generations == 1
    await after.close()
    await admin.close()
    proxy.stop()


async def test_a_session_closed_but_not_written_is_finished_after_a_restart(mock: Mock, tmp_path: Path) -> None:
    """The process dies between the note that a session is closed and its rows."""
    proxy = await _proxy(mock, tmp_path)
    admin = proxy.admin()
    handle = await admin.open_session(SessionSpec(group="g"))
    assert (await chat(proxy.url, handle.api_key, HI)).status_code == 200
    proxy.kill()
    database = sqlite3.connect(proxy.record / "journal.sqlite")
    database.execute("UPDATE sessions SET state = 'closed', rewards = '[0.25, {}]'")
    database.commit()
    database.close()
    await asyncio.to_thread(proxy.start)
    async with httpx.AsyncClient(base_url=proxy.url, trust_env=False) as http:
        while (await http.get("/healthz")).json()["sessions"]:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
    proxy.stop()
    (row,) = proxy.rows()
    assert (row["group"], row["reward"], row["mask"].count(1)) == ("g", 0.25, 256)
    await admin.close()


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
async def test_a_close_that_is_repeated_after_a_kill_gets_the_same_rows(mock: Mock, tmp_path: Path, form: str) -> None:
    """The rows were written and the session forgotten, but the process died before its opener heard of it."""
    proxy = await _proxy(mock, tmp_path, "--rows", form)
    admin = proxy.admin()
    handle, empty, unwanted = [await admin.open_session(SessionSpec(group="g", metadata={"a": "é"})) for _ in range(3)]
    assert (await chat(proxy.url, handle.api_key, HI)).status_code == 200
    outcome = {"reward": 0.5, "rewards": {"style": 0.25}}
    async with httpx.AsyncClient(base_url=proxy.url, trust_env=False, headers=ADMIN) as http:
        told = [(await http.post(f"/sessions/{one.id}/close", json=outcome)).json() for one in (handle, empty)]
        await admin.delete_session(unwanted.id)
        proxy.kill()
        files = {path.name: path.read_bytes() for path in (proxy.record / "rows").iterdir()}
        await asyncio.to_thread(proxy.start)
        again = [(await http.post(f"/sessions/{one.id}/close", json=outcome)).json() for one in (handle, empty)]
        assert again == told
        assert [len(result["rows"]) for result in again] == [1, 0]
        assert (again[0]["reward"], again[0]["metadata"]) == (0.5, {"a": "é"})
        assert {path.name: path.read_bytes() for path in (proxy.record / "rows").iterdir()} == files
        assert (await http.delete(f"/sessions/{handle.id}")).status_code == 204
        for path in (f"{handle.id}/reward", f"{unwanted.id}/close"):
            refused = await http.post(f"/sessions/{path}", json=outcome)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_closed")
    late = await chat(proxy.url, handle.api_key, HI)
    assert (late.status_code, late.json()["error"]["code"]) == (409, "session_closed")
    for path in (proxy.record / "rows").iterdir():
        path.unlink()  # its user took them away
    with pytest.raises(ProxyRefused, match="409 session_closed"):
        await admin.close_session(handle.id)
    await admin.close()
    proxy.stop()


async def test_a_damaged_turn_is_named_and_the_earlier_ones_are_kept(mock: Mock, tmp_path: Path) -> None:
    proxy = await _proxy(mock, tmp_path)
    admin = proxy.admin()
    handle, other = [await admin.open_session(SessionSpec()) for _ in range(2)]
    history = list(HI)
    for _ in range(2):
        answer = await chat(proxy.url, handle.api_key, history)
        history += [answer.json()["choices"][0]["message"], *HI]
    assert (await chat(proxy.url, other.api_key, HI)).status_code == 200
    proxy.kill()
    database = sqlite3.connect(proxy.record / "journal.sqlite")
    (body,) = database.execute("SELECT body FROM turns WHERE number = 2").fetchone()
    broken = body[:200] + bytes([body[200] ^ 1]) + body[201:]
    database.execute("UPDATE turns SET body = ? WHERE number = 2", (broken,))
    database.commit()
    database.close()
    await asyncio.to_thread(proxy.start)
    answer = await chat(proxy.url, handle.api_key, history)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_damaged")
    assert "turn 1 of 2" in answer.json()["error"]["message"]
    assert (await chat(proxy.url, other.api_key, HI)).status_code == 200
    result = await admin.close_session(handle.id)
    assert result.audit.is_clean
    assert [len(row.turns) for row in result.rows] == [1]
    await admin.close()
    proxy.stop()


async def test_a_full_disk_keeps_the_answer_back_and_the_earlier_data_intact(mock: Mock, tmp_path: Path) -> None:
    """A real limit of the kernel on what the process may write, below what the journal grows to."""
    proxy = Standalone(tmp_path, await mock.start(), mock.folder)
    limit = 600_000
    await asyncio.to_thread(proxy.start, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    admin = proxy.admin()
    handle = await admin.open_session(SessionSpec())
    given = 0
    for number in range(60):
        answer = await chat(proxy.url, handle.api_key, [{"role": "user", "content": f"{number} " + "word " * 4000}])
        if answer.status_code != 200:
            break
        given += 1
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "journal_failed"), answer.text
    assert any(word in answer.json()["error"]["message"] for word in ("full", "disk I/O"))
    assert given > 2
    proxy.kill()
    await asyncio.to_thread(proxy.start)
    result = await admin.close_session(handle.id)
    assert result.audit.is_clean
    assert result.audit.num_generations == given
    await admin.close()
    proxy.stop()


async def test_rows_that_cannot_be_written_are_kept(mock: Mock, tmp_path: Path) -> None:
    proxy = await _proxy(mock, tmp_path)
    admin = proxy.admin()
    handle = await admin.open_session(SessionSpec())
    assert (await chat(proxy.url, handle.api_key, HI)).status_code == 200
    rows = proxy.record / "rows"
    rows.rename(proxy.record / "away")
    with pytest.raises(ProxyRefused, match="503 record_failed"):
        await admin.close_session(handle.id, 1.0)
    (proxy.record / "away").rename(rows)
    assert (await admin.close_session(handle.id)).reward == 1.0
    assert len(proxy.rows()) == 1
    await admin.close()
    proxy.stop()


async def test_a_proxy_that_was_killed_while_paused_waits_for_the_resume(mock: Mock, tmp_path: Path) -> None:
    proxy = await _proxy(mock, tmp_path)
    admin = proxy.admin()
    handle = await admin.open_session(SessionSpec())
    await admin.pause()
    proxy.kill()
    mock.latency_s = 100.0  # vLLM is paused, too: requests wait there
    starting = asyncio.create_task(asyncio.to_thread(proxy.start))
    while "is it paused, too" not in proxy.log.read_text():
        assert not starting.done(), proxy.log.read_text()
        await asyncio.sleep(0.1)
    mock.latency_s = 0.0
    await starting
    assert "wait for POST /resume" in proxy.log.read_text()
    asking = asyncio.create_task(chat(proxy.url, handle.api_key, HI))
    await asyncio.wait({asking}, timeout=1.0)
    assert not asking.done()
    await admin.resume(version=8)
    assert (await asking).status_code == 200
    (row,) = (await admin.close_session(handle.id)).rows
    assert [span.version for span in row.version_spans] == [8]
    assert not (proxy.record / "paused").exists()
    await admin.close()
    assert proxy.stop() == 0


async def test_open_sessions_are_not_continued_with_the_ids_of_another_tokenizer(mock: Mock, tmp_path: Path) -> None:
    proxy = await _proxy(mock, tmp_path)
    admin = proxy.admin()
    handle = await admin.open_session(SessionSpec())
    assert proxy.stop() == 0
    other = save_tokenizer(tmp_path / "other", small_tokenizer(CHATML))
    options = [*proxy.command[proxy.command.index("proxy") + 1 :], "--tokenizer", str(other)]
    assert "holds 1 open sessions of another tokenizer" in await asyncio.to_thread(refused, tmp_path, *options)
    again = shutil.copytree(mock.folder, tmp_path / "again")  # as save_pretrained leaves it after a call that truncates
    tokenizer = FolderTokenizer(again).backend_tokenizer
    tokenizer.enable_truncation(8)
    tokenizer.save(str(again / "tokenizer.json"))
    proxy.command += ["--tokenizer", str(again)]
    await asyncio.to_thread(proxy.start)
    await admin.close_session(handle.id)
    assert proxy.stop() == 0
    await admin.close()


def test_a_note_of_the_tokenizers_file_is_none_of_its_ids(mock: Mock, tmp_path: Path) -> None:
    nobody: dict[str, Any] = {"engine": "", "model": "", "tokenizer": "", "host": "", "port": 0, "admin_key": ""}
    digest = hashlib.sha256((mock.folder / "tokenizer.json").read_bytes()).hexdigest()
    (tmp_path / "tokenizer").write_text(digest)  # as a proxy of 29 November 2026 left it
    standalone._check_ids(StandaloneConfig(record=tmp_path, **nobody), FolderTokenizer(mock.folder), 1)


async def test_two_processes_do_not_share_a_folder(mock: Mock, tmp_path: Path) -> None:
    proxy = await _proxy(mock, tmp_path)
    options = proxy.command[proxy.command.index("proxy") + 1 :]
    options[options.index("--port") + 1] = "0"
    assert "another process records there" in await asyncio.to_thread(refused, tmp_path, *options)
    proxy.stop()


def test_a_disk_without_locks_is_told_from_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(ConfigError, match="cannot be locked: .*No locks available.*this node's own disk"):
        standalone._lock(tmp_path)


async def test_bad_options_are_named(mock: Mock, tmp_path: Path) -> None:
    url, folder = await mock.start(), str(mock.folder)
    good = ["--engine", url, "--model", folder, "--served-model", "mock"]
    empty = tmp_path / "empty"
    empty.mkdir()
    cases = {
        "--engine=http://127.0.0.1:1": ["--engine", "http://127.0.0.1:1", "--model", folder],
        "--engine=nowhere": ["--engine", "nowhere", "--model", folder],
        "Fix: --served-model mock": ["--engine", url, "--model", folder],
        "no such folder": [*good, "--tokenizer", "no/such/folder/here"],
        "cannot be read": [*good, "--tokenizer", str(empty)],
        "did you mean max_in_flight": [*good, "--limit", "max_inflight=3"],
        "needs a number": [*good, "--limit", "max_in_flight=many"],
        "cannot listen": [*good, "--port", "70000"],
        "--record=/proc/none": [*good, "--record", "/proc/none"],
        "--engine-key-file": [*good, "--engine-key-file", "no-such-file"],
    }
    for story, arguments in cases.items():
        assert story in await asyncio.to_thread(refused, tmp_path, *arguments)


@pytest.mark.parametrize(
    "template", [CHATML, "{{ bos_token or 'none' }}{% for m in messages %}{{ m.content }}\n{% endfor %}"]
)
def test_the_folders_tokenizer_is_transformers_own(tmp_path: Path, template: str) -> None:
    from transformers import AutoTokenizer  # brings torch, which no other test of the proxy needs

    folder = save_tokenizer(tmp_path / "m", small_tokenizer(template))
    ours, theirs = FolderTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "é & <b>"}, {"role": "user", "content": " 'quoted'\n\n"}]
    tools = [{"type": "function", "function": {"name": "t", "description": "a > b é"}}]
    for offered in (None, tools):
        text = ours.apply_chat_template(messages, tools=offered, tokenize=False, add_generation_prompt=True)
        assert text == theirs.apply_chat_template(messages, tools=offered, tokenize=False, add_generation_prompt=True)
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids)
    assert (len(ours), ours.eos_token_id) == (len(theirs), theirs.eos_token_id)


async def test_the_help_teaches_and_names_every_limit() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-OO", "-m", "seamless_verl.cli", "proxy", "--help", stdout=asyncio.subprocess.PIPE
    )
    text = (await process.communicate())[0].decode()
    assert process.returncode == 0
    for word in ("vllm serve", "OPENAI_BASE_URL", "journal.sqlite", "max_in_flight", "--durable"):
        assert word in text
    for name, default in asdict(Limits()).items():
        assert re.search(rf"^  {name}: \w.* Default: {re.escape(str(default))}$", text, re.MULTILINE), name
