"""Agents die with their rollout worker; those that make the attempts again are given the same answers."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from seamless_verl.proxy.client import SessionHandle
from seamless_verl.proxy.journal.kept_sessions import KeepingJournal
from seamless_verl.proxy.journal.left_sessions import LEFT, LeftSessions, make_way
from seamless_verl.proxy.session.store import SessionStore
from seamless_verl.trajectory.rows import Row
from tests.fakes import Served, serving

KEPT_TOKENS = 4
SPEC: dict[str, Any] = {"group": "prompt-1", "index": 2, "metadata": {"task": "one", "reserved": 3}}


def _dead_says(prompt: str) -> str:
    return f"the quick brown fox says {prompt.count('<|im_end|>')}"


def _heir_says(prompt: str) -> str:
    """Another sample of the same length, so that an unfinished answer's rest may be taken from it."""
    return _dead_says(prompt).replace("quick brown", "other fine")


@asynccontextmanager
async def _worker(folder: Path, script: Callable[[str], str] = _heir_says) -> AsyncIterator[Served]:
    """A proxy as it is beside a rollout worker; entered again on the same folder, it is the same worker's."""
    path = folder / "journal.sqlite"
    journal, store = KeepingJournal(path, max_bytes=1 << 20), SessionStore()
    journal.earlier = LeftSessions(path).of
    journal.resume(store)
    async with serving(script, journal=journal, sessions=store) as proxy:
        yield proxy
    await journal.close()


async def _asks(
    proxy: Served, session: SessionHandle, tools: Sequence[str], said: list[Any] | None = None, **wishes: Any
) -> list[str]:
    """The agent: what its tools say is what it asks next, after what was ``said``. Returns its answers."""
    said = [] if said is None else said
    answers = []
    for told in tools:
        said.append({"role": "user", "content": told})
        answer = (await proxy.post(session, {"model": "m", "messages": said, **wishes})).json()
        answers.append(answer["choices"][0]["message"]["content"])
        said.append({"role": "assistant", "content": answers[-1]})
    return answers


def _begun(proxy: Served) -> list[tuple[int, str]]:
    """With how many tokens the engine was asked to begin, and why they end."""
    begun = [request.begun for request in proxy.engine.requests]
    return [(len(one.token_ids), one.finish_reason.value) if one else (0, "") for one in begun]


async def _rows(proxy: Served, session: SessionHandle) -> tuple[Row, ...]:
    result = await proxy.admin.close_session(session.id, 1.0)
    assert result.audit.is_clean
    await proxy.admin.delete_session(session.id)
    return result.rows


@dataclass
class Dead:
    """A worker that died while it had an attempt at its third answer; another attempt of the group was over.

    Attributes:
        over: rows of that one.
        given_up: index of an attempt that was begun anew and had not begun again.
    """

    folder: Path
    over: tuple[Row, ...] = ()
    given_up: int = 7


@pytest.fixture
async def dead(tmp_path: Path) -> Dead:
    found, was = Dead(tmp_path / "worker_0"), tmp_path / "was"
    was.mkdir()
    make_way(was / "journal.sqlite", "life 1", is_successor=False)
    async with _worker(was, _dead_says) as proxy:
        over = await proxy.open(**{**SPEC, "index": 1})
        await _asks(proxy, over, ["go", "on"])
        found.over = await _rows(proxy, over)
        both = await proxy.open(**{**SPEC, "index": 4})
        await _asks(proxy, both, ["do it"], n=2)
        await _rows(proxy, both)
        rows_not_taken = await proxy.open(**{**SPEC, "index": 3})
        await _asks(proxy, rows_not_taken, ["go"])
        await proxy.admin.close_session(rows_not_taken.id, 1.0)
        given_up = await proxy.open(**{**SPEC, "index": found.given_up})
        await _asks(proxy, given_up, ["do it"])
        await proxy.admin.delete_session(given_up.id)
        session = await proxy.open(**SPEC)
        said: list[Any] = []
        await _asks(proxy, session, ["do it"], said)
        await _asks(proxy, session, ["tool says 1"], said, max_tokens=KEPT_TOKENS)
        proxy.engine.keeps, proxy.engine.delay_s = KEPT_TOKENS, 600.0
        proxy.engine.started.clear()
        asking = asyncio.create_task(_asks(proxy, session, ["tool says 2"], said))
        await proxy.engine.started.wait()
        left = proxy.deps.sessions.by_id(session.id)
        await proxy.deps.journal.updated(left)  # written behind the part
        shutil.copytree(was, found.folder)  # what is on the disk at that moment
        asking.cancel()
    make_way(found.folder / "journal.sqlite", "life 1", is_successor=True)
    return found


async def _asks_as_the_dead_did(proxy: Served, session: SessionHandle) -> list[str]:
    said: list[Any] = []
    first = await _asks(proxy, session, ["do it"], said)
    second = await _asks(proxy, session, ["tool says 1"], said, max_tokens=KEPT_TOKENS)
    return [*first, *second, *await _asks(proxy, session, ["tool says 2", "tool says 3"], said)]


async def test_the_same_requests_are_given_the_same_answers_and_the_unfinished_one_goes_on(dead: Dead) -> None:
    async with _worker(dead.folder) as proxy:
        session = await proxy.open(**SPEC)
        whole, cut, unfinished, new = await _asks_as_the_dead_did(proxy, session)
        assert whole == "the quick brown fox says 1"
        assert whole.startswith(cut), "it ended by its length"
        assert unfinished.startswith("the quick"), "the dead agent's beginning"
        assert new == "the other fine fox says 7"
        ends = [(KEPT_TOKENS, "length"), (KEPT_TOKENS, "aborted"), (0, "")]
        assert _begun(proxy)[1:] == ends, "what had not been begun is generated"
        assert _begun(proxy)[0][1] == "stop", "a whole answer: the engine makes no token of it"
        (row,) = await _rows(proxy, session)
        # The fake writes the rest of an answer that it goes on with under version 9.
        assert 9 in [span.version for span in row.version_spans]


async def test_an_attempt_that_was_over_gets_the_same_row(dead: Dead) -> None:
    async with _worker(dead.folder) as proxy:
        session = await proxy.open(**{**SPEC, "index": 1})
        await _asks(proxy, session, ["go", "on"])
        (row,), (was,) = await _rows(proxy, session), dead.over
        assert (list(row.token_ids), row.version_spans) == (list(was.token_ids), was.version_spans)
        assert list(row.log_probs) == list(was.log_probs)
        assert [why for _, why in _begun(proxy)] == ["stop", "stop"]


async def test_an_attempt_whose_rows_nobody_had_taken_yet_is_found_too(dead: Dead) -> None:
    async with _worker(dead.folder) as proxy:
        await _asks(proxy, await proxy.open(**{**SPEC, "index": 3}), ["go"])
        assert [why for _, why in _begun(proxy)] == ["stop"]


async def test_each_sample_of_a_request_is_given_again_in_its_place(dead: Dead) -> None:
    async with _worker(dead.folder) as proxy:
        session = await proxy.open(**{**SPEC, "index": 4})
        await _asks(proxy, session, ["do it"], n=2)
        assert [why for _, why in _begun(proxy)] == ["stop", "stop"]
        one, other = (request.request_id for request in proxy.engine.requests)
        assert one != other
        await _asks(proxy, session, ["do it"], n=2)  # delivered, so these are two further samples
        assert [why for _, why in _begun(proxy)][2:] == ["", ""]
        assert len(await _rows(proxy, session)) == 4


async def test_an_agent_whose_tools_say_otherwise_goes_its_own_way(dead: Dead) -> None:
    async with _worker(dead.folder) as proxy:
        session = await proxy.open(**SPEC)
        await _asks(proxy, session, ["do it", "tool says 7", "tool says 2"])
        assert [why for _, why in _begun(proxy)] == ["stop", "", ""]
        assert len(await _rows(proxy, session)) == 1, "what nobody asked for again is in none"


@pytest.mark.parametrize(
    "other",
    [{"group": "prompt-2"}, {"index": 0}, {"max_turns": 3}, {"metadata": {"task": "one", "reserved": 4}}],
    ids=lambda other: next(iter(other)),
)
async def test_another_attempt_and_one_under_another_reservation_are_given_nothing(
    dead: Dead, other: dict[str, Any]
) -> None:
    async with _worker(dead.folder) as proxy:
        await _asks(proxy, await proxy.open(**{**SPEC, **other}), ["do it"])
        assert _begun(proxy) == [(0, "")]


async def test_an_attempt_that_was_given_up_leaves_nothing(dead: Dead) -> None:
    async with _worker(dead.folder) as proxy:
        await _asks(proxy, await proxy.open(**{**SPEC, "index": dead.given_up}), ["do it"])
        assert _begun(proxy) == [(0, "")]


async def test_only_one_session_is_given_them(dead: Dead) -> None:
    async with _worker(dead.folder) as proxy:
        for reason in ("stop", ""):
            await _asks(proxy, await proxy.open(**SPEC), ["do it"])
            assert _begun(proxy)[-1][1] == reason


async def test_a_proxy_that_dies_in_between_goes_on_with_what_was_not_asked_for_yet(dead: Dead) -> None:
    said: list[Any] = []
    async with _worker(dead.folder) as proxy:
        session = await proxy.open(**SPEC)
        await _asks(proxy, session, ["do it"], said)
    async with _worker(dead.folder) as proxy:
        await _asks(proxy, session, ["tool says 1"], said, max_tokens=KEPT_TOKENS)
        assert _begun(proxy) == [(KEPT_TOKENS, "length")]
        assert len(await _rows(proxy, session)) == 1


async def test_what_a_worker_itself_kept_is_not_given_to_its_later_sessions(dead: Dead) -> None:
    async with _worker(dead.folder) as proxy:
        for _ in range(2):
            session = await proxy.open(**{**SPEC, "index": 5})
            await _asks(proxy, session, ["do it"])
            await _rows(proxy, session)
    async with _worker(dead.folder) as proxy:
        await _asks(proxy, await proxy.open(**{**SPEC, "index": 5}), ["do it"])
        assert _begun(proxy) == [(0, "")]


async def test_a_successor_that_died_before_it_had_a_journal_leaves_what_its_own_predecessor_left(dead: Dead) -> None:
    make_way(dead.folder / "journal.sqlite", "life 1", is_successor=True)
    async with _worker(dead.folder) as proxy:
        await _asks(proxy, await proxy.open(**SPEC), ["do it"])
        assert _begun(proxy)[0][1] == "stop"


@pytest.mark.parametrize("is_successor", [False, True])
async def test_a_run_that_is_started_again_is_given_nothing_of_its_earlier_life(dead: Dead, is_successor: bool) -> None:
    """Also by a successor of a worker that died before it had a proxy, where the earlier life's journal still is."""
    make_way(dead.folder / "journal.sqlite", "life 2", is_successor=is_successor)
    async with _worker(dead.folder) as proxy:
        for index in (1, 2):
            await _asks(proxy, await proxy.open(**{**SPEC, "index": index}), ["do it"])
        assert _begun(proxy) == [(0, ""), (0, "")]


@pytest.mark.parametrize("harm", ["damaged", "another format", "no kept.sqlite"])
async def test_what_cannot_be_read_is_generated_again(dead: Dead, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    left = dead.folder / LEFT
    for end in ("-wal", "-shm"):
        left.with_name(f"{LEFT}{end}").unlink(missing_ok=True)
    if harm == "damaged":
        left.write_bytes(b"no database" * 100)
    elif harm == "another format":
        with closing(sqlite3.connect(left)) as db:
            db.execute("PRAGMA user_version = 1")
    else:  # `seamless.proxy.keep_mib` is 0
        for file in dead.folder.glob("kept.sqlite*"):
            file.unlink()
    async with _worker(dead.folder) as proxy:
        await _asks(proxy, await proxy.open(**SPEC), ["do it"])
        assert (_begun(proxy)[0][1] == "stop") == (harm == "no kept.sqlite")
    assert ("generated again" in caplog.text) == (harm != "no kept.sqlite")


def test_what_no_worker_left_is_no_trouble(tmp_path: Path) -> None:
    make_way(tmp_path / "journal.sqlite", "life 1", is_successor=True)
    assert not list(tmp_path.glob("*.sqlite*"))
