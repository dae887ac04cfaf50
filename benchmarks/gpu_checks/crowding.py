"""More requests than an engine has room for: all in flight through a loan; and more tokens than its cache holds."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_checks.interrupting import largest_error, of_answers
from benchmarks.gpu_checks.live import on_stage, settings
from benchmarks.gpu_checks.registry import Context
from benchmarks.records import Record

if TYPE_CHECKING:
    from benchmarks.gpu_checks.stage import Stage

_REQUESTS = 1200
_ANSWER = 24
_BLOCKS, _CROWD, _LONG = 40, 48, 400
_STUCK_S = 60.0
_QUEUE_S = 6.0  # as long as a large model's weights take: all requests are there before the replica serves


def run_loan(context: Context) -> list[Record]:
    lengths = ["data.max_response_length=200", "actor_rollout_ref.rollout.max_model_len=256"]
    return on_stage(context, "crowding:loan", [*settings(context), *lengths])


async def loan(stage: Stage) -> list[Record]:
    """Requests come while the replica holds them, are interrupted when it is taken back, and wait for the next loan."""
    await stage.take_back()
    began = time.monotonic()
    asked = [
        asyncio.ensure_future(
            stage.generate([1, 20 + n % 70, 2, 1], temperature=1.0, max_tokens=_ANSWER, ignore_eos=True)
        )
        for n in range(_REQUESTS)
    ]
    await asyncio.sleep(1.0)  # nobody serves: they wait for a replica
    records = []
    for number in (1, 2):
        at = time.monotonic()
        held = await _within(stage.lend(_QUEUE_S))
        took = time.monotonic() - at
        records.append(
            Record(name=f"loan {number}: until it serves", value=took, unit="s", bar=f"< {_STUCK_S:g}", holds=held)
        )
        if not held:
            break
        if number == 1:
            await _some_done(asked, _REQUESTS // 10)
            await stage.take_back()
    done, late = await asyncio.wait(asked, timeout=_STUCK_S * 2)
    failed = sum(task.exception() is not None for task in done)
    whole = sum(task.exception() is None and len(task.result().token_ids) == _ANSWER for task in done)
    for task in late:
        task.cancel()
    return [
        *records,
        Record(name="requests answered in full", value=whole, unit="", bar=f"= {_REQUESTS}", holds=whole == _REQUESTS),
        Record(name="requests that failed", value=failed, unit="", bar="= 0", holds=failed == 0),
        Record(name="requests never answered", value=len(late), unit="", bar="= 0", holds=not late),
        Record(name="from the first request to the last answer", value=time.monotonic() - began, unit="s"),
    ]


async def _within(call: Any) -> bool:
    try:
        await asyncio.wait_for(call, _STUCK_S)
    except TimeoutError:
        return False
    return True


async def _some_done(tasks: list[asyncio.Future[Any]], count: int) -> None:
    waiting = set(tasks)
    while waiting and len(tasks) - len(waiting) < count:
        _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)


def run_pressure(context: Context) -> list[Record]:
    blocks = _BLOCKS * (8 if context.on_gpu else 1)  # of 16 tokens on a GPU, 128 on the CPU
    overrides = [
        "data.max_response_length=900",
        "actor_rollout_ref.rollout.max_model_len=1000",
        "actor_rollout_ref.rollout.max_num_seqs=64",
        "actor_rollout_ref.rollout.disable_log_stats=false",  # it counts preemptions
        f"++actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override={blocks}",
    ]
    tolerance = 0.15 if context.on_gpu else 1e-4
    return on_stage(context, "crowding:pressure", [*settings(context), *overrides], tolerance=tolerance)


async def pressure(stage: Stage, tolerance: float) -> list[Record]:
    """Three times as many tokens as the cache holds; larger numbers are younger sessions, which came first."""
    prompts = [[1, 20 + number, 30, 2, 1] for number in range(_CROWD)]
    finished: list[int] = []

    async def ask(number: int) -> Any:
        answer = await stage.generate(
            prompts[number], priority=1 + number, temperature=1.0, max_tokens=_LONG, ignore_eos=True
        )
        finished.append(number)
        return answer

    answers = await asyncio.gather(*(ask(number) for number in reversed(range(_CROWD))))
    answers.reverse()
    short = sum(len(answer.token_ids) != _LONG for answer in answers)
    preempted = await stage.counted("vllm:num_preemptions")
    off = await largest_error(stage, prompts, answers)
    first = finished[: _CROWD // 3]
    oldest = sum(number < _CROWD // 3 for number in first) / len(first)
    return [
        *of_answers(short, off, tolerance),
        Record(name="times that a request lost its cache", value=preempted, unit="", bar="> 0", holds=preempted > 0),
        Record(
            name="oldest third among the first third to finish",
            value=oldest,
            unit="share",
            bar=">= 0.5",  # they came last: 0 where nobody looks at priorities
            holds=oldest >= 0.5,
        ),
    ]
