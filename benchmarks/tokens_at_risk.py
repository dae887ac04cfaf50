"""What a replica's death costs, and what it costs to have its answers leave it in parts before (``tokens_at_risk``).

Two real replicas (verl's server, vLLM's engine) with answers of the same length. First their pace, with and without
parts, in turns. Then one is killed with -9 while it generates: what both engines made beyond the answers was made
twice.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import ray

from benchmarks.records import Record, arguments, report
from benchmarks.weights import PROMPT, VOCABULARY, Replicas, count_frames, small_model

_EVERY = (0, 256, 64)
_RUNNING, _TOKENS = 64, 400
_KILL_AFTER = 300  # tokens of each answer, about


def client_of(replicas: Replicas, every: int) -> Any:
    """A client that outlives replicas, and lets answers leave them in parts of so many tokens."""
    from omegaconf import OmegaConf

    from seamless_verl.verl_adapter.rollout.llm_client import VersionedLLMClient

    ours = {"supervise": {"tokens_at_risk": every}, "scheduler": {"policy": "greedy"}}
    return VersionedLLMClient(OmegaConf.merge(replicas.client.config, {"seamless": ours}), replicas.router)


async def answered(replicas: Replicas, every: int) -> None:
    """All requests, to their ends."""
    client = client_of(replicas, every)
    rng = random.Random(_RUNNING)
    params = {"max_tokens": _TOKENS, "ignore_eos": True, "logprobs": True}

    async def one() -> None:
        prompt = [rng.randrange(5, VOCABULARY) for _ in range(PROMPT)]
        output = await client.generate(
            uuid.uuid4().hex,
            prompt_ids=prompt,
            sampling_params=params,
            on_progress=lambda part: None,
        )
        assert len(output.token_ids) == len(output.log_probs) == _TOKENS

    await asyncio.gather(*(one() for _ in range(_RUNNING)))


def pace(replicas: Replicas, every: int) -> float:
    """Tokens per second."""
    began = time.perf_counter()
    asyncio.run(answered(replicas, every))
    return _RUNNING * _TOKENS / (time.perf_counter() - began)


def made_twice(replicas: Replicas, every: int) -> float:
    """Tokens made again for each request of a replica that is killed."""
    since = time.time()
    victim, other = (replica.server_handle for replica in replicas.replicas)
    pid = ray.get(victim.__ray_call__.remote(_pid))
    seen: list[tuple[int, int]] = []

    async def kill() -> None:
        while True:
            made, running = await victim.__ray_call__.remote(_state, since)
            if running and made >= _KILL_AFTER * running:
                seen.append((made, running))
                os.kill(pid, signal.SIGKILL)
                return
            await asyncio.sleep(0.01)

    async def both() -> None:
        await asyncio.gather(answered(replicas, every), kill())

    asyncio.run(both())
    ((made, running),) = seen
    of_other, _ = ray.get(other.__ray_call__.remote(_state, since))
    return (made + of_other - _RUNNING * _TOKENS) / running


def _pid(server: Any) -> int:
    return os.getpid()


def _state(server: Any, since: float) -> tuple[int, int]:
    """Tokens that its engine made since then, and its requests."""
    made = sum(frame.tokens for frame in server.frames if frame.at >= since)
    return made, len(server.engine.output_processor.request_states)


def _records(paces: dict[int, list[float]], lost: dict[int, list[float]]) -> list[Record]:
    records = []
    for every, found in paces.items():
        name = f"parts of {every} tokens" if every else "no parts"
        against = [one / none for one, none in zip(found, paces[0], strict=True)]
        records.append(Record(name=f"{name}: tokens/s", value=statistics.median(found), unit="1/s"))
        if every:
            ratio = statistics.median(against)
            bar = ">= 0.97" if every == max(_EVERY) else ""
            records.append(
                Record(name="  of those without", value=ratio, unit="x", bar=bar, holds=ratio >= 0.97 if bar else None)
            )
        again = statistics.median(lost[every])
        # What was made while the last part and the kill were on their way is made again, too.
        holds = again <= every + 8 if every else None
        bar = "<= a part, and 8" if every else ""
        records.append(
            Record(name="  made again per request of a killed replica", value=again, unit="", bar=bar, holds=holds)
        )
    return records


def main() -> int:
    options = arguments(__doc__ or "")
    from seamless_verl.run.environment import CPU_ENVIRONMENT

    of_workers = {key: value for key, value in CPU_ENVIRONMENT.items() if not key.startswith("RAY_")}
    os.environ.update({key: value for key, value in of_workers.items() if value is not None})
    import verl  # noqa: F401  (its plug-ins: the CPU platform, vLLM's CPU build)

    paces: dict[int, list[float]] = {every: [] for every in _EVERY}
    lost: dict[int, list[float]] = {every: [] for every in _EVERY}
    rounds, kills = (1, 1) if options.quick else (5, 2)
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        model = small_model(Path(scratch))
        for number in range(kills * len(_EVERY)):
            every = _EVERY[number % len(_EVERY)]
            environment = {"env_vars": of_workers}
            ray.init(
                "local", num_cpus=8, num_gpus=2, include_dashboard=False, runtime_env=environment, log_to_driver=False
            )
            try:
                replicas = Replicas(model, Path(shared) / f"weights-{number}")
                replicas.update("refill")
                for replica in replicas.replicas:
                    ray.get(replica.server_handle.__ray_call__.remote(count_frames))
                for turn in range(rounds + 1 if not number else 0):
                    for way in _EVERY[turn % 3 :] + _EVERY[: turn % 3]:
                        found = pace(replicas, way)
                        print(f"parts of {way}: {found:.0f} tokens/s", flush=True)
                        paces[way] += [found] if turn else []  # the first is to get warm
                lost[every].append(made_twice(replicas, every))
                print(f"parts of {every}: {lost[every][-1]:.1f} tokens made again per request", flush=True)
                replicas.close()
            finally:
                ray.shutdown()
    return report(_records(paces, lost), options.json)


if __name__ == "__main__":
    sys.exit(main())
