"""New weights under load: replicas that pull in turn, beside verl's update that stops all of them.

Two real replicas (verl's server and worker, vLLM's engine) with so many requests between them; a new one begins when
one ends. Both ways get the same weights from the same shared memory and take turns on the same replicas; what stands
for the trainer holds weights on the host. Our client sends an interrupted request again at once; verl's own sleeps for
a second before it does. With ``--verls-client`` all requests go through verl's: there is one more way, in which it
sleeps, and in the others it is spared that. With ``--all-at-once`` there is one more way: ours with replicas that pull
at the same time (``seamless.weights.at_once``). Between them come turns without an update, which show what the pace
does by itself.

Each request has a prompt of its own, and goes to the replica with the fewest requests. As the GPU recipes have it:
``--siblings 8 --router cache_aware``, prompts that eight requests share and that stay together.

* wait      of whoever publishes
* lost      tokens that were not generated in the seconds around an update, against the pace before it
* silence   the longest time without a token, of one request (the median of all), of one replica, and of both
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import ray

from benchmarks.records import Record, arguments, report

_RUNNING = (8, 32, 64)
PROMPT, _SHORTEST, _LONGEST = 128, 150, 400
_SEATS, VOCABULARY = 64, 512
_BEFORE_S, _AFTER_S = 2.0, 2.5  # in which the pace is taken, and in which what is missing is counted
WAYS = ("nothing", "together", "refill", "keep")
_SLEPT = "together, then a sleep"
_AT_ONCE = "refill, all at once"
_LOOK_S = 0.1  # asking takes the servers' time, and only those that pull in turn are asked more than once
_NAME = 32  # characters of a request's name, by which it is known again when it is sent once more


class Frame(NamedTuple):
    """What an engine tells at once: when, how many tokens, and of which requests."""

    at: float
    tokens: int
    requests: tuple[str, ...]


class Publisher:
    """Stands for the trainer's first rank: weights of any version, an optimizer's step apart."""

    def __init__(self, model: str, folder: str) -> None:
        from safetensors.torch import load_file

        from seamless_verl.verl_adapter.weights.shared_engine import SharedMemoryEngine

        self._weights = load_file(f"{model}/model.safetensors")
        self._engine = SharedMemoryEngine(1 << 20, is_master=True, folder=folder, dtype="float32")

    async def publish(self, version: int) -> dict[str, float]:
        stepped = ((name, value * (1 + 1e-5 * version)) for name, value in self._weights.items())
        return await self._engine.send_weights(stepped, version)


class Trainer:
    """Its workers, as verl's manager and ours call them."""

    def __init__(self, publisher: Any) -> None:
        self.workers = [publisher]
        self.world_size = 1
        self._publisher = publisher

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        """verl has both ends work at the same time; through a file the reader must come second."""
        return [ray.put(ray.get(self._publisher.publish.remote(global_steps)))]

    def execute_checkpoint_engine(self, method: list[str], **_: Any) -> list[Any]:
        return [ray.put(None)]


class VerlsAsyncio:
    """In the place of ``asyncio`` in the module of verl's client, which sleeps only while it ``is_slow``."""

    is_slow = True

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s if self.is_slow else 0.0)


def verls_client(*made_of: Any) -> tuple[Any, VerlsAsyncio]:
    """verl's client, which tells our router what ours tells it, and what decides whether it sleeps."""
    from verl.workers.rollout import llm_server

    from seamless_verl.verl_adapter.rollout.llm_client import VersionedLLMClient

    class VerlsClient(VersionedLLMClient):
        generate = llm_server.FullyAsyncLLMServerClient.generate

    llm_server.asyncio = sleeper = VerlsAsyncio()
    return VerlsClient(*made_of), sleeper


class Replicas:
    """Some of them, their router, and both ways to give them weights."""

    def __init__(
        self, model: Path, folder: Path, count: int = 2, router: str = "least_requests", with_verls_client: bool = False
    ) -> None:
        from omegaconf import OmegaConf
        from verl.checkpoint_engine import CheckpointEngineManager
        from verl.workers.rollout.router import get_router_handle

        from benchmarks.placement import composed
        from seamless_verl.config import RouterConfig, WeightsConfig
        from seamless_verl.verl_adapter.rollout.holding_balancer import balancer_class
        from seamless_verl.verl_adapter.rollout.llm_client import VersionedLLMClient
        from seamless_verl.verl_adapter.vllm.pulling_server import PullingReplica
        from seamless_verl.verl_adapter.weights.rolling_weights import RollingWeights
        from seamless_verl.verl_adapter.weights.weight_store import SHARED

        engine = "actor_rollout_ref.rollout.checkpoint_engine"
        overrides = (
            "+recipe=arithmetic",
            f"actor_rollout_ref.model.path={model}",
            f"actor_rollout_ref.rollout.max_num_seqs={_SEATS}",
            f"actor_rollout_ref.rollout.max_model_len={PROMPT + _LONGEST + 8}",
            f"{engine}.backend={SHARED}",
            f"{engine}.custom_backend_module=seamless_verl.verl_adapter.weights.shared_engine",
            f"+{engine}.engine_kwargs.{SHARED}={{folder: {folder}, dtype: float32}}",
        )
        config = composed(overrides, platform="cpu")
        rollout = config.actor_rollout_ref.rollout
        self.replicas = [
            PullingReplica(rank, config=rollout, model_config=config.actor_rollout_ref.model, gpus_per_node=1)
            for rank in range(count)
        ]
        for replica in self.replicas:
            asyncio.run(replica.init_standalone())
        servers = {replica.server_address: replica.server_handle for replica in self.replicas}
        settings = RouterConfig(policy=router)
        self.router = get_router_handle(servers, load_balancer_cls=balancer_class(settings, _SEATS))
        self.client = VersionedLLMClient(config, self.router)
        self._sleeper = VerlsAsyncio()  # of nobody
        if with_verls_client:
            self.client, self._sleeper = verls_client(config, self.router)
        trainer = Trainer(ray.remote(num_cpus=0)(Publisher).remote(str(model), str(folder)))
        plain = SimpleNamespace(**OmegaConf.to_container(rollout.checkpoint_engine))
        self._verls = CheckpointEngineManager(plain, trainer, self.replicas)
        edges = {"router": self.router, "record": lambda event: None, "clock": time.monotonic, "say": print}
        rolling = functools.partial(RollingWeights, trainer, self.replicas, folder=folder, **edges)
        ways = {"refill": ("refill", 1), "keep": ("keep", 1), _AT_ONCE: ("refill", count)}
        self._ours = {
            way: rolling(config=WeightsConfig(sync="rolling", cache=cache, at_once=at_once))
            for way, (cache, at_once) in ways.items()
        }
        self._version = 0

    def update(self, way: str) -> float:
        """A new version for both, or ``nothing``; seconds that the trainer waits."""
        if way == "nothing":
            return 0.0
        self._version += 1
        self._sleeper.is_slow = way == _SLEPT
        began = time.perf_counter()
        manager = self._ours.get(way, self._verls)
        manager.update_weights(self._version)
        return time.perf_counter() - began

    def have_it(self) -> bool:
        calls = [replica.server_handle.__ray_call__.remote(_version) for replica in self.replicas]
        return set(ray.get(calls)) == {self._version}

    def tokens(self, since: float) -> list[list[Frame]]:
        """Frames of each replica's engine."""
        return ray.get([replica.server_handle.__ray_call__.remote(_frames, since) for replica in self.replicas])

    def close(self) -> None:
        for manager in self._ours.values():
            manager.close()


def _version(server: Any) -> int:
    return int(server.global_steps)


def count_frames(server: Any) -> None:
    """Runs in a server's process: note when tokens come out of its engine."""
    server.frames = []
    process = server.engine.output_processor.process_outputs

    def counted(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        given = [each for each in outputs if each.new_token_ids]
        if given:
            requests = tuple(each.request_id[:_NAME] for each in given)
            server.frames.append(Frame(time.time(), sum(len(each.new_token_ids) for each in given), requests))
        return process(outputs, *args, **kwargs)

    server.engine.output_processor.process_outputs = counted


def _frames(server: Any, since: float) -> list[Frame]:
    return [frame for frame in server.frames if frame.at >= since]


@contextmanager
def load(replicas: Replicas, running: int, siblings: int = 1) -> Iterator[None]:
    """Within, so many requests are out, in a thread of their own; so many have the same prompt."""
    from seamless_verl.verl_adapter.rollout.request_log import request_log

    rng, over = random.Random(running), threading.Event()
    drawn = ((uuid.uuid4().hex, [rng.randrange(5, VOCABULARY) for _ in range(PROMPT)]) for _ in itertools.count())
    members = ((group, prompt, member) for group, prompt in drawn for member in range(siblings))
    request_log.over = replicas.client.conversations_over

    async def agent() -> None:
        while not over.is_set():
            length = rng.randrange(_SHORTEST, _LONGEST)
            params = {"max_tokens": length, "ignore_eos": True, "logprobs": True}
            group, prompt, member = next(members)
            with request_log.session(group, member):
                await replicas.client.generate(uuid.uuid4().hex, prompt_ids=prompt, sampling_params=params)

    async def all_of_them() -> None:
        await asyncio.gather(*(agent() for _ in range(running)))

    thread = threading.Thread(target=asyncio.run, args=(all_of_them(),))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measured(replicas: Replicas, way: str) -> dict[str, float]:
    """One update."""
    began = time.time()
    time.sleep(_BEFORE_S)
    at = time.time()
    wait_s = replicas.update(way)
    while not replicas.have_it():
        time.sleep(_LOOK_S)
    all_new_s = time.time() - at
    time.sleep(max(0.0, at + _AFTER_S - time.time()))
    frames = replicas.tokens(began)
    end = at + _AFTER_S
    merged = sorted(frame for each in frames for frame in each)
    pace = sum(frame.tokens for frame in merged if frame.at < at) / _BEFORE_S
    made = sum(frame.tokens for frame in merged if at <= frame.at < end)
    return {
        "wait_s": wait_s,
        "all_new_s": all_new_s,
        "lost": pace * _AFTER_S - made,
        "silence_of_request_s": _silence_of_request(merged, at),
        "silence_s": max(_silence(each, at, end) for each in frames),
        "silence_of_both_s": _silence(merged, at, end),
    }


def _silence(frames: list[Frame], start: float, end: float) -> float:
    times = [start, *(frame.at for frame in frames if start <= frame.at < end), end]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def _silence_of_request(frames: list[Frame], at: float) -> float:
    """The longest time that a request waited for its next token from ``at`` on: the median of those with tokens before
    and after it."""
    times: dict[str, list[float]] = {}
    for frame in frames:
        for request in frame.requests:
            times.setdefault(request, []).append(frame.at)
    waits = [
        max(later - earlier for earlier, later in itertools.pairwise(seen) if later >= at)
        for seen in times.values()
        if seen[0] < at <= seen[-1]
    ]
    return statistics.median(waits)


def judged(running: int, found: dict[str, list[dict[str, float]]]) -> list[Record]:
    def median(way: str, figure: str) -> float:
        return statistics.median(one[figure] for one in found[way])

    def compared(name: str, way: str, figure: str, unit: str, most: float | None) -> Record:
        value, theirs = median(way, figure), median("together", figure)
        if most is None or way in ("together", _SLEPT, _AT_ONCE):
            return Record(name=name, value=value, unit=unit)
        return Record(name=name, value=value, unit=unit, bar=f"<= {most:g} of verl's", holds=value <= most * theirs)

    quiet, beside = "silence_of_request_s", f"{running} requests"
    records = [
        Record(name=f"{beside}, no update: tokens lost", value=median("nothing", "lost"), unit=""),
        Record(name="  a request without a token", value=median("nothing", quiet), unit="s"),
    ]
    theirs = {"together": "verl's stop", _SLEPT: "verl's stop, its own client"}
    for way, name in (theirs | {way: f"rolling, {way}" for way in ("refill", "keep", _AT_ONCE)}).items():
        if way not in found:
            continue
        most = 0.25 if way == "keep" else 0.5 if running == max(_RUNNING) else 1.0
        records += [
            compared(f"{beside}, {name}: the trainer waits", way, "wait_s", "s", 0.25),
            compared("  until all are new", way, "all_new_s", "s", None),
            compared("  tokens lost", way, "lost", "", most),
            compared("  a request without a token", way, quiet, "s", most),
            compared("  longest silence of one replica", way, "silence_s", "s", None),
            compared("  longest silence of all", way, "silence_of_both_s", "s", None),
        ]
    return records


def small_model(folder: Path, **shape: int) -> Path:
    """A random Qwen3 of a few megabytes."""
    from benchmarks.training_workers import model_folder
    from seamless_verl.recipes.arithmetic import assets

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4} | shape
    model_folder(str(folder), **sizes, num_key_value_heads=2, head_dim=32, vocab_size=VOCABULARY)
    for file in (assets.build() / "model").glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--updates", type=int, default=20, help="of each way and number of requests")
    parser.add_argument("--running", type=int, nargs="+", default=_RUNNING, metavar="N", help="requests under way")
    parser.add_argument("--siblings", type=int, default=1, metavar="N", help="requests with the same prompt")
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="how many there are")
    parser.add_argument("--router", default="least_requests", metavar="POLICY", help="seamless.router.policy")
    parser.add_argument("--verls-client", action="store_true", help="requests go through verl's own client")
    parser.add_argument("--all-at-once", action="store_true", help="one more way: all replicas pull at the same time")


@contextmanager
def started(count: int = 2, router: str = "least_requests", with_verls_client: bool = False) -> Iterator[Replicas]:
    """Replicas with weights, whose engines note what they tell; within, Ray runs."""
    from seamless_verl.run.environment import CPU_ENVIRONMENT

    of_workers = {key: value for key, value in CPU_ENVIRONMENT.items() if not key.startswith("RAY_")}
    os.environ.update({key: value for key, value in of_workers.items() if value is not None})
    import verl  # noqa: F401  (its plug-ins: the CPU platform, vLLM's CPU build)
    from verl.workers.rollout.llm_server import LLMServerClient

    # By which the engine's tokens are those of a request that was sent again, too.
    LLMServerClient._vllm_request_id = lambda _, request_id: f"{request_id}-{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        actors = {"num_cpus": 4 + 2 * count, "num_gpus": count, "runtime_env": {"env_vars": of_workers}}
        ray.init("local", include_dashboard=False, log_to_driver=False, **actors)
        try:
            model, folder = small_model(Path(scratch)), Path(shared) / "weights"
            replicas = Replicas(model, folder, count, router, with_verls_client)
            for way in ("refill", "keep"):
                replicas.update(way)
            for replica in replicas.replicas:
                ray.get(replica.server_handle.__ray_call__.remote(count_frames))
            yield replicas
            replicas.close()
        finally:
            ray.shutdown()


def main() -> int:
    options = arguments(__doc__ or "", _options)
    found: dict[int, dict[str, list[dict[str, float]]]] = {}
    ways = (*WAYS, *([_SLEPT] if options.verls_client else []), *([_AT_ONCE] if options.all_at_once else []))
    with started(options.replicas, options.router, options.verls_client) as replicas:
        for running in options.running:
            taken = found[running] = {way: [] for way in ways}
            with load(replicas, running, options.siblings):
                time.sleep(_BEFORE_S)
                for turn in range(2 if options.quick else options.updates):
                    for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                        taken[way].append(measured(replicas, way))
            print(f"{running} requests: {len(taken['keep'])} updates of each way", flush=True)
    return report([record for running, taken in found.items() for record in judged(running, taken)], options.json)


if __name__ == "__main__":
    sys.exit(main())
