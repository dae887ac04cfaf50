"""One life of a run whose two replicas may have unlike weights, without Ray, TransferQueue and engines.

The router, the client, the rollout worker, its manager, the buffer, the thread that has replicas pull and verl's
`_validate` are the real ones. Requests of the replicas run until the test ends them, and a pull lasts until it lets it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seamless_verl.config import SeamlessConfig
from tests.contract.dataloader.test_streaming import Rollout
from tests.contract.rollout.test_router import Awaitable, balancer_of
from tests.contract.weights.test_rolling_weights import done
from tests.fakes import ScriptedTransferQueue

LONG = 400  # tokens of an answer that goes on until the test ends it
SOON_S = 20.0


class Enough(Exception):
    """verl's `_validate` has its rows; what it makes of them is not looked at."""


class Handle:
    """An actor's, for other threads than that of ``loop``: every call is a future."""

    def __init__(self, target: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._target, self._loop = target, loop
        self._actor_id = type(target).__name__.encode()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        async def call(*args: Any, **named: Any) -> Any:
            answer = method(*args, **named)
            return await answer if asyncio.iscoroutine(answer) else answer

        def remote(*args: Any, **named: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(call(*args, **named), self._loop)

        return SimpleNamespace(remote=remote)


class Worker:
    """The handle's view of a rollout worker: it is given prompts, and never rings."""

    def __init__(self, worker: Any) -> None:
        self.generate_sequences = worker.generate_sequences


class Replica:
    """A replica and its server.

    Attributes:
        taken: versions that it has loaded, in order.
        asked: set when a pull begins.
        may_load: cleared: a pull waits for it.
        running: requests that wait for the test, by their first prompt token.
        aborted: requests that somebody interrupted.
    """

    def __init__(self, rank: int, loop: asyncio.AbstractEventLoop) -> None:
        self.replica_rank, self.server_address = rank, f"replica-{rank}"
        self.servers = [Handle(self, loop)]
        self.taken: list[int] = []
        self.asked, self.may_load, self._gate = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.may_load.set()
        self._gate.set()
        self.running: dict[int, asyncio.Event] = {}
        self.aborted: list[str] = []
        self.balancer: Any = None

    async def generate(self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        await self._gate.wait()
        began = self.taken[-1]
        if sampling_params["max_tokens"] == LONG:
            self.running[prompt_ids[0]] = ends = asyncio.Event()
            await ends.wait()
            del self.running[prompt_ids[0]]
        extra = {"global_steps": self.taken[-1], "version_spans": [(began, 1)], "replica": self.server_address}
        return TokenOutput(token_ids=[9], log_probs=[-0.5], stop_reason="completed", extra_fields=extra)

    def abort_request(self, request_id: str, reset_prefix_cache: bool) -> None:
        self.aborted.append(request_id)

    async def requests(self) -> tuple[int, int]:
        return len(self.running), 0

    async def pull(self, folder: str, at_least: int, keep: bool, router: Any, address: str, carrier: Any) -> Any:
        from seamless_verl.verl_adapter.weights import weight_store

        self._gate.clear()
        self.asked.set()
        await self.may_load.wait()
        manifest = weight_store.newest(Path(folder))
        assert manifest is not None
        assert manifest.version >= at_least
        before = self.taken[-1] if self.taken else None
        self.taken.append(manifest.version)
        self.balancer.set_version([address], manifest.version)
        self._gate.set()
        return SimpleNamespace(before=before, version=manifest.version, seconds={}, running=1, waiting=0)


class World:
    """One life of a run, with two replicas.

    Attributes:
        answers: by session, the version and the replica of each answer that a rollout worker was given.
        looked: set whenever the weights' thread has asked the router what requests wait for.
    """

    def __init__(self, patch: pytest.MonkeyPatch, queue: ScriptedTransferQueue, folder: Path, policy: str) -> None:
        from omegaconf import OmegaConf

        from seamless_verl.verl_adapter.dataloader.replaced_workers import ReplacingManager
        from seamless_verl.verl_adapter.dataloader.rollout_workers import NotifyingWorker
        from seamless_verl.verl_adapter.rollout.llm_client import VersionedLLMClient
        from seamless_verl.verl_adapter.weights.rolling_weights import RollingWeights

        self.loop = asyncio.get_running_loop()
        self.seamless = SeamlessConfig.from_mapping({"weights": {"sync": "rolling", "max_lag": 2}})
        self.replicas = [Replica(rank, self.loop) for rank in range(2)]
        self.balancer = balancer_of({each.server_address: Awaitable(each) for each in self.replicas}, policy=policy)
        for each in self.replicas:
            each.balancer = self.balancer
        self.looked = asyncio.Event()
        self.router = Handle(self, self.loop)
        values = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
        rollout = {**values, "calculate_log_probs": True, "n": 2, "val_kwargs": {**values, "n": 2}, "name": "vllm"}
        rollout |= {"agent": {"num_workers": 1, "default_agent_loop": "single_turn_agent"}, "response_length": LONG}
        seamless = {"weights": {"sync": "rolling"}}
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "model": {}}, "seamless": seamless})
        self.config = config
        self.client = VersionedLLMClient(config, Awaitable(self.balancer))
        self.answers: dict[str, list[tuple[int, str]]] = {}
        self.ended = threading.Semaphore(0)  # released by each attempt of a rollout worker that has ended
        worker = object.__new__(NotifyingWorker)
        worker.config, worker.background_tasks, worker._groups = config, set(), None
        worker._news, worker._waiting, worker._loop_watch, worker._late_s = 0, [], SimpleNamespace(), 1e9
        patch.setattr(NotifyingWorker.__mro__[1], "_run_agent_loop", self._attempt)
        self.manager = ReplacingManager(config, SimpleNamespace(_load_balancer=self.router))
        self.manager.agent_loop_workers = [Handle(Worker(worker), self.loop)]
        self.rows = Rollout(queue, eta=2, batch_size=2)
        trainers: Any = SimpleNamespace(update_weights=self._publish)
        replicas: Any = self.replicas
        self._folder = folder
        self.weights = RollingWeights(
            trainers,
            replicas,
            folder=folder,
            config=self.seamless.weights,
            router=self.router,
            record=lambda event: None,
            clock=lambda: 0.0,
            say=print,
        )

    def _publish(self, global_steps: int, mode: str) -> list[Any]:
        import torch

        from seamless_verl.verl_adapter.weights import weight_store

        weight_store.publish(self._folder, global_steps, [("w", torch.tensor([float(global_steps)]))])
        return [done({})]

    def wanted(self) -> int | None:
        """The router's, for the weights' thread."""
        self.looked.set()
        found: int | None = self.balancer.wanted()
        return found

    def oldest_version(self) -> int | None:
        """The router's, for the trainer."""
        found: int | None = self.balancer.oldest_version()
        return found

    async def _attempt(self, sampling_params: Any, *, uid: str, session_id: int, **_: Any) -> None:
        """Of an agent of a rollout worker, in one turn."""
        await self.ask(uid, session_id, tokens=1)
        self.ended.release()

    async def ask(self, group: str, member: int, tokens: int, prompt: int = 1) -> None:
        name = f"{group}/{member}"
        output = await self.client.generate(name, prompt_ids=[prompt], sampling_params={"max_tokens": tokens})
        told = output.extra_fields["version_spans"][0][0], output.extra_fields["max_global_steps"]
        assert told[0] <= told[1]
        self.answers.setdefault(name, []).append(told)

    def train(self, group: str, turns: int, prompt: int) -> asyncio.Task[None]:
        """A session of a training prompt, of so many turns, each of which the test ends."""
        from seamless_verl.verl_adapter.rollout.request_log import request_log

        async def session() -> None:
            with request_log.session(group, 0):
                for _ in range(turns):
                    await self.ask(group, 0, tokens=LONG, prompt=prompt)

        return asyncio.ensure_future(session())

    def step(self) -> None:
        """Of the trainer, up to its publication: prompts in, a batch out."""
        self.rows.buffer.admit(self.rows.step)
        for uid in sorted(self.rows.running)[:2]:
            self.rows.finish(uid)
        self.rows.sample(2)
        self.rows.end_step()

    async def until(self, is_so: Callable[[], bool]) -> None:
        deadline = self.loop.time() + SOON_S
        while not is_so():  # what is looked at are real objects, which tell nobody
            assert self.loop.time() < deadline
            await asyncio.sleep(0.001)

    async def looks_again(self) -> None:
        """Once for what is asked now, and once more: by then pulls that follow from it have begun."""
        for _ in range(2):
            self.looked.clear()
            await asyncio.wait_for(self.looked.wait(), SOON_S)

    def trainer(self, patch: pytest.MonkeyPatch, then: Callable[[Any], None]) -> Any:
        """Ours; within verl's own `fit` it does ``then``."""
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer

        from seamless_verl.verl_adapter.trainer.trainer import SeamlessTrainer

        def fit(trainer: Any, manager: Any) -> None:
            trainer.agent_loop_manager = manager
            then(trainer)

        patch.setattr(PPOTrainer, "fit", fit)
        made = object.__new__(SeamlessTrainer)
        made.config, made.seamless, made.rows, made.global_steps = self.config, self.seamless, self.rows.buffer, 0
        made.reporter = SimpleNamespace(say=print)
        made.standalone_server_manager = SimpleNamespace(global_load_balancer=Handle(self.balancer, self.loop))
        made.llm_server_manager, made.standing = None, SimpleNamespace(tell_cache_sizes=lambda *_: None)
        made.declare_slices, made.flight = lambda workers: None, SimpleNamespace(whole_run=nullcontext)
        made.standalone_checkpoint_manager, made.signals = self.weights, SimpleNamespace(close=lambda: None)
        return made

    def validate(self, trainer: Any) -> None:
        """verl's own, with two prompts, up to its rows."""
        import numpy as np
        import torch

        words = [[{"role": "user", "content": "a task"}], [{"role": "user", "content": "another"}], None]
        columns = {"raw_prompt": np.array(words, dtype=object)[:-1], "index": np.array([0, 1, None], dtype=object)[:-1]}
        trainer.val_dataloader = [{**columns, "dummy_tensor": torch.arange(2)}]
        trainer.global_steps = self.rows.version
        trainer.replay_buffer = SimpleNamespace(sample=lambda **_: self._sample(4))
        with pytest.raises(Enough):
            trainer._validate()

    def _sample(self, attempts: int) -> None:
        for _ in range(attempts):
            assert self.ended.acquire(timeout=SOON_S), "the validation waits for ever"
        raise Enough
