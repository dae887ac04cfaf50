"""Interrupted answers whose engine knows more than tokens: under a grammar, and about pictures."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import time
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_checks.interrupting import interrupted, largest_error, of_answers
from benchmarks.gpu_checks.live import on_stage, settings
from benchmarks.gpu_checks.registry import Context, PartlySkipped
from benchmarks.gpu_checks.whole_runs import named
from benchmarks.records import Record

if TYPE_CHECKING:
    from benchmarks.gpu_checks.stage import Stage

_DIGITS = 400
_PICTURES, _WORDS = 4, 300


def run(context: Context) -> list[Record]:
    lengths = ["data.max_response_length=900", "actor_rollout_ref.rollout.max_model_len=1000"]
    records = on_stage(context, "constraining:grammar", [*settings(context), *lengths], name="grammar")
    records = [named(record, "grammar: ") for record in records]
    if importlib.util.find_spec("torchvision") is None:
        raise PartlySkipped("pictures: torchvision, which vLLM's processors import, is not installed", records)
    from tests.pictures import save_model

    model = save_model(context.folder / "model-of-pictures")
    overrides = [*settings(context), *lengths, f"actor_rollout_ref.model.path={model}"]
    tolerance = 0.15 if context.on_gpu else 1e-4
    seen = on_stage(context, "constraining:pictures", overrides, name="pictures", tolerance=tolerance)
    return [*records, *(named(record, "pictures: ") for record in seen)]


async def grammar(stage: Stage) -> list[Record]:
    """Digits with a separator after each ten: whoever begins the grammar anew in the middle is found out."""
    from vllm.sampling_params import StructuredOutputsParams

    pattern = rf"([0-9]{{10}} ){{{_DIGITS // 10}}}"
    asked: list[dict[str, Any]] = [
        {
            "temperature": 1.0,
            "max_tokens": 900,
            "structured_outputs": StructuredOutputsParams(regex=pattern),
        }
        for _ in range(8)
    ]

    async def answers() -> list[Any]:
        return await asyncio.gather(*(stage.generate([1, 20 + n, 2, 1], **asked[n]) for n in range(8)))

    began = time.monotonic()
    await answers()
    stopped, cut = await interrupted(stage, answers(), time.monotonic() - began)
    tokenizer = stage.trainer.tokenizer
    texts = [tokenizer.decode(answer.token_ids, skip_special_tokens=True) for answer in cut]
    wrong = sum(re.fullmatch(pattern, text) is None for text in texts)
    return [
        Record(name="answers interrupted", value=stopped, unit="", bar="> 0", holds=stopped > 0),
        Record(name="answers that break it", value=wrong, unit="of 8", bar="= 0", holds=wrong == 0),
    ]


async def pictures(stage: Stage, tolerance: float) -> list[Record]:
    from seamless_verl.proxy.text.pictures import open_image
    from tests.pictures import picture

    shown = [{"image_data": [open_image(picture((60 * n, 90, 200 - 40 * n)))]} for n in range(_PICTURES)]
    processor = stage.trainer.processor
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>what?<|im_end|>\n<|im_start|>assistant\n"
    prompts = [processor.tokenizer.encode(text) for _ in shown]

    async def answers() -> list[Any]:
        asked = (
            stage.generate(ids, shown=seen, temperature=0.0, max_tokens=_WORDS, ignore_eos=True)
            for ids, seen in zip(prompts, shown, strict=True)
        )
        return await asyncio.gather(*asked)

    began = time.monotonic()
    whole = await answers()
    stopped, cut = await interrupted(stage, answers(), time.monotonic() - began)
    short = sum(len(answer.token_ids) != _WORDS for answer in cut)
    off = await largest_error(stage, prompts, cut, shown)
    same = sum(a.token_ids == b.token_ids for a, b in zip(whole, cut, strict=True)) / len(cut)
    return [
        Record(name="answers interrupted", value=stopped, unit="", bar="> 0", holds=stopped > 0),
        *of_answers(short, off, tolerance),
        Record(name="greedy answers equal to uninterrupted ones", value=same, unit="share"),
    ]
