"""The proxy of a rollout worker as a real Ray actor: killed with -9 in the middle of a session, it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import psutil
import pytest

pytest.importorskip("verl")
import ray

from seamless_verl.errors import SeamlessError
from seamless_verl.machine import journal_folder
from seamless_verl.proxy.client import ProxyAdmin
from seamless_verl.proxy.session.sessions import SessionSpec
from seamless_verl.trajectory.generation import FinishReason
from seamless_verl.verl_adapter.rollout.proxy_actor import ShardSettings
from seamless_verl.verl_adapter.rollout.proxy_shard import ActorProxy
from tests.fakes import ScriptedEngine, small_tokenizer

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=1, include_dashboard=False)
    yield
    ray.shutdown()


def _settings(tokenizer: Any) -> ShardSettings:
    return ShardSettings(
        tokenizer=tokenizer,
        processor=None,
        processor_args={},
        template_args={},
        stop_token_ids=[tokenizer.eos_token_id],
        tool_parser=None,
        reasoning_parser=None,
        max_model_len=4096,
        model="m",
        admin_key="admin",
        abilities=frozenset(),
    )


@pytest.fixture
async def engine() -> ScriptedEngine:
    return ScriptedEngine(small_tokenizer(), lambda prompt: f"answer {prompt.count('<|im_end|>')}", num_versions=2)


@pytest.fixture
async def proxy(cluster: None, engine: ScriptedEngine, tmp_path: Path) -> AsyncIterator[ActorProxy]:
    started = ActorProxy(_settings(engine.tokenizer), engine, "127.0.0.1", 0, tmp_path / "proxy" / "worker_0")
    yield started
    await started.close()


def _kill() -> None:
    names = {one.pid: " ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])}
    ours = {child.pid for child in psutil.Process().children(recursive=True)}
    (actor,) = [pid for pid, name in names.items() if "ray::ProxyActor" in name and pid in ours]
    os.kill(actor, signal.SIGKILL)


async def _until_kept(journal: Path) -> None:
    """The actor writes it; nothing tells this process when."""
    for _ in range(1000):
        with contextlib.closing(sqlite3.connect(journal)) as db:
            if db.execute("SELECT count(*) FROM unfinished").fetchone()[0]:
                return
        await asyncio.sleep(0.01)
    raise AssertionError("no part of an answer was written")


async def test_a_killed_proxy_comes_back_at_its_address_and_sessions_go_on(
    proxy: ActorProxy, engine: ScriptedEngine, tmp_path: Path
) -> None:
    journal = tmp_path / "proxy" / "worker_0" / "journal.sqlite"
    admin = ProxyAdmin(proxy.base_url, "admin")
    await proxy.start(admin)
    session = await admin.open_session(SessionSpec(max_tokens=1000))
    history: list[Any] = []
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=60) as agent:

        async def turn(number: int) -> None:
            history.append({"role": "user", "content": f"question {number}"})
            raw = await agent.chat.completions.with_raw_response.create(model="m", messages=history)
            assert raw.headers["x-seamless-match"] == "clean"
            history.append({"role": "assistant", "content": raw.parse().choices[0].message.content})

        await turn(0)
        _kill()  # between two turns: the next one connects to a socket that nobody serves yet
        await turn(1)
        engine.delay_s, engine.keeps = 60.0, 2
        engine.started.clear()
        asking = asyncio.create_task(turn(2))
        await engine.started.wait()
        engine.delay_s = 0.0
        await _until_kept(journal)
        _kill()  # while the engine generates: the SDK asks again
        await asking
        assert engine.num_cancelled == 1
        begun = engine.requests[-1].resume_from
        assert begun is not None, "it goes on with the tokens that there were"
        assert len(begun.token_ids) == 2
    _kill()
    result = await admin.close_session(session.id, 1.0)
    assert result.audit.is_clean
    (row,) = result.rows
    assert result.kinds == {"clean": 3}
    # What was sent with the third question holds the first two answers, token for token.
    sent = list(engine.requests[-1].prompt_ids)
    assert list(row.token_ids[: len(sent)]) == sent
    assert [history[at]["content"] for at in (1, 3, 5)] == ["answer 1", "answer 3", "answer 5"]
    await admin.close()


async def test_a_proxy_that_cannot_start_says_why(cluster: None, engine: ScriptedEngine, tmp_path: Path) -> None:
    folder = tmp_path / "worker_0"
    proxy = ActorProxy(_settings(engine.tokenizer), engine, "127.0.0.1", 0, folder)
    (folder / "journal.sqlite").mkdir()
    admin = ProxyAdmin(proxy.base_url, "admin")
    with pytest.raises(SeamlessError) as caught:
        await proxy.start(admin)
    assert "proxy.journal" in str(caught.value.__cause__)
    await admin.close()


async def test_a_proxy_that_cannot_start_leaves_its_port_to_the_next(
    cluster: None, engine: ScriptedEngine, tmp_path: Path
) -> None:
    class Unreadable(ShardSettings):  # defined here, Ray sends it by value
        def text_side(self) -> Any:  # when the proxy has the socket already
            raise SeamlessError("no such parser")

    settings: Any = _settings(engine.tokenizer)
    unreadable = Unreadable(**{field.name: getattr(settings, field.name) for field in fields(settings)})
    port = 0
    for given in (unreadable, settings):
        proxy = ActorProxy(given, engine, "127.0.0.1", port, tmp_path / "worker_0")
        port = int(proxy.base_url.rpartition(":")[2])
        admin = ProxyAdmin(proxy.base_url, "admin", timeout_s=0.2)  # far less than a start takes
        with pytest.raises(SeamlessError) if given is unreadable else contextlib.nullcontext():
            await proxy.start(admin)
        await admin.close()
    await proxy.close()


async def test_bound_to_every_address_agents_are_told_the_nodes(
    cluster: None, engine: ScriptedEngine, tmp_path: Path
) -> None:
    proxy = ActorProxy(_settings(engine.tokenizer), engine, "0.0.0.0", 0, tmp_path / "worker_0")
    assert proxy.base_url.startswith(f"http://{ray.nodes()[0]['NodeManagerAddress']}:")
    admin = ProxyAdmin(proxy.base_url, "admin")
    await proxy.start(admin)
    session = await admin.open_session(SessionSpec(max_tokens=1000))
    assert session.base_url.startswith(proxy.base_url)
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=60) as agent:
        answer = await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == "answer 1"
    await admin.close()
    await proxy.close()


async def test_a_journal_beside_a_shared_run_folder_serves_a_killed_proxy_and_goes_with_the_worker(
    cluster: None, engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nserver:/runs {tmp_path / 'runs'} nfs4 rw 0 0\n")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "own"))
    folder = journal_folder(None, tmp_path / "runs" / "1", "1", mounts) / "worker_0"
    proxy = ActorProxy(_settings(engine.tokenizer), engine, "127.0.0.1", 0, folder)
    admin = ProxyAdmin(proxy.base_url, "admin")
    await proxy.start(admin)
    session = await admin.open_session(SessionSpec(max_tokens=1000))
    assert (folder / "journal.sqlite").exists()
    _kill()
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=60) as agent:
        answer = await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == "answer 1"
    await admin.close()
    await proxy.close()
    assert not (tmp_path / "runs").exists()
    assert list((tmp_path / "own").iterdir()) == []


def test_the_proxys_own_bound_lets_all_attempts_of_a_large_fleet_through(engine: ScriptedEngine) -> None:
    """32 replicas of 256 seats behind one rollout worker: 4,096 calls at a time were refused beyond that."""
    settings = replace(_settings(engine.tokenizer), attempts=8192)
    assert settings.deps(engine, *settings.text_side()).limits.max_in_flight >= 8192


@pytest.mark.parametrize(("attempts", "node", "held"), [(256, 1024, 2.5), (8192, 1024, 64), (256, 24, 2)])
def test_the_proxys_memory_grows_with_its_attempts_up_to_a_share_of_its_node(
    engine: ScriptedEngine, attempts: int, node: int, held: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gib = 1 << 30
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=node * gib))
    settings = replace(_settings(engine.tokenizer), attempts=attempts, max_model_len=1 << 17)
    assert settings.deps(engine, *settings.text_side()).limits.max_resident_bytes == held * gib


async def test_the_next_workers_agents_are_given_what_those_of_the_dead_one_were(
    cluster: None, engine: ScriptedEngine, tmp_path: Path
) -> None:
    spec = SessionSpec(group="prompt", index=1, max_tokens=1000)
    for is_dead in (True, False):
        folder, which = tmp_path / "worker_0", {"is_successor": not is_dead}
        proxy = ActorProxy(_settings(engine.tokenizer), engine, "127.0.0.1", 0, folder, **which)
        admin = ProxyAdmin(proxy.base_url, "admin")
        await proxy.start(admin)
        session = await admin.open_session(spec)
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=60) as agent:
            await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        if not is_dead:
            assert (await admin.close_session(session.id, 1.0)).audit.is_clean
        await admin.close()
        await proxy.close()
    first, again = engine.requests
    assert first.resume_from is None
    assert again.resume_from is not None
    assert again.resume_from.finish_reason is FinishReason.STOP, "nothing is generated"
