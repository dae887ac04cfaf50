"""Several shards behind one front, as processes; the engine is the only part that is not real."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest

from seamless_verl.proxy.client import ProxyAdmin, ProxyRefused
from seamless_verl.proxy.session.sessions import SessionSpec
from tests.edge.proxy.test_standalone import HI, Mock, folder, mock  # noqa: F401 - fixtures
from tests.standalone import KEY, Standalone, chat, refused

pytestmark = pytest.mark.timeout(180)
ADMIN = {"authorization": f"Bearer {KEY}"}

#: Talks on standard output as vLLM's log does: before a shard is ready, and more than a pipe holds afterwards.
TALK = """
import os, sys, threading, time
def talk():
    while not os.path.exists("{folder}/ready"):
        time.sleep(0.01)
    for _ in range(1000):
        print("INFO " + 1000 * "x", flush=True)
    open("{folder}/told-" + sys.orig_argv[sys.orig_argv.index("--shard") + 1], "w").close()
if "--shard" in sys.orig_argv:
    print("INFO Triton is installed but 0 active driver(s) found", flush=True)
    threading.Thread(target=talk, daemon=True).start()
"""


@pytest.fixture
async def proxy(mock: Mock, tmp_path: Path) -> AsyncIterator[Standalone]:  # noqa: F811
    started = Standalone(tmp_path, await mock.start(), mock.folder, "--shards", "2")
    await asyncio.to_thread(started.start)
    yield started
    await asyncio.to_thread(started.stop)


async def test_sessions_are_spread_and_adding_a_shard_moves_none(proxy: Standalone) -> None:
    admin = proxy.admin()
    handles = [await admin.open_session(SessionSpec(group=str(number))) for number in range(24)]
    homes = Counter(handle.base_url.split("/sessions")[0] for handle in handles)
    assert len(homes) == 2
    assert proxy.url not in homes
    histories = {}
    for number, handle in enumerate(handles):
        # By the front with the key alone, or as told: both ways lead to the same session.
        url = proxy.url if number % 2 else handle.base_url.removesuffix("/v1")
        answer = await chat(url, handle.api_key, HI)
        assert answer.status_code == 200, answer.text
        histories[handle.id] = [*HI, answer.json()["choices"][0]["message"], *HI]
    async with httpx.AsyncClient(base_url=proxy.url, trust_env=False, timeout=60) as http:
        assert (await http.post("/shards")).status_code == 401
        assert (await http.post("/shards", headers={"authorization": "Bearer nobody-knows"})).status_code == 403
        added = await http.post("/shards", headers=ADMIN)
        assert (added.status_code, added.json()["added"]) == (201, 2)
        assert (await http.get("/healthz")).json() == {"status": "ok", "sessions": 24, "down": []}
        text = (await http.get("/metrics")).text
        assert text.count("# TYPE seamless_proxy_turns_total counter") == 1
        turns = [float(line.split()[1]) for line in text.splitlines() if line.startswith("seamless_proxy_turns_total{")]
        assert (len(turns), sum(turns)) == (3, 24.0)
        stats = (await http.get("/stats", headers=ADMIN)).json()
        assert sum(shard["turns"] for shard in stats.values()) == 24
    for handle in handles:
        answer = await chat(handle.base_url.removesuffix("/v1"), handle.api_key, histories[handle.id])
        assert (answer.status_code, answer.headers["x-seamless-match"]) == (200, "clean")
    new = [await admin.open_session(SessionSpec()) for _ in range(24)]
    assert {handle.id.partition("-")[0] for handle in new} == {"0", "1", "2"}
    for handle in handles:
        result = await admin.close_session(handle.id, 1.0)
        assert (len(result.rows), result.audit.is_clean) == (1, True)
    await admin.close()
    written = list(proxy.record.glob("shard-*/rows/*.jsonl"))
    assert len(written) == 24


async def test_agents_that_reach_the_front_alone_are_told_its_address(mock: Mock, tmp_path: Path) -> None:  # noqa: F811
    outside = "https://proxy.example.org"
    proxy = Standalone(tmp_path, await mock.start(), mock.folder, "--shards", "2", "--base-url", f"{outside}/")
    await asyncio.to_thread(proxy.start)
    admin = proxy.admin()
    for _ in range(4):
        handle = await admin.open_session(SessionSpec())
        assert handle.base_url == f"{outside}/sessions/{handle.id}/v1"
        inside = f"{proxy.url}/sessions/{handle.id}"
        assert (await chat(inside, handle.api_key, HI)).status_code == 200
        assert (await admin.close_session(handle.id)).audit.num_generations == 1
    await admin.close()
    await asyncio.to_thread(proxy.stop)


async def test_a_stream_passes_through_the_front(proxy: Standalone) -> None:
    admin = proxy.admin()
    handle = await admin.open_session(SessionSpec())
    answer = await chat(proxy.url, handle.api_key, HI, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    assert answer.text.rstrip().endswith("data: [DONE]")
    await admin.close()


async def test_nobodys_sessions_are_refused(proxy: Standalone) -> None:
    async with httpx.AsyncClient(base_url=proxy.url, trust_env=False, timeout=60) as http:
        for headers in ({}, {"authorization": "Bearer sk-seamless-7-abc"}, {"authorization": "Bearer x"}):
            answer = await http.post("/v1/chat/completions", json={"model": "m", "messages": HI}, headers=headers)
            assert answer.status_code == 401
        assert (await http.get("/sessions/9-abc", headers=ADMIN)).status_code == 404
        assert (await http.get("/sessions/0-abc", headers=ADMIN)).status_code == 404
    admin = proxy.admin()
    handles = [await admin.open_session(SessionSpec()) for _ in range(2)]
    async with httpx.AsyncClient(base_url=proxy.url, trust_env=False, timeout=60) as http:
        other = {"authorization": f"Bearer {handles[0].api_key}"}
        answer = await http.get(f"/sessions/{handles[1].id}", headers=other)
        assert answer.status_code in (401, 403)
    with pytest.raises(ProxyRefused, match="404"):
        await admin.close_session("0-none")
    await admin.close()


async def test_a_killed_shard_comes_back_with_its_sessions(proxy: Standalone) -> None:
    admin = proxy.admin()
    handle = await admin.open_session(SessionSpec())
    history = list(HI)
    answer = await chat(proxy.url, handle.api_key, history)
    history += [answer.json()["choices"][0]["message"], *HI]
    _kill_shard(proxy, handle.id.partition("-")[0])
    while (answer := await chat(proxy.url, handle.api_key, history)).status_code == 503:
        assert answer.json()["error"]["code"] == "shard_down"
        await asyncio.sleep(0.1)
    assert (answer.status_code, answer.headers["x-seamless-match"]) == (200, "clean")
    assert (await admin.close_session(handle.id)).audit.num_generations == 2
    await admin.close()


async def test_shards_end_with_their_front_and_fewer_of_them_keep_old_sessions(mock: Mock, tmp_path: Path) -> None:  # noqa: F811
    proxy = Standalone(tmp_path, await mock.start(), mock.folder, "--shards", "3")
    await asyncio.to_thread(proxy.start)
    admin = proxy.admin()
    handles = [await admin.open_session(SessionSpec()) for _ in range(12)]
    assert proxy.process is not None
    children = psutil.Process(proxy.process.pid).children()
    proxy.kill()
    gone, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=30)
    assert (len(gone), alive) == (3, [])
    assert set(json.loads((proxy.record / "shards.json").read_text())) == {"0", "1", "2"}
    proxy.command[proxy.command.index("--shards") + 1] = "2"
    await asyncio.to_thread(proxy.start)
    again = proxy.admin()
    for handle in handles:
        assert (await chat(handle.base_url.removesuffix("/v1"), handle.api_key, HI)).status_code == 200
    new = [await again.open_session(SessionSpec()) for _ in range(12)]
    assert {handle.id.partition("-")[0] for handle in new} == {"0", "1"}
    await admin.close()
    await again.close()
    await asyncio.to_thread(proxy.stop)


async def test_a_shard_that_was_not_there_when_weights_changed_knows_their_version(proxy: Standalone) -> None:
    async with httpx.AsyncClient(base_url=proxy.url, trust_env=False, timeout=60, headers=ADMIN) as http:
        for url in (await http.get("/shards")).json()["shards"].values():
            assert (await http.post(f"{url}/resume", json={"version": 8})).status_code == 204
        added = ProxyAdmin((await http.post("/shards")).json()["shards"]["2"], KEY)
    handle = await added.open_session(SessionSpec())
    assert (await chat(handle.base_url.removesuffix("/v1"), handle.api_key, HI)).status_code == 200
    (row,) = (await added.close_session(handle.id)).rows
    assert [span.version for span in row.version_spans] == [8]
    await added.close()


async def test_shards_are_paused_together(proxy: Standalone) -> None:
    """One that starts while the others are paused waits as they do; once they were resumed it does not."""
    async with httpx.AsyncClient(base_url=proxy.url, trust_env=False, timeout=60, headers=ADMIN) as http:
        urls = (await http.get("/shards")).json()["shards"]
        for url in urls.values():
            assert (await http.post(f"{url}/pause", json={})).json()["quiet"]
        added = ProxyAdmin((await http.post("/shards")).json()["shards"]["2"], KEY)
        handle = await added.open_session(SessionSpec())
        waiting = asyncio.create_task(chat(handle.base_url.removesuffix("/v1"), handle.api_key, HI))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        _kill_shard(proxy, "1")
        for url in (urls["0"], handle.base_url.partition("/sessions")[0]):
            assert (await http.post(f"{url}/resume", json={"version": 3})).status_code == 204
        assert (await waiting).status_code == 200
        while (await http.get("/healthz")).status_code != 200:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)
        back = ProxyAdmin(urls["1"], KEY)
        handle = await back.open_session(SessionSpec())
        assert (await chat(handle.base_url.removesuffix("/v1"), handle.api_key, HI)).status_code == 200
    for admin in (added, back):
        await admin.close()


async def test_a_shard_that_waits_for_vllm_is_not_paused_when_the_others_were_resumed_meanwhile(
    mock: Mock,  # noqa: F811
    proxy: Standalone,
) -> None:
    async with httpx.AsyncClient(base_url=proxy.url, trust_env=False, timeout=60, headers=ADMIN) as http:
        urls = (await http.get("/shards")).json()["shards"]
        for url in urls.values():
            assert (await http.post(f"{url}/pause", json={})).json()["quiet"]
        mock.latency_s = 100.0  # vLLM is paused, too
        _kill_shard(proxy, "1")
        while "is it paused, too" not in proxy.log.read_text():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)
        assert (await http.post(f"{urls['0']}/resume", json={"version": 3})).status_code == 204
        mock.latency_s = 0.0
        while (await http.get("/healthz")).status_code != 200:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)
    back = ProxyAdmin(urls["1"], KEY)
    handle = await back.open_session(SessionSpec())
    assert (await chat(handle.base_url.removesuffix("/v1"), handle.api_key, HI)).status_code == 200
    (row,) = (await back.close_session(handle.id)).rows
    assert [span.version for span in row.version_spans] == [3]
    await back.close()


async def test_a_front_ends_while_its_shards_wait_for_vllm(mock: Mock, tmp_path: Path) -> None:  # noqa: F811
    proxy = Standalone(tmp_path, await mock.start(), mock.folder, "--shards", "2")
    proxy.record.mkdir()
    (proxy.record / "paused").touch()
    proxy.log.touch()
    mock.latency_s = 100.0
    starting = asyncio.create_task(asyncio.to_thread(proxy.start))
    while proxy.log.read_text().count("is it paused, too") < 2:
        assert not starting.done(), proxy.log.read_text()
        await asyncio.sleep(0.1)
    assert proxy.process is not None
    children = psutil.Process(proxy.process.pid).children()
    proxy.process.terminate()
    with pytest.raises(AssertionError):  # it never said that it takes requests
        await starting
    await asyncio.to_thread(proxy.process.communicate, timeout=60)
    assert proxy.process.returncode == 0
    assert not any(child.is_running() for child in children)  # they hold its lock and its ports
    assert "never retrieved" not in proxy.log.read_text()


async def test_what_shards_print_neither_keeps_them_from_starting_nor_stops_them(mock: Mock, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "sitecustomize.py").write_text(TALK.format(folder=tmp_path))
    proxy = Standalone(tmp_path, await mock.start(), mock.folder, "--shards", "2")
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    await asyncio.to_thread(proxy.start, env={**os.environ, "PYTHONPATH": path})
    (tmp_path / "ready").touch()
    while {file.name for file in proxy.record.parent.glob("told-*")} != {"told-0", "told-1"}:  # noqa: ASYNC110 - other processes
        await asyncio.sleep(0.05)
    admin = proxy.admin()
    handle = await admin.open_session(SessionSpec())
    assert (await chat(proxy.url, handle.api_key, HI)).status_code == 200
    await admin.close()
    assert await asyncio.to_thread(proxy.stop) == 0
    assert proxy.log.read_text().count("INFO Triton") == 2
    assert proxy.log.read_text().count("INFO x") == 2000


async def test_a_folder_is_refused_with_shards_and_without_where_its_sessions_would_not_be_found(
    mock: Mock,  # noqa: F811
    tmp_path: Path,
) -> None:
    proxy = Standalone(tmp_path, await mock.start(), mock.folder, "--shards", "3")
    options = proxy.command[proxy.command.index("proxy") + 1 :]
    proxy.record.mkdir()
    (proxy.record / "journal.sqlite").touch()
    assert "Fix: leave out --shards" in await asyncio.to_thread(refused, tmp_path, *options)
    (proxy.record / "journal.sqlite").rename(tmp_path / "journal.sqlite")
    (proxy.record / "shards.json").write_text(json.dumps({str(n): f"127.0.0.1:{7000 + n}" for n in range(4)}))
    told = await asyncio.to_thread(refused, tmp_path, *options[: options.index("--shards")])
    assert "--shards=1" in told
    assert "Fix: write --shards 4" in told


def _kill_shard(proxy: Standalone, shard: str) -> None:
    assert proxy.process is not None
    children = psutil.Process(proxy.process.pid).children()
    (found,) = [child for child in children if f"--shard {shard}" in " ".join(child.cmdline())]
    os.kill(found.pid, signal.SIGKILL)
