"""A vLLM server without a model: the wire of ``/v1/completions`` and ``/v1/chat/completions``, as fast as Python can.

Answers have 256 tokens with log-probs and are a function of the prompt alone, so that any two recorders can be
compared and a lost, doubled or changed turn can be seen. For chat it returns 4,096 prompt ids, as a vLLM asked for
``return_token_ids`` would; for completions it names tokens by their ids, as one asked for
``return_tokens_as_token_ids`` would.

    python -m benchmarks.mock_engine PORT MODEL_FOLDER [LATENCY_S]
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import httptools
import uvloop

NUM_PROMPT, NUM_GENERATED, NUM_ANSWERS = 4096, 256, 64


def choice_of(text: str, ids: list[int], log_probs: list[float], finish_reason: str) -> dict[str, object]:
    """One choice of ``/v1/completions``."""
    names = [f"token_id:{token}" for token in ids]
    wire = {
        "text_offset": [0] * len(ids),
        "token_logprobs": log_probs,
        "tokens": names,
        "top_logprobs": [{name: value} for name, value in zip(names, log_probs, strict=True)],
    }
    return {"index": 0, "text": text, "logprobs": wire, "finish_reason": finish_reason}


class PreparedAnswers:
    """Texts of exactly ``NUM_GENERATED`` tokens, the stop token last, in both forms of the wire."""

    def __init__(self, folder: Path) -> None:
        from seamless_verl.proxy.text.tokenizer import FolderTokenizer

        tokenizer = FolderTokenizer(folder)
        words = (folder / "words.txt").read_text().split()
        rng = random.Random(5)
        self.completions: list[bytes] = []
        self.ids: list[list[int]] = []
        self.log_probs: list[list[float]] = []
        self.chats: list[bytes] = []
        self.streams: list[bytes] = []
        for _ in range(NUM_ANSWERS):
            text = " ".join(rng.choice(words) for _ in range(NUM_GENERATED * 2))
            assert tokenizer.eos_token_id is not None
            ids = [*tokenizer.encode(text)[: NUM_GENERATED - 1], tokenizer.eos_token_id]
            text = tokenizer.decode(ids[:-1])
            self._prepare(text, ids, [round(-3 * rng.random(), 12) for _ in ids], tokenizer)

    def _prepare(self, text: str, ids: list[int], log_probs: list[float], tokenizer: object) -> None:
        self.ids.append(ids)
        self.log_probs.append(log_probs)
        tokens = [tokenizer.decode([token]) for token in ids]  # type: ignore[attr-defined]
        choice = choice_of(text, ids, log_probs, "stop")
        usage = {"prompt_tokens": NUM_PROMPT, "completion_tokens": len(ids), "total_tokens": NUM_PROMPT + len(ids)}
        head = b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"mock","choices":['
        tail = b'],"usage":' + json.dumps(usage).encode() + b"}"
        self.completions.append(head + json.dumps(choice).encode() + tail)
        self.streams.append(b'data: {"choices":[' + json.dumps(choice).encode() + b"]}\n\ndata: [DONE]\n\n")
        content = [
            {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
            for token, value in zip(tokens, log_probs, strict=True)
        ]
        chat = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "mock",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text, "tool_calls": []},
                    "logprobs": {"content": content},
                    "finish_reason": "stop",
                    "token_ids": ids,
                }
            ],
            "usage": usage,
            "prompt_token_ids": list(range(1000, 1000 + NUM_PROMPT)),
        }
        self.chats.append(json.dumps(chat).encode())


class Connection(asyncio.Protocol):
    """One client of the mock; ``latency_s`` is asked for every request."""

    def __init__(self, answers: PreparedAnswers, latency_s: Callable[[], float]) -> None:
        self._answers = answers
        self._latency_s = latency_s
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_body(self, chunk: bytes) -> None:
        self._body.append(chunk)

    def on_message_complete(self) -> None:
        body, self._body = b"".join(self._body), []
        if body and (latency_s := self._latency_s()):
            self._timer = asyncio.get_running_loop().call_later(latency_s, self._reply, self._url, body)
        else:
            self._reply(self._url, body)

    def _reply(self, url: bytes, body: bytes) -> None:
        if self._transport.is_closing():
            return  # whoever asked is gone
        if url.endswith(b"/chat/completions"):
            self._send(self._answers.chats[zlib.crc32(body) % NUM_ANSWERS])
        elif url.endswith(b"/completions"):
            start = body.index(b'"prompt":[') + 9
            prompt = body[start : body.index(b"]", start) + 1]
            number = zlib.crc32(prompt) % NUM_ANSWERS
            self._answered(prompt, number)
            if b'"stream":true' in body:
                self._send(self._answers.streams[number], kind=b"text/event-stream")
                return
            self._send(self._answers.completions[number])
        else:
            self._send(b'{"object":"list","data":[{"id":"mock","object":"model","max_model_len":1000000}]}')

    def _answered(self, prompt: bytes, number: int) -> None:
        """For those who keep a book."""

    def _send(self, body: bytes, *, kind: bytes = b"application/json") -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind, len(body))
        self._transport.write(head + body)


async def serve(port: int, folder: Path, latency_s: float) -> None:
    answers = PreparedAnswers(folder)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(answers, lambda: latency_s), "127.0.0.1", port, backlog=4096)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0))
