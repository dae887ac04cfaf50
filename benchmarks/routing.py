"""Agents of many turns whose contexts do not fit into the caches together: where each turn goes, and what that costs.

    python -m benchmarks.routing [--quick] [--json FILE]

Two real replicas (verl's server, vLLM's engine), each with a cache that holds a few of the sessions, and groups of
sessions that share a prompt, as GRPO's do. All sessions begin at once; in each turn the model answers, then a tool adds
its own tokens. The same sessions run under every rule in turns, on the same replicas, with empty caches at the start:

* least requests   each turn goes to the replica with the fewest
* verl's           least requests for the first turn; the others go where that one went
* StaleFlow's      marginal gain, as `seamless.router.policy=marginal_gain` runs it
* ours by default  verl's rule, and the engines serve the oldest session first (`oldest_first`)
* cache-aware      `seamless.router.policy=cache_aware`

prefilled again   context tokens that an engine computed although some engine had computed them before
tokens/s          generated, over the time until the last session ends
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.records import Record, arguments, report
from benchmarks.weights import VOCABULARY, small_model

LEAST, VERLS, STALEFLOWS, OURS, CACHE_AWARE = (
    "least requests",
    "verl's",
    "StaleFlow's",
    "ours by default",
    "cache-aware",
)
WAYS = (LEAST, VERLS, STALEFLOWS, OURS, CACHE_AWARE)
_BLOCK = 32  # tokens; what vLLM's cache is counted in
_SEATS = 32
# Prefilling a token takes it a 60th of a decode step, about what we reckon for 7 billion parameters on an H20.
_SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The sessions of a round.

    Attributes:
        groups, members: prompts, and sessions of each.
        prompt: tokens that the sessions of a group begin with.
        turns: of each session, from and to.
        answer, observation: tokens of a turn, from and to.
        tool_s: seconds between two turns, from and to.
        cache: tokens of a replica's cache.
    """

    groups: int = 8
    members: int = 4
    prompt: int = 768
    turns: tuple[int, int] = (6, 10)
    answer: tuple[int, int] = (16, 48)
    observation: tuple[int, int] = (128, 320)
    tool_s: tuple[float, float] = (0.05, 0.4)
    cache: int = 12288


@dataclass(slots=True)
class Round:
    """What became of them."""

    seconds: float = 0.0
    generated: int = 0
    again: int = 0
    latencies: list[float] = field(default_factory=list)
    begun: set[str] = field(default_factory=set)  # groups whose prompt some engine has computed


class LeastRequestsEveryTurn:
    """Goes before verl's balancer (`Replicas`): the place of the last turn is forgotten."""

    def acquire_server(self, request_id: str) -> Any:
        self._request_id_to_server.pop(request_id, None)  # type: ignore[attr-defined]
        return super().acquire_server(request_id)  # type: ignore[misc]


class Replicas:
    """Two of them, with a router and a client for each way."""

    def __init__(self, model: Path, cache: int) -> None:
        from verl.workers.rollout.llm_server import LLMServerClient
        from verl.workers.rollout.router import GlobalRequestLoadBalancer, get_router_handle

        from benchmarks.placement import composed
        from seamless_verl.config import RouterConfig
        from seamless_verl.verl_adapter.rollout.holding_balancer import balancer_class
        from seamless_verl.verl_adapter.rollout.llm_client import VersionedLLMClient
        from seamless_verl.verl_adapter.slices.standing import tell_cache_sizes
        from seamless_verl.verl_adapter.vllm.vllm_server import InterruptibleReplica

        vllm = "actor_rollout_ref.rollout.engine_kwargs.vllm"
        config = composed(
            (
                "+recipe=arithmetic",
                f"actor_rollout_ref.model.path={model}",
                f"actor_rollout_ref.rollout.max_num_seqs={_SEATS}",
                "actor_rollout_ref.rollout.max_model_len=4096",
                "actor_rollout_ref.rollout.enable_prefix_caching=true",
                "++actor_rollout_ref.rollout.scheduling_policy=priority",
                f"{vllm}.num_gpu_blocks_override={cache // _BLOCK}",
                f"+{vllm}.block_size={_BLOCK}",
            ),
            platform="cpu",
        )
        rollout = config.actor_rollout_ref.rollout
        replicas = [
            InterruptibleReplica(rank, config=rollout, model_config=config.actor_rollout_ref.model, gpus_per_node=1)
            for rank in range(2)
        ]
        for replica in replicas:
            asyncio.run(replica.init_standalone())
        self.servers = {replica.server_address: replica.server_handle for replica in replicas}
        every_turn = type("LeastRequests", (LeastRequestsEveryTurn, GlobalRequestLoadBalancer), {})
        classes = {
            LEAST: every_turn,
            VERLS: GlobalRequestLoadBalancer,
            STALEFLOWS: balancer_class(RouterConfig(policy="marginal_gain"), _SEATS),
            OURS: balancer_class(RouterConfig(), _SEATS),
            CACHE_AWARE: balancer_class(RouterConfig(policy="cache_aware"), _SEATS),
        }
        self.clients: dict[str, Any] = {}
        for way, balancer in classes.items():
            router = get_router_handle(self.servers, load_balancer_cls=balancer)
            tell_cache_sizes(router, self.servers)
            client = LLMServerClient if way in (LEAST, VERLS) else VersionedLLMClient
            self.clients[way] = client(config, router)

    def forget(self) -> None:
        """Empty every cache."""
        ray.get([server.clear_kv_cache.remote() for server in self.servers.values()])


async def session(client: Any, found: Round, load: Load, group: tuple[str, list[int]], rng: random.Random) -> None:
    """One agent, from its first turn to its last."""
    from seamless_verl.verl_adapter.rollout.request_log import request_log

    name, prompt = group
    index = rng.randrange(1 << 60)
    with request_log.session(name, index):
        context, computed = list(prompt), len(prompt) if name in found.begun else 0
        found.begun.add(name)
        for _ in range(rng.randint(*load.turns)):
            began = time.perf_counter()
            params = {"max_tokens": rng.randint(*load.answer), "ignore_eos": True, "logprobs": True}
            output = await client.generate(f"{name}-{index}", prompt_ids=context, sampling_params=params)
            found.latencies.append(time.perf_counter() - began)
            found.generated += len(output.token_ids)
            missed = len(context) - (output.extra_fields.get("num_cached_tokens") or 0)
            found.again += max(0, missed - (len(context) - computed))
            context += output.token_ids
            computed = len(context)
            context += [rng.randrange(5, VOCABULARY) for _ in range(rng.randint(*load.observation))]
            await asyncio.sleep(rng.uniform(*load.tool_s))


async def play(client: Any, load: Load, seed: int) -> Round:
    """All sessions, begun at once."""
    from seamless_verl.verl_adapter.rollout.request_log import request_log

    request_log.over = getattr(client, "conversations_over", request_log.over)
    rng, found = random.Random(seed), Round()
    prompts = {f"{seed}-{n}": [rng.randrange(5, VOCABULARY) for _ in range(load.prompt)] for n in range(load.groups)}
    tasks = [
        session(client, found, load, group, random.Random(rng.random()))
        for group in prompts.items()
        for _ in range(load.members)
    ]
    began = time.perf_counter()
    await asyncio.gather(*tasks)
    found.seconds = time.perf_counter() - began
    return found


def judged(rounds: dict[str, list[Round]]) -> list[Record]:
    def median(way: str, figure: str) -> float:
        return statistics.median(_figures(one)[figure] for one in rounds[way])

    best = max(median(way, "tokens/s") for way in WAYS if way != CACHE_AWARE)
    records = []
    for way in WAYS:
        ours = way == CACHE_AWARE
        pace, again = median(way, "tokens/s"), median(way, "again")
        records += [
            Record(
                name=f"{way}: generated",
                value=pace,
                unit="tokens/s",
                bar="the best" if ours else "",
                holds=pace >= best if ours else None,
            ),
            Record(
                name="  prefilled again",
                value=again,
                unit="tokens",
                bar="<= 0.6 of least requests'" if ours else "",
                holds=again <= 0.6 * median(LEAST, "again") if ours else None,
            ),
            Record(name="  a turn takes, median", value=median(way, "p50"), unit="s"),
            Record(name="  a turn takes, 99th percentile", value=median(way, "p99"), unit="s"),
        ]
    return records


def _figures(one: Round) -> dict[str, float]:
    p50, p99 = np.percentile(one.latencies, (50, 99))
    return {"tokens/s": one.generated / one.seconds, "again": float(one.again), "p50": float(p50), "p99": float(p99)}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="of each way")


def main() -> int:
    options = arguments(__doc__ or "", _options)
    from seamless_verl.run.environment import CPU_ENVIRONMENT

    of_workers = {key: value for key, value in CPU_ENVIRONMENT.items() if not key.startswith("RAY_")}
    os.environ.update({key: value for key, value in of_workers.items() if value is not None})
    import verl  # noqa: F401  (its plug-ins: the CPU platform, vLLM's CPU build)

    load = Load(groups=2, members=2) if options.quick else Load()
    rounds: dict[str, list[Round]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as scratch:
        environment = {"env_vars": of_workers}
        ray.init(
            "local", num_cpus=16, num_gpus=2, include_dashboard=False, runtime_env=environment, log_to_driver=False
        )
        try:
            replicas = Replicas(small_model(Path(scratch), **_SHAPE), load.cache)
            asyncio.run(play(replicas.clients[CACHE_AWARE], Load(groups=2), -1))  # engines are warm, and measured
            for number in range(1 if options.quick else options.rounds):
                for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                    replicas.forget()
                    one = asyncio.run(play(replicas.clients[way], load, number))
                    rounds[way].append(one)
                    print(f"round {number}, {way}: {_figures(one)}", flush=True)
            paces = ray.get([server.pace.remote() for server in replicas.servers.values()])
        finally:
            ray.shutdown()
    return report([*judged(rounds), *_engines(paces)], options.json)


def _engines(paces: list[Any]) -> list[Record]:
    """What the engines' own steps said at the end."""
    records = []
    for number, pace in enumerate(paces):
        step_s = pace.decode.step_s(8, 0)
        records += [
            Record(name=f"engine {number}: a step with 8 requests", value=1e3 * step_s, unit="ms"),
            Record(name="  prefilling a token", value=pace.prefill_s_per_token / step_s, unit="steps"),
            Record(name="  a turn", value=pace.turn_tokens, unit="tokens"),
        ]
    return records


if __name__ == "__main__":
    sys.exit(main())
