"""Answers that are interrupted in their middle go on as if nothing had been."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_checks.live import on_stage, settings
from benchmarks.gpu_checks.registry import Context
from benchmarks.records import Record

if TYPE_CHECKING:
    from benchmarks.gpu_checks.stage import Stage

_PROMPTS = [[1, 20 + number, 30, 2, 1] for number in range(8)]
_TOKENS = 600
CUTS = 3


def run(context: Context) -> list[Record]:
    lengths = ["data.max_response_length=900", "actor_rollout_ref.rollout.max_model_len=1000"]
    # bfloat16 has eight bits: a prefill and a decode step differ by what their kernels round.
    tolerance = 0.15 if context.on_gpu else 1e-4
    return on_stage(context, "interrupting:body", [*settings(context), *lengths], tolerance=tolerance)


async def body(stage: Stage, tolerance: float) -> list[Record]:
    began = time.monotonic()
    whole = await _answers(stage)
    seconds = time.monotonic() - began
    stopped, cut = await interrupted(stage, _answers(stage), seconds)
    short = sum(len(answer.token_ids) != _TOKENS or len(answer.log_probs) != _TOKENS for answer in cut)
    off = await largest_error(stage, _PROMPTS, cut)
    same = sum(a.token_ids == b.token_ids for a, b in zip(whole, cut, strict=True)) / len(cut)
    return [
        Record(name="answers interrupted", value=stopped, unit="", bar=f"= {CUTS * 8}", holds=stopped == CUTS * 8),
        *of_answers(short, off, tolerance),
        # With eight bits the best of 150,000 tokens may change by a rounding, and the rest of the answer with it.
        Record(name="greedy answers equal to uninterrupted ones", value=same, unit="share"),
    ]


async def _answers(stage: Stage) -> list[Any]:
    asked = [stage.generate(ids, temperature=0.0, max_tokens=_TOKENS, ignore_eos=True) for ids in _PROMPTS]
    return await asyncio.gather(*asked)


async def interrupted(stage: Stage, answers: Awaitable[list[Any]], seconds: float) -> tuple[int, list[Any]]:
    """Interrupt them `CUTS` times on their way of some seconds; how many were, and how they ended."""
    running = asyncio.ensure_future(answers)
    stopped = 0
    for _ in range(CUTS):
        await asyncio.sleep(seconds / (CUTS + 1))
        stopped += await stage.interrupt()
    return stopped, await running


def of_answers(short: int, off: float, tolerance: float) -> list[Record]:
    """``short`` of them lost or gained tokens; ``off``: of `largest_error`."""
    return [
        Record(name="answers that lost or gained tokens", value=short, unit="", bar="= 0", holds=short == 0),
        Record(
            name="log-probs against the engine's of the whole text",
            value=off,
            unit="nats",
            bar=f"<= {tolerance:g}",
            holds=off <= tolerance,
        ),
    ]


async def largest_error(
    stage: Stage,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Any],
    shown: Sequence[Mapping[str, Any]] | None = None,
) -> float:
    """Between the log-probs that answers came with and those that the engine gives their tokens, shown as a whole."""
    worst = 0.0
    for prompt, answer, seen in zip(prompts, answers, shown or [{}] * len(answers), strict=True):
        scores = await stage.scores([*prompt, *answer.token_ids], len(answer.token_ids), seen)
        worst = max([worst, *(abs(a - b) for a, b in zip(scores, answer.log_probs, strict=True))])
    return worst
