"""Agents die with their rollout worker; those that make the attempts again are given the same answers."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from seamless_verl.proxy.client import SessionHandle, SessionResult
from seamless_verl.proxy.journal.kept_sessions import KeepingJournal
from seamless_verl.proxy.journal.left_sessions import LEFT, LeftSessions, leave
from seamless_verl.proxy.session.store import SessionStore
from tests.fakes import Served, serving

KEPT_TOKENS = 4
SPEC: dict[str, Any] = {"group": "prompt-1", "index": 2, "metadata": {"task": "one"}}


def _script(prompt: str) -> str:
    return f"the quick brown fox says {prompt.count('<|im_end|>')}"


@asynccontextmanager
async def _worker(folder: Path, began: float) -> AsyncIterator[Served]:
    """A proxy as it is beside a rollout worker; entered again with the same ``began``, it is the same worker's."""
    path = folder / "journal.sqlite"
    journal, store = KeepingJournal(path, max_bytes=1 << 20), SessionStore()
    journal.earlier = LeftSessions(path, before=began).of
    journal.resume(store)
    async with serving(_script, journal=journal, sessions=store) as proxy:
        yield proxy
    await journal.close()


async def _asks(
    proxy: Served, session: SessionHandle, tools: Sequence[str], said: list[Any] | None = None
) -> list[str]:
    """The agent: what its tools say is what it asks next, after what was ``said``. Returns its answers."""
    said = [] if said is None else said
    answers = []
    for told in tools:
        said.append({"role": "user", "content": told})
        answer = (await proxy.post(session, {"model": "m", "messages": said})).json()
        answers.append(answer["choices"][0]["message"]["content"])
        said.append({"role": "assistant", "content": answers[-1]})
    return answers


async def _ends(proxy: Served, session: SessionHandle) -> SessionResult:
    result = await proxy.admin.close_session(session.id, 1.0)
    assert result.audit.is_clean
    return result


@pytest.fixture
async def dead(tmp_path: Path) -> Path:
    """The folder of a worker that died: one attempt of its group was over, the other was at its third answer."""
    folder, was = tmp_path / "worker_0", tmp_path / "was"
    was.mkdir()
    async with _worker(was, time.time()) as proxy:
        over = await proxy.open(**{**SPEC, "index": 1})
        await _asks(proxy, over, ["go", "on"])
        await _ends(proxy, over)
        await proxy.admin.delete_session(over.id)
        session = await proxy.open(**SPEC)
        said: list[Any] = []
        await _asks(proxy, session, ["do it", "tool says 1"], said)
        proxy.engine.keeps, proxy.engine.delay_s = KEPT_TOKENS, 600.0
        proxy.engine.started.clear()
        asking = asyncio.create_task(_asks(proxy, session, ["tool says 2"], said))
        await proxy.engine.started.wait()
        (left,) = proxy.deps.sessions
        await proxy.deps.journal.updated(left)  # written behind the part
        shutil.copytree(was, folder)  # what is on the disk at that moment
        asking.cancel()
    leave(folder / "journal.sqlite")
    return folder


async def test_the_same_requests_are_given_the_same_answers_and_the_unfinished_one_goes_on(dead: Path) -> None:
    async with _worker(dead, time.time()) as proxy:
        session = await proxy.open(**SPEC)
        answers = await _asks(proxy, session, ["do it", "tool says 1", "tool says 2", "tool says 3"])
        assert answers == [f"the quick brown fox says {number}" for number in (1, 3, 5, 7)]
        begun = [len(request.begun.token_ids) if request.begun else 0 for request in proxy.engine.requests]
        assert begun[2:] == [KEPT_TOKENS, 0], "what had not been begun is generated"
        assert [request.begun is not None and request.begun.finish_reason.value for request in proxy.engine.requests][
            :2
        ] == ["stop", "stop"], "whole answers: the engine makes no token of them"
        (row,) = (await _ends(proxy, session)).rows
        # The fake writes the rest of an answer that it goes on with under version 9.
        assert 9 in [span.version for span in row.version_spans]


async def test_an_attempt_that_was_over_is_found_as_well(dead: Path) -> None:
    async with _worker(dead, time.time()) as proxy:
        session = await proxy.open(**{**SPEC, "index": 1})
        await _asks(proxy, session, ["go", "on"])
        assert all(request.begun for request in proxy.engine.requests)
        assert len((await _ends(proxy, session)).rows) == 1


async def test_an_agent_whose_tools_say_otherwise_goes_its_own_way(dead: Path) -> None:
    async with _worker(dead, time.time()) as proxy:
        session = await proxy.open(**SPEC)
        await _asks(proxy, session, ["do it", "tool says 7", "tool says 2"])
        assert [request.begun is not None for request in proxy.engine.requests] == [True, False, False]
        (row,) = (await _ends(proxy, session)).rows
        assert "tool says 1" not in proxy.engine.tokenizer.decode(list(row.token_ids)), "what nobody asked for is gone"


@pytest.mark.parametrize(
    "other",
    [{"group": "prompt-2"}, {"index": 0}, {"max_turns": 3}, {"sampling": {"temperature": 0.5}}],
    ids=lambda other: next(iter(other)),
)
async def test_another_attempt_and_one_under_other_rules_are_given_nothing(dead: Path, other: dict[str, Any]) -> None:
    async with _worker(dead, time.time()) as proxy:
        await _asks(proxy, await proxy.open(**{**SPEC, **other}), ["do it"])
        assert [request.begun for request in proxy.engine.requests] == [None]


async def test_only_one_session_is_given_them(dead: Path) -> None:
    async with _worker(dead, time.time()) as proxy:
        for is_given in (True, False):
            await _asks(proxy, await proxy.open(**SPEC), ["do it"])
            assert (proxy.engine.requests[-1].begun is not None) == is_given


async def test_a_proxy_that_dies_in_between_goes_on_with_what_was_not_asked_for_yet(dead: Path) -> None:
    began = time.time()
    async with _worker(dead, began) as proxy:
        session = await proxy.open(**SPEC)
        await _asks(proxy, session, ["do it"])
    async with _worker(dead, began) as proxy:
        await _asks(proxy, session, ["do it", "tool says 1"])
        (second,) = proxy.engine.requests  # the first is in the journal
        assert second.begun is not None
        assert len((await _ends(proxy, session)).rows) == 1


async def test_what_a_process_itself_kept_is_not_given_to_its_later_sessions(dead: Path) -> None:
    async with _worker(dead, time.time()) as proxy:
        for _ in range(2):
            session = await proxy.open(**{**SPEC, "index": 5})
            await _asks(proxy, session, ["do it"])
            await _ends(proxy, session)
            await proxy.admin.delete_session(session.id)
        assert [request.begun for request in proxy.engine.requests] == [None, None]


@pytest.mark.parametrize("harm", ["damaged", "another format", "gone"])
async def test_what_cannot_be_read_is_generated_again(dead: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    left = dead / LEFT
    for end in ("-wal", "-shm"):
        left.with_name(f"{LEFT}{end}").unlink(missing_ok=True)
    if harm == "damaged":
        left.write_bytes(b"no database" * 100)
    elif harm == "another format":
        with closing(sqlite3.connect(left)) as db:
            db.execute("PRAGMA user_version = 1")
    else:
        left.unlink()
    async with _worker(dead, time.time()) as proxy:
        await _asks(proxy, await proxy.open(**SPEC), ["do it"])
        assert [request.begun for request in proxy.engine.requests] == [None]
    assert ("generated again" in caplog.text) == (harm != "gone")


def test_what_no_worker_left_is_no_trouble(tmp_path: Path) -> None:
    leave(tmp_path / "journal.sqlite")
    assert list(tmp_path.iterdir()) == []
