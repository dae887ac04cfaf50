"""Several stand-alone proxies, each with a journal of its own, behind one front.

::

    front (port)  ── starts, watches, starts again ──▶ shard 0 (a place of its own, RECORD/shard-0)
                                                       shard 1 (a place of its own, RECORD/shard-1) …

What a shard is, a :class:`Launcher` decides: a process of this machine (here), or an actor on a node of a Ray cluster
(`verl_adapter.rollout.ray_shards`). It keeps its place as long as its folder lives: agents hold its address.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from seamless_verl.errors import ConfigError
from seamless_verl.proxy.deploy.front import Front, make_front
from seamless_verl.proxy.deploy.http_server import ProxyServer, free_port_after
from seamless_verl.proxy.deploy.standalone import StandaloneConfig, stopped_by_signal
from seamless_verl.proxy.session.address_book import AddressBook

_log = logging.getLogger(__name__)
_RESTART_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 15.0


class RunningShard(Protocol):
    """One shard that takes requests."""

    @property
    def address(self) -> str:
        """Base URL, as the front and agents reach it."""
        ...

    async def ended(self) -> str:
        """Returns when it has ended; how."""
        ...

    async def stop(self) -> None:
        """Finish requests under way, then end."""
        ...


class Launcher(Protocol):
    """Starts shards."""

    async def launch(self, shard: int, place: str | None, taken: Collection[str]) -> RunningShard:
        """Start a shard; returns when it takes requests.

        Args:
            place: ``host:port`` that it had before, None for a new one.
            taken: places of all other shards.

        Raises:
            ConfigError: it does not start.
        """
        ...


class Shards:
    """The shards of one front and their table.

    Args:
        record: the folder of the table.
        num: shards that take new sessions; others that the folder knows keep their sessions.
    """

    def __init__(self, record: Path, num: int, launcher: Launcher) -> None:
        self._num = num
        self._launcher = launcher
        self._file = record / "shards.json"
        self._places: dict[int, str] = known_places(self._file)
        known = {shard: f"http://{place}" for shard, place in self._places.items()}
        self._book = AddressBook(addresses=known, retired=frozenset(known))  # away until `start` has started them
        self._watchers: dict[int, asyncio.Task[None]] = {}
        self._running: dict[int, RunningShard] = {}
        self._launching = set[asyncio.Task[RunningShard]]()  # takes as long as vLLM is paused
        self._adding = asyncio.Lock()
        self._stopping = asyncio.Event()

    @property
    def book(self) -> AddressBook:
        return self._book

    async def start(self) -> None:
        """Start all shards; returns when all take requests.

        Raises:
            ConfigError: one of them does not.
        """
        wanted = set(range(self._num))
        await asyncio.gather(*(self._start_one(shard) for shard in sorted(wanted | set(self._places))))
        self._book = AddressBook(addresses=self._book.addresses, retired=frozenset(self._places) - wanted)

    async def add(self) -> int:
        """One more shard for new sessions; no session moves."""
        async with self._adding:
            shard = max(self._places) + 1
            if self._stopping.is_set():
                raise ConfigError("--shards", shard, "no shard is added: the front ends", "start it again")
            await self._start_one(shard)
        return shard

    async def stop(self) -> None:
        """Stop every shard after its requests under way; one that does not take requests yet is given up."""
        self._stopping.set()
        for launching in self._launching:
            launching.cancel()
        await asyncio.gather(*self._launching, return_exceptions=True)
        await asyncio.gather(*(shard.stop() for shard in self._running.values()), return_exceptions=True)
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)

    async def _start_one(self, shard: int) -> None:
        await self._launch(shard)
        self._watchers[shard] = asyncio.create_task(self._watch(shard))
        self._watchers[shard].add_done_callback(functools.partial(self._report, shard))

    async def _launch(self, shard: int) -> None:
        taken = [place for other, place in self._places.items() if other != shard]
        launching = asyncio.create_task(self._launcher.launch(shard, self._places.get(shard), taken))
        self._launching.add(launching)
        launching.add_done_callback(self._launching.discard)
        try:
            running = await launching
        except asyncio.CancelledError:
            if not self._stopping.is_set():
                raise
            raise ConfigError("--shards", shard, "this shard was given up: the front ends", "start it again") from None
        places = self._places | {shard: running.address.partition("://")[2]}
        if places != self._places:
            try:
                _write_places(self._file, places)
            except ConfigError:
                await running.stop()  # the folder would not know it: its sessions could not be found again
                raise
            self._places = places
        self._running[shard] = running
        if self._book.addresses.get(shard) != running.address:  # one that retired and is started again stays retired
            self._book = self._book.with_shard(shard, running.address)

    async def _watch(self, shard: int) -> None:
        """Start a shard again whenever it ends by itself: its journal has every answered turn."""
        while not self._stopping.is_set():
            try:
                how = await self._running[shard].ended()
            except Exception as error:  # noqa: BLE001 - whoever could tell of it is out of reach, and so is the shard
                how = _told(error)
            if not self._stopping.is_set():
                await self._start_again(shard, how)

    async def _start_again(self, shard: int, how: str) -> None:
        """Until it runs or the front stops; whatever keeps it from starting may pass (memory, a disk, a cluster)."""
        pause_s = _RESTART_PAUSE_S
        while not self._stopping.is_set():
            _log.error("shard %d ended (%s); starting it again in %.1f s", shard, how, pause_s)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
                return
            try:
                await self._launch(shard)
                break
            except Exception as error:  # noqa: BLE001 - logged by the next round
                how = _told(error)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if self._stopping.is_set():
            await self._running[shard].stop()  # it may have come too late to be stopped with the others

    def _report(self, shard: int, watching: asyncio.Task[None]) -> None:
        if not self._stopping.is_set():
            error = None if watching.cancelled() else watching.exception()
            _log.error("shard %d is watched no more, and not started again when it ends", shard, exc_info=error)


class LocalShards:
    """A :class:`Launcher` of processes on this machine; they end by themselves when this process is gone.

    Args:
        arguments: of ``seamless-verl``, as this process got them; what one shard is told comes after them, and holds.
        record: each shard has a folder in it.
        host, port: of the front; shards take the ports after it where they are free.
    """

    def __init__(self, arguments: Sequence[str], *, record: Path, host: str, port: int) -> None:
        self._arguments = arguments
        self._record = record
        self._host = host
        self._port = port

    async def launch(self, shard: int, place: str | None, taken: Collection[str]) -> RunningShard:
        """See :class:`Launcher`."""
        used = [int(other.rpartition(":")[2]) for other in taken]
        port = int(place.rpartition(":")[2]) if place else free_port_after(self._host, self._port, shard + 1, used)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "seamless_verl.cli", *self._arguments),
            *("--shard", str(shard), "--port", str(port), "--record", str(self._record / f"shard-{shard}")),
            stdin=PIPE,
            stdout=PIPE,
            stderr=None,
        )
        assert process.stdout is not None
        try:
            async for line in process.stdout:  # others come before it where something prints as Python starts
                if line.startswith(b"proxy http"):
                    return _LocalShard(process, line.decode().split()[1])
                sys.stderr.write(line.decode(errors="replace"))
        except asyncio.CancelledError:
            await _LocalShard(process, "").stop()
            raise
        await process.wait()
        raise ConfigError("--shards", shard, "this shard did not start", "see its message above")


class _LocalShard:
    def __init__(self, process: Process, address: str) -> None:
        self._process = process
        self.address = address

    async def ended(self) -> str:
        return f"exit code {await self._process.wait()}"

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        await self._process.wait()


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


async def serve_shards(
    config: StandaloneConfig, num: int, launcher: Launcher, *, ready: Callable[[str, int], None]
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        config: of the front, with a folder.
        num: see :class:`Shards`.
        ready: called with the front's base URL and the number of shards once requests are taken.

    Raises:
        ConfigError: the front or a shard cannot start.
    """
    stop = stopped_by_signal()
    assert config.record is not None
    config.record.mkdir(parents=True, exist_ok=True)
    shards = Shards(config.record, num, launcher)
    front = Front(book=lambda: shards.book, admin_key=config.admin_key, limits=config.limits, add_shard=shards.add)
    server = ProxyServer(make_front(front), config.host, config.port, drain_s=config.drain_s)
    starting: asyncio.Task[None] | None = None
    try:
        base_url = await server.start()
        starting, stopped = asyncio.create_task(shards.start()), asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            ready(base_url, len(shards.book.addresses))
            await stopped
    finally:
        await asyncio.gather(server.stop(), shards.stop())
        if starting is not None:
            await asyncio.gather(starting, return_exceptions=True)  # given up by now; its story is no news
        await front.close()


def known_places(file: Path) -> dict[int, str]:
    """Shards that the folder has seen before.

    Raises:
        ConfigError: the table cannot be read.
    """
    try:
        return (
            {int(shard): str(place) for shard, place in json.loads(file.read_text()).items()} if file.exists() else {}
        )
    except (OSError, ValueError, AttributeError) as error:
        fix = 'mend it by hand: {"0": "HOST:PORT", …}, the addresses that agents of open sessions use'
        raise ConfigError("--record", file, f"is no table of shards: {error}", fix) from error


def _write_places(file: Path, places: Mapping[int, str]) -> None:
    """Replace the table as a whole: half of one would make the next start refuse the folder.

    Raises:
        ConfigError: the table cannot be written.
    """
    part = file.with_name(f"{file.name}.part")
    try:
        part.write_text(json.dumps({str(shard): place for shard, place in places.items()}))
        part.replace(file)
    except OSError as error:
        fix = "make room, or let this user write there"
        raise ConfigError("--record", file, f"the table of shards cannot be written: {error}", fix) from error
