"""The HTTP engine against the one route of a vLLM server that it uses."""

from __future__ import annotations

import time
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from seamless_verl.proxy.engine import EngineUnavailable, FinishReason, GenerationRequest
from seamless_verl.proxy.server import ProxyServer
from seamless_verl.proxy.vllm_http import VllmHttpEngine

REQUEST = GenerationRequest(
    request_id="r1",
    session_id="s1",
    prompt_ids=(5, 6, 7),
    sampling={"max_tokens": 4, "temperature": 0.5, "top_k": 20, "stop": ["X"], "seed": 3},
    deadline=time.time() + 60,
)


class ScriptedVllm:
    """Stands at the wire of a vLLM server's ``/v1/completions``; shapes as vLLM 0.24 to 0.27 answer."""

    def __init__(self, choice: dict[str, Any] | None, status: int = 200) -> None:
        self.body: dict[str, Any] = {}
        self.app = FastAPI()

        async def completions(request: Request) -> Response:
            import json

            self.body = await request.json()
            text = json.dumps({"choices": [choice]} if choice else {"error": {"message": "no such model"}})
            return Response(text, status_code=status, media_type="application/json")

        self.app.router.add_route("/v1/completions", completions, methods=["POST"])


async def _ask(vllm: ScriptedVllm) -> Any:
    server = ProxyServer(vllm.app, drain_s=1)
    engine = VllmHttpEngine(await server.start(), "tiny", version=7)
    try:
        return await engine.generate(REQUEST)
    finally:
        await engine.close()
        await server.stop()


@pytest.mark.parametrize(("finish", "expected"), [("stop", "stop"), ("length", "length"), ("abort", "aborted")])
async def test_ids_log_probs_and_version_arrive(finish: str, expected: str) -> None:
    vllm = ScriptedVllm(
        {"text": "ab", "finish_reason": finish, "token_ids": [8, 9], "logprobs": {"token_logprobs": [-0.5, -0.25]}}
    )
    generation = await _ask(vllm)
    assert (generation.token_ids, generation.log_probs) == ([8, 9], [-0.5, -0.25])
    assert [(span.version, span.num_tokens) for span in generation.version_spans] == [(7, 2)]
    assert generation.finish_reason is FinishReason(expected)
    sent = {key: vllm.body[key] for key in ("prompt", "max_tokens", "temperature", "top_k", "stop", "seed", "logprobs")}
    assert sent == {
        "prompt": [5, 6, 7],
        "max_tokens": 4,
        "temperature": 0.5,
        "top_k": 20,
        "stop": ["X"],
        "seed": 3,
        "logprobs": 0,
    }


@pytest.mark.parametrize(
    ("vllm", "story"),
    [
        (ScriptedVllm(None, 404), "answered 404: .*no such model"),
        (ScriptedVllm({"text": "ab", "finish_reason": "stop", "logprobs": None}), "returns no token ids"),
    ],
)
async def test_a_server_that_cannot_serve_is_unavailable(vllm: ScriptedVllm, story: str) -> None:
    with pytest.raises(EngineUnavailable, match=story):
        await _ask(vllm)


async def test_a_server_that_is_away_is_unavailable() -> None:
    engine = VllmHttpEngine("http://127.0.0.1:1", "tiny")
    with pytest.raises(EngineUnavailable, match=r"ConnectionRefusedError from http://127\.0\.0\.1:1"):
        await engine.generate(REQUEST)
    await engine.close()
