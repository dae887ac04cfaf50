"""Pictures alone, with a real vLLM server and a real model class: what was recorded is what the model says of them.

Needs torchvision, which the development environment leaves out (vLLM's processors of videos import it); install the
one of the installed torch to run it.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai
import pytest

pytest.importorskip("torchvision", reason="needs torchvision, see the head of this file")

from seamless_verl.proxy.session.sessions import SessionSpec
from seamless_verl.proxy.text.pictures import open_image
from tests.fakes import small_tokenizer
from tests.pictures import PLACEHOLDERS, VISION_CHATML, VISION_TOKENS, save_model
from tests.standalone import Standalone
from tests.vllm_server import vllm_server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    scratch = tmp_path_factory.mktemp("vllm")
    model = save_model(scratch / "model")
    with vllm_server(model, scratch, "--max-model-len", "2048") as url:
        yield url, model


def _noise(seed: int, size: tuple[int, int], mode: str, form: str) -> bytes:
    """A picture of noise; viewers, and vLLM, would turn it by 90 degrees."""
    from PIL import Image

    turned, file = Image.Exif(), BytesIO()
    turned[0x0112] = 6
    noise = Image.frombytes(mode, size, Random(seed).randbytes(size[0] * size[1] * len(mode)))
    noise.resize((size[0] * 4, size[1] * 4), Image.Resampling.BILINEAR).save(file, form, exif=turned)
    return file.getvalue()


def _part(data: bytes) -> Any:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(data).decode()}"}}


async def test_recorded_log_probs_are_those_of_the_model_with_the_same_pixels(
    vllm: tuple[str, Path], tmp_path: Path
) -> None:
    url, model = vllm
    clear, photo = _noise(1, (30, 20), "RGBA", "PNG"), _noise(2, (40, 17), "RGB", "JPEG")
    turns: list[Any] = [[_part(clear), {"type": "text", "text": "what?"}], [_part(photo)], "the same?"]
    proxy = Standalone(tmp_path, url, model, served="tiny")
    await asyncio.to_thread(proxy.start)
    assert "no pictures" not in proxy.said
    admin = proxy.admin()
    handle = await admin.open_session(SessionSpec(sampling={"temperature": 1.0, "seed": 5}))
    client = openai.AsyncOpenAI(base_url=handle.base_url, api_key=handle.api_key, max_retries=0)
    history: list[Any] = []
    for number, content in enumerate(turns):
        if number == 2:  # dies between two turns; the same agent goes on
            proxy.kill()
            await asyncio.to_thread(proxy.start)
        history.append({"role": "user", "content": content})
        if number == 1:
            stream = await client.chat.completions.create(model="m", messages=history, max_tokens=40, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        else:
            answer = await client.chat.completions.create(model="m", messages=history, max_tokens=40)
            text = answer.choices[0].message.content or ""
        history.append({"role": "assistant", "content": text})
    result = await admin.close_session(handle.id, 1.0)
    await client.close()
    await admin.close()
    assert proxy.stop() == 0
    assert (result.audit.is_clean, result.kinds) == (True, {"clean": 3})
    (row,) = result.rows
    assert [result.images[digest] for digest in row.images] == [clear, photo]
    scored, blind = _scored(model, list(row.token_ids), [result.images[digest] for digest in row.images])
    policy = [at for at in range(len(row.mask)) if row.mask[at]]
    assert [row.log_probs[at] for at in policy] == pytest.approx([scored[at] for at in policy], abs=1e-4)
    assert max(abs(scored[at] - blind[at]) for at in policy) > 0.1
    liked = await _likes_placeholders(url, list(row.token_ids[: row.turns[0].start]))
    generated = [row.token_ids[at] for at in policy]
    assert liked > 0
    assert sum(generated.count(token) for token in _ids()) == 0


def _ids() -> list[int]:
    tokenizer = small_tokenizer(VISION_CHATML, special=VISION_TOKENS)
    return [int(tokenizer.convert_tokens_to_ids(token)) for token in PLACEHOLDERS]


def _scored(folder: Path, ids: list[int], files: list[bytes]) -> tuple[list[float], list[float]]:
    """Log-probs of a row by transformers, with its pictures and with their negatives."""
    import torch
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    made = AutoProcessor.from_pretrained(folder).image_processor(
        images=[open_image(data) for data in files], return_tensors="pt"
    )
    row = torch.tensor([ids])
    found = []
    for pixels in (made["pixel_values"], -made["pixel_values"]):
        with torch.no_grad():
            logits = model(
                input_ids=row,
                pixel_values=pixels,
                image_grid_thw=made["image_grid_thw"],
                mm_token_type_ids=(row == model.config.image_token_id).long(),
            ).logits
        log_probs = logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
        found.append([0.0, *log_probs.tolist()])
    return found[0], found[1]


async def _likes_placeholders(url: str, prompt: list[int]) -> int:
    """How many of them the server generates where nobody forbids it."""
    text = [token for token in prompt if token not in _ids()]
    body = {"model": "tiny", "prompt": text, "max_tokens": 100, "seed": 5, "logprobs": 0}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        answer = await http.post(f"{url}/v1/completions", json={**body, "return_tokens_as_token_ids": True})
    tokens = answer.json()["choices"][0]["logprobs"]["tokens"]
    return sum(tokens.count(f"token_id:{token}") for token in _ids())
