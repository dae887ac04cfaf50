"""Several stand-alone proxies on one machine, each a process with a journal of its own, behind one front.

::

    front (port)  ── starts, watches, starts again ──▶ shard 0 (port + 1, RECORD/shard-0)
                                                       shard 1 (port + 2, RECORD/shard-1) …

A shard keeps its port for as long as its folder lives, since agents hold its address. A shard whose front is gone
ends by itself (its standard input closes), so that a new front finds the folders free.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from seamless_verl.errors import ConfigError
from seamless_verl.proxy.address_book import AddressBook
from seamless_verl.proxy.front import Front, make_front
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.server import ProxyServer, free_port_after

_log = logging.getLogger(__name__)
_RESTART_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsConfig:
    """Attributes:
    arguments: of ``seamless-verl proxy``, as they hold for every shard.
    num: shards that take new sessions; others that the folder knows keep their sessions.
    """

    arguments: Sequence[str]
    num: int
    record: Path
    host: str
    port: int
    admin_key: str
    drain_s: float
    limits: Limits


class Shards:
    """The processes of one front and their table."""

    def __init__(self, config: ShardsConfig) -> None:
        self._config = config
        self._file = config.record / "shards.json"
        self._ports: dict[int, int] = _known_ports(self._file)
        self._book = AddressBook(addresses={})
        self._watchers: dict[int, asyncio.Task[None]] = {}
        self._processes: dict[int, Process] = {}
        self._stopping = False

    @property
    def book(self) -> AddressBook:
        return self._book

    async def start(self) -> None:
        """Start all shards; returns when all take requests.

        Raises:
            ConfigError: one of them does not.
        """
        wanted = set(range(self._config.num))
        await asyncio.gather(*(self._start_one(shard) for shard in sorted(wanted | set(self._ports))))
        self._book = AddressBook(addresses=self._book.addresses, retired=frozenset(self._ports) - wanted)

    async def add(self) -> int:
        """One more shard for new sessions; no session moves."""
        shard = max(self._ports) + 1
        await self._start_one(shard)
        return shard

    async def stop(self) -> None:
        """Let every shard finish what is under way."""
        self._stopping = True
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)

    async def _start_one(self, shard: int) -> None:
        if shard not in self._ports:
            self._ports[shard] = free_port_after(self._config.host, self._config.port, shard + 1, self._ports.values())
            self._file.write_text(json.dumps({str(number): port for number, port in self._ports.items()}))
        address = await self._spawn(shard)
        self._book = self._book.with_shard(shard, address)
        self._watchers[shard] = asyncio.create_task(self._watch(shard))

    async def _spawn(self, shard: int) -> str:
        """Start the process; its address once it takes requests."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "seamless_verl.cli", "proxy", *self._config.arguments),
            *("--shard", str(shard), "--port", str(self._ports[shard])),
            *("--record", str(self._config.record / f"shard-{shard}")),
            stdin=PIPE,
            stdout=PIPE,
            stderr=None,
        )
        self._processes[shard] = process
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        if not line.startswith("proxy http"):
            await process.wait()
            raise ConfigError("--shards", self._config.num, f"shard {shard} did not start", "see its message above")
        return line.split()[1]

    async def _watch(self, shard: int) -> None:
        """Start a shard again whenever it ends by itself: its journal has every answered turn."""
        while True:
            code = await self._processes[shard].wait()
            if self._stopping:
                return
            _log.error("shard %d ended with code %s; starting it again", shard, code)
            await asyncio.sleep(_RESTART_PAUSE_S)
            try:
                await self._spawn(shard)
            except ConfigError as error:
                _log.error("%s", error)


async def serve_shards(config: ShardsConfig, *, ready: Callable[[str, int], None]) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        ready: called with the front's base URL and the number of shards once requests are taken.

    Raises:
        ConfigError: the front or a shard cannot start.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    config.record.mkdir(parents=True, exist_ok=True)
    shards = Shards(config)
    front = Front(book=lambda: shards.book, admin_key=config.admin_key, limits=config.limits, add_shard=shards.add)
    server = ProxyServer(make_front(front), config.host, config.port, drain_s=config.drain_s)
    try:
        base_url = await server.start()
        await shards.start()
        ready(base_url, len(shards.book.addresses))
        await stop.wait()
    finally:
        await asyncio.gather(server.stop(), shards.stop())
        await front.close()


def _known_ports(file: Path) -> dict[int, int]:
    """Shards that the folder has seen before.

    Raises:
        ConfigError: the table cannot be read.
    """
    try:
        return {int(shard): int(port) for shard, port in json.loads(file.read_text()).items()} if file.exists() else {}
    except (OSError, ValueError, AttributeError) as error:
        fix = 'mend it by hand: {"0": PORT, …}, the ports that agents of open sessions use'
        raise ConfigError("--record", file, f"is no table of shards: {error}", fix) from error
