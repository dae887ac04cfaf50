"""The proxy of one rollout worker as a Ray actor; if it dies, Ray starts it again on its journal.

::

    rollout worker   owns the client to the replicas, the agents and the listening socket
        └── ProxyActor   tokenizer, session trees, journal.sqlite; restarted by Ray without limit

This module is imported in the actor, which needs neither verl nor vLLM (unless a parser of vLLM's was asked for).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from seamless_verl.errors import SeamlessError
from seamless_verl.machine import APART
from seamless_verl.proxy.calls import OnUnsupported
from seamless_verl.proxy.client import ProxyAdmin
from seamless_verl.proxy.deploy.http_server import ProxyServer, base_url_of, listen_on, search_garbage_rarely
from seamless_verl.proxy.engine import Ability, Engine
from seamless_verl.proxy.engines.remote_engine import EngineHost, RemoteEngine
from seamless_verl.proxy.http.app import ProxyDeps, make_app
from seamless_verl.proxy.journal.kept_sessions import KeepingJournal
from seamless_verl.proxy.journal.left_sessions import LeftSessions, make_way
from seamless_verl.proxy.journal.sqlite_journal import SqliteJournal
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.session.store import SessionStore
from seamless_verl.proxy.text.chat_template import TokenizerRenderer
from seamless_verl.proxy.text.parsing import AnswerParser, keeps_special_tokens
from seamless_verl.proxy.text.pictures import ImageReader, ProcessorReader
from seamless_verl.run.supervisor import RUN_ID
from seamless_verl.verl_adapter.vllm.vllm_parsers import make_parser

_log = logging.getLogger(__name__)
_CALLS_PER_ATTEMPT = 4
_BYTES_PER_TOKEN = 80  # of a session in memory: `weight_bytes` of 100,000 tokens in 200 turns, reckoned to 75
_SHARES = 16  # of a node's memory, one for each worker's sessions: verl's eight on one node take half at most
_GONE_S = 10.0  # for a proxy that was killed
_START_S = 600.0  # for one that imports from a slow file system
_JOURNAL = "journal.sqlite"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSettings:
    """What a rollout worker's proxy is told; pickled on its way to an actor.

    Attributes:
        tokenizer: verl's, of the model and with the chat template that is trained.
        processor: verl's, of a model that takes pictures; None for one that does not.
        processor_args: of its calls.
        template_args: of the chat template.
        stop_token_ids: ids that end an answer.
        tool_parser, reasoning_parser: vLLM's, by name; see `make_parser`.
        max_model_len: prompt and answer together, in tokens.
        abilities: of the engine.
        on_unsupported: what becomes of preferences that nobody here can honour.
        attempts: of agents that may be under way here.
    """

    tokenizer: Any
    processor: Any
    processor_args: Mapping[str, Any]
    template_args: Mapping[str, Any]
    stop_token_ids: Sequence[int]
    tool_parser: str | None
    reasoning_parser: str | None
    max_model_len: int
    model: str
    admin_key: str
    abilities: frozenset[Ability]
    on_unsupported: OnUnsupported = OnUnsupported.ACCEPT
    attempts: int = 0

    def text_side(self) -> tuple[TokenizerRenderer, AnswerParser, ImageReader | None]:
        """The way from messages and pictures to token ids, and back.

        Raises:
            ConfigError: there is no such parser.
        """
        parser = make_parser(self.tokenizer, self.tool_parser, self.reasoning_parser)
        images = None
        if getattr(self.processor, "image_token", None) is not None:
            images = ProcessorReader(self.processor, self.processor_args, max_pixels=Limits().max_image_pixels)
        template = getattr(self.processor, "chat_template", None)
        video = getattr(self.processor, "video_token", None)
        renderer = TokenizerRenderer(
            self.tokenizer,
            template_args={**({"chat_template": template} if template else {}), **self.template_args},
            stop_token_ids=self.stop_token_ids,
            keep_special_tokens=keeps_special_tokens(parser, self.tokenizer),
            placeholder=None if images is None else images.placeholder,
            others=() if video is None else (self.tokenizer.convert_tokens_to_ids(video),),
        )
        return renderer, parser, images

    def deps(
        self, engine: Engine, renderer: TokenizerRenderer, parser: AnswerParser, images: ImageReader | None
    ) -> ProxyDeps:
        """A proxy that keeps its sessions in memory."""
        wanted = _BYTES_PER_TOKEN * self.max_model_len * self.attempts
        share = psutil.virtual_memory().total // _SHARES
        return ProxyDeps(
            engine=engine,
            renderer=renderer,
            parser=parser,
            images=images,
            abilities=self.abilities,
            on_unsupported=self.on_unsupported,
            admin_key=self.admin_key,
            model=self.model,
            limits=Limits(
                max_model_len=self.max_model_len,
                # An agent may have several calls under way; the bound is against clients that are none.
                max_in_flight=max(Limits().max_in_flight, _CALLS_PER_ATTEMPT * self.attempts),
                max_resident_bytes=max(Limits().max_resident_bytes, min(wanted, share)),
            ),
        )


class ProxyActor:
    """An asynchronous actor; Ray repeats `serve` after a restart.

    Args:
        owner: address of the rollout worker's `EngineHost`.
        journal: file of the journal, on this node.
        keep_bytes: of sessions that are over and kept beside it; 0: none.
    """

    def __init__(self, settings: ShardSettings, owner: str, journal: Path, keep_bytes: int) -> None:
        self._settings = settings
        self._owner = owner
        self._journal = journal
        self._keep_bytes = keep_bytes

    async def serve(self) -> None:
        """Serve until the owner is gone.

        Raises:
            RuntimeError: it cannot; in words, since a ConfigError does not survive the way back through Ray.
        """
        try:
            journal = (
                KeepingJournal(self._journal, max_bytes=self._keep_bytes)
                if self._keep_bytes
                else SqliteJournal(self._journal)
            )
            sessions = SessionStore()
            journal.earlier = LeftSessions(self._journal).of
            journal.resume(sessions)
            engine, listener = await RemoteEngine.connect(self._owner)
            deps = replace(self._settings.deps(engine, *self._settings.text_side()), journal=journal, sessions=sessions)
        except (SeamlessError, OSError) as error:
            raise RuntimeError(f"the proxy of a rollout worker cannot start: {error}") from None
        deps.counters.num_sessions = len(sessions)
        server = ProxyServer(make_app(deps), listener=listener)
        await server.start()
        search_garbage_rarely()
        await engine.ended()
        await server.stop()
        await journal.close()


class ActorProxy:
    """A `ProxyActor` on this node, on a socket of this process's; Ray starts it again whenever it dies.

    Args:
        engine: belongs to this process, and is asked from the actor.
        folder: of the journal, on this node's own disk; removed in the end where it is not the run's. An earlier
            process's journal is removed first, since its sessions have nobody left who waits for them.
        keep_bytes: of sessions that are over and kept there, also those of an earlier process; 0: none.
        is_successor: this worker is in the place of one that died, whose agents' answers go to those that make their
            attempts again.

    Attributes:
        base_url: as agents reach it, also while it is down: they wait then.
    """

    def __init__(
        self,
        settings: ShardSettings,
        engine: Engine,
        host: str,
        port: int,
        folder: Path,
        *,
        keep_bytes: int = 0,
        is_successor: bool = False,
    ) -> None:
        self._listener = listen_on(host, port)
        self.base_url = base_url_of(self._listener, node_ip=ray.util.get_node_ip_address())
        self._engine = EngineHost(engine, self._listener)
        self._folder = folder
        self._is_successor = is_successor
        folder.mkdir(parents=True, exist_ok=True)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": here}
        actor_class: Any = ray.remote(ProxyActor)
        self._actor: ActorHandle[ProxyActor] = actor_class.options(**options).remote(
            settings, self._engine.address, folder / _JOURNAL, keep_bytes
        )
        self._serving: asyncio.Future[None] | None = None

    async def start(self, admin: ProxyAdmin) -> None:
        """Returns once it answers requests.

        Raises:
            SeamlessError: it does not start; nothing of it is left.
        """
        try:
            self._engine.start()
            life = os.environ.get(RUN_ID) or ray.get_runtime_context().get_job_id()
            await asyncio.to_thread(make_way, self._folder / _JOURNAL, life, is_successor=self._is_successor)
            self._serving = asyncio.ensure_future(_served(self._actor))
            self._serving.add_done_callback(self._gave_up)
            until = time.monotonic() + _START_S
            while not await self._answers(admin, self._serving):
                if time.monotonic() > until:
                    raise SeamlessError(f"the proxy on {self.base_url} did not answer within {_START_S:.0f} s")
                _log.warning("the proxy on %s is still starting", self.base_url)
        except BaseException:
            await self.close()
            raise

    async def _answers(self, admin: ProxyAdmin, serving: asyncio.Future[Any]) -> bool:
        """False: not yet; what it imports may take minutes to read from a file system that others use, too."""
        answering: asyncio.Future[Any] = asyncio.ensure_future(admin.stats())
        try:
            await asyncio.wait({serving, answering}, return_when=asyncio.FIRST_COMPLETED)
            self.check()
            await answering
        except httpx.TimeoutException:
            return False
        finally:
            answering.cancel()
        return True

    def _gave_up(self, serving: asyncio.Future[None]) -> None:
        """Ray does not start it again, for example because its disk is full: waiting connections are refused now."""
        self._listener.close()
        if not serving.cancelled():
            _log.error("the proxy on %s has ended", self.base_url, exc_info=serving.exception())

    def check(self) -> None:
        """Raise when it ended for good, or could not come back if it died."""
        if self._serving is not None and self._serving.done():
            raise SeamlessError(f"the proxy on {self.base_url} has ended") from self._serving.exception()
        self._engine.check()

    async def close(self) -> None:
        if self._serving is not None:
            self._serving.remove_done_callback(self._gave_up)
        ray.kill(self._actor)
        with contextlib.suppress(RayError, asyncio.TimeoutError):  # until it is gone it has the listening socket, too
            await asyncio.wait_for(_ready(self._actor), _GONE_S)
        await self._engine.close()
        self._listener.close()
        if self._folder.parent.name.startswith(APART):
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # another worker's journal is still in it
                self._folder.parent.rmdir()


async def _served(actor: ActorHandle[ProxyActor]) -> None:
    await actor.serve.remote()


async def _ready(actor: Any) -> None:
    await actor.__ray_ready__.remote()
