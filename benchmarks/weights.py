"""New weights under load: replicas that pull in turn, beside verl's update that stops all of them.

Two real replicas (verl's server and worker, vLLM's engine) with so many requests between them; a new one begins when
one ends. Both ways get the same weights from the same shared memory and take turns on the same replicas; what stands
for the trainer holds weights on the host. Clients send an interrupted request again at once (verl's own client sleeps
for a second). Between them come turns without an update, which show what the pace does by itself.

* wait      of whoever publishes
* lost      tokens that were not generated in the seconds around an update, against the pace before it
* silence   the longest time without a token of one replica, and of both
"""

from __future__ import annotations

import argparse
import asyncio
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
from typing import Any

import ray

from benchmarks.records import Record, arguments, report

_RUNNING = (8, 32, 64)
PROMPT, _SHORTEST, _LONGEST = 128, 150, 400
_SEATS, VOCABULARY = 64, 512
_BEFORE_S, _AFTER_S = 2.0, 2.5  # in which the pace is taken, and in which what is missing is counted
WAYS = ("nothing", "together", "refill", "keep")


class Publisher:
    """Stands for the trainer's first rank: weights of any version, an optimizer's step apart."""

    def __init__(self, model: str, folder: str) -> None:
        from safetensors.torch import load_file

        from seamless_verl.verl_adapter.weights.shared_engine import SharedMemoryEngine

        self._weights = load_file(f"{model}/model.safetensors")
        self._engine = SharedMemoryEngine(1 << 20, is_master=True, folder=folder)

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


class Replicas:
    """Two of them, their router, and both ways to give them weights."""

    def __init__(self, model: Path, folder: Path) -> None:
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
            f"+{engine}.engine_kwargs.{SHARED}={{folder: {folder}}}",
        )
        config = composed(overrides, platform="cpu")
        rollout = config.actor_rollout_ref.rollout
        self.replicas = [
            PullingReplica(rank, config=rollout, model_config=config.actor_rollout_ref.model, gpus_per_node=1)
            for rank in range(2)
        ]
        for replica in self.replicas:
            asyncio.run(replica.init_standalone())
        servers = {replica.server_address: replica.server_handle for replica in self.replicas}
        self.router = get_router_handle(servers, load_balancer_cls=balancer_class(RouterConfig(), _SEATS))
        self.client = VersionedLLMClient(config, self.router)
        trainer = Trainer(ray.remote(num_cpus=0)(Publisher).remote(str(model), str(folder)))
        plain = SimpleNamespace(**OmegaConf.to_container(rollout.checkpoint_engine))
        self._verls = CheckpointEngineManager(plain, trainer, self.replicas)
        self._ours = {
            cache: RollingWeights(
                trainer,
                self.replicas,
                folder=folder,
                config=WeightsConfig(sync="rolling", cache=cache),
                router=self.router,
                record=lambda event: None,
                clock=time.monotonic,
            )
            for cache in ("refill", "keep")
        }
        self._version = 0

    def update(self, way: str) -> float:
        """A new version for both, or ``nothing``; seconds that the trainer waits."""
        if way == "nothing":
            return 0.0
        self._version += 1
        began = time.perf_counter()
        manager = self._verls if way == "together" else self._ours[way]
        manager.update_weights(self._version)
        return time.perf_counter() - began

    def have_it(self) -> bool:
        calls = [replica.server_handle.__ray_call__.remote(_version) for replica in self.replicas]
        return set(ray.get(calls)) == {self._version}

    def tokens(self, since: float) -> list[list[tuple[float, int]]]:
        """Of each replica: when its engine's frames came, and how many tokens were in them."""
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
        server.frames.append((time.time(), sum(len(each.new_token_ids) for each in outputs)))
        return process(outputs, *args, **kwargs)

    server.engine.output_processor.process_outputs = counted


def _frames(server: Any, since: float) -> list[tuple[float, int]]:
    return [frame for frame in server.frames if frame[0] >= since and frame[1]]


@contextmanager
def load(replicas: Replicas, running: int) -> Iterator[None]:
    """Within, so many requests are out, in a thread of their own."""
    rng, over = random.Random(running), threading.Event()

    async def agent() -> None:
        while not over.is_set():
            prompt = [rng.randrange(5, VOCABULARY) for _ in range(PROMPT)]
            length = rng.randrange(_SHORTEST, _LONGEST)
            params = {"max_tokens": length, "ignore_eos": True, "logprobs": True}
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
        time.sleep(0.01)
    all_new_s = time.time() - at
    time.sleep(max(0.0, at + _AFTER_S - time.time()))
    frames = replicas.tokens(began)
    end = at + _AFTER_S
    pace = sum(count for each in frames for when, count in each if when < at) / _BEFORE_S
    made = sum(count for each in frames for when, count in each if at <= when < end)
    return {
        "wait_s": wait_s,
        "all_new_s": all_new_s,
        "lost": pace * _AFTER_S - made,
        "silence_s": max(_silence(each, at, end) for each in frames),
        "silence_of_both_s": _silence(sorted(frame for each in frames for frame in each), at, end),
    }


def _silence(frames: list[tuple[float, int]], start: float, end: float) -> float:
    times = [start, *(when for when, _ in frames if start <= when < end), end]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def judged(running: int, found: dict[str, list[dict[str, float]]]) -> list[Record]:
    def median(way: str, figure: str) -> float:
        return statistics.median(one[figure] for one in found[way])

    records = []
    lost = median("nothing", "lost")
    records.append(Record(name=f"{running} requests, no update: tokens lost", value=lost, unit=""))
    for way in WAYS[1:]:
        name = {"together": "verl's stop", "refill": "rolling, refill", "keep": "rolling, keep"}[way]
        wait, verls = median(way, "wait_s"), median("together", "wait_s")
        ours = way != "together"
        records.append(
            Record(
                name=f"{running} requests, {name}: the trainer waits",
                value=wait,
                unit="s",
                bar="<= 1/4 of verl's" if ours else "",
                holds=wait <= verls / 4 if ours else None,
            )
        )
        records.append(Record(name="  until both are new", value=median(way, "all_new_s"), unit="s"))
        lost, theirs = median(way, "lost"), median("together", "lost")
        most = {"keep": 0.25, "refill": 0.5 if running == max(_RUNNING) else 1.0}.get(way)
        records.append(
            Record(
                name="  tokens lost",
                value=lost,
                unit="",
                bar=f"<= {most:g} of verl's" if most else "",
                holds=lost <= most * theirs if most else None,
            )
        )
        records.append(Record(name="  longest silence of one replica", value=median(way, "silence_s"), unit="s"))
        both = median(way, "silence_of_both_s")
        records.append(Record(name="  longest silence of both", value=both, unit="s"))
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


def main() -> int:
    options = arguments(__doc__ or "", _options)
    from seamless_verl.run.environment import CPU_ENVIRONMENT

    of_workers = {key: value for key, value in CPU_ENVIRONMENT.items() if not key.startswith("RAY_")}
    os.environ.update({key: value for key, value in of_workers.items() if value is not None})
    import verl  # noqa: F401  (its plug-ins: the CPU platform, vLLM's CPU build)

    found: dict[int, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        environment = {"env_vars": of_workers}
        ray.init("local", num_cpus=8, num_gpus=2, include_dashboard=False, runtime_env=environment, log_to_driver=False)
        try:
            replicas = Replicas(small_model(Path(scratch)), Path(shared) / "weights")
            for way in ("refill", "keep"):
                replicas.update(way)
            for replica in replicas.replicas:
                ray.get(replica.server_handle.__ray_call__.remote(count_frames))
            for running in options.running:
                taken = found[running] = {way: [] for way in WAYS}
                with load(replicas, running):
                    time.sleep(_BEFORE_S)
                    for turn in range(2 if options.quick else options.updates):
                        for way in WAYS[turn % len(WAYS) :] + WAYS[: turn % len(WAYS)]:
                            taken[way].append(measured(replicas, way))
                print(f"{running} requests: {len(taken['keep'])} updates of each way", flush=True)
            replicas.close()
        finally:
            ray.shutdown()
    return report([record for running, taken in found.items() for record in judged(running, taken)], options.json)


if __name__ == "__main__":
    sys.exit(main())
