"""Shards of the stand-alone proxy as actors on the nodes of a Ray cluster (`seamless-verl proxy --ray`).

::

    front ──▶ Ray: one actor per shard, spread over the nodes ──▶ each serves from its own event loop, agents talk to
      └ starts a dead one again on its node and port                it directly; its journal is in RECORD/shard-N there

Invariant: a shard's node and port stay the same for as long as its folder lives, so no session ever moves. If its node
is gone, its sessions wait for the node (their agents get 503 and Retry-After through the front).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from seamless_verl.errors import ConfigError, SeamlessError
from seamless_verl.proxy.deploy.http_server import free_port_after, is_wide, url_of
from seamless_verl.proxy.deploy.shards import RunningShard
from seamless_verl.proxy.deploy.standalone import Ready, StandaloneConfig, serve
from seamless_verl.proxy.session.address_book import prefix_of


class ShardActor:
    """One shard; an asynchronous actor, so that it serves between its calls."""

    def __init__(self, config: StandaloneConfig) -> None:
        self._config = config
        self._stop = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    async def start(self, port: int | None) -> str:
        """Serve, on a port of this node or on a free one; the base URL once requests are taken.

        Raises:
            RuntimeError: it cannot; in words, since a ConfigError does not survive the way back through Ray.
        """
        host = ray.util.get_node_ip_address() if is_wide(self._config.host) else self._config.host
        if port is None:
            port = free_port_after(self._config.host, 0, 0, ())
        address = url_of(host, port)
        config = replace(self._config, port=port, base_url=self._config.base_url or address)
        ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(serve(config, stop=self._stop, ready=ready.set_result))
        either: list[asyncio.Future[Any]] = [self._serving, ready]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            try:
                await self._serving
            except SeamlessError as error:
                raise RuntimeError(str(error)) from None
        return address

    async def ended(self) -> None:
        """Returns when it no longer serves; fails when the actor dies."""
        assert self._serving is not None
        await asyncio.shield(self._serving)

    async def stop(self) -> None:
        self._stop.set()
        await self.ended()


class RayShards:
    """A :class:`~seamless_verl.proxy.deploy.shards.Launcher`.

    Args:
        config: of every shard; folder, name and port are each one's own.
        address: of the cluster, as `ray.init` takes it.

    Raises:
        ConfigError: no such cluster, or one of several machines whose shards would be reachable from their own only.
    """

    def __init__(self, config: StandaloneConfig, address: str) -> None:
        self._config = config
        try:
            ray.init(address, ignore_reinit_error=True, logging_level=logging.WARNING)
        except (ConnectionError, ValueError) as error:
            fix = "start one (ray start --head), or name it: --ray HOST:6379"
            raise ConfigError("--ray", address, f"no Ray cluster there: {error}", fix) from error
        machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        if len(machines) > 1 and config.host in ("127.0.0.1", "localhost", "::1"):
            story = f"the cluster has {len(machines)} machines; a shard on one could not be reached from another"
            raise ConfigError("--host", config.host, story, "write --host 0.0.0.0, in a network that you trust")

    async def launch(self, shard: int, place: str | None, taken: Collection[str]) -> RunningShard:
        """See :class:`~seamless_verl.proxy.deploy.shards.Launcher`."""
        assert self._config.record is not None
        folder = self._config.record.absolute() / f"shard-{shard}"
        config = replace(self._config, record=folder, prefix=prefix_of(shard))
        strategy = NodeAffinitySchedulingStrategy(self._node_of(shard, place), soft=False)
        actor_class: Any = ray.remote(ShardActor)
        actor = actor_class.options(num_cpus=0, scheduling_strategy=strategy).remote(config)
        try:
            start = actor.start.remote(int(place.rpartition(":")[2]) if place else None)
            return _RayShard(actor, await start)  # however long: it waits for a paused vLLM
        except asyncio.CancelledError:
            ray.kill(actor)
            raise
        except RayError as error:
            ray.kill(actor)
            story = str(error.cause if isinstance(error, RayTaskError) else error) or type(error).__name__
            raise ConfigError("--shards", shard, f"this shard did not start: {story}", "mend that") from error

    def _node_of(self, shard: int, place: str | None) -> str:
        """Id of the node that a shard lived on; a new one's is the next of all.

        Ray's own SPREAD may put several actors that start together on one node. A loopback address fits any node, since
        all are on one machine then.
        """
        nodes = sorted((node["NodeID"], node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"])
        host = place.rpartition(":")[0].strip("[]") if place is not None else None
        fitting = [name for name, address in nodes if host in (None, address, self._config.host)]
        if not fitting:
            raise ConfigError("--shards", shard, f"its node {host} is not in the cluster", "start the node again")
        return str(fitting[shard % len(fitting)])


class _RayShard:
    def __init__(self, actor: Any, address: str) -> None:
        self._actor = actor
        self.address = address

    async def ended(self) -> str:
        try:
            await self._actor.ended.remote()
        except RayActorError as error:
            return f"{type(error).__name__}"
        except RayTaskError as error:
            return str(error.cause)
        finally:
            ray.kill(self._actor)
        return "stopped"

    async def stop(self) -> None:
        await self._actor.stop.remote()
