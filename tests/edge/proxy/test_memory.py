"""What bounds memory: bodies on their way in, texts that are kept, sessions without turns, answers that nobody got."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.proxy import engine as engine_module
from seamless_verl.proxy.client import SessionHandle
from seamless_verl.proxy.engine import EngineUnavailable
from seamless_verl.proxy.http import requests
from seamless_verl.proxy.http.requests import read_body
from seamless_verl.proxy.journal.sqlite_journal import SqliteJournal
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.session import handover
from seamless_verl.proxy.session.handover import FolderSink
from seamless_verl.proxy.session.store import SessionStore
from seamless_verl.proxy.text.chat_template import TextCache, TokenizerRenderer
from seamless_verl.trajectory.tokens import Segment
from tests.fakes import Served, serving, small_tokenizer, user

HI: list[Any] = [{"role": "user", "content": "hi"}]
CHAT = {"model": "m", "messages": HI}


class Slow:
    """Requests that have sent the beginning of their bodies and wait for :attr:`go`."""

    def __init__(self, proxy: Served) -> None:
        self._proxy = proxy
        self.go = asyncio.Event()
        self._tasks: list[asyncio.Task[httpx.Response]] = []

    async def send(self, handle: SessionHandle, num_bytes: int, path: str) -> None:
        body = b'{"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}'

        async def content() -> AsyncIterator[bytes]:
            yield b" " * num_bytes
            await self.go.wait()
            yield body

        headers = {"authorization": f"Bearer {handle.api_key}"}
        length = str(num_bytes + len(body))
        posting = self._proxy.http.post(path, content=content(), headers={**headers, "content-length": length})
        self._tasks.append(asyncio.create_task(posting))

    async def answers(self) -> list[int]:
        self.go.set()
        return [(await task).status_code for task in self._tasks]


async def _until(holds: Any) -> None:
    """A request reaches the proxy through a socket, which no event of this process announces."""
    for _ in range(400):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to that")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/count_tokens"])
async def test_one_key_cannot_have_any_number_of_bodies_read(path: str) -> None:
    async with serving() as proxy:
        handle, other = await proxy.open(max_parallel=1), await proxy.open()
        session = proxy.deps.sessions.by_id(handle.id)
        slow = Slow(proxy)
        for _ in range(8):
            await slow.send(handle, 100, path.replace("/count_tokens", ""))
        await _until(lambda: session.num_arriving == 8)
        refused = await proxy.post(handle, CHAT, path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
        assert refused.headers["retry-after"] == "1"
        assert (await proxy.post(other, CHAT)).status_code == 200  # others are not concerned
        statuses = await slow.answers()
        assert set(statuses) <= {200, 429}  # one may be in flight at a time
        assert 200 in statuses
        assert session.num_arriving == 0
        assert (await proxy.post(handle, CHAT)).status_code == 200


async def test_requests_that_wait_for_one_answer_count_too() -> None:
    async with serving(delay_s=60) as proxy:
        handle = await proxy.open(max_parallel=1)
        session = proxy.deps.sessions.by_id(handle.id)
        again = {"x-stainless-retry-count": "1"}
        waiting = [asyncio.create_task(proxy.post(handle, CHAT, **again)) for _ in range(8)]
        await _until(lambda: session.num_users == 8)
        assert proxy.deps.counters.retries_joined == 7
        assert (await proxy.post(handle, CHAT, **again)).status_code == 429
        await proxy.admin.delete_session(handle.id)
        assert {(await task).status_code for task in waiting} == {409}


async def test_a_session_that_leaves_memory_as_it_is_closed_says_how_its_turns_matched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = SqliteJournal(tmp_path / "j.sqlite")
    limits = Limits(max_resident_bytes=1, alarm_rows=1)
    async with serving(journal=journal, sink=FolderSink(tmp_path), limits=limits) as proxy:
        handle = await proxy.open()
        for _ in range(2):
            assert (await proxy.post(handle, CHAT)).status_code == 200
        first = await proxy.admin.close_session(handle.id)
        again = await proxy.admin.close_session(handle.id)  # from what the session left behind
        assert (first.kinds, first.drift) == ({"clean": 1, "fork": 1}, {"resampled": 1})
        assert again == first
        assert "{'resampled': 1}" in caplog.text
        assert (await proxy.admin.stats())["sessions_spilled"] >= 2
    await journal.close()


async def test_all_bodies_on_their_way_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def told(request: Any, limits: Limits, *, take: Callable[[int], None]) -> Awaitable[bytes]:
        def counting(num_bytes: int) -> None:
            take(num_bytes)
            taken.append(num_bytes)

        return read_body(request, limits, take=counting)

    monkeypatch.setattr(requests, "read_body", told)
    async with serving(limits=Limits(max_arriving_bytes=50_000)) as proxy:
        handles = [await proxy.open() for _ in range(4)]
        taken.clear()
        slow = Slow(proxy)
        for handle in handles[:2]:
            await slow.send(handle, 20_000, "/v1/chat/completions")
        await _until(lambda: sum(taken) == 40_000)
        long = {"model": "m", "messages": [{"role": "user", "content": "x " * 10_000}]}
        refused = await proxy.post(handles[2], long)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
        assert (await proxy.post(handles[3], CHAT)).status_code == 200
        assert await slow.answers() == [200, 200]
        assert (await proxy.post(handles[2], long)).status_code == 200


@given(st.lists(st.integers(0, 60), max_size=60), st.integers(1000, 20_000))
def test_a_cache_of_texts_is_right_and_bounded_by_bytes(lengths: list[int], max_bytes: int) -> None:
    cache: TextCache[str, list[str]] = TextCache(lambda text: [text], factor=2, max_bytes=max_bytes)
    for length in lengths:
        text = "x" * length * 20
        assert cache.get(text) == [text]
        assert cache.get(text) == [text]
        assert 0 <= cache.num_bytes <= max_bytes
    if lengths and 3 * (sys.getsizeof("x" * lengths[-1] * 20)) + 200 <= max_bytes // 4:
        text = "x" * lengths[-1] * 20
        assert cache.get(text) is cache.get(text)  # the latest is still there


def test_long_prompts_do_not_stay_for_ever() -> None:
    renderer = TokenizerRenderer(small_tokenizer())
    long = "long " * 400_000
    for number in range(40):
        renderer.render_initial([user(f"{number} {long}" if number < 2 else f"{number} {long[:400_000]}")], ())
    assert renderer._encoded.num_bytes <= 64 << 20
    short = [user("short")]
    assert renderer.render_initial(short, ()) is renderer.render_initial(short, ())


async def test_a_request_that_is_too_long_is_not_kept() -> None:
    async with serving() as proxy:
        handle = await proxy.open(max_model_len=200)
        (session,) = proxy.deps.sessions
        long = {"model": "m", "messages": [{"role": "user", "content": "word " * 1000}]}
        refused = await proxy.post(handle, long)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert (await proxy.post(handle, {**long, "max_tokens": 9}, "/v1/messages/count_tokens")).status_code != 500
        assert (session.recent.num_bytes, proxy.deps.counters.resident_bytes) == (0, 0)
        assert (await proxy.post(handle, {**CHAT, "n": 3})).status_code == 200
        once = session.recent.num_bytes
        assert (await proxy.post(handle, CHAT)).status_code == 200
        assert session.recent.num_bytes == once > 0  # three samples of one request, and its repetition, are one
        assert (await proxy.post(handle, {"model": "m", "messages": [{"role": "user", "content": "ho"}]})).is_success
        assert session.recent.num_bytes == 2 * once


async def test_sessions_without_turns_are_spilled_as_well(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal.db")
    limits = Limits(max_resident_bytes=100_000)
    async with serving(journal=journal, limits=limits) as proxy:
        proxy.engine.failure = EngineUnavailable("away")
        handles = [await proxy.open() for _ in range(10)]
        long = {"model": "m", "messages": [{"role": "user", "content": "word " * 4000}]}
        for handle in handles:
            assert (await proxy.post(handle, long)).status_code == 503
            assert proxy.deps.counters.resident_bytes <= 100_000
        assert proxy.deps.counters.sessions_spilled >= 8
        proxy.engine.failure = None
        for handle in handles:
            assert (await proxy.post(handle, long)).status_code == 200
            assert (await proxy.admin.close_session(handle.id)).audit.is_clean
        assert proxy.deps.counters.resident_bytes == 0
    await journal.close()


async def test_of_answers_that_nobody_got_only_the_latest_names_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_MAX_DISCARDED", 5)
    async with serving(lambda prompt: "one two three") as proxy:
        handle = await proxy.open()
        (session,) = proxy.deps.sessions
        generate = proxy.engine.generate

        async def failing(request: Any) -> Any:
            if len(proxy.engine.requests) % 2:
                proxy.engine.requests.append(request)
                raise EngineUnavailable("away")
            return await generate(request)

        proxy.engine.generate = failing  # type: ignore[method-assign]
        for _ in range(9):
            assert (await proxy.post(handle, {**CHAT, "n": 2})).status_code == 503
        entries = session.ledger.entries
        assert len(entries) == 5
        assert all(entry.discarded and not entry.token_ids and not entry.log_probs for entry in entries)
        proxy.engine.generate = generate  # type: ignore[method-assign]
        await proxy.post(handle, CHAT)
        result = await proxy.admin.close_session(handle.id)
        assert (result.audit.is_clean, result.audit.num_generations) == (True, 6)


async def test_a_session_that_is_deleted_under_a_request_does_not_come_back() -> None:
    async with serving() as proxy:
        handle = await proxy.open()
        assert (await proxy.post(handle, CHAT)).status_code == 200
        assert proxy.deps.counters.resident_bytes > 0
        proxy.engine.delay_s = 60
        proxy.engine.started.clear()
        waiting = asyncio.create_task(proxy.post(handle, CHAT))
        await proxy.engine.started.wait()
        await proxy.admin.delete_session(handle.id)
        assert (await waiting).status_code == 409
        assert proxy.deps.counters.resident_bytes == 0


async def test_a_session_that_is_deleted_while_it_is_closed_is_read_whole_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, go_on, harvest = threading.Event(), threading.Event(), handover._harvest

    def slow(session: Any) -> Any:
        reading.set()
        assert go_on.wait(60)
        return harvest(session)

    monkeypatch.setattr(handover, "_harvest", slow)
    async with serving() as proxy:
        handle = await proxy.open()
        said = HI
        for _ in range(2):
            answer = (await proxy.post(handle, {"model": "m", "messages": said})).json()["choices"][0]["message"]
            said = [*said, answer, *HI]
        ends = proxy.server._app.state.handover  # type: ignore[attr-defined]
        closing = asyncio.ensure_future(ends.close(handle.id))
        assert await asyncio.to_thread(reading.wait, 60)
        deleting = asyncio.ensure_future(ends.acknowledge(handle.id))
        for _ in range(20):
            await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(closing, deleting)
        counters = proxy.deps.counters
        assert (counters.rows_audited, counters.violations, counters.num_sessions) == (1, 0, 0)


async def test_whoever_keeps_something_of_a_session_is_told_when_it_has_ended() -> None:
    ended: list[str] = []
    async with serving(sessions=SessionStore(on_drop=ended.append)) as proxy:
        closed, deleted = await proxy.open(), await proxy.open()
        await proxy.post(closed, CHAT)
        await proxy.admin.close_session(closed.id)
        await proxy.admin.delete_session(deleted.id)
        assert ended == [closed.id, deleted.id]


@pytest.fixture
def _no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _num_segments() -> int:
    return sum(type(one) is Segment for one in gc.get_objects())  # isinstance would wake lazy modules


@pytest.mark.usefixtures("_no_garbage_collector")
async def test_a_session_that_is_over_does_not_wait_for_the_garbage_collector() -> None:
    before = _num_segments()
    async with serving() as proxy:
        for end in (proxy.admin.close_session, proxy.admin.delete_session):
            handle = await proxy.open()
            for text in ("a", "b"):
                answer = await proxy.post(handle, {"model": "m", "messages": [{"role": "user", "content": text}]})
                assert answer.status_code == 200
            assert _num_segments() >= before + 4
            await end(handle.id)
            await _until(lambda: _num_segments() <= before)
