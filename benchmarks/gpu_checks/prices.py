"""What moving a slice costs at 8B shapes, in the simulator's words (``seamless-verl simulate --set``)."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_checks.live import on_stage, settings
from benchmarks.gpu_checks.registry import Context
from benchmarks.gpu_checks.whole_runs import offloading
from benchmarks.records import Record

if TYPE_CHECKING:
    from benchmarks.gpu_checks.stage import Stage

_SESSIONS = 256
_PREFILL_S = 60.0  # of measuring; what is missing of 256 sessions is told in proportion
_ROUNDS = 3
_WAVE = 16


def run(context: Context) -> list[Record]:
    context_tokens = 16_384 if context.on_gpu else 200
    overrides = [
        *settings(context, "large"),
        *offloading(True),
        f"data.max_prompt_length={context_tokens}",
        "data.max_response_length=200",
        f"actor_rollout_ref.rollout.max_model_len={context_tokens + 232}",
    ]
    if context.on_gpu:
        overrides += [
            "++actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16",  # 16 GB: fp32 would not fit beside the rest
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
            "actor_rollout_ref.rollout.max_num_batched_tokens=16384",
            "actor_rollout_ref.rollout.max_num_seqs=256",
        ]
    return on_stage(context, "prices:body", overrides, context_tokens=context_tokens)


async def body(stage: Stage, context_tokens: int) -> list[Record]:
    took: dict[str, list[float]] = {}
    for _ in range(_ROUNDS):
        for name, seconds in (await _round(stage)).items():
            took.setdefault(name, []).append(seconds)
    typical = {name: statistics.median(seconds) for name, seconds in took.items()}
    drain = typical["interrupt and sleep"] + typical["trainer comes back"]
    wake = typical["trainer leaves"] + typical["weights and cache"]
    per_token, sessions = await _prefill(stage, context_tokens)
    whole = per_token * _SESSIONS * context_tokens
    return [
        Record(name="parameters of the model", value=await stage.parameters(), unit=""),
        *(Record(name=name, value=seconds, unit="s") for name, seconds in typical.items()),
        Record(name="price of lending", value=wake, unit="s", bar=f"--set costs.wake={wake:.2f}"),
        Record(name="price of taking back", value=drain, unit="s", bar=f"--set costs.drain={drain:.2f}"),
        Record(name=f"prefill, {sessions} sessions of {context_tokens} tokens", value=1e6 * per_token, unit="us/token"),
        Record(name=f"prefill of {_SESSIONS} such sessions", value=whole, unit="s"),
    ]


async def _round(stage: Stage) -> dict[str, float]:
    """One loan's moves with requests under way, each timed; the trainer's own as verl's engine makes them."""
    took: dict[str, float] = {}
    asked = [
        asyncio.ensure_future(stage.generate([1, 20 + n % 60, 2, 1], temperature=1.0, max_tokens=180, ignore_eos=True))
        for n in range(64)
    ]
    await asyncio.sleep(0.3)
    took["interrupt and sleep"] = await _timed(stage.take_back())
    took["trainer comes back"] = await _timed(stage.move_trainer("device"))
    took["trainer leaves"] = await _timed(stage.move_trainer("cpu"))
    took["weights and cache"] = await _timed(stage.lend())
    await asyncio.gather(*asked)
    return took


async def _timed(call: Any) -> float:
    began = time.monotonic()
    await call
    return time.monotonic() - began


async def _prefill(stage: Stage, context_tokens: int) -> tuple[float, int]:
    """Seconds per token of contexts that the cache does not know; over how many sessions it was measured."""
    spent, done = 0.0, 0
    while done < _SESSIONS and spent < _PREFILL_S:
        drawn = [random.Random(done + n).choices(range(10, 90), k=context_tokens) for n in range(_WAVE)]
        prompts = asyncio.gather(*(stage.generate(prompt, temperature=1.0, max_tokens=1) for prompt in drawn))
        spent += await _timed(prompts)
        done += _WAVE
    return spent / (done * context_tokens), done
