"""Trainer mode ``seamless``: verl's ``separate_async`` with a bound on staleness, an audit and a report per step.

    prompts ─► agent loops ─► TransferQueue ─► StreamingReplayBuffer ─► audit ─► verl's PPO steps ─► weights ─► replicas

Everything between the audit and the weights is verl's own code. verl calls hooks; each hands on to a part:

    rows        the dataloader: what is admitted, what can be taken       (`dataloader`)
    lending     the trainer's GPUs, lent while it waits; None: verl's own (`lending`)
    flight      the flight recorder                                       (`trainer_flight`)
    meter       audit, staleness and the report of a step                 (`step_report`)
    standing    replicas on GPUs of their own                             (`slices.standing`)
    curriculum  which prompts come; None: verl's own dataloader           (`dataloader.curriculum_dataloader`)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray
import verl.trainer.ppo.v1.trainer_separate_async as separate_async
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.debug import marked_timer
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.utils import update_prometheus_config

from seamless_verl.config import TRAINER_MODE
from seamless_verl.observe.flight import Phase
from seamless_verl.observe.reporter import Reporter
from seamless_verl.observe.time_ledger import SliceSeconds
from seamless_verl.run.check_combinations import has_own_sampler
from seamless_verl.scheduling.slices import Tag
from seamless_verl.verl_adapter.dataloader.curriculum_dataloader import CurriculumLoader, curriculum_of
from seamless_verl.verl_adapter.dataloader.row_buffer import follow_versions, resumed_folder, row_buffer
from seamless_verl.verl_adapter.dataloader.streaming_buffer import STATE_FILE, StreamingReplayBuffer
from seamless_verl.verl_adapter.dataloader.woken_buffer import PolledBuffer, RowBuffer, WokenReplayBuffer
from seamless_verl.verl_adapter.rollout.llm_client import VersionedLLMClient
from seamless_verl.verl_adapter.slices.resource_pools import adopt_resources
from seamless_verl.verl_adapter.slices.standing import StandingServers, replica_loader, with_standing
from seamless_verl.verl_adapter.trainer.adoption import adopt_config, refuse_early, refuse_no_batch
from seamless_verl.verl_adapter.trainer.batches import correct, in_training_order, on_real_rows
from seamless_verl.verl_adapter.trainer.lending import Lending, lending_of
from seamless_verl.verl_adapter.trainer.signal_files import SignalFiles
from seamless_verl.verl_adapter.trainer.step_report import AuditFailed, StepMeter, report_validation
from seamless_verl.verl_adapter.trainer.trainer_flight import TrainerFlight, run_started, slices_of_verl
from seamless_verl.verl_adapter.weights.rolling_weights import standing_weights
from seamless_verl.verl_adapter.weights.weight_transfer import GuardedCheckpointManager


@register_trainer(TRAINER_MODE)
class SeamlessTrainer(separate_async.PPOTrainerSeparateAsync):
    """See the module. Under `seamless_verl.main`, bad configuration is refused earlier (`run.preflight`)."""

    def __init__(self, config: DictConfig) -> None:
        self.seamless = adopt_config(config)
        self.slices = adopt_resources(config, self.seamless)  # empty: verl decides everything, as without us
        refuse_early(config, self.seamless)
        RolloutReplicaRegistry.register("vllm", replica_loader(self.seamless.weights.sync))
        self.flight = TrainerFlight(self.seamless.run_dir)
        super().__init__(with_standing(config))
        self.config = config
        buffer: Any = self.replay_buffer
        self.rows: RowBuffer = buffer if isinstance(buffer, WokenReplayBuffer) else PolledBuffer(buffer)
        self.curriculum: CurriculumLoader | None = None
        self.lending: Lending | None = None
        self.standing = StandingServers(config, self.seamless.router, hybrid=self._enable_hybrid_replicas)
        self.reporter = Reporter.for_run(self.seamless.run_dir)
        self.signals = SignalFiles(config, self.seamless.run_dir, lambda line: self.reporter.say(line))
        self.meter = StepMeter()
        self.before_checkpoint: Callable[[], None] = lambda: None
        self.first_step_at: float | None = None
        self._step_began_at = 0.0  # of the recorder's clock
        self.current_mode = separate_async.HybridEngineMode.TRAINER
        # Made in `_setup`, where verl makes its own.
        self.resource_pool_manager: Any = None
        self.standalone_server_manager: Any = None
        self.standalone_checkpoint_manager: Any = None
        self._pending_sync_metrics: dict[str, Any] = {}

    # ---------------------------------------------------------------- construction

    def _build_replay_buffer(self) -> Any:
        if has_own_sampler(self.config):
            sampler = super()._build_replay_buffer()
            return PolledBuffer.checked(sampler) if self.outlives_replicas else sampler
        return row_buffer(
            self.config,
            self.seamless.staleness,
            refill=self._add_prompts_to_generate,
            filter_metric=self._resolve_filter_groups_metric(),
            on_progress=self.flight.progress,
        )

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        refuse_no_batch(self.config, len(self.train_dataset))
        if (settings := self.seamless.curriculum).enabled:
            self.curriculum = curriculum_of(self.config, settings, self.train_dataset, self.rows, self.reporter)
            self.train_dataloader = self.curriculum

    def _init_resource_pool_mgr(self) -> None:
        """Runs once: our `_setup` calls it before verl's does."""
        if self.resource_pool_manager:
            return
        super()._init_resource_pool_mgr()
        kinds = {r.accelerator for r in self.seamless.resources if Tag.TRAIN.value in r.capabilities}
        self.resource_pool_manager = self.standing.pool_manager(self.resource_pool_manager, next(iter(kinds), None))

    def _setup(self) -> None:
        """As `PPOTrainerSeparateAsync._setup`, with the standalone replicas starting beside the trainer's workers, on
        GPUs that are reserved for both beforehand.

        It is written out instead of called because verl 0.9.1 starts them one after the other, and because its last
        line raises TypeError when hybrid replicas are off (``logger.info(…, flush=True)``, line 181).
        """
        pools = self.standing.pools()
        self._init_resource_pool_mgr()
        self.resource_pool_manager.place(self.config, pools, self.reporter.say)
        if self.standing.exist:
            with self.standing.starting(pools) as servers:
                PPOTrainer._setup(self)
            self.standalone_server_manager = servers.result()
        else:
            PPOTrainer._setup(self)
            self.standalone_server_manager = self.standing.router_alone(self.actor_rollout_wg)
        rollout = self.config.actor_rollout_ref.rollout
        if rollout.prometheus.enable:
            addresses = self.llm_server_manager.server_addresses + self.standalone_server_manager.server_addresses
            update_prometheus_config(rollout.prometheus, addresses, rollout.name)
        self.checkpoint_manager = GuardedCheckpointManager.in_place_of(self.checkpoint_manager)
        servers, recorder = self.standalone_server_manager, self.flight.recorder
        self.standalone_checkpoint_manager = standing_weights(
            rollout, self.seamless.weights, self.actor_rollout_wg, servers, recorder, self.reporter.say
        )
        if self._enable_hybrid_replicas:
            self.current_mode = separate_async.HybridEngineMode.ROLLOUT
            self.add_replicas_to_balancer()

    def get_llm_client(self) -> Any:
        return self.standalone_server_manager.get_client(client_cls=VersionedLLMClient)

    # ---------------------------------------------------------------- the run

    def fit(self, agent_loop_manager: Any) -> None:
        workers = getattr(agent_loop_manager, "agent_loop_workers", [])
        self.rows.listen(workers, getattr(agent_loop_manager, "replace", None), self.reporter.say)
        agent_loop_manager.floor_of = getattr(self.rows, "floor_of", None)
        agent_loop_manager.look = self.rows.desk.look
        if (weights := self.seamless.weights).sync == "rolling":
            follow_versions(self.rows, self.standalone_checkpoint_manager, weights.max_lag)
        self.standing.tell_cache_sizes(self.standalone_server_manager, self.llm_server_manager)
        self.declare_slices(workers)
        with self.flight.whole_run(), closing(self.standalone_checkpoint_manager), closing(self.signals):
            super().fit(agent_loop_manager)

    @property
    def outlives_replicas(self) -> bool:
        """Whether the run goes on when a replica dies: a scheduler does without it."""
        return self.seamless.scheduler.policy is not None and self._enable_hybrid_replicas

    def declare_slices(self, workers: Sequence[Any]) -> None:
        """verl's initialization has ended. With a policy its scheduler takes over here; ``workers`` roll out."""
        gate = "verl_enable_switch" if self.hybrid_rollout_config.enable_switch else "disaggregated"
        policy = str(self.seamless.scheduler.policy) if self.outlives_replicas else gate
        now = self.flight.recorder.now()
        started = run_started(self.config, self.seamless, now, policy, self.total_training_steps)
        if self.outlives_replicas:
            self.flight.begin(started, [], [])
            self.current_mode = separate_async.HybridEngineMode.TRAINER  # verl's own switch has nothing to do
            self.lending = lending_of(self, workers)
            self.lending.introduce(self.slices)
            return
        hybrid = self.llm_server_manager.server_addresses if self._enable_hybrid_replicas else ()
        standing = self.standalone_server_manager.server_addresses
        self.flight.begin(started, *slices_of_verl(self.config, now, hybrid, standing, lent=self._rolls_out()))

    # ---------------------------------------------------------------- a step

    def on_step_begin(self) -> None:
        self.first_step_at = self.first_step_at or time.time()
        self._step_began_at = self.flight.recorder.now()
        self.meter.open_window(self._books())
        self.flight.step_began(self.global_steps)
        if self.lending is not None:
            self.lending.begin_step(self.global_steps)
        super().on_step_begin()

    def prepare_step(self) -> dict[str, Any]:
        """Admit what the bound has room for; verl submits one batch per step, whatever is still in flight."""
        if isinstance(self.rows, StreamingReplayBuffer) and self.rows.admits:
            self.rows.admit(self.global_steps)
        else:
            self._add_batch_to_generate()
        if self.lending is None:
            return dict(self._wait_for_sampleable_and_switch())
        with marked_timer("switch_wait", self.timing_raw, color="yellow"):
            self.lending.acquire_gang()
        return {}

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        uids = [str(uid) for uid in batch["uid"]]
        self.rows.reserve(uids, self.global_steps)
        if self.lending is not None:
            self.lending.submitted(uids)
        return int(super()._submit_batch_to_rollout(batch))

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> KVBatchMeta:
        """verl's own calls in verl's order (a contract test compares), recorded, with ours between them."""
        phase = self.flight.phase
        with marked_timer("gen", timing_raw, color="red"):
            batch = self._sample(metrics, sample_batch_size)
        if self.reward_loop_manager.reward_loop_worker_handles is None:
            with marked_timer("reward", timing_raw, color="yellow"), phase(Phase.REWARD):
                batch = self._compute_reward_colocate(batch, metrics=metrics)
        batch = self._balanced(batch, metrics)
        with marked_timer("old_log_prob", timing_raw, color="blue"):
            batch = self._audited_old_log_prob(batch, metrics)
        if self.use_reference_policy:
            with marked_timer("ref", timing_raw, color="olive"), phase(Phase.REF_LOG_PROB):
                batch = self._compute_ref_log_prob(batch, metrics=metrics)
                batch.extra_info.pop("no_lora_adapter", None)  # or the critic goes without its own, under verl 0.9.1
        if self.use_critic:
            with marked_timer("values", timing_raw, color="cyan"), phase(Phase.VALUES):
                batch = self._compute_values(batch, metrics=metrics)
        with marked_timer("adv", timing_raw, color="brown"):
            with phase(Phase.ADVANTAGE):
                batch = on_real_rows(batch, lambda real: self._compute_advantage(real, metrics=metrics))
            limits = self.config.data.max_response_length, self.config.actor_rollout_ref.rollout.max_model_len
            batch = correct(batch, metrics, self.seamless, limits=limits, version=self.global_steps - 1)
            self.signals.keep(batch, f"{self.global_steps}.{self.local_trigger_step}")
        if self.use_critic:
            with marked_timer("update_critic", timing_raw, color="pink"), phase(Phase.UPDATE_CRITIC):
                batch = self._update_critic(batch, metrics=metrics)
        if self.config.trainer.critic_warmup <= self.global_steps:
            with marked_timer("update_actor", timing_raw, color="red"), phase(Phase.UPDATE_ACTOR):
                batch = self._update_actor(batch, metrics=metrics)
        self.meter.count_sharing(metrics, self.config, len(batch.keys))
        if self.curriculum is not None and self.local_trigger_step + 1 == self.parameter_sync_step:
            self.curriculum.step_ended(self.global_steps)
        return batch

    def _sample(self, metrics: dict[str, Any], count: int) -> KVBatchMeta:
        if self.lending is not None:
            self.lending.before_sample(self.local_trigger_step)
        with self.flight.phase(Phase.WAIT_FOR_BATCH):  # from here on the trainer waits with its gang
            self.on_sample_begin()
            batch, found = self.replay_buffer.sample(
                global_steps=self.global_steps, partition_id="train", batch_size=count
            )
            metrics.update(found)
            batch.extra_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
            self.on_sample_end()
        return batch

    def _balanced(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = self._balance_batch(batch, metrics=metrics)
        critic_ranks = max(self.critic_wg._query_dispatch_info("train")) + 1 if self.use_critic else None
        return in_training_order(batch, self.config, self.seamless, self._actor_ranks(), critic_ranks)

    def _actor_ranks(self) -> int:
        return int(max(self.actor_rollout_wg._dispatch_info["actor"])) + 1

    def _audited_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        version = self.global_steps - 1
        with self._refusal_reported():
            self.meter.audit(batch)
            self.meter.count_staleness(batch, version)
            correction = self.config.algorithm.get("rollout_correction")
            bypassed = correction is not None and correction.bypass_mode
            if bypassed and self.local_trigger_step == 0:
                compute, ranks = partial(PPOTrainer._compute_old_log_prob, self), self._actor_ranks()
                metrics |= self.meter.compare_a_sample(batch, version, ranks, self.config, compute)
            with self.flight.phase(Phase.OLD_LOG_PROB):
                batch = self._compute_old_log_prob(batch, metrics=metrics)
            if not bypassed:
                self.meter.compare_log_probs(batch, version)
            return batch

    def on_step_end(self) -> None:
        if self.lending is None:
            stops = self.seamless.weights.sync == "together"
            with self.flight.publishing(self.global_steps, lent=self._rolls_out(), stops=stops):
                super().on_step_end()
        else:
            if self.prev_step_profile:
                self._stop_rollout_profiling()
            self.lending.close_batch()
            with marked_timer("update_weights", self.timing_raw, color="red"):
                self._pending_sync_metrics = self.lending.publish(
                    waited_s=self._step_sample_wait_seconds,
                    waited_groups=self._step_wait_samples,
                    last=self.global_steps >= self.total_training_steps,
                )
        self.flight.step_ended()
        self.meter.close_window(self._books())

    # ---------------------------------------------------------------- reports

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        self.flight.recorder.record(self.meter.rows_trained(self.flight.recorder.now(), global_steps))
        self._report_step(metrics, timing_raw, global_steps)

    def _report_step(self, metrics: dict[str, Any], timing_raw: Mapping[str, float], step: int) -> None:
        report = self.meter.finish(
            step=step,
            total_steps=self.total_training_steps,
            timing=timing_raw,
            attempts=self.rows.desk.close_step(),
            curriculum=self.curriculum.progress() if self.curriculum is not None else None,
        )
        metrics.update(report.as_metrics())
        self.reporter.step(report, metrics)

    @contextmanager
    def _refusal_reported(self) -> Iterator[None]:
        """A failed audit ends the run; the record of its step is written first and says how many rows were refused."""
        try:
            yield
        except AuditFailed:
            self.meter.close_window(self._books())
            metrics: dict[str, Any] = {}
            self._report_step(metrics, {"step": self.flight.recorder.now() - self._step_began_at}, self.global_steps)
            self.logger.log(data=metrics, step=self.global_steps)
            raise

    def _books(self) -> tuple[SliceSeconds, ...]:
        """What every slice has done up to now; a router of the user's own keeps no books."""
        if self.standing.own_router:
            return self.flight.books(())
        return self.flight.books(ray.get(self.standalone_server_manager.global_load_balancer.books.remote()))

    def _val_metrics_update(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        data_sources, uids, infos, _ = args
        infos["reward"] = infos["reward"][: len(uids)]  # workers that are not ours leave what a reward calls so
        wanted = sum(kwargs["expected_acc_counts"].values())
        report_validation(self.reporter, self.global_steps, wanted, data_sources, uids, infos)
        return super()._val_metrics_update(*args, **kwargs)

    # ---------------------------------------------------------------- validation, verl's own switch

    def on_validate_begin(self) -> None:
        if self.lending is None:
            super().on_validate_begin()
        else:
            self.lending.begin_validation()
        self.flight.began(Phase.VALIDATE)

    def on_validate_end(self) -> None:
        self.flight.ended(Phase.VALIDATE)
        super().on_validate_end()
        if self.lending is not None:
            self.lending.end_validation()

    def switch_to_rollout(self, **kwargs: Any) -> None:
        if self._enable_hybrid_replicas:  # without them verl calls it all the same, and nothing happens
            with self.flight.phase(Phase.SWITCH):
                super().switch_to_rollout(**kwargs)
            self.flight.lent()

    def switch_to_trainer(self) -> None:
        if self._enable_hybrid_replicas:
            with self.flight.phase(Phase.SWITCH):
                super().switch_to_trainer()
            self.flight.reclaimed()

    def _rolls_out(self) -> bool:
        return bool(self.current_mode == separate_async.HybridEngineMode.ROLLOUT)

    # ---------------------------------------------------------------- checkpoints

    def _save_checkpoint(self) -> None:
        self.before_checkpoint()
        if isinstance(self.rows, StreamingReplayBuffer):  # before verl's parts: the last declares it complete
            self.rows.save(Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}")
        with self.flight.phase(Phase.CHECKPOINT):
            super()._save_checkpoint()
        self.reporter.checkpoint(self.global_steps)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if not self.global_steps or not isinstance(self.rows, StreamingReplayBuffer):
            return
        folder = resumed_folder(self.config.trainer, self.global_steps)
        if not self.rows.load(folder, self.global_steps):
            self.reporter.say(f"{folder} has no {STATE_FILE}: its prompts in flight are generated again")
