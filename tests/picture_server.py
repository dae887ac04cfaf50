"""Stands at the wire of a vLLM 0.27 server with a model that takes pictures; its processor is a real one."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Callable
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from tests.pictures import small_processor
from tests.standalone import save_tokenizer

CHAT = {"role": "user", "content": [{"type": "image"}]}
DEFAULTS = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}


def model_folder(folder: Path) -> Path:
    """What the proxy reads of the model that :class:`PictureServer` serves."""
    processor = small_processor()
    save_tokenizer(folder, processor.tokenizer)
    names = {"image_token_id": processor.image_token_id, "video_token_id": processor.video_token_id}
    (folder / "config.json").write_text(json.dumps(names))
    return folder


class PictureServer:
    """Answers ``ok``, with log-probs that depend on the pictures of the prompt.

    Attributes:
        asked, completed: bodies of generate requests, and of completions.
        status: of what is rendered.
        shown: pixels of each picture that was rendered.
        says: token ids of the next answers, in place of ``ok``.
        is_blind: ignores the features, as servers do that do not know them.
        edit: changes what is rendered before it is sent.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.completed: list[dict[str, Any]] = []
        self.shown: list[bytes] = []
        self.says: list[int] = []
        self.is_blind = False
        self.status = 200
        self.app = FastAPI()
        self.edit: Callable[[dict[str, Any]], dict[str, Any]] = lambda rendered: rendered
        self._processor = small_processor()
        for path, handler in (
            ("/v1/models", self._models),
            ("/v1/completions", self._complete),
            ("/v1/chat/completions/render", self._render),
            ("/inference/v1/generate", self._generate),
        ):
            self.app.router.add_route(path, handler, methods=["GET", "POST"])

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "tiny", "max_model_len": 2048}]})

    def _answer(self) -> list[int]:
        tokenizer = self._processor.tokenizer
        return self.says or [*tokenizer.encode("ok"), tokenizer.eos_token_id]

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.completed.append(body)
        ids = self._answer()[: body["max_tokens"]]
        told = {"tokens": [f"token_id:{token}" for token in ids], "token_logprobs": [-0.5] * len(ids)}
        return JSONResponse({"choices": [{"text": "ok", "finish_reason": "stop", "logprobs": told}]})

    async def _render(self, request: Request) -> Response:
        from PIL import Image

        body = await request.json()
        (message,) = body["messages"]
        (part,) = message["content"]
        file = b64decode(part["image_url"]["url"].partition(",")[2])
        with Image.open(BytesIO(file)) as picture:
            assert picture.mode == "RGB"
            self.shown.append(picture.tobytes())
            try:
                made = self._processor(
                    text=[self._processor.apply_chat_template([CHAT], tokenize=False, add_generation_prompt=True)],
                    images=[picture],
                )
            except ValueError as error:
                return JSONResponse({"error": {"message": str(error)}}, status_code=400)
        ids = [int(token) for token in made["input_ids"][0]]
        placeholder = self._processor.image_token_id
        place = {"offset": ids.index(placeholder), "length": ids.count(placeholder)}
        digest = blake2b(self.shown[-1]).hexdigest()
        rendered = {
            "token_ids": ids,
            "features": {
                "mm_hashes": {"image": [digest]},
                "mm_placeholders": {"image": [place]},
                "kwargs_data": {"image": [b64encode(digest.encode() * 3).decode()]},
            },
            "sampling_params": {**DEFAULTS, "max_tokens": 1, "bad_words": [], "stop": []},
        }
        return JSONResponse(self.edit(rendered), status_code=self.status)

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        features = body["features"]
        seen = [b64decode(data).decode() for data in features["kwargs_data"]["image"]]
        assert seen == [digest * 3 for digest in features["mm_hashes"]["image"]]
        score = -1.0 if self.is_blind else -int(blake2b("".join(seen).encode(), digest_size=2).hexdigest(), 16) / 1e5
        ids = self._answer()[: body["sampling_params"]["max_tokens"]]
        choices = [_choice([token], score, "stop" if token == ids[-1] else None) for token in ids]
        if body["stream"]:
            return StreamingResponse(_events(choices), media_type="text/event-stream")
        return JSONResponse({"request_id": "g", "choices": [_choice(ids, score, "stop")]})


def _choice(ids: list[int], score: float, finish: str | None) -> dict[str, Any]:
    content = [{"token": f"token_id:{token}", "logprob": score, "bytes": None, "top_logprobs": []} for token in ids]
    return {"index": 0, "token_ids": ids, "finish_reason": finish, "logprobs": {"content": content}}


async def _events(choices: list[dict[str, Any]]) -> AsyncIterator[str]:
    for choice in choices:
        yield f"data: {json.dumps({'request_id': 'g', 'choices': [choice], 'usage': None})}\n\n"
    yield "data: [DONE]\n\n"
