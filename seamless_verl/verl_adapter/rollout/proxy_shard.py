"""The proxy beside a rollout worker, the agents, and the client that opens and closes sessions.

verl spreads rollout workers over the nodes; agents of a worker talk to the proxy beside them, no central gateway exists
(ADR 0003). With a journal the proxy is an actor on the worker's node, which may die at any time (ADR 0009); without
one it is served from the worker's own event loop.
"""

from __future__ import annotations

import asyncio
import copy
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase

from seamless_verl.agents.contract import AgentRunner, max_jobs, runner_class
from seamless_verl.config import ProxyConfig, SeamlessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.machine import journal_folder
from seamless_verl.proxy.calls import OnUnsupported
from seamless_verl.proxy.client import ProxyAdmin
from seamless_verl.proxy.deploy.http_server import ProxyServer, base_url_of, listen_on
from seamless_verl.proxy.http.app import make_app
from seamless_verl.proxy.text.steadiness import moving_note
from seamless_verl.run.capacity import attempts_per_worker
from seamless_verl.run.check_combinations import check_routing_replay
from seamless_verl.run.supervisor import RUN_ID
from seamless_verl.staleness.groups import SUCCESSOR
from seamless_verl.verl_adapter.rollout.attempt_watch import attempt_log
from seamless_verl.verl_adapter.rollout.proxy_actor import ActorProxy, ShardSettings
from seamless_verl.verl_adapter.rollout.request_log import at_worker_end
from seamless_verl.verl_adapter.rollout.trainer_engine import VerlEngine, abilities_of


class ProxyShard:
    """The proxy, the agents and the admin client of this rollout worker; one per process, started on first use."""

    _current: asyncio.Task[ProxyShard] | None = None

    def __init__(
        self, seamless: SeamlessConfig, proxy: ProxyServer | ActorProxy, admin: ProxyAdmin, runner: Any
    ) -> None:
        self.seamless = seamless
        self._proxy = proxy
        self.admin = admin
        self.runner: AgentRunner = runner
        self._places = asyncio.Semaphore(max_jobs(self.runner, seamless.agent.max_concurrent))
        self._under_way: set[asyncio.Task[Any]] = set()  # attempts, and deletions of their sessions

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Stands around one attempt, in a task of its own; waits until the runner can take it."""
        async with self._places:
            attempt = asyncio.current_task()
            assert attempt is not None
            self._note(attempt)
            yield

    def _note(self, task: asyncio.Task[Any]) -> None:
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def delete_session(self, session_id: str) -> None:
        """Also if the attempt is cancelled meanwhile: the agent of a session that stays open uses the engine."""
        deleting = asyncio.ensure_future(self.admin.delete_session(session_id))
        self._note(deleting)
        await asyncio.shield(deleting)

    async def close(self) -> None:
        """End the agents, then the proxy. Attempts need it until they have ended: they delete their sessions."""
        try:
            await self.runner.close()
            while self._under_way:
                await asyncio.wait(self._under_way)
        finally:
            await self.admin.close()
            await (self._proxy.close() if isinstance(self._proxy, ActorProxy) else self._proxy.stop())

    @classmethod
    async def get(cls, loop: AgentLoopBase) -> ProxyShard:
        """This worker's shard; ``loop`` tells of the model and of the client to its replicas.

        Raises:
            SeamlessError: it cannot start, or its proxy has ended for good.
        """
        task = cls._current
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):  # a failed start too
            task = cls._current = asyncio.ensure_future(cls._start_until_the_end(loop))
        shard = await asyncio.shield(task)
        if isinstance(shard._proxy, ActorProxy):
            shard._proxy.check()
        return shard

    @classmethod
    async def _start_until_the_end(cls, loop: AgentLoopBase) -> ProxyShard:
        shard = await cls._start(loop)
        at_worker_end.push_async_callback(shard.close)
        return shard

    @classmethod
    async def _start(cls, loop: AgentLoopBase) -> ProxyShard:
        config, tokenizer = loop.config, loop.tokenizer
        plain: Any = OmegaConf.to_container(config, resolve=True)
        seamless = SeamlessConfig.from_mapping(plain["seamless"])
        check_routing_replay(plain)  # here at the latest: the rows of a data set of the user's own may ask for agents
        runner = _runner(seamless)
        attempts = attempts_per_worker(plain, seamless)
        seamless = replace(seamless, agent=replace(seamless.agent, max_concurrent=attempts))
        rollout = config.actor_rollout_ref.rollout
        settings = ShardSettings(
            tokenizer=tokenizer,
            processor=_portable(loop.processor),
            processor_args=_plain(loop.mm_processor_kwargs),
            template_args=_plain(loop.apply_chat_template_kwargs),
            stop_token_ids=_stop_token_ids(config, tokenizer),
            tool_parser=seamless.proxy.tool_parser,
            reasoning_parser=seamless.proxy.reasoning_parser,
            max_model_len=rollout.max_model_len or rollout.prompt_length + rollout.response_length,
            model=str(config.actor_rollout_ref.model.path),
            admin_key=secrets.token_urlsafe(32),
            abilities=abilities_of(rollout.name),
            on_unsupported=OnUnsupported(seamless.proxy.on_unsupported),
            attempts=attempts,
        )
        renderer, parser, images = settings.text_side()
        if note := moving_note(renderer):
            attempt_log.note(f"{settings.model}: {note}")
        engine = VerlEngine(
            loop.server_manager,
            decode=renderer.decode,
            max_model_len=settings.max_model_len,
            stop_token_ids=renderer.stop_token_ids,
            processor_args=settings.processor_args,
        )
        host, port = seamless.proxy.host, seamless.proxy.port
        if seamless.proxy.journal and seamless.run_dir is not None:
            folder, is_successor = _place_of_journal(seamless.proxy, Path(seamless.run_dir))
            kept = seamless.proxy.keep_mib << 20
            actor = ActorProxy(settings, engine, host, port, folder, keep_bytes=kept, is_successor=is_successor)
            admin = ProxyAdmin(actor.base_url, settings.admin_key)
            await actor.start(admin)
            return cls(seamless, actor, admin, runner)
        app = make_app(settings.deps(engine, renderer, parser, images))
        listener = listen_on(host, port)
        server = ProxyServer(app, listener=listener)
        await server.start()
        base_url = base_url_of(listener, node_ip=ray.util.get_node_ip_address())
        return cls(seamless, server, ProxyAdmin(base_url, settings.admin_key, app=app), runner)


def _plain(section: Any) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(OmegaConf.create(dict(section or {})))
    return dict(plain)


def _portable(processor: Any) -> Any:
    """A copy without the functions of the model's class that verl binds to it; these cannot be pickled."""
    copied = copy.copy(processor)
    for name in ("get_rope_index", "get_vision_position_ids"):
        getattr(copied, "__dict__", {}).pop(name, None)
    return copy.deepcopy(copied)  # verl uses its own in other threads


def _runner(seamless: SeamlessConfig) -> AgentRunner:
    if seamless.agent.runner is None:
        raise ConfigError(
            "seamless.agent.runner",
            None,
            "is not set, but rows of the data ask for agent_name=seamless_agent",
            "name an AgentRunner class",
        )
    return runner_class(seamless.agent.runner)(**seamless.agent.kwargs)


def _place_of_journal(proxy: ProxyConfig, run_dir: Path) -> tuple[Path, bool]:
    """This worker's folder, the same in each life of a run, and whether it is in the place of one that died.

    verl calls its workers ``agent_loop_worker_3_5f0c…``; the end is a new one for each.
    """
    journals = journal_folder(proxy.journal_dir, run_dir, os.environ.get(RUN_ID) or run_dir.name)
    name, _, end = (ray.get_runtime_context().get_actor_name() or f"process-{os.getpid()}_").rpartition("_")
    return journals / name, end.startswith(SUCCESSOR)


def _stop_token_ids(config: Any, tokenizer: Any) -> list[int]:
    """Ids that end an answer: the tokenizer's, and those that the model's generation config adds (vLLM obeys both)."""
    from transformers import GenerationConfig

    try:
        listed = GenerationConfig.from_pretrained(config.actor_rollout_ref.model.path).eos_token_id
    except OSError:  # the model comes without one
        listed = None
    ids = {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])}
    return sorted(token for token in ids if token is not None)
