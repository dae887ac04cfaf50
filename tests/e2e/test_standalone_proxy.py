"""``seamless-verl proxy`` in front of a real vLLM server on the CPU: the contract that the stand-ins promise."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from recipes.arithmetic.assets import build
from seamless_verl.proxy.session.sessions import SessionSpec
from tests.standalone import Standalone
from tests.vllm_server import vllm_server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A vLLM server over the tiny model of the arithmetic recipe."""
    scratch = tmp_path_factory.mktemp("vllm")
    model = build() / "model"
    with vllm_server(model, scratch) as url:
        yield url, model


async def test_turns_of_a_real_engine_are_recorded_bit_for_bit(vllm: tuple[str, Path], tmp_path: Path) -> None:
    url, model = vllm
    proxy = Standalone(tmp_path, url, model, served="tiny")
    await asyncio.to_thread(proxy.start)
    admin = proxy.admin()
    handle = await admin.open_session(SessionSpec(sampling={"temperature": 1.0}, max_tokens=400))
    client = openai.AsyncOpenAI(base_url=handle.base_url, api_key=handle.api_key)
    history: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "1+1="}]
    said = []
    for number in range(4):
        if number == 2:  # dies between two turns; the same agent goes on
            proxy.kill()
            await asyncio.to_thread(proxy.start)
        if number % 2:
            stream = await client.chat.completions.create(model="m", messages=history, max_tokens=12, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        else:
            answer = await client.chat.completions.create(
                model="m", messages=history, max_tokens=12, logprobs=True, top_logprobs=2
            )
            text = answer.choices[0].message.content or ""
            assert answer.choices[0].logprobs is not None
            for token in answer.choices[0].logprobs.content or []:
                assert 1 <= len(token.top_logprobs) <= 2
                assert token.top_logprobs[0].logprob >= token.logprob - 1e-6
        said.append(text)
        history += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{number}+1="}]
    result = await admin.close_session(handle.id, 1.0)
    assert result.audit.is_clean
    assert result.audit.num_generations == 4
    (row,) = result.rows
    assert [turn.trained for turn in row.turns] == [True] * 4
    assert all(value <= 0 for value in row.log_probs)
    (written,) = proxy.rows()
    assert written["token_ids"] == list(row.token_ids)
    await _engine_agrees(url, row.token_ids, row.turns[-1].start, row.log_probs)
    await client.close()
    await admin.close()
    assert proxy.stop() == 0


async def _engine_agrees(url: str, ids: tuple[int, ...], start: int, log_probs: tuple[float, ...]) -> None:
    """Asked to score the recorded row, the engine gives the log-probs that were recorded: the prompt was the row."""
    body = {"model": "tiny", "prompt": list(ids), "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        scored = (await http.post(f"{url}/v1/completions", json=body)).json()["choices"][0]["prompt_logprobs"]
    for at in range(start, len(ids)):
        assert scored[at][str(ids[at])]["logprob"] == pytest.approx(log_probs[at], abs=2e-3)


async def test_json_schemas_hold_with_a_real_engine(vllm: tuple[str, Path], tmp_path: Path) -> None:
    url, model = vllm
    proxy = Standalone(tmp_path, url, model, served="tiny")
    await asyncio.to_thread(proxy.start)
    admin = proxy.admin()
    handle = await admin.open_session(SessionSpec())
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    async with httpx.AsyncClient(base_url=proxy.url, trust_env=False, timeout=60) as http:
        body = {"model": "m", "messages": [{"role": "user", "content": "1"}], "response_format": wanted}
        answer = await http.post(
            "/v1/chat/completions",
            json={**body, "max_tokens": 60},
            headers={"authorization": f"Bearer {handle.api_key}"},
        )
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["message"]["content"]
    assert text.startswith("{") or answer.json()["choices"][0]["finish_reason"] == "length"
    assert (await admin.close_session(handle.id)).audit.is_clean
    await admin.close()
    assert proxy.stop() == 0
