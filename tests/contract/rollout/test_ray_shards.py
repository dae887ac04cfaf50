"""Shards as actors on two nodes of a real Ray cluster (both on this machine), behind the command's own front."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ray.cluster_utils import Cluster

from benchmarks.traffic import model_folder
from seamless_verl.proxy.client import ProxyAdmin
from seamless_verl.proxy.deploy.standalone import StandaloneConfig
from seamless_verl.proxy.session.sessions import SessionSpec
from seamless_verl.verl_adapter.rollout.ray_shards import ShardActor
from tests.edge.proxy.test_standalone import HI, Mock
from tests.standalone import KEY, Standalone, chat

pytestmark = pytest.mark.timeout(300)
ADMIN = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def cluster() -> Iterator[Any]:
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    started.add_node(num_cpus=1)
    yield started
    started.shutdown()


@pytest.fixture
async def proxy(cluster: Any, tmp_path: Path) -> AsyncIterator[Standalone]:
    mock = Mock(model_folder(tmp_path / "model"))
    started = Standalone(tmp_path, await mock.start(), mock.folder, "--shards", "2", "--ray", cluster.address)
    await asyncio.to_thread(started.start)
    yield started
    await asyncio.to_thread(started.stop)
    mock.stop()


def _actors() -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if "ray::ShardActor" in " ".join(one.info["cmdline"] or ())]


async def test_shards_live_on_the_nodes_and_sessions_never_move(proxy: Standalone, cluster: Any) -> None:
    admin = proxy.admin()
    handles = [await admin.open_session(SessionSpec()) for _ in range(12)]
    homes = {handle.base_url.split("/sessions")[0] for handle in handles}
    assert len(homes) == 2
    histories = {}
    for handle in handles:
        answer = await chat(proxy.url, handle.api_key, HI)
        histories[handle.id] = [*HI, answer.json()["choices"][0]["message"], *HI]
    before = _actors()
    assert len({actor.ppid() for actor in before}) == len(before) == 2  # a node's raylet is the parent of its actors
    async with httpx.AsyncClient(base_url=proxy.url, trust_env=False, timeout=120) as http:
        added = await http.post("/shards", headers=ADMIN)
        assert (added.status_code, added.json()["added"], len(added.json()["shards"])) == (201, 2, 3)
    for actor in before:
        os.kill(actor.pid, signal.SIGKILL)
    for handle in handles:
        # At the address it was given, once its shard is back there; meanwhile the front says when to try again.
        while (answer := await chat(proxy.url, handle.api_key, histories[handle.id])).status_code == 503:
            assert answer.headers["retry-after"] == "1"
            await asyncio.sleep(0.2)
        assert (answer.status_code, answer.headers["x-seamless-match"]) == (200, "clean")
        again = await chat(handle.base_url.removesuffix("/v1"), handle.api_key, HI)
        assert again.status_code == 200
        result = await admin.close_session(handle.id, 1.0)
        assert (result.audit.is_clean, result.audit.num_generations) == (True, 3)
    assert len(list(proxy.record.glob("shard-*/rows/*.jsonl"))) == 12
    await admin.close()


@pytest.mark.parametrize("outside", ["", "https://proxy.example.org"])
async def test_openers_are_told_the_address_of_the_shard_or_the_one_that_was_given(
    outside: str, tmp_path: Path
) -> None:
    mock = Mock(model_folder(tmp_path / "model"))
    config = StandaloneConfig(
        engine=await mock.start(),
        model="mock",
        tokenizer=str(mock.folder),
        record=tmp_path / "record",
        host="127.0.0.1",
        port=0,
        admin_key=KEY,
        base_url=outside,
    )
    shard = ShardActor(config)  # without Ray around it
    address = await shard.start(None)
    admin = ProxyAdmin(address, KEY)
    handle = await admin.open_session(SessionSpec())
    assert handle.base_url == f"{outside or address}/sessions/{handle.id}/v1"
    await admin.close()
    await shard.stop()
    mock.stop()
