"""Rows with pictures on verl's own path: its server gets the pictures, its post-processing accepts the row."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopWorker
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.utils import qwen2_5_vl_dedup_image_tokens

from seamless_verl.proxy.client import SessionResult
from seamless_verl.proxy.engine import GenerationRequest
from seamless_verl.verl_adapter.rollout.trainer_engine import VerlEngine
from seamless_verl.verl_adapter.rollout.verl_samples import row_to_output
from tests.edge.proxy.test_images import BLUE, RED, WIDE, _chat, _part, _text
from tests.fakes import serving
from tests.pictures import small_processor


async def _session() -> tuple[SessionResult, list[int]]:
    async with serving(sees=True) as proxy:
        handle = await proxy.open()
        history = _chat(_text("look"), _part(RED), _part(WIDE))["messages"]
        answer = await proxy.post(handle, {"model": "m", "messages": history})
        history += [answer.json()["choices"][0]["message"], {"role": "user", "content": [_part(BLUE)]}]
        assert (await proxy.post(handle, {"model": "m", "messages": history})).headers["x-seamless-match"] == "clean"
        return await proxy.admin.close_session(handle.id), list(proxy.engine.requests[-1].prompt_ids)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # transformers with NumPy 2
async def test_verl_computes_the_inputs_of_the_row_that_was_recorded() -> None:
    result, _ = await _session()
    (row,) = result.rows
    output = row_to_output(
        row, reward=1.0, metrics=AgentLoopMetrics(), extra_fields={}, violations=0, images=result.images
    )
    worker: Any = object.__new__(AgentLoopWorker)
    worker.processor, worker.tokenizer = small_processor(), small_processor().tokenizer
    worker.mm_processor_kwargs = {}
    import torch

    inputs = worker._compute_multi_modal_inputs(output, torch.tensor([[*output.prompt_ids, *output.response_ids]]))
    grid = inputs["image_grid_thw"]
    assert len(grid) == len(row.images) == 3
    # One patch embedding per placeholder: what the model merges into the row's tokens is as long as they have room for.
    merged = int((grid.prod(dim=1) // small_processor().image_processor.merge_size ** 2).sum())
    assert merged == row.token_ids.count(small_processor().image_token_id)


async def test_the_server_gets_the_pictures_and_expands_the_prompt_to_what_is_recorded() -> None:
    result, prompt = await _session()
    (row,) = result.rows
    asked: dict[str, Any] = {}

    class Client:
        async def generate(self, **options: Any) -> TokenOutput:
            asked.update(options)
            extra = {"version_spans": [(1, 1)]}
            return TokenOutput(token_ids=[0], log_probs=[-1.0], stop_reason="completed", extra_fields=extra)

    client: Any = Client()
    engine = VerlEngine(
        client, decode=str, max_model_len=4000, stop_token_ids=frozenset({0}), processor_args={"max_pixels": 50176}
    )
    images = [result.images[digest] for digest in row.images]
    request = GenerationRequest(
        request_id="r",
        session_id="s",
        prompt_ids=prompt,
        sampling={"max_tokens": 5},
        deadline=time.time() + 60,
        images=images,
    )
    await engine.generate(request)
    assert [picture.size for picture in asked["image_data"]] == [(100, 80), (200, 60), (100, 80)]
    assert asked["image_data"][2].getpixel((0, 0)) == (0, 0, 255)
    assert asked["mm_processor_kwargs"] == {"max_pixels": 50176}
    # verl's server folds each picture to one placeholder, which vLLM's processor unfolds again.
    folded = qwen2_5_vl_dedup_image_tokens(asked["prompt_ids"], small_processor())
    text = small_processor().tokenizer.decode(folded)
    unfolded = small_processor()(text=[text], images=asked["image_data"])["input_ids"][0]
    assert unfolded == prompt


def test_a_processor_travels_to_the_actor_without_verls_additions() -> None:
    import types

    from seamless_verl.verl_adapter.rollout.proxy_shard import _portable

    processor = small_processor()
    processor.get_rope_index = types.MethodType(lambda self: None, processor)
    try:
        assert "get_rope_index" not in vars(_portable(processor))
        assert "get_rope_index" in vars(processor)
    finally:
        del processor.get_rope_index
    assert _portable(None) is None
    assert SimpleNamespace(**vars(_portable(processor))).image_token == "<|image_pad|>"
