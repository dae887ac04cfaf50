"""Disks that are full or read-only, for real: a file system of their own, in a mount namespace of the proxy."""

from __future__ import annotations

import asyncio
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest

from seamless_verl.proxy.client import ProxyRefused
from seamless_verl.proxy.session.sessions import SessionSpec
from tests.edge.proxy.test_standalone import HI, Mock, folder, mock  # noqa: F401 - fixtures
from tests.standalone import Standalone, chat


@lru_cache(maxsize=1)
def _may_mount() -> bool:
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.timeout(120)
needs_mounts = pytest.mark.skipif(
    not _may_mount(), reason="no user namespaces here; runs as root and where unshare -rm is allowed"
)


def _inside(proxy: Standalone, preparation: str) -> list[str]:
    """The proxy's command in a mount namespace, after ``preparation``, in which $0 is the recorded folder."""
    return ["unshare", "-rm", "sh", "-c", f'{preparation} && exec "$@"', str(proxy.record), *proxy.command]


@needs_mounts
async def test_a_full_disk_keeps_answers_back_until_there_is_room(mock: Mock, tmp_path: Path) -> None:  # noqa: F811
    proxy = Standalone(tmp_path, await mock.start(), mock.folder)
    proxy.record.mkdir()
    fill = "mount -t tmpfs -o size=14m tmpfs $0 && head -c 12000000 /dev/zero > $0/filler"
    proxy.command = _inside(proxy, fill)
    await asyncio.to_thread(proxy.start)
    assert proxy.process is not None
    admin = proxy.admin()
    handle = await admin.open_session(SessionSpec())
    given = 0
    while True:
        answer = await chat(proxy.url, handle.api_key, [{"role": "user", "content": f"{given} " + "word " * 6000}])
        if answer.status_code != 200:
            break
        given += 1
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "journal_failed")
    assert "full" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "5"
    assert given > 2
    with pytest.raises(ProxyRefused, match="503"):  # the rows would not fit either
        await admin.close_session(handle.id, 1.0)
    (Path(f"/proc/{proxy.process.pid}/root{proxy.record}") / "filler").unlink()
    result = await admin.close_session(handle.id)
    trained = sum(turn.trained for row in result.rows for turn in row.turns)
    assert (result.reward, result.audit.is_clean, trained) == (1.0, True, given)
    other = await admin.open_session(SessionSpec())
    assert (await chat(proxy.url, other.api_key, HI)).status_code == 200
    await admin.close()
    assert await asyncio.to_thread(proxy.stop) == 0


@needs_mounts
async def test_a_read_only_disk_is_named_at_the_start_and_nothing_is_changed(mock: Mock, tmp_path: Path) -> None:  # noqa: F811
    proxy = Standalone(tmp_path, await mock.start(), mock.folder)
    await asyncio.to_thread(proxy.start)
    admin = proxy.admin()
    handle = await admin.open_session(SessionSpec())
    answer = await chat(proxy.url, handle.api_key, HI)
    await asyncio.to_thread(proxy.stop)
    read_only = _inside(proxy, "mount --bind $0 $0 && mount -o remount,bind,ro $0")
    done = await asyncio.to_thread(subprocess.run, read_only, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert f"--record={proxy.record}: cannot be written" in done.stderr
    assert "Read-only file system" in done.stderr
    await asyncio.to_thread(proxy.start)
    history = [*HI, answer.json()["choices"][0]["message"], *HI]
    again = await chat(proxy.url, handle.api_key, history)
    assert (again.status_code, again.headers["x-seamless-match"]) == (200, "clean")
    await admin.close()
    await asyncio.to_thread(proxy.stop)
