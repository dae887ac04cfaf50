"""The front's table of shards: who is started, started again, retired; what starts them is scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from pathlib import Path

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.proxy import shards as module
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.shards import Shards, ShardsConfig


class ScriptedShard:
    def __init__(self, address: str) -> None:
        self.address = address
        self.over = asyncio.Event()

    async def ended(self) -> str:
        await self.over.wait()
        return "told to"

    async def stop(self) -> None:
        self.over.set()


class ScriptedLauncher:
    """Stands where processes or actors are started; a shard without a place gets the next port."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, str | None]] = []
        self.running: dict[int, ScriptedShard] = {}
        self.failures = 0
        self.again = asyncio.Event()

    async def launch(self, shard: int, place: str | None, taken: Collection[str]) -> ScriptedShard:
        self.launched.append((shard, place))
        if self.failures:
            self.failures -= 1
            raise ConfigError("--shards", shard, "did not start", "mend it")
        self.running[shard] = ScriptedShard(f"http://{place or f'10.0.0.{shard}:{7000 + shard}'}")
        self.again.set()
        return self.running[shard]


def _shards(folder: Path, num: int) -> tuple[Shards, ScriptedLauncher]:
    config = ShardsConfig(num=num, record=folder, host="h", port=1, admin_key="k" * 8, drain_s=1.0, limits=Limits())
    launcher = ScriptedLauncher()
    return Shards(config, launcher), launcher


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RESTART_PAUSE_S", 0.0)


async def test_a_shard_keeps_its_place_and_one_that_is_added_takes_no_session(tmp_path: Path) -> None:
    shards, launcher = _shards(tmp_path, 2)
    await shards.start()
    assert sorted(launcher.launched) == [(0, None), (1, None)]
    before = dict(shards.book.addresses)
    assert await shards.add() == 2
    assert {shard: shards.book.addresses[shard] for shard in before} == before
    assert json.loads((tmp_path / "shards.json").read_text()) == {str(n): f"10.0.0.{n}:{7000 + n}" for n in range(3)}
    await shards.stop()
    again, launcher = _shards(tmp_path, 2)
    await again.start()
    assert sorted(launcher.launched) == [(n, f"10.0.0.{n}:{7000 + n}") for n in range(3)]
    assert again.book.retired == {2}
    await again.stop()


async def test_a_shard_that_ends_is_started_again_until_it_serves_and_a_retired_one_stays_retired(
    tmp_path: Path,
) -> None:
    shards, launcher = _shards(tmp_path, 3)
    await shards.start()
    await shards.stop()
    shards, launcher = _shards(tmp_path, 2)
    await shards.start()
    book = shards.book
    for shard in (0, 2):
        launcher.failures = 2
        launcher.launched.clear()
        launcher.again.clear()
        await launcher.running[shard].stop()
        await launcher.again.wait()
        assert launcher.launched == [(shard, f"10.0.0.{shard}:{7000 + shard}")] * 3
    await asyncio.sleep(0)
    assert shards.book == book
    assert {shards.book.place(str(n)) for n in range(64)} == {0, 1}
    await shards.stop()
    assert all(running.over.is_set() for running in launcher.running.values())
    assert len(launcher.launched) == 3  # none was started again while stopping


async def test_a_shard_that_does_not_start_is_an_error_at_the_start(tmp_path: Path) -> None:
    shards, launcher = _shards(tmp_path, 1)
    launcher.failures = 1
    with pytest.raises(ConfigError, match="did not start"):
        await shards.start()
    assert not (tmp_path / "shards.json").exists()
