"""The front's table of shards: who is started, started again, retired; what starts them is scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from pathlib import Path

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.proxy.deploy import shards as module
from seamless_verl.proxy.deploy.shards import Shards


class ScriptedShard:
    def __init__(self, address: str) -> None:
        self.address = address
        self.over = asyncio.Event()
        self.ends_with: BaseException | None = None

    async def ended(self) -> str:
        await self.over.wait()
        if self.ends_with is not None:
            raise self.ends_with
        return "told to"

    async def stop(self) -> None:
        self.over.set()


class ScriptedLauncher:
    """Stands where processes or actors are started; a shard without a place gets the next port."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, str | None]] = []
        self.running: dict[int, ScriptedShard] = {}
        self.failures = 0
        self.error: Exception = ConfigError("--shards", 0, "did not start", "mend it")
        self.again = asyncio.Event()
        self.hangs: asyncio.Event | None = None

    async def launch(self, shard: int, place: str | None, taken: Collection[str]) -> ScriptedShard:
        self.launched.append((shard, place))
        if self.hangs is not None:
            self.hangs.set()
            await asyncio.Event().wait()
        if self.failures:
            self.failures -= 1
            raise self.error
        self.running[shard] = ScriptedShard(f"http://{place or f'10.0.0.{shard}:{7000 + shard}'}")
        self.again.set()
        return self.running[shard]


def _shards(folder: Path, num: int) -> tuple[Shards, ScriptedLauncher]:
    launcher = ScriptedLauncher()
    return Shards(folder, num, launcher), launcher


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


@pytest.mark.parametrize("error", [BlockingIOError(11, "no process can be made"), RuntimeError("no answer of Ray's")])
async def test_a_shard_is_started_again_whatever_keeps_it_from_it(
    error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shards, launcher = _shards(tmp_path, 1)
    await shards.start()
    launcher.failures, launcher.error = 3, error
    launcher.again.clear()
    launcher.running[0].ends_with = ConnectionError("Ray is out of reach")
    launcher.running[0].over.set()
    await asyncio.wait_for(launcher.again.wait(), 30)
    assert len(launcher.launched) == 5
    assert [record.args[1] for record in caplog.records] == [
        "ConnectionError: Ray is out of reach",
        *[f"{type(error).__name__}: {error}"] * 3,
    ]
    await shards.stop()


async def test_pauses_between_starts_grow_and_a_stop_does_not_wait_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_RESTART_PAUSE_S", 0.001)
    monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.003)
    shards, launcher = _shards(tmp_path, 1)
    await shards.start()
    launcher.failures = 3
    launcher.again.clear()
    launcher.running[0].over.set()
    await asyncio.wait_for(launcher.again.wait(), 30)
    assert [record.args[2] for record in caplog.records] == [0.001, 0.002, 0.003, 0.003]
    caplog.clear()
    monkeypatch.setattr(module, "_RESTART_PAUSE_S", 1000.0)
    launcher.running[0].over.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert caplog.records, "it waits to start the shard again"
    await asyncio.wait_for(shards.stop(), 30)


@pytest.mark.parametrize("added", [False, True])
async def test_a_stop_does_not_wait_for_a_shard_that_waits_for_vllm(tmp_path: Path, added: bool) -> None:
    shards, launcher = _shards(tmp_path, 1)
    await shards.start()
    launcher.hangs = asyncio.Event()
    adding = [asyncio.create_task(shards.add()) for _ in range(2 * added)]
    if not added:
        launcher.running[0].over.set()
    await asyncio.wait_for(launcher.hangs.wait(), 30)
    await asyncio.wait_for(shards.stop(), 30)
    for each in adding:
        with pytest.raises(ConfigError, match="the front ends"):
            await asyncio.wait_for(each, 30)
    assert len(launcher.launched) == 2


async def test_a_table_that_cannot_be_written_leaves_the_old_one_and_no_shard_that_it_does_not_name(
    tmp_path: Path,
) -> None:
    shards, launcher = _shards(tmp_path, 1)
    await shards.start()
    before = (tmp_path / "shards.json").read_text()
    (tmp_path / "shards.json.part").mkdir()  # stands in the way
    with pytest.raises(ConfigError, match="cannot be written"):
        await shards.add()
    assert launcher.running[1].over.is_set()
    assert (tmp_path / "shards.json").read_text() == before
    (tmp_path / "shards.json.part").rmdir()
    assert await shards.add() == 1
    assert len(json.loads((tmp_path / "shards.json").read_text())) == 2
    await shards.stop()


async def test_a_crash_while_the_table_is_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, _ = _shards(tmp_path, 1)
    await shards.start()
    write_text = Path.write_text

    def half(path: Path, text: str) -> int:
        write_text(path, text[: len(text) // 2])
        raise RuntimeError("killed here")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", half)
        with pytest.raises(RuntimeError, match="killed here"):
            await shards.add()
    await shards.stop()
    again, launcher = _shards(tmp_path, 1)
    await again.start()
    assert launcher.launched == [(0, "10.0.0.0:7000")]
    await again.stop()


async def test_a_shard_that_nobody_watches_any_more_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shards, launcher = _shards(tmp_path, 1)
    await shards.start()
    launcher.running[0].ends_with = asyncio.CancelledError()  # nobody asked for it
    launcher.running[0].over.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert "shard 0 is watched no more" in caplog.text
    assert len(launcher.launched) == 1
    caplog.clear()
    await shards.stop()
    assert caplog.text == ""
