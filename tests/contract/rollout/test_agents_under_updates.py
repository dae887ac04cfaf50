"""Under the trainer: agents of the real SDK, the proxy, our engine and our client over verl's, and replicas whose
weights change while they generate. Only the replica is scripted; it stands at `LLMServerClient.generate`."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

pytest.importorskip("verl")
from omegaconf import OmegaConf
from verl.workers.rollout.replica import TokenOutput

from seamless_verl.proxy.client import ProxyAdmin
from seamless_verl.proxy.deploy.http_server import ProxyServer
from seamless_verl.proxy.engine import GenerationRequest
from seamless_verl.proxy.http.app import ProxyDeps, make_app
from seamless_verl.proxy.session.sessions import SessionSpec
from seamless_verl.proxy.text.chat_template import TokenizerRenderer
from seamless_verl.trajectory.generation import FinishReason
from seamless_verl.verl_adapter.rollout import llm_client
from seamless_verl.verl_adapter.rollout.trainer_engine import VerlEngine, abilities_of
from tests.fakes import small_tokenizer
from tests.interruptible import NUM_TURNS, InterruptibleEngine, chat_agent, expected_of_chat, script

NUM_AGENTS = 4


class Replica:
    """verl's server side: requests park at its gate while weights change, those under way are aborted."""

    def __init__(self, engine: InterruptibleEngine) -> None:
        self._engine = engine
        self._is_open = asyncio.Event()
        self._is_open.set()

    async def generate(self, client: Any, *, request_id: str, prompt_ids: Any, sampling_params: Any) -> TokenOutput:
        await self._is_open.wait()
        made = await self._engine.generate(
            GenerationRequest(
                request_id=request_id,
                session_id=request_id,
                prompt_ids=prompt_ids,
                sampling=sampling_params,
                deadline=0.0,
            )
        )
        is_aborted = made.finish_reason is FinishReason.ABORTED
        version = made.version_spans[0].version if made.version_spans else self._engine.version
        return TokenOutput(
            token_ids=list(made.token_ids),
            log_probs=list(made.log_probs),
            stop_reason="aborted" if is_aborted else "completed",
            extra_fields={"global_steps": version},
        )

    async def update(self) -> None:
        self._is_open.clear()
        self._engine.interrupt()
        await asyncio.sleep(0)  # where the weights would arrive
        self._engine.stamp(self._engine.version + 1)
        self._is_open.set()


async def test_forced_updates_are_invisible_and_every_token_knows_its_weights(monkeypatch: Any) -> None:
    tokenizer = small_tokenizer()
    engine = InterruptibleEngine(tokenizer, script, tokens_per_update=40, num_updates=1000)
    replica = Replica(engine)
    monkeypatch.setattr(llm_client.LLMServerClient, "generate", lambda self, **kwargs: replica.generate(self, **kwargs))
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"response_length": 4000}}})
    renderer = TokenizerRenderer(tokenizer)
    verl_engine = VerlEngine(
        llm_client.VersionedLLMClient(config),
        decode=renderer.decode,
        max_model_len=100_000,
        stop_token_ids=renderer.stop_token_ids,
    )
    deps = ProxyDeps(engine=verl_engine, renderer=renderer, admin_key="a", model="m", abilities=abilities_of("vllm"))
    server = ProxyServer(make_app(deps), drain_s=1.0)
    admin = ProxyAdmin(await server.start(), "a")

    async def update() -> None:
        while True:
            await engine.due.wait()
            engine.due.clear()
            await replica.update()

    updating = asyncio.create_task(update())
    try:
        for number in range(NUM_AGENTS):
            handle = await admin.open_session(SessionSpec(max_tokens=4000))
            async with openai.AsyncOpenAI(base_url=handle.base_url, api_key=handle.api_key, max_retries=0) as sdk:
                assert await chat_agent(sdk, "agent", stream=bool(number % 2)) == expected_of_chat()
            result = await admin.close_session(handle.id)
            assert result.audit.is_clean
            (row,) = result.rows
            assert result.kinds == {"clean": NUM_TURNS}
            assert len({span.version for span in row.version_spans}) > 1
        assert engine.version > 2 * NUM_AGENTS
        assert engine.num_interrupted >= engine.version - 1 - NUM_AGENTS
        assert (await admin.stats())["refusals"] == {}
    finally:
        updating.cancel()
        await admin.close()
        await server.stop()
