"""The engine gives its memory back and takes it again: ten times, each with new weights, and nothing changes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_checks.live import on_stage, settings
from benchmarks.gpu_checks.registry import Context
from benchmarks.records import Record

if TYPE_CHECKING:
    from benchmarks.gpu_checks.stage import Stage

_CYCLES = 10
_PROMPT = [1, 21, 30, 2, 1]
_TOKENS = 64
_MIB = 1 << 20


def run(context: Context) -> list[Record]:
    offload = [f"actor_rollout_ref.actor.fsdp_config.{what}_offload=true" for what in ("param", "optimizer")]
    lengths = ["data.max_response_length=200", "actor_rollout_ref.rollout.max_model_len=256"]
    slack = 256 if context.on_gpu else 0  # allocators round; the CPU platform's book does not
    return on_stage(context, "sleeping:body", [*settings(context), *offload, *lengths], slack_mib=slack)


async def body(stage: Stage, slack_mib: float) -> list[Record]:
    first = await _greedy(stage)
    sums = await stage.engine_sums()
    awake, asleep, give_s, take_s, changed, wrong = [], [], [], [], 0, 0
    for _ in range(_CYCLES):
        awake.append((await stage.device_memory())[0])
        began = time.monotonic()
        await stage.take_back()
        give_s.append(time.monotonic() - began)
        asleep.append((await stage.device_memory())[0])
        began = time.monotonic()
        await stage.lend()
        take_s.append(time.monotonic() - began)
        wrong += await stage.engine_sums() != sums
        changed += (await _greedy(stage)) != first
    return [
        Record(name="cycles whose weights differ", value=wrong, unit="", bar="= 0", holds=wrong == 0),
        Record(name="cycles whose greedy answer differs", value=changed, unit="", bar="= 0", holds=changed == 0),
        *_memory(awake, asleep, (await stage.device_memory())[1], slack_mib),
        Record(name="seconds to give a device back, median", value=_median(give_s), unit="s"),
        Record(name="seconds to lend it, median", value=_median(take_s), unit="s"),
        Record(name="seconds to lend it, longest", value=max(take_s), unit="s"),
    ]


def _memory(awake: list[int], asleep: list[int], total: int, slack_mib: float) -> list[Record]:
    """From the second cycle on: the first one makes what is kept, e.g. the sender's buffers."""
    if not total:
        return [Record(name="memory: this platform keeps no book", value=0, unit="")]
    freed = min(a - b for a, b in zip(awake[1:], asleep[1:], strict=True)) / _MIB
    grown = {"awake": (max(awake[2:]) - awake[1]) / _MIB, "asleep": (max(asleep[2:]) - asleep[1]) / _MIB}
    return [
        Record(name="memory that sleeping frees, least", value=freed, unit="MiB", bar="> 0", holds=freed > 0),
        *(
            Record(
                name=f"memory that grows over the cycles, {state}",
                value=value,
                unit="MiB",
                bar=f"<= {slack_mib:g}",
                holds=value <= slack_mib,
            )
            for state, value in grown.items()
        ),
    ]


async def _greedy(stage: Stage) -> tuple[Any, ...]:
    answer = await stage.generate(_PROMPT, temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)
    return tuple(answer.token_ids)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
