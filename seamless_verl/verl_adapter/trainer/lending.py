"""The trainer's side of the scheduler: when it wants its GPUs, when it is done with them, and how it waits.

    step begins ─► admit prompts ─► acquire gang ──(lent slices generate)──► granted ─► mini-batch … ─► publish, release
                                         ▲                                       │
                                         └── release, acquire ◄── starves for the next mini-batch

Nothing here runs unless ``seamless.scheduler.policy`` is set; then verl's own switch is off.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import ray
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.utils.debug import marked_timer

from seamless_verl.errors import SeamlessError
from seamless_verl.observe.flight import Phase, WeightsChecked
from seamless_verl.observe.scheduler_flight import RecordedScheduler
from seamless_verl.scheduling import events as ev
from seamless_verl.scheduling.declaration import policy_of
from seamless_verl.scheduling.scheduler import Scheduler
from seamless_verl.scheduling.slices import SERVING_SOON, Slice, SliceState, Tag
from seamless_verl.verl_adapter.dataloader.replay import StreamingReplayBuffer, WokenReplayBuffer
from seamless_verl.verl_adapter.slices.replica_slices import ReplicaSlices
from seamless_verl.verl_adapter.slices.resource_pools import TagAwareResourcePoolManager
from seamless_verl.verl_adapter.slices.slice_driver import SliceDriver
from seamless_verl.verl_adapter.trainer.recorded_trainer import RecordedTrainer
from seamless_verl.verl_adapter.weights.weight_checks import weight_checks_of

_LOOK_S = 10.0  # without any news, look again: a killed worker tells nobody
_LOOK_AT_RESTARTS_S = 1.0  # nobody rings when a replica is back, and the gang may wait for it
_WITHOUT_BELL_S = 0.05
_SAVED_FOR_LENDING = -1  # key beside those of verl's own saved weights, which count mini-batches


class GangRefused(SeamlessError):
    """The scheduler says that the trainer can never have its GPUs, or that nobody is left to generate."""


class LendingTrainer(RecordedTrainer):
    """`slices` is set by the subclass before ``__init__``; empty: verl decides everything, as without us."""

    slices: tuple[Slice, ...]

    def __init__(self, config: DictConfig) -> None:
        self.driver: SliceDriver | None = None
        self._pools_known = False
        self._gang = 0
        self._request = ""  # the grant that the trainer holds
        self._asked = 0
        self._within_step = False  # its workers' weights are newer than those published
        self._starved_s = 0.0
        self._starved_groups = 0
        self._workers: Sequence[Any] = ()
        self._scheduler: Scheduler
        self._replicas: ReplicaSlices
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        """Once: the subclass calls it before verl's ``_setup`` does."""
        if self._pools_known:
            return
        self._pools_known = True
        super()._init_resource_pool_mgr()
        kinds = {r.accelerator for r in self.seamless.resources if Tag.TRAIN.value in r.capabilities}
        rollout = self.config.actor_rollout_ref.rollout
        self.resource_pool_manager = TagAwareResourcePoolManager(
            resource_pool_spec=self.resource_pool_manager.resource_pool_spec,
            mapping=self.resource_pool_manager.mapping,
            standing_gpus=(rollout.nnodes or 0) * (rollout.n_gpus_per_node or 0),
            accelerator=next(iter(kinds), None),
        )

    @property
    def outlives_replicas(self) -> bool:
        """A scheduler decides, and goes on without a replica that died."""
        return self.seamless.scheduler.policy is not None and self._enable_hybrid_replicas

    def fit(self, agent_loop_manager: Any) -> None:
        workers = getattr(agent_loop_manager, "agent_loop_workers", [])
        if all(hasattr(worker, "take_request_events") for worker in workers):
            self._workers = workers
        super().fit(agent_loop_manager)

    def _declare_slices(self) -> None:
        """With a policy: its scheduler takes over here, where verl's initialization ends."""
        if not self.outlives_replicas:
            super()._declare_slices()
            return
        policy_name = str(self.seamless.scheduler.policy)
        self.flight.begin(self._run_started(self.flight.recorder.now(), policy_name), [], [])
        batch = self.config.data.train_batch_size
        policy = policy_of(self.seamless.scheduler, batch=batch, mini_batch=self._mini_batch())
        train = [s for s in self.slices if Tag.TRAIN in s.capabilities]
        standing = [s for s in self.slices if Tag.TRAIN not in s.capabilities]
        self._gang = len(train)
        self._replicas = ReplicaSlices(
            [s.id for s in train],
            [s.id for s in standing],
            self.llm_server_manager,
            self.standalone_server_manager,
            self.checkpoint_manager,
            self.standalone_checkpoint_manager,
            self._published_weights,
            weight_checks_of(
                self.config, self.seamless.scheduler.check_weights, self.actor_rollout_wg.workers, self._weights_checked
            ),
        )
        self._scheduler = Scheduler(policy)
        recorded = RecordedScheduler(
            self._scheduler, self.flight.follow, policy=policy_name, addresses=self._replicas.addresses
        )
        self.driver = SliceDriver(
            recorded,
            self._replicas,
            clock=self.flight.recorder.now,
            fetch=self._fetch,
            watch=self._watch,
            warn=self.reporter.say,
        )
        if isinstance(self.replay_buffer, WokenReplayBuffer):
            self.replay_buffer.attend(self._attend)
        self._introduce(train)

    def _introduce(self, train: Sequence[Slice]) -> None:
        """verl's initialization leaves all replicas awake and on the router; those that only train go off it."""
        driver = self.driver
        assert driver is not None
        only_train = [s.id for s in train if not s.lendable]
        if only_train:
            self._replicas.unregister(only_train)
            self._replicas.interrupt(only_train)
        lent = [s.id for s in train if s.lendable]
        self._replicas.publish(self.global_steps)
        self._replicas.check(lent, self.global_steps)
        driver.joined(lent)
        at, version = driver.now(), self.global_steps
        driver.tell(ev.WeightsPublished(at=at, version=version))
        for slice_ in self.slices:
            serves = slice_.id not in only_train
            state = SliceState.ROLLOUT if serves else SliceState.IDLE
            driver.tell(ev.SliceAdded(at=at, slice=slice_, state=state, version=version if serves else None))

    def _weights_checked(self, slice_id: str, version: int, published: str, held: str) -> None:
        at = self.flight.recorder.now()
        self.flight.recorder.record(
            WeightsChecked(at=at, slice=slice_id, version=version, published=published, held=held)
        )

    def _fetch(self) -> list[ev.Event]:
        fetched = ray.get([worker.take_request_events.remote() for worker in self._workers])
        return [event for events in fetched for event in events]

    def _watch(self, addresses: Sequence[str]) -> None:
        for worker in self._workers:
            worker.watch_servers.remote(addresses)

    @contextmanager
    def _published_weights(self) -> Iterator[None]:
        """Between mini-batches, what was saved when the step began stands in for the newer weights.

        A token's version says which weights made it, so half-trained ones must not serve under the published number.
        """
        if not self._within_step:
            yield
            return
        self.actor_rollout_wg.save_model_to_cpu(_SAVED_FOR_LENDING)
        self.actor_rollout_wg.restore_model_from_cpu(0)
        try:
            yield
        finally:
            self.actor_rollout_wg.restore_model_from_cpu(_SAVED_FOR_LENDING)
            self.actor_rollout_wg.clear_cpu_model(_SAVED_FOR_LENDING)

    def _mini_batch(self) -> int:
        return int(self.config.data.train_batch_size // self.parameter_sync_step)

    # ---------------------------------------------------------------- prompts and requests

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        if self.driver is not None:
            groups = tuple(str(uid) for uid in batch["uid"])
            sessions = int(self.config.actor_rollout_ref.rollout.n)
            self.driver.tell(ev.GroupsSubmitted(at=self.driver.now(), groups=groups, sessions=sessions))
        return super()._submit_batch_to_rollout(batch)

    def _tell_news(self) -> int:
        """Requests and groups, as of now; returns how many groups could be taken."""
        assert self.driver is not None
        self.driver.tell_requests()
        buffer = self.replay_buffer
        if isinstance(buffer, WokenReplayBuffer):
            ready, on_their_way = buffer.take_stock(self.global_steps)
        else:  # a sampler of the user's own
            ready = buffer.get_sampleable_count(self.global_steps, "train")
            on_their_way = len(buffer.pending_keys["train"]) + len(buffer.running_keys["train"])
        self.driver.tell(ev.GroupsReady(at=self.driver.now(), ready=ready, in_flight=on_their_way))
        return ready

    def _attend(self) -> None:
        """What happens to slices while the trainer waits for rows: deaths, returns, deadlines."""
        assert self.driver is not None
        self.driver.tell_requests()
        self.driver.tell_restarts()
        self.driver.tick()

    # ---------------------------------------------------------------- the gang

    def on_step_begin(self) -> None:
        if self.driver is None:
            super().on_step_begin()
            return
        self.flight.step_began(self.global_steps)
        self._step_sample_wait_seconds = self._starved_s = 0.0
        self._step_wait_samples = self._starved_groups = 0

    def _wait_for_sampleable_and_switch(self) -> dict[str, Any]:
        if self.driver is None:
            return super()._wait_for_sampleable_and_switch()
        with marked_timer("switch_wait", self.timing_raw, color="yellow"):
            self._acquire(Tag.TRAIN, self._gang, minimum=self._mini_batch(), batch=self.config.data.train_batch_size)
        return {}

    def on_sample_begin(self) -> None:
        if self.driver is not None:
            self._before_sample()
        super().on_sample_begin()  # from here on the trainer waits with its gang

    def _before_sample(self) -> None:
        if self.local_trigger_step == 0:
            correction = self.config.algorithm.get("rollout_correction") or {}
            if self.parameter_sync_step > 1 and correction.get("bypass_mode", False):
                self.actor_rollout_wg.save_model_to_cpu(0)  # verl does so itself unless it bypasses old log-probs
            return
        self._within_step = True
        if self._tell_news() < self._mini_batch():  # the gang may be of use elsewhere meanwhile
            left = self.config.data.train_batch_size - self.local_trigger_step * self._mini_batch()
            self._release()
            self._acquire(Tag.TRAIN, self._gang, minimum=self._mini_batch(), batch=left)

    def on_step_end(self) -> None:
        if self.driver is None:
            super().on_step_end()
            return
        if self.prev_step_profile:
            self._stop_rollout_profiling()
        self._tell_news()  # without replicas that are back: the weights to be had here are not the published ones
        at = self.driver.now()
        if isinstance(self.replay_buffer, StreamingReplayBuffer):
            awaited = frozenset(self.replay_buffer.protocol.awaited())
            self.driver.tell(ev.BatchOpened(at=at, awaited=awaited))
        ended = ev.StepEnded(
            at=at,
            step=self.global_steps,
            waited_s=self._step_sample_wait_seconds,
            waited_groups=self._step_wait_samples,
            starved_s=self._starved_s,
            starved_groups=self._starved_groups,
            last=self.global_steps >= self.total_training_steps,
        )
        self._within_step = False
        self._replicas.publish(self.global_steps)
        published = ev.WeightsPublished(at=at, version=self.global_steps)
        request, self._request = self._request, ""
        with self.flight.phase(Phase.SYNC_WEIGHTS), marked_timer("update_weights", self.timing_raw, color="red"):
            self.driver.tell(ended, published, ev.Released(at=at, request=request))
        self._pending_sync_metrics = dict(self._replicas.sync_metrics)
        self.flight.step_ended()

    def _acquire(self, tag: Tag, count: int, *, minimum: int = 0, batch: int = 0) -> None:
        """Ask for slices and wait for them; they may generate until the scheduler takes them back.

        Raises:
            GangRefused: they can never be had.
        """
        driver = self.driver
        assert driver is not None
        self._asked += 1
        request = f"step-{self.global_steps}/{self._asked}"
        driver.tell_restarts()
        missing = minimum - self._tell_news() if tag is Tag.TRAIN else 0
        asked = ev.AcquireRequested(
            at=driver.now(), request=request, tag=tag, count=count, minimum=minimum, batch=batch
        )
        driver.tell(asked)
        if missing > 0 and not driver.lending:
            self._starved_groups += missing
        with self._waiting_for_batch() if tag is Tag.TRAIN else nullcontext():
            while request not in driver.granted:
                if request in driver.refused:
                    raise GangRefused(f"{request}: {driver.refused[request]}")
                look_s = _LOOK_AT_RESTARTS_S if driver.restarting else _LOOK_S
                until = min(driver.timer if driver.timer is not None else math.inf, driver.now() + look_s)
                began, lending = driver.now(), driver.lending
                self._wait(max(until - began, 0.001))
                self._starved_s += 0.0 if lending or missing <= 0 else driver.now() - began
                driver.tell_restarts()
                self.flight.progress(self._tell_news(), minimum)
                driver.tick()
        del driver.granted[request]
        self._request = request

    @contextmanager
    def _waiting_for_batch(self) -> Iterator[None]:
        buffer = self.replay_buffer
        streams = isinstance(buffer, StreamingReplayBuffer)
        patience = buffer.stragglers.waiting(self.global_steps) if streams else nullcontext()
        with self.flight.phase(Phase.WAIT_FOR_BATCH), patience:
            yield

    def _wait(self, timeout_s: float) -> None:
        if isinstance(self.replay_buffer, WokenReplayBuffer):
            self.replay_buffer.wait_for_news(timeout_s)
        else:  # a sampler of the user's own, without a bell
            time.sleep(min(timeout_s, _WITHOUT_BELL_S))

    def _release(self) -> None:
        assert self.driver is not None
        request, self._request = self._request, ""
        self.driver.tell(ev.Released(at=self.driver.now(), request=request))

    # ---------------------------------------------------------------- validation

    def on_validate_begin(self) -> None:
        if self.driver is None:
            super().on_validate_begin()
            return
        cluster = self._scheduler.cluster
        while True:
            serving = sum(status.holder is None for status in cluster if status.state in SERVING_SOON)
            wanted = max(1, serving + len(cluster.idle(Tag.ROLLOUT)))  # none: one is being restarted, or it is refused
            try:
                self._acquire(Tag.ROLLOUT, wanted)
                return
            except GangRefused:  # one died on the way
                if wanted == 1:
                    raise

    def on_validate_end(self) -> None:
        super().on_validate_end()
        if self.driver is not None:
            self._release()
