"""Trainer mode ``seamless``: verl's ``separate_async`` with a bound on staleness, an audit and a report per step.

    prompts ─► agent loops ─► TransferQueue ─► StreamingReplayBuffer ─► audit ─► verl's PPO steps ─► weights ─► replicas

Everything between the audit and the weights is verl's own code.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import verl.trainer.ppo.v1.trainer_separate_async as separate_async
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.single_controller.ray.base import RayResourcePool
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry
from verl.workers.rollout.utils import update_prometheus_config

from seamless_verl.errors import ConfigError
from seamless_verl.observe.reporter import Reporter
from seamless_verl.observe.time_ledger import SliceSeconds
from seamless_verl.staleness.groups import StuckPolicy, Treatment
from seamless_verl.verl_adapter.dataloader.curriculum_dataloader import CurriculumLoader
from seamless_verl.verl_adapter.dataloader.replay import StreamingReplayBuffer, WokenReplayBuffer
from seamless_verl.verl_adapter.plugin import TRAINER_MODE
from seamless_verl.verl_adapter.rollout.llm_client import VersionedLLMClient
from seamless_verl.verl_adapter.rollout.load_balancer import balancer_class
from seamless_verl.verl_adapter.slices.placing import PlacedServers, standing_pools
from seamless_verl.verl_adapter.slices.resource_pools import adopt_resources, replica_gpus
from seamless_verl.verl_adapter.trainer.adoption import adopt_config, refuse_early, some_standing, standalone_config
from seamless_verl.verl_adapter.trainer.corrections import write_interpolation_weights, zero_overlong_advantages
from seamless_verl.verl_adapter.trainer.lending import LendingTrainer
from seamless_verl.verl_adapter.trainer.step_report import AuditFailed, StepMeter, rows_to_compare, validation_report
from seamless_verl.verl_adapter.weights.weight_transfer import GuardedCheckpointManager

_STREAMING_STATE = "streaming.json"


def _interruptible_replica() -> type[RolloutReplica]:
    from seamless_verl.verl_adapter.vllm.vllm_server import InterruptibleReplica  # brings vLLM in

    return InterruptibleReplica


@register_trainer(TRAINER_MODE)
class SeamlessTrainer(LendingTrainer):
    """See the module. Under `seamless_verl.main`, bad configuration is refused earlier (`run.preflight`)."""

    def __init__(self, config: DictConfig) -> None:
        self.seamless = adopt_config(config)
        self.slices = adopt_resources(config, self.seamless)
        refuse_early(config, self.seamless)
        RolloutReplicaRegistry.register("vllm", _interruptible_replica)
        with some_standing(config):
            super().__init__(config)
        self.reporter = Reporter.for_run(self.seamless.run_dir)
        self.first_step_at: float | None = None
        self._meter = StepMeter()
        self._step_began_at = 0.0  # of the recorder's clock
        self.standalone_server_manager: LLMServerManager
        self.standalone_checkpoint_manager: GuardedCheckpointManager
        self.current_mode = separate_async.HybridEngineMode.TRAINER

    # ---------------------------------------------------------------- construction

    def _build_replay_buffer(self) -> Any:
        sampler = self.config.trainer.v1.sampler
        custom = sampler.get("custom_sampler") or {}
        if custom.get("path") and custom.get("name"):
            return super()._build_replay_buffer()
        common = {
            "trainer_config": self.config.trainer.v1.get(TRAINER_MODE),
            "sampler_kwargs": sampler.sampler_kwargs,
            "refill_fn": self._add_prompts_to_generate,
            "filter_groups_metric": self._resolve_filter_groups_metric(),
        }
        staleness = self.seamless.staleness
        if staleness.policy == "verl":
            return WokenReplayBuffer(
                trainer_mode=TRAINER_MODE,
                max_off_policy_threshold=sampler.max_off_policy_threshold,
                max_off_policy_strategy=sampler.max_off_policy_strategy,
                **common,
            )
        return StreamingReplayBuffer(
            eta=staleness.eta,
            batch_size=self.config.data.train_batch_size,
            redundancy=staleness.redundancy,
            in_flight=staleness.in_flight,
            stuck=StuckPolicy(treatment=Treatment(staleness.stuck), patience_s=staleness.stuck_patience_s),
            admits=not self.config.skip.rollout_tq.enable,
            on_progress=self.flight.progress,
            **common,
        )

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        if self.seamless.curriculum.enabled:
            if not isinstance(self.replay_buffer, StreamingReplayBuffer) or self.config.skip.rollout_tq.enable:
                raise ConfigError(
                    "seamless.curriculum",
                    "enabled",
                    "needs to see every group: no custom_sampler, no staleness.policy=verl, no replayed rollouts",
                    "leave those out, or the curriculum",
                )
            data = self.config.data
            self.train_dataloader = CurriculumLoader(
                self.train_dataset,
                self.seamless.curriculum,
                train_batch_size=data.train_batch_size,
                shuffle=data.shuffle,
                seed=data.get("seed"),
                on_epoch=lambda report: self.reporter.epoch(report),
                say=lambda line: self.reporter.say(line),
            )
            self.replay_buffer.follow(self.train_dataloader)

    def _setup(self) -> None:
        """As `PPOTrainerSeparateAsync._setup`, with the standalone replicas starting beside the trainer's workers, on
        GPUs that are reserved for both beforehand.

        It is written out instead of called because verl 0.9.1 starts them one after the other, and because its last
        line raises TypeError when hybrid replicas are off (``logger.info(…, flush=True)``, line 181).
        """
        pools = standing_pools(self.config, self._num_hybrid_replicas())
        self._init_resource_pool_mgr()
        self.resource_pool_manager.place(self.config, pools, self.reporter.say)
        if self._has_standing:
            with ThreadPoolExecutor(1, thread_name_prefix="replicas") as pool:
                replicas = pool.submit(self._start_standalone_replicas, pools)
                try:
                    PPOTrainer._setup(self)
                finally:
                    self.standalone_server_manager = replicas.result()
        else:
            PPOTrainer._setup(self)
            self.standalone_server_manager = self._router_alone()
        rollout = self.config.actor_rollout_ref.rollout
        if rollout.prometheus.enable:
            addresses = self.llm_server_manager.server_addresses + self.standalone_server_manager.server_addresses
            update_prometheus_config(rollout.prometheus, addresses, rollout.name)
        self.checkpoint_manager = GuardedCheckpointManager.in_place_of(self.checkpoint_manager)
        self.standalone_checkpoint_manager = GuardedCheckpointManager(
            config=omega_conf_to_dataclass(rollout.checkpoint_engine),
            actor_wg=self.actor_rollout_wg,
            replicas=self.standalone_server_manager.get_replicas(),
        )
        if self._enable_hybrid_replicas:
            self.current_mode = separate_async.HybridEngineMode.ROLLOUT
            self.add_replicas_to_balancer()

    def _start_standalone_replicas(self, pools: dict[int, RayResourcePool]) -> LLMServerManager:
        config, first, balancer = standalone_config(self.config), self._num_hybrid_replicas(), self._balancer_class()
        return PlacedServers.create(config=config, pools=pools, start_rank=first, load_balancer_cls=balancer)

    @property
    def _has_standing(self) -> bool:
        """Whether some GPUs only roll out; otherwise the trainer's own replicas are all there are."""
        return bool(self.config.actor_rollout_ref.rollout.nnodes)

    def _router_alone(self) -> LLMServerManager:
        """A manager of no replicas; those of the trainer join its router when they are lent."""
        return LLMServerManager.create_empty(
            config=self.config, worker_group=self.actor_rollout_wg, load_balancer_cls=self._balancer_class()
        )

    def _balancer_class(self) -> Any:
        """None where the user names a router: verl makes that one."""
        rollout = self.config.actor_rollout_ref.rollout
        if rollout.get("router_config_path") is not None:
            return None
        return balancer_class(self.seamless.router, rollout.max_num_seqs)

    def on_init_end(self) -> None:
        if self._has_standing:
            super().on_init_end()
        else:
            self.checkpoint_manager.update_weights(self.global_steps)

    def _num_hybrid_replicas(self) -> int:
        if not self._enable_hybrid_replicas:
            return 0
        trainer = self.config.trainer
        return int(trainer.nnodes * trainer.n_gpus_per_node // replica_gpus(self.config))

    def get_llm_client(self) -> VersionedLLMClient:
        return self.standalone_server_manager.get_client(client_cls=VersionedLLMClient)

    # ---------------------------------------------------------------- prompts

    def fit(self, agent_loop_manager: Any) -> None:
        if isinstance(self.replay_buffer, WokenReplayBuffer):
            self.replay_buffer.listen(getattr(agent_loop_manager, "agent_loop_workers", []))
        super().fit(agent_loop_manager)

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        if isinstance(self.replay_buffer, StreamingReplayBuffer):
            self.replay_buffer.reserve(list(batch["uid"]), self.global_steps)
        return super()._submit_batch_to_rollout(batch)

    def prepare_step(self) -> dict[str, Any]:
        """Admit what the bound has room for; verl submits one batch per step, whatever is still in flight."""
        if not isinstance(self.replay_buffer, StreamingReplayBuffer) or self.config.skip.rollout_tq.enable:
            return super().prepare_step()
        self.replay_buffer.admit(self.global_steps)
        return self._wait_for_sampleable_and_switch()

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        batch = super().step(metrics, timing_raw)
        if isinstance(self.train_dataloader, CurriculumLoader):
            self.train_dataloader.step_ended(self.global_steps)
        return batch

    # ---------------------------------------------------------------- a step

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], **kwargs: Any) -> KVBatchMeta:
        """As verl's, then rows of like length side by side within each optimizer step: less padding per micro-batch.

        Every rank cuts its share in order into mini-batches, one per optimizer step. Which rows a step gets stays as
        verl has it, or its gradient would depend on their lengths; the order within a step is of no matter to the loss.
        """
        batch = super()._balance_batch(batch, metrics, **kwargs)
        together = self._rows_between_cuts(len(batch.keys))
        order = [
            row
            for first in range(0, len(batch.keys), together)
            for row in sorted(range(first, first + together), key=lambda row: batch.tags[row]["seq_len"])
        ]
        batch.reorder(order)
        return batch

    def _rows_between_cuts(self, rows: int) -> int:
        """The batch of ``rows`` may be sorted in pieces of this many: no share of a rank and no mini-batch of actor or
        critic (verl's ``TrainingWorker.train_mini_batch``) begins or ends within a piece.
        """
        config, n = self.config, self.config.actor_rollout_ref.rollout.n
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        lengths = [rows // ranks, config.actor_rollout_ref.actor.ppo_mini_batch_size * n // ranks]
        if self.use_critic:
            ranks = max(self.critic_wg._query_dispatch_info("train")) + 1  # of its own: sequence parallelism may differ
            lengths.append(config.critic.ppo_mini_batch_size * n // ranks)
        return math.gcd(*lengths)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        version = self.global_steps - 1
        with self._refusal_reported():
            self._meter.audit(batch)
            self._meter.count_staleness(batch, version)
            correction = self.config.algorithm.get("rollout_correction")
            if correction is None or not correction.bypass_mode:
                batch = super()._compute_old_log_prob(batch, metrics)
                self._meter.compare_log_probs(batch, version)
                return batch
            if self.local_trigger_step == 0:
                self._compare_a_sample(batch, version, metrics)
            return super()._compute_old_log_prob(batch, metrics)

    @contextmanager
    def _refusal_reported(self) -> Iterator[None]:
        """A failed audit ends the run; the record of its step is written first and says how many rows were refused."""
        try:
            yield
        except AuditFailed:
            self._meter.close_window(self.flight.books(self._server_books()))
            metrics: dict[str, Any] = {}
            self._report_step(metrics, {"step": self.flight.recorder.now() - self._step_began_at}, self.global_steps)
            self.logger.log(data=metrics, step=self.global_steps)
            raise

    def _compare_a_sample(self, batch: KVBatchMeta, version: int, metrics: dict[str, Any]) -> None:
        """verl copies the rollout's log-probs here; a forward pass over a few rows shows whether the trainer agrees."""
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        sample = rows_to_compare(batch, version, ranks)
        if sample is None:
            return
        found: dict[str, Any] = {}
        correction = self.config.algorithm.rollout_correction
        correction.bypass_mode = False
        PPOTrainer._compute_old_log_prob(self, sample, found)
        correction.bypass_mode = True
        self._meter.compare_log_probs(sample, version)
        metrics.update({name: value for name, value in found.items() if name.startswith("training/rollout_")})

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_advantage(batch, metrics)
        if self.seamless.curriculum.zero_overlong_advantage:
            share = zero_overlong_advantages(batch, self.config.data.max_response_length)
            metrics["training/overlong_share"] = share
        if self.seamless.staleness.correction == "a3po":
            batch = write_interpolation_weights(batch, self.global_steps - 1)
        return batch

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        self.flight.recorder.record(self._meter.rows_trained(self.flight.recorder.now(), global_steps))
        self._report_step(metrics, timing_raw, global_steps)

    def _report_step(self, metrics: dict[str, Any], timing_raw: Mapping[str, float], step: int) -> None:
        report = self._meter.finish(
            step=step,
            total_steps=self.total_training_steps,
            timing=timing_raw,
            curriculum=self.train_dataloader.standing() if self.seamless.curriculum.enabled else None,
        )
        metrics.update(report.as_metrics())
        self.reporter.step(report, metrics)

    def on_step_begin(self) -> None:
        if self.first_step_at is None:
            self.first_step_at = time.time()
        self._step_began_at = self.flight.recorder.now()
        self._meter.open_window(self.flight.books(self._server_books()))
        super().on_step_begin()

    def on_step_end(self) -> None:
        super().on_step_end()
        self._meter.close_window(self.flight.books(self._server_books()))

    def _server_books(self) -> tuple[SliceSeconds, ...]:
        if self.config.actor_rollout_ref.rollout.get("router_config_path") is not None:
            return ()  # a router of the user's own keeps none
        return ray.get(self.standalone_server_manager.global_load_balancer.books.remote())

    def _val_metrics_update(
        self,
        data_sources: list[str],
        sample_uids: list[str],
        reward_extra_infos_dict: dict[str, list[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, float]:
        for report in validation_report(self.global_steps, data_sources, sample_uids, reward_extra_infos_dict):
            self.reporter.validation(report)
        wanted = len(self.val_dataset) * self.config.actor_rollout_ref.rollout.val_kwargs.n
        missing = wanted - len(sample_uids)
        if missing:
            self.reporter.say(
                f"validation after step {self.global_steps}: {missing} of {wanted} rollouts are missing; verl leaves "
                "out the whole group of a rollout that failed (the reasons are in logs/)"
            )
        return super()._val_metrics_update(data_sources, sample_uids, reward_extra_infos_dict, *args, **kwargs)

    # ---------------------------------------------------------------- checkpoints

    def _save_checkpoint(self) -> None:
        if isinstance(self.replay_buffer, StreamingReplayBuffer):
            # Before verl's own parts: the last of them declares the checkpoint complete.
            folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _STREAMING_STATE).write_text(json.dumps(self.replay_buffer.state()), encoding="utf-8")
        super()._save_checkpoint()
        self.reporter.checkpoint(self.global_steps)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if not self.global_steps or not isinstance(self.replay_buffer, StreamingReplayBuffer):
            return
        if self.config.trainer.resume_mode == "resume_path":
            folder = Path(self.config.trainer.resume_from_path)
        else:
            folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        state = folder / _STREAMING_STATE
        if not state.exists():
            self.replay_buffer.start_at(self.global_steps)
            self.reporter.say(f"{folder} has no {_STREAMING_STATE}: its prompts in flight are generated again")
            return
        self.replay_buffer.restore(json.loads(state.read_text(encoding="utf-8")))


__all__ = ["SeamlessTrainer", "adopt_config"]
