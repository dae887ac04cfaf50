"""The HTTP engine against the one route of a vLLM server that it uses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from seamless_verl.errors import ConfigError
from seamless_verl.proxy.engine import EngineRefused, EngineUnavailable, FinishReason, GenerationRequest, TokenChunk
from seamless_verl.proxy.server import ProxyServer
from seamless_verl.proxy.vllm_http import VllmHttpEngine, _Collector

REQUEST = GenerationRequest(
    request_id="r1",
    session_id="s1",
    prompt_ids=(5, 6, 7),
    sampling={"max_tokens": 4, "temperature": 0.5, "top_k": 20, "stop": ["X"], "seed": 3},
    deadline=time.time() + 60,
)


class ScriptedVllm:
    """Stands at the wire of a vLLM server's ``/v1/completions``; shapes as vLLM 0.24 to 0.27 answer."""

    def __init__(self, choice: dict[str, Any] | None, status: int = 200, raw: bytes = b"") -> None:
        self.body: dict[str, Any] = {}
        self.app = FastAPI()

        async def completions(request: Request) -> Response:
            self.body = await request.json()
            text = raw or json.dumps({"choices": [choice]} if choice else {"error": {"message": "no such model"}})
            return Response(text, status_code=status, media_type="application/json")

        self.app.router.add_route("/v1/completions", completions, methods=["POST"])


_TOP = {"token_id:3": -0.1, "token_id:8": -0.5}


async def _ask(vllm: ScriptedVllm, request: GenerationRequest = REQUEST) -> Any:
    server = ProxyServer(vllm.app, drain_s=1)
    engine = VllmHttpEngine(await server.start(), "tiny", version=7)
    try:
        return await engine.generate(request)
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


async def test_a_request_that_the_server_refuses_is_no_outage() -> None:
    with pytest.raises(EngineRefused, match="answered 400"):
        await _ask(ScriptedVllm(None, 400))


async def test_a_stream_gives_tokens_as_they_come_and_all_of_them_in_the_end() -> None:
    """Events cut at every possible place, as a network may cut them; alternatives come with ids for names."""
    events = [
        {"finish_reason": None, "token_ids": [8], "logprobs": {"token_logprobs": [-0.5], "top_logprobs": [_TOP]}},
        {"finish_reason": None, "token_ids": [], "logprobs": None},
        {"finish_reason": "stop", "token_ids": [9], "logprobs": {"token_logprobs": [-0.25], "top_logprobs": [_TOP]}},
    ]
    text = "".join(f"data: {json.dumps({'choices': [event]})}\n\n" for event in events) + "data: [DONE]\n\n"
    for cut in range(0, len(text), 7):
        seen: list[TokenChunk] = []
        collector = _Collector(7, 1, seen.append)
        collector.feed(text[:cut].encode())
        collector.feed(text[cut:].encode())
        whole = collector.generation()
        assert [(chunk.token_ids, chunk.log_probs) for chunk in seen] == [([8], [-0.5]), ([9], [-0.25])]
        assert (whole.token_ids, whole.log_probs, whole.finish_reason) == ([8, 9], [-0.5, -0.25], FinishReason.STOP)
        assert whole.alternatives == [[(3, -0.1)], [(3, -0.1)]]


async def test_a_stream_comes_over_the_wire() -> None:
    body = b'data: {"choices":[{"finish_reason":"stop","token_ids":[8],"logprobs":{"token_logprobs":[-0.5]}}]}\n\n'
    seen: list[TokenChunk] = []
    generation = await _ask(ScriptedVllm(None, raw=body), replace(REQUEST, on_tokens=seen.append))
    assert [list(chunk.token_ids) for chunk in seen] == [[8]] == [generation.token_ids]
    with pytest.raises(EngineUnavailable, match="no completion"):
        await _ask(ScriptedVllm(None, raw=b'data: {"error": 1}\n\n'), replace(REQUEST, on_tokens=seen.append))


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", b"who are you\r\n\r\n"])
async def test_half_an_answer_is_an_outage(reply: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    engine = VllmHttpEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "tiny")
    with pytest.raises(EngineUnavailable):
        await engine.generate(REQUEST)
    await engine.close()
    server.close()


async def test_cancelling_cuts_the_connection() -> None:
    gone, asked = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                pass
        writer.close()
        gone.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    engine = VllmHttpEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "tiny")
    call = asyncio.create_task(engine.generate(REQUEST))
    await asyncio.wait_for(asked.wait(), 5)
    call.cancel()
    await asyncio.wait_for(gone.wait(), 5)
    server.close()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://h:99999", "http://h/v1"])
def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="--engine="):
        VllmHttpEngine(url, "tiny")


async def test_a_server_that_is_away_is_unavailable() -> None:
    engine = VllmHttpEngine("http://127.0.0.1:1", "tiny")
    with pytest.raises(EngineUnavailable, match=r"ConnectionRefusedError from http://127\.0\.0\.1:1"):
        await engine.generate(REQUEST)
    await engine.close()
