"""verl's agent loop ``seamless_agent``: one rollout is one proxy session and one agent outside this process.

    prompt ─► open session ─► AgentRunner (agent process ──HTTP──► proxy ─► replicas) ─► close ─► rows

The proxy is a sidecar of the rollout worker process: a shard. verl spreads these workers over the nodes, so agents
of a worker talk to the shard beside them and no central gateway exists (ADR 0003).
"""

from __future__ import annotations

import asyncio
import importlib
import json
import secrets
from typing import Any

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.utils.profiler import simple_timer

from seamless_verl.agents.contract import AgentJob, AgentReport, AgentRunner
from seamless_verl.config import SeamlessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.observe.flight import SessionEnded
from seamless_verl.proxy.app import ProxyDeps, make_app
from seamless_verl.proxy.client import ProxyAdmin, SessionResult
from seamless_verl.proxy.limits import Limits
from seamless_verl.proxy.rendering import TokenizerRenderer
from seamless_verl.proxy.server import ProxyServer
from seamless_verl.proxy.sessions import SessionSpec
from seamless_verl.trajectory.rows import Row
from seamless_verl.verl_adapter.attempts import recorder_of_process
from seamless_verl.verl_adapter.engine import ABILITIES, VerlEngine
from seamless_verl.verl_adapter.parsers import make_parser
from seamless_verl.verl_adapter.request_log import request_log
from seamless_verl.verl_adapter.rows import row_to_output


class ProxyShard:
    """The proxy, the agents and the admin client of this rollout worker; one per process, started on first use."""

    _current: asyncio.Task[ProxyShard] | None = None

    def __init__(self, seamless: SeamlessConfig, server: ProxyServer, admin: ProxyAdmin, runner: AgentRunner) -> None:
        self.seamless = seamless
        self.server = server
        self.admin = admin
        self.runner = runner
        self.places = asyncio.Semaphore(seamless.agent.max_concurrent)

    @classmethod
    async def get(cls, config: Any, client: Any, tokenizer: Any, template_args: dict[str, Any]) -> ProxyShard:
        task = cls._current
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):  # a failed start too
            cls._current = asyncio.ensure_future(cls._start(config, client, tokenizer, template_args))
        return await asyncio.shield(cls._current)

    @classmethod
    async def _start(cls, config: Any, client: Any, tokenizer: Any, template_args: dict[str, Any]) -> ProxyShard:
        seamless = SeamlessConfig.from_mapping(OmegaConf.to_container(config.seamless, resolve=True))
        if seamless.agent.runner is None:
            raise ConfigError(
                "seamless.agent.runner",
                None,
                "is not set, but rows of the data ask for agent_name=seamless_agent",
                "name an AgentRunner class",
            )
        module, _, name = seamless.agent.runner.rpartition(".")
        runner: AgentRunner = getattr(importlib.import_module(module), name)(**seamless.agent.kwargs)
        parser = make_parser(tokenizer, seamless.proxy.tool_parser, seamless.proxy.reasoning_parser)
        renderer = TokenizerRenderer(
            tokenizer,
            template_args=template_args,
            stop_token_ids=_stop_token_ids(config, tokenizer),
            keep_special_tokens=parser.keeps_special_tokens,
        )
        rollout = config.actor_rollout_ref.rollout
        max_model_len = rollout.max_model_len or rollout.prompt_length + rollout.response_length
        admin_key = secrets.token_urlsafe(32)
        app = make_app(
            ProxyDeps(
                engine=VerlEngine(
                    client,
                    decode=renderer.decode,
                    max_model_len=max_model_len,
                    stop_token_ids=renderer.stop_token_ids,
                ),
                renderer=renderer,
                codec=renderer,
                parser=parser,
                abilities=ABILITIES,
                admin_key=admin_key,
                model=str(config.actor_rollout_ref.model.path),
                limits=Limits(max_model_len=max_model_len),
            )
        )
        server = ProxyServer(app, seamless.proxy.host, seamless.proxy.port)
        return cls(seamless, server, ProxyAdmin(await server.start(), admin_key, app=app), runner)


def _stop_token_ids(config: Any, tokenizer: Any) -> list[int]:
    """Ids that end an answer: the tokenizer's, and those that the model's generation config adds (vLLM obeys both)."""
    from transformers import GenerationConfig

    try:
        listed = GenerationConfig.from_pretrained(config.actor_rollout_ref.model.path).eos_token_id
    except OSError:  # the model comes without one
        listed = None
    ids = {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])}
    return sorted(token for token in ids if token is not None)


class ProxyAgentLoop(AgentLoopBase):
    """Rolls a prompt out with an agent; returns one `AgentLoopOutput` per row of its session."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """``kwargs`` are the fields of the data row; ``extra_info["task"]`` is the task, as JSON or as a mapping.

        Raises:
            RuntimeError: the agent never got an answer, so there is nothing to train on; verl refills the group.
        """
        template_args = OmegaConf.to_container(OmegaConf.create(dict(self.apply_chat_template_kwargs)))
        shard = await ProxyShard.get(self.config, self.server_manager, self.tokenizer, template_args)
        extra_info = kwargs.get("extra_info") or {}
        task = extra_info.get("task")
        task = json.loads(task) if isinstance(task, str) else dict(task or {})
        timing: dict[str, float] = {}
        async with shard.places:
            result, report = await self._attempt(
                shard, task, self._spec(shard.seamless, sampling_params, kwargs), timing
            )
        task_id = f"{extra_info.get('split', '')}/{extra_info.get('index', kwargs.get('index', ''))}"
        outputs = [
            self._output(row, result, report, task_id, AgentLoopMetrics(**timing))
            for row in reversed(result.rows)  # verl scores a session by its last row; ours with the most tokens
            if row.num_trained
        ]
        if not outputs:
            raise RuntimeError(f"session {result.id} has no generated token: {report.status.value}, {report.detail}")
        return outputs

    async def _attempt(
        self, shard: ProxyShard, task: dict[str, Any], spec: SessionSpec, timing: dict[str, float]
    ) -> tuple[SessionResult, AgentReport]:
        session = await shard.admin.open_session(spec)
        request_log.name(session.id)
        try:
            with simple_timer("generate_sequences", timing):
                report = await shard.runner.run(
                    AgentJob(
                        task=task,
                        base_url=session.base_url,
                        api_key=session.api_key,
                        model=str(self.config.actor_rollout_ref.model.path),
                        deadline_s=shard.seamless.agent.deadline_s,
                    )
                )
        except BaseException:
            await shard.admin.delete_session(session.id)
            raise
        result = await shard.admin.close_session(session.id, report.reward, report.rewards)
        recorder = recorder_of_process(shard.seamless.run_dir, "rollout")
        recorder.record(_session_ended(recorder.now(), result, report, timing["generate_sequences"]))
        return result, report

    def _spec(self, seamless: SeamlessConfig, sampling_params: dict[str, Any], kwargs: dict[str, Any]) -> SessionSpec:
        """The trainer decides how tokens are sampled; agents may ask, but are overridden."""
        decided = {key: sampling_params[key] for key in ("temperature", "top_p", "top_k") if key in sampling_params}
        if seamless.agent.max_tokens_per_turn is not None:
            decided["max_tokens"] = seamless.agent.max_tokens_per_turn
        return SessionSpec(
            group=str(kwargs.get("uid", "")),
            index=int(kwargs.get("session_id", 0)),
            deadline_s=seamless.agent.deadline_s,
            max_turns=seamless.agent.max_turns,
            max_tokens=self.rollout_config.response_length,
            sampling=decided,
        )

    def _output(
        self, row: Row, result: SessionResult, report: AgentReport, task_id: str, metrics: AgentLoopMetrics
    ) -> AgentLoopOutput:
        return row_to_output(
            row,
            reward=report.reward,
            metrics=metrics,
            extra_fields={"reward_extra_info": {**report.rewards, "task_id": task_id}, "drift": dict(result.drift)},
            violations=len(result.audit.violations),
        )


def _session_ended(at: float, result: SessionResult, report: AgentReport, seconds: float) -> SessionEnded:
    return SessionEnded(
        at=at,
        session=result.id,
        group=result.group,
        seconds=round(seconds, 3),
        turns=sum(result.kinds.values()),
        rows=sum(1 for row in result.rows if row.num_trained),
        reward=report.reward,
        status=report.status.value,
        drift=dict(result.drift),
    )
