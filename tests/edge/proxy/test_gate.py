"""Weights change while agents work: they wait, go on where they were, and are never told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from seamless_verl.proxy.client import ProxyAdmin, ProxyRefused
from seamless_verl.proxy.deploy.http_server import ProxyServer
from seamless_verl.proxy.engine import EngineUnavailable, Gate, GatedEngine, GenerationRequest, TokenChunk
from seamless_verl.proxy.http.app import ProxyDeps, make_app
from seamless_verl.proxy.session.sessions import SessionSpec
from seamless_verl.proxy.text.chat_template import TokenizerRenderer
from seamless_verl.trajectory.generation import GRAMMAR_PREFIX, Generation
from tests.fakes import serving, small_tokenizer
from tests.interruptible import NUM_TURNS, InterruptibleEngine, chat_agent, expected_of_chat, script

HI: list[Any] = [{"role": "user", "content": "hi"}]
NUM_UPDATES = 12


@asynccontextmanager
async def _updated_proxy() -> AsyncIterator[tuple[InterruptibleEngine, str, ProxyAdmin]]:
    tokenizer = small_tokenizer()
    engine = InterruptibleEngine(tokenizer, script, tokens_per_update=40, num_updates=NUM_UPDATES)
    renderer = TokenizerRenderer(tokenizer)
    deps = ProxyDeps(
        engine=engine,
        renderer=renderer,
        admin_key="admin-key",
        model="tiny",
        gate=Gate(engine.stamp),
    )
    server = ProxyServer(make_app(deps), drain_s=1.0)
    admin = ProxyAdmin(await server.start(), "admin-key")
    try:
        yield engine, server.base_url, admin
    finally:
        await admin.close()
        await server.stop()


async def _update(engine: InterruptibleEngine, admin: ProxyAdmin) -> None:
    """Weight updates as somebody's own trainer makes them, each while tokens are generated."""
    for version in range(2, 2 + NUM_UPDATES):
        await engine.due.wait()
        engine.due.clear()
        await admin.pause(timeout_s=0)
        engine.interrupt()
        assert (await admin.pause(timeout_s=10))["quiet"]
        await admin.resume(version)


async def _claude_agent(sdk: Any, name: str, *, stream: bool) -> list[str]:
    turns: list[Any] = [{"role": "user", "content": f"I am {name}"}]
    told = []
    for _ in range(NUM_TURNS):
        tools = [{"name": "run", "input_schema": {"type": "object"}}]
        options: dict[str, Any] = dict(model="m", max_tokens=2000, messages=turns, tools=tools)
        if stream:
            async with sdk.messages.stream(**options) as events:
                message = await events.get_final_message()
        else:
            message = await sdk.messages.create(**options)
        uses = [block for block in message.content if block.type == "tool_use"]
        text = "".join(block.text for block in message.content if block.type == "text")
        told.append(f"{text}|{[json.dumps(use.input) for use in uses]}")
        turns.append({"role": "assistant", "content": message.content})
        turns.append(
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "out"} for use in uses],
            }
        )
    return told


async def test_agents_see_well_formed_answers_only_while_weights_change() -> None:
    async with _updated_proxy() as (engine, url, admin):
        handle = await admin.open_session(SessionSpec())
        updating = asyncio.create_task(_update(engine, admin))
        async with (
            openai.AsyncOpenAI(base_url=handle.base_url, api_key=handle.api_key, max_retries=0) as gpt,
            anthropic.AsyncAnthropic(base_url=f"{url}/", api_key=handle.api_key, max_retries=0) as claude,
        ):
            told = await asyncio.gather(
                chat_agent(gpt, "whole", stream=False),
                chat_agent(gpt, "streamed", stream=True),
                _claude_agent(claude, "claude", stream=False),
                _claude_agent(claude, "claude in a stream", stream=True),
            )
        assert told == [expected_of_chat()] * 4
        updating.cancel()
        assert engine.version > NUM_UPDATES // 2
        assert engine.num_interrupted >= NUM_UPDATES // 2  # updates came while answers were under way
        result = await admin.close_session(handle.id)
        assert result.audit.is_clean
        assert len(result.rows) == 4
        assert result.kinds == {"clean": 1 + 4 * (NUM_TURNS - 1), "fork": 3}
        for row in result.rows:
            assert sum(span.stop - span.start for span in row.version_spans) == row.num_trained
            versions = [span.version for span in row.version_spans]
            assert versions == sorted(versions)
            trained = [(row.token_ids[at], row.log_probs[at]) for at in range(len(row.mask)) if row.mask[at]]
            assert [log_prob for _, log_prob in trained] == [engine.log_prob(token) for token, _ in trained]
        assert max(len({span.version for span in row.version_spans}) for row in result.rows) > 1


class _Noting(InterruptibleEngine):
    """Remembers what it was asked."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        self.asked.append(request)
        return await super().generate(request)


@pytest.mark.parametrize("moves_grammars", [True, False])
async def test_an_answer_under_a_grammar_goes_on_where_the_engine_moves_grammars(moves_grammars: bool) -> None:
    tokenizer = small_tokenizer()
    engine = _Noting(tokenizer, lambda prompt: '{"name": "the quick brown fox"}', tokens_per_update=9, num_updates=1)
    gate, told, kept = Gate(engine.stamp), list[TokenChunk](), list[Generation]()
    prompt = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    request = GenerationRequest(
        request_id="r",
        session_id="s",
        prompt_ids=prompt,
        sampling={"max_tokens": 100, "structured_outputs": {"json": {}}},
        deadline=time.time() + 60,
        on_tokens=told.append,
        on_progress=kept.append,
    )
    gated = GatedEngine(engine, gate, tokenizer.decode, moves_grammars=moves_grammars)
    asking = asyncio.create_task(gated.generate(request))
    await engine.due.wait()
    closing = asyncio.create_task(gate.close(20))
    await asyncio.sleep(0)
    engine.interrupt()
    assert await closing
    gate.open(2)
    answer = await asking
    assert tokenizer.decode(answer.token_ids, skip_special_tokens=True) == '{"name": "the quick brown fox"}'
    first, second = engine.asked
    assert "extra_args" not in first.sampling
    spans = [(span.version, span.num_tokens) for span in answer.version_spans]
    if moves_grammars:
        assert second.sampling["extra_args"] == {GRAMMAR_PREFIX: 9}
        assert list(second.prompt_ids) == [*prompt, *answer.token_ids[:9]]
        assert [token for chunk in told for token in chunk.token_ids] == list(answer.token_ids)
        assert spans == [(1, 9), (2, len(answer.token_ids) - 9)]
        (part,) = kept
        told.clear()
        later = await gated.generate(replace(request, resume_from=part))
        assert (list(later.token_ids), later.version_spans[0]) == (list(answer.token_ids), part.version_spans[0])
        assert [token for chunk in told for token in chunk.token_ids] == list(answer.token_ids)
    else:
        assert kept == []
        assert "extra_args" not in second.sampling
        assert list(second.prompt_ids) == prompt
        assert told == []
        assert spans == [(2, len(answer.token_ids))]


async def test_the_wait_at_the_gate_ends_with_the_session_and_starts_no_engine() -> None:
    gate = Gate(lambda version: None)
    async with serving(gate=gate) as proxy:
        paused = await proxy.admin.pause(timeout_s=0)
        assert paused == {"quiet": True, "at_engine": 0}
        hurried, patient = await proxy.open(deadline_s=0.3), await proxy.open()
        asking = asyncio.create_task(proxy.post(patient, {"model": "m", "messages": HI}))
        begun = time.monotonic()
        late = await proxy.post(hurried, {"model": "m", "messages": HI})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert time.monotonic() - begun < 5
        assert proxy.engine.requests == []
        await proxy.admin.resume()
        assert (await asking).status_code == 200


async def test_pausing_waits_for_what_is_under_way() -> None:
    gate = Gate(lambda version: None)
    async with serving(gate=gate, streams=True) as proxy:
        permits = proxy.engine.permits = asyncio.Semaphore(0)
        handle = await proxy.open()
        asking = asyncio.create_task(proxy.post(handle, {"model": "m", "messages": HI, "stream": True}))
        await proxy.engine.started.wait()
        assert await proxy.admin.pause(timeout_s=0.05) == {"quiet": False, "at_engine": 1}
        pausing = asyncio.create_task(proxy.admin.pause(timeout_s=20))
        for _ in range(50):
            permits.release()
        assert await pausing == {"quiet": True, "at_engine": 0}
        assert (await asking).status_code == 200


async def test_an_engine_that_is_away_while_weights_change_is_waited_for() -> None:
    gate = Gate(lambda version: None)
    async with serving(gate=gate) as proxy:
        handle = await proxy.open()
        generate, failing = proxy.engine.generate, asyncio.Event()

        async def restarting(request: Any) -> Any:
            await gate.close(0)
            proxy.engine.generate = generate  # type: ignore[method-assign]
            failing.set()
            raise EngineUnavailable("restarting")

        proxy.engine.generate = restarting  # type: ignore[method-assign]
        asking = asyncio.create_task(proxy.post(handle, {"model": "m", "messages": HI}))
        await failing.wait()
        gate.open(7)
        assert (await asking).status_code == 200
        proxy.engine.failure = EngineUnavailable("gone")  # while the gate is open, that is an answer
        assert (await proxy.post(handle, {"model": "m", "messages": HI})).status_code == 503


@pytest.mark.parametrize(("path", "body"), [("/pause", {"timeout_s": -1}), ("/resume", {"version": -3})])
async def test_the_gate_is_the_admins(path: str, body: dict[str, Any]) -> None:
    async with serving(gate=Gate(lambda version: None)) as proxy:
        handle = await proxy.open()
        assert (await proxy.post(handle, {}, path)).status_code == 403
        admin = {"authorization": "Bearer admin-key"}
        assert (await proxy.http.post(path, json=body, headers=admin)).status_code == 400
    async with serving() as proxy:
        refused = await proxy.http.post(path, json={}, headers=admin)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "no_gate")


async def test_a_pause_that_cannot_be_written_down_leaves_the_gate_open(tmp_path: Path) -> None:
    gate = Gate(lambda version: None, tmp_path / "gone" / "paused")
    async with serving(gate=gate) as proxy:
        with pytest.raises(ProxyRefused, match="503 pause_not_recorded"):
            await proxy.admin.pause()
        assert gate.is_open
