"""The HTTP engine against the one route of a vLLM server that it uses."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from seamless_verl.errors import ConfigError
from seamless_verl.proxy.deploy.http_server import ProxyServer
from seamless_verl.proxy.engine import EngineRefused, EngineUnavailable, GenerationRequest, TokenChunk
from seamless_verl.proxy.engines.vllm_http import VllmHttpEngine
from seamless_verl.proxy.engines.vllm_probe import continues_grammars
from seamless_verl.trajectory.generation import GRAMMAR_PREFIX, FinishReason
from tests.fakes import small_tokenizer

REQUEST = GenerationRequest(
    request_id="r1",
    session_id="s1",
    prompt_ids=(5, 6, 7),
    sampling={"max_tokens": 4, "temperature": 0.5, "top_k": 20, "stop": ["X"], "seed": 3},
    deadline=4e9,  # a test may wait long for a processor
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
    told = {"tokens": ["token_id:8", "token_id:9"], "token_logprobs": [-0.5, -0.25]}
    vllm = ScriptedVllm({"text": "ab", "finish_reason": finish, "logprobs": told})
    generation = await _ask(vllm)
    assert (generation.token_ids, generation.log_probs) == ([8, 9], [-0.5, -0.25])
    assert [(span.version, span.num_tokens) for span in generation.version_spans] == [(7, 2)]
    assert generation.finish_reason is FinishReason(expected)
    assert vllm.body["return_tokens_as_token_ids"] is True
    assert "return_token_ids" not in vllm.body, "it would send the whole prompt back"
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
        (ScriptedVllm({"text": "ab", "finish_reason": "stop", "logprobs": None}), "returns no log-probs"),
        (
            ScriptedVllm(
                {"text": "1", "finish_reason": "stop", "logprobs": {"tokens": ["1"], "token_logprobs": [-1.0]}}
            ),
            "returns no token ids",
        ),
    ],
)
async def test_a_server_that_cannot_serve_is_unavailable(vllm: ScriptedVllm, story: str) -> None:
    with pytest.raises(EngineUnavailable, match=story):
        await _ask(vllm)


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
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.wait_for(gone.wait(), 5)
    await engine.close()
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


class ForcingVllm:
    """Stands at the same wire; obeys a ``choice`` of one text, from its beginning or where the plug-in moves it."""

    def __init__(self, tokenizer: Any, *, has_plug_in: bool, status: int = 200) -> None:
        self.app = FastAPI()
        self.asked: list[dict[str, Any]] = []

        async def completions(request: Request) -> Response:
            body = await request.json()
            self.asked.append(body)
            (text,) = body["structured_outputs"]["choice"]
            ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
            num_kept = body.get("vllm_xargs", {}).get(GRAMMAR_PREFIX, 0) if has_plug_in else 0
            assert body["prompt"][len(body["prompt"]) - num_kept :] == ids[:num_kept]
            left = ids[num_kept:][: body["max_tokens"]]
            told = {"tokens": [f"token_id:{token}" for token in left], "token_logprobs": [-1.0] * len(left)}
            choice = {"text": "", "finish_reason": "stop", "logprobs": told}
            return JSONResponse({"choices": [choice]}, status_code=status)

        self.app.router.add_route("/v1/completions", completions, methods=["POST"])


@pytest.mark.parametrize(
    ("has_plug_in", "status", "continues"), [(True, 200, True), (False, 200, False), (True, 400, False)]
)
async def test_it_is_tried_whether_a_grammar_goes_on(has_plug_in: bool, status: int, continues: bool) -> None:
    tokenizer = small_tokenizer()
    vllm = ForcingVllm(tokenizer, has_plug_in=has_plug_in, status=status)
    server = ProxyServer(vllm.app, drain_s=1)
    engine = VllmHttpEngine(await server.start(), "tiny")
    try:
        assert await continues_grammars(engine, tokenizer.decode) is continues
    finally:
        await engine.close()
        await server.stop()
    if status == 200:
        assert [body.get("vllm_xargs") for body in vllm.asked] == [None, {GRAMMAR_PREFIX: 2}]
        assert all("extra_args" not in body for body in vllm.asked)


# As vLLM 0.27.1 wrote it for two tokens with ``logprobs=2`` (fields that nobody reads left out).
STREAM = [
    '{"id":"cmpl-b","choices":[{"index":0,"text":"ck","logprobs":{"text_offset":[0],"token_logprobs":[-5.9],'
    '"tokens":["token_id:271"],"top_logprobs":[{"token_id:271":-5.9,"token_id:7":-4.8,"token_id:173":-5.1}]},'
    '"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}',
    '{"id":"cmpl-b","choices":[{"index":0,"text":"","logprobs":{"text_offset":[2],"token_logprobs":[-5.7],'
    '"tokens":["token_id:189"],"top_logprobs":[{"token_id:189":-5.7,"token_id:207":-5.1,"token_id:271":-5.2}]},'
    '"finish_reason":"length","stop_reason":null,"prompt_token_ids":null,"token_ids":null}],"system_fingerprint":"v"}',
    "[DONE]",
]


class StreamingVllm:
    """Stands at the same wire with ``stream``; sends its events in pieces of ``size`` bytes."""

    def __init__(self, events: list[str], size: int, status: int = 200) -> None:
        from fastapi.responses import StreamingResponse

        self.app = FastAPI()
        text = "".join(f"data: {event}\n\n" for event in events).encode()

        async def pieces() -> Any:
            for at in range(0, len(text), size):
                yield text[at : at + size]

        async def completions(request: Request) -> Response:
            self.body = await request.json()
            return StreamingResponse(pieces(), status_code=status, media_type="text/event-stream")

        self.app.router.add_route("/v1/completions", completions, methods=["POST"])


async def _stream(vllm: StreamingVllm, chunks: list[TokenChunk]) -> Any:
    server = ProxyServer(vllm.app, drain_s=1)
    engine = VllmHttpEngine(await server.start(), "tiny", version=7)
    sampling = {"max_tokens": 2, "logprobs": 2}
    try:
        return await engine.generate(replace(REQUEST, sampling=sampling, on_tokens=chunks.append))
    finally:
        await engine.close()
        await server.stop()


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_tokens_are_told_as_they_come_and_again_in_the_end(size: int) -> None:
    vllm, chunks = StreamingVllm(STREAM, size), list[TokenChunk]()
    generation = await _stream(vllm, chunks)
    assert [tuple(chunk.token_ids) for chunk in chunks] == [(271,), (189,)]
    assert [chunk.alternatives[0][0] for chunk in chunks] == [(7, -4.8), (207, -5.1)]
    assert (generation.token_ids, generation.log_probs) == ([271, 189], [-5.9, -5.7])
    assert generation.alternatives == [((7, -4.8), (173, -5.1)), ((207, -5.1), (271, -5.2))]
    assert generation.finish_reason is FinishReason.LENGTH
    assert (vllm.body["stream"], vllm.body["logprobs"], vllm.body["return_tokens_as_token_ids"]) == (True, 2, True)


@pytest.mark.parametrize(
    ("events", "status", "kind", "story"),
    [
        ([STREAM[0], '{"error": {"message": "EngineCore died"}}', "[DONE]"], 200, EngineUnavailable, "EngineCore died"),
        (["{nonsense"], 200, EngineUnavailable, "no completion"),
        ([STREAM[0].replace('"tokens":[', '"tokens":["token_id:5",')], 200, EngineUnavailable, "2 tokens but 1"),
        (["bad grammar"], 400, EngineRefused, "answered 400: .*bad grammar"),
    ],
)
async def test_a_stream_that_breaks_off(events: list[str], status: int, kind: type[Exception], story: str) -> None:
    with pytest.raises(kind, match=story):
        await _stream(StreamingVllm(events, 100, status), [])


async def test_a_stream_that_ends_too_soon_is_aborted() -> None:
    generation = await _stream(StreamingVllm(STREAM[:1], 100), [])
    assert generation.finish_reason is FinishReason.ABORTED
