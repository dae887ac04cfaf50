"""A replica as a run has it, in a Ray cluster of its own: verl's server actor, vLLM's CPU build, our router and client.

What stands beside the server is not a trainer: an actor that hands over the weights of a folder, whatever the version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import ray
from hydra import compose, initialize_config_dir
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.router import get_router_handle

from seamless_verl.config import RouterConfig
from seamless_verl.run.compose import our_config_dir, verl_config_dir
from seamless_verl.run.environment import CPU_ENVIRONMENT
from seamless_verl.scheduling.slices import SliceId
from seamless_verl.verl_adapter.rollout.holding_balancer import balancer_class
from seamless_verl.verl_adapter.rollout.llm_client import VersionedLLMClient
from seamless_verl.verl_adapter.slices.replica_slices import ReplicaSlices
from seamless_verl.verl_adapter.vllm.vllm_server import InterruptibleReplica
from tests.as_on_gpus import GPU_RUNNER, SCHEDULED_AHEAD
from tests.fakes import small_tokenizer

SLICE = SliceId("trainer/0")


class Weights:
    """Stands beside the server, as the trainer's worker does, and sends what is in a folder."""

    def __init__(self, config: Any, folder: str) -> None:
        import os

        from verl.workers.rollout.vllm_rollout import ServerAdapter

        os.environ.update(RANK="0", RAY_LOCAL_WORLD_SIZE="1")
        self._adapter = ServerAdapter(config, None, None, replica_rank=0)
        self._folder = folder

    async def publish(self, version: int) -> None:
        from safetensors.torch import load_file

        weights = load_file(f"{self._folder}/model.safetensors")
        await self._adapter.update_weights(iter(weights.items()), global_steps=version)


class CountingClient(VersionedLLMClient):
    """A client that counts the attempts it has sent.

    Attributes:
        sent: attempts that have been given a seat, and so are on their way to the server.
    """

    sent = 0

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        seat = await super()._acquire_server(request_id, **extra)
        self.sent += 1
        return seat


class LiveReplica:
    """One hybrid replica, its router and a client of it.

    Attributes:
        slices: what lends it, with the replica as its only slice, ``SLICE``.
        url: of the server's HTTP side.
    """

    def __init__(self, model: Path, *overrides: str, replica_class: type[Any] = InterruptibleReplica) -> None:
        config = _config(model, overrides)
        rollout = config.actor_rollout_ref.rollout
        self._replica = replica_class(
            replica_rank=0, config=rollout, model_config=config.actor_rollout_ref.model, gpus_per_node=1
        )
        self._weights = ray.remote(num_gpus=1)(Weights).remote(self._replica.config, str(model))
        self._replica.rollout_mode = RolloutMode.HYBRID
        self._replica.workers = [self._weights]
        asyncio.run(self._replica.launch_servers())
        self.server = self._replica.server_handle
        self.router = get_router_handle(
            {self._replica.server_address: self.server},
            load_balancer_cls=balancer_class(RouterConfig(), rollout.max_num_seqs),
        )
        self.client = CountingClient(config, self.router)
        self.url = f"http://{self._replica.server_address}"
        standing = SimpleNamespace(get_replicas=list, global_load_balancer=self.router)
        hybrid = SimpleNamespace(get_replicas=lambda: [self._replica])
        own = SimpleNamespace(update_weights=self._load)
        self.slices = ReplicaSlices(
            hybrid=[SLICE],
            standing=[],
            hybrid_servers=hybrid,
            standing_servers=standing,
            hybrid_weights=own,
            standing_weights=SimpleNamespace(replicas=[]),
            published_weights=nullcontext,
        )
        ray.get(self.server.set_global_steps.remote(0))
        ray.get(self.router.get_total_inflight.remote())  # it is there

    def _load(self, version: int) -> None:
        """As verl's trainer fills a replica on its own GPUs."""
        ray.get(self.server.wake_up.remote(["weights"]))
        ray.get(self._weights.publish.remote(version))
        ray.get(self.server.wake_up.remote(["kv_cache"]))

    def interrupt(self) -> None:
        """New weights are coming: the first half of verl's ``CheckpointEngineManager.update_weights``."""
        asyncio.run(self._replica.abort_all_requests())

    def update(self, version: int) -> None:
        """The second half."""
        asyncio.run(self._replica.release_kv_cache())
        ray.get(self._weights.publish.remote(version))
        asyncio.run(self._replica.resume_kv_cache())
        asyncio.run(self._replica.resume_generation())

    def works(self) -> tuple[bool, bool]:
        """As its engine's configuration says: it schedules ahead; its model runner is that of GPUs."""
        found: tuple[bool, bool] = ray.get(self.server.__ray_call__.remote(_works))
        return found

    def num_running(self) -> int:
        """Requests that the engine decodes, as its scheduler says."""
        return self._metric("num_requests_running")

    def num_generated(self) -> int:
        """Tokens that the engine has made since it began."""
        return self._metric("generation_tokens_total")

    def _metric(self, name: str) -> int:
        metrics = httpx.get(f"{self.url}/metrics", trust_env=False).text
        (line,) = [line for line in metrics.splitlines() if line.startswith(f"vllm:{name}")]
        return int(float(line.rsplit(" ", 1)[1]))


def _works(server: Any) -> tuple[bool, bool]:
    config = server.engine.vllm_config
    return bool(config.scheduler_config.async_scheduling), bool(config.use_v2_model_runner)


def tiny_model(folder: Path) -> Path:
    """An untrained Qwen3 with the vocabulary of `small_tokenizer`, in a second."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    make: Any = Qwen3Config
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, head_dim=32)
    config = make(
        **sizes,
        vocab_size=len(tokenizer),
        num_key_value_heads=1,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    model: Any = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return folder


def _config(model: Path, overrides: tuple[str, ...]) -> Any:
    with initialize_config_dir(str(verl_config_dir()), version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                f"hydra.searchpath=[file://{our_config_dir()}]",
                "+seamless=default",
                "+platform=cpu",
                "+recipe=arithmetic",
                "seamless.run_dir=null",
                "seamless.scheduler.policy=greedy",  # the client waits while nobody serves
                f"actor_rollout_ref.model.path={model}",
                *overrides,
            ],
        )


@contextmanager
def live_replica(
    model: Path,
    *overrides: str,
    ahead: bool = False,
    gpu_runner: bool = False,
    replica_class: type[Any] = InterruptibleReplica,
) -> Iterator[LiveReplica]:
    """One hybrid replica on a Ray of its own.

    Args:
        overrides: of the composed configuration.
        ahead: vLLM schedules as on GPUs (`tests.scheduled_ahead`), not as its CPU build does.
        gpu_runner: vLLM's model runner is that of GPUs (`tests/gpu_runner`); a step takes 0.1 s.
    """
    of_workers = {key: value for key, value in CPU_ENVIRONMENT.items() if not key.startswith("RAY_")}
    of_workers |= SCHEDULED_AHEAD if ahead else {}
    of_workers |= GPU_RUNNER if gpu_runner else {}
    environment = {"env_vars": of_workers}
    ray.init("local", num_cpus=4, num_gpus=1, include_dashboard=False, runtime_env=environment, log_to_driver=False)
    try:
        started = LiveReplica(model, *overrides, replica_class=replica_class)
        assert started.works() == (ahead, gpu_runner)
        yield started
    finally:
        ray.shutdown()
