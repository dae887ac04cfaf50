"""Every name of verl, Ray and vLLM that we touch, checked against what is installed.

A failure here after an upgrade tells what moved and who of ours uses it; the comment of a work-around tells when it may
go. ``SEAMLESS_VERL=CHECKOUT pytest tests/contract`` runs these tests against another verl than the installed one;
``python -m tests.contract.moved CHECKOUT`` only reads it (docs/versions.md).
"""

import asyncio
import contextlib
import importlib
import inspect
import itertools
import json
import re
import types

import numpy as np
import pytest

from seamless_verl.run.check_batches import _CRITICS_TOKENS, ESTIMATORS
from seamless_verl.run.check_combinations import uses_critic
from seamless_verl.run.check_machine import _TRACKERS
from seamless_verl.verl_adapter import job
from tests.contract.moved import users

pytestmark = [
    pytest.mark.timeout(180),
    # verl, Ray and vLLM warn at import about things that are none of ours.
    pytest.mark.filterwarnings("ignore"),
]

NAMES = [
    # trainer
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._setup",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._build_replay_buffer",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._resolve_filter_groups_metric",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._init_dataloader",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._add_prompts_to_generate",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._submit_batch_to_rollout",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._load_checkpoint",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._reissue_inflight_prompts",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer.prepare_step",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer.step",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._step_once",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._add_batch_to_generate",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._balance_batch",
    "verl.workers.engine_workers:TrainingWorker.train_mini_batch",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_metrics",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._val_metrics_update",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._save_checkpoint",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer.fit",
    "verl.trainer.ppo.v1.trainer_base:register_trainer",
    "verl.trainer.ppo.core_algos:POLICY_LOSS_REGISTRY",
    "verl.trainer.distillation.losses:distillation_loss",
    "verl.trainer.distillation.losses:AggregationType.MIN",
    "verl.trainer.distillation.losses:Metric",
    "verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync._compute_old_log_prob",
    "verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync.add_replicas_to_balancer",
    "verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync._wait_for_sampleable_and_switch",
    "verl.trainer.ppo.v1.trainer_separate_async:HybridEngineMode.TRAINER",
    "verl.trainer.ppo.v1:AgentLoopManagerTQ.create",
    "verl.trainer.ppo.v1:get_trainer_cls",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync.wait_for_sampleable",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync.get_sampleable_count",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync._sync_metadata_from_transfer_queue",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync._wait_for_next_poll",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync._dapo_filtered_keys",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync._clear_groups",
    "verl.trainer.ppo.v1.replay_buffer:DAPO_FILTERED_REWARD_COUNTS_KEY",
    "verl.trainer.ppo.v1.replay_buffer:_accumulate_eviction_metrics",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync._materialize_batch",
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ.__ray_actor_class__._run_prompt",
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ.__ray_actor_class__._run_agent_loop",
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ.__ray_actor_class__._agent_loop_postprocess",
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ.__ray_actor_class__._compute_score",
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ.__ray_actor_class__._compute_teacher_logprobs",
    "verl.trainer.ppo.v1.agent_loop_tq:apply_greedy_sampling_params",
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ.__init__",
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ.generate_sequences",
    "verl.experimental.agent_loop.agent_loop:AgentLoopManager._init_agent_loop_workers",
    "verl.utils.tensordict_utils:index_select_tensor_dict",
    "ray.actor:ActorHandle._actor_id",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._init_resource_pool_mgr",
    "verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync.on_sample_begin",
    "verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync.on_step_begin",
    "verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync.on_step_end",
    "verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync.on_validate_begin",
    "verl.utils.skip:SkipManager.annotate_tq",
    "verl.utils.dataset.rl_dataset:collate_fn",
    "verl.trainer.constants_ppo:get_ppo_ray_runtime_env",
    "verl.trainer.ppo.utils:need_critic",
    "verl.trainer.ppo.utils:need_reference_policy",
    "verl.utils.config:validate_config",
    "verl.utils.device:auto_set_device",
    "verl.utils.logging_utils:configure_verl_logging",
    "verl.utils.tracking:Tracking.finish",
    "ray:timeline",
    "ray.exceptions:RayActorError",
    "ray.exceptions:WorkerCrashedError",
    "ray.exceptions:NodeDiedError",
    "ray.exceptions:LocalRayletDiedError",
    "ray.exceptions:OutOfMemoryError",
    "ray.util:list_named_actors",
    "transfer_queue.controller:TransferQueueController",
    "transfer_queue.interface:_TQ_CONTROLLER",
    "transfer_queue.interface:close",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer.get_reward_handles",
    "verl.utils.import_utils:load_class_from_fqn",
    # rollout
    "verl.workers.rollout.llm_server:LLMServerManager.create",
    "verl.workers.rollout.llm_server:LLMServerManager.get_client",
    "verl.workers.rollout.llm_server:FullyAsyncLLMServerClient._configured_response_length",
    "verl.workers.rollout.llm_server:LLMServerClient.generate",
    "verl.workers.rollout.llm_server:LLMServerClient._vllm_request_id",
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.abort_request",
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer._park_until_admitted",
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.clear_kv_cache",
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.run_server",
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer._get_wake_up_tags",
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.sleep",
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.wake_up",
    "vllm.v1.executor.abstract:Executor.sleep",
    "verl.workers.rollout.router:GlobalRequestLoadBalancer.acquire_server",
    "verl.workers.rollout.router:GlobalRequestLoadBalancer.release_server",
    "verl.workers.rollout.router:GlobalRequestLoadBalancer.add_servers",
    "verl.workers.rollout.router:GlobalRequestLoadBalancer.remove_servers",
    "verl.workers.rollout.router:GlobalRequestLoadBalancer.clear_sticky_cache",
    "verl.workers.rollout.router:GlobalRequestLoadBalancer.require_acquire_fields",
    "verl.workers.rollout.llm_server:LLMServerClient._acquire_server",
    "verl.workers.rollout.llm_server:LLMServerManager.get_replicas",
    "verl.workers.rollout.replica:TokenOutput",
    "verl.workers.rollout.replica:RolloutReplica.abort_all_requests",
    "verl.workers.rollout.replica:RolloutReplica.resume_generation",
    "verl.workers.rollout.replica:RolloutReplica.sleep",
    "verl.workers.rollout.replica:RolloutReplica.launch_servers",
    "verl.workers.rollout.replica:RolloutReplica.max_concurrency",
    "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightSender._init_socket",
    "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightSender.async_send_weights",
    "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightReceiver.receive_weights",
    "verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter.resume",
    "verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter.update_weights",
    "verl.workers.rollout.utils:ensure_async_iterator",
    "verl.workers.rollout.replica:RolloutReplica.get_ray_class_with_init_args",
    "verl.workers.rollout.replica:RolloutMode.STANDALONE",
    "verl.utils.device:get_device_name",
    "verl.single_controller.ray:RayWorkerGroup",
    "verl.single_controller.ray:RayClassWithInitArgs",
    "verl.checkpoint_engine.base:_worker_cls",
    "verl.checkpoint_engine:CheckpointEngineManager.abort_replicas",
    "verl.checkpoint_engine:CheckpointEngineManager.release_kv_cache_replicas",
    "verl.checkpoint_engine:CheckpointEngineManager.resume_kv_cache_replicas",
    "verl.checkpoint_engine:CheckpointEngineManager.resume_generation_replicas",
    "ray.util.collective.collective:_group_mgr._name_group_map",
    "ray.util.collective.collective:is_group_initialized",
    "ray.util.collective.collective:destroy_collective_group",
    "ray.experimental.internal_kv:_internal_kv_put",
    "ray.experimental.internal_kv:_internal_kv_get",
    "ray.experimental.internal_kv:_internal_kv_del",
    "verl.checkpoint_engine:CheckpointEngineManager.update_weights",
    "verl.checkpoint_engine:CheckpointEngineManager.add_replicas",
    "verl.checkpoint_engine:CheckpointEngineManager.remove_replicas",
    "verl.experimental.separation.engine_workers:DetachActorWorker.save_model_to_cpu",
    "verl.experimental.separation.engine_workers:DetachActorWorker.restore_model_from_cpu",
    "verl.experimental.separation.engine_workers:DetachActorWorker.clear_cpu_model",
    "verl.single_controller.ray.base:ResourcePoolManager.create_resource_pool",
    "verl.single_controller.ray.base:ResourcePoolManager._check_resource_available",
    "verl.single_controller.ray.base:RayResourcePool.__init__",
    "verl.single_controller.ray.base:RayResourcePool.get_placement_groups",
    "verl.single_controller.ray.base:RayWorkerGroup.__init__",
    "verl.single_controller.ray.base:sort_placement_group_by_node_ip",
    "verl.plugin.platform:get_platform",
    "verl.workers.rollout.replica:RolloutReplica.init_standalone",
    "verl.workers.rollout.replica:get_rollout_replica_class",
    "ray._private.state:available_resources_per_node",
    "ray.util.placement_group:placement_group",
    "ray.util.placement_group:PlacementGroup.wait",
    "verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter.__init__",
    "verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension._get_zmq_handle",
    "verl.experimental.agent_loop.agent_loop:AgentLoopBase",
    "verl.experimental.agent_loop.agent_loop:AgentLoopOutput",
    "verl.experimental.agent_loop.agent_loop:AgentLoopMetrics",
    "verl.experimental.agent_loop.agent_loop:_agent_loop_registry",
    # weights and platform
    "verl.checkpoint_engine.base:CheckpointEngineRegistry.register",
    "verl.checkpoint_engine.base:CheckpointEngineWithCache.get_weights",
    "verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension.update_weights_from_ipc",
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.abort_all_requests",
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.open_submission_gate",
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.resume_engine_generation",
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.set_global_steps",
    "vllm.renderers.base:BaseRenderer.clear_mm_cache_async",
    "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc",
    "vllm.v1.engine.async_llm:AsyncLLM.reset_encoder_cache",
    "vllm.config.model:ModelConfig.is_multimodal_model",
    "vllm.v1.engine.core_client:AsyncMPClient.pause_scheduler_async",
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer.num_output_tokens",
    "verl.checkpoint_engine.base:split_weight_chunks",
    "verl.checkpoint_engine.base:merge_weight_chunks",
    "verl.plugin.platform.platform_manager:PlatformRegistry.register",
    "verl.utils.distributed:initialize_global_process_group_ray",
    "verl.utils.torch_functional:logprobs_from_logits_v2",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.prepare_model_inputs",
    "verl.workers.engine.fsdp.transformer_impl:CPUOffloadPolicy",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.to",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_model_optimizer",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.forward_backward_batch",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.optimizer_step",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.optimizer_zero_grad",
    "verl.workers.rollout.replica:RolloutMode.HYBRID",
    "verl.workers.engine.base:BaseEngineCtx._context_switch",
    "verl.utils.fsdp_utils:fsdp1_sharded_save_to_cpu",
    "verl.utils.fsdp_utils:fsdp1_sharded_load_from_cpu",
    "torch.distributed.fsdp._flat_param:FlatParamHandle.reshard",
    "verl.utils.fsdp_utils:fsdp2_sharded_save_to_cpu",
    "verl.utils.fsdp_utils:fsdp2_sharded_load_from_cpu",
    "verl.utils.fsdp_utils:offload_fsdp2_model_to_cpu",
    "verl.utils.fsdp_utils:load_fsdp2_model_to_gpu",
    "verl.utils.fsdp_utils:offload_fsdp_optimizer",
    "verl.utils.fsdp_utils:load_fsdp_optimizer",
    "vllm.platforms.cpu:CpuPlatform.check_and_update_config",
    "vllm.platforms.cpu:CpuPlatform.is_sleep_mode_available",
    "vllm.v1.worker.cpu_worker:CPUWorker.sleep",
    "vllm.v1.worker.cpu_worker:CPUWorker.wake_up",
    "vllm.v1.worker.cpu_worker:CPUWorker.load_model",
    "vllm.v1.worker.cpu_worker:CPUWorker.initialize_from_config",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.post_kv_cache_wake_up",
    # TransferQueue, vLLM
    "vllm.v1.engine.async_llm:AsyncLLM.errored",
    "vllm.v1.engine.async_llm:AsyncLLM.abort",
    "vllm.v1.engine.async_llm:AsyncLLM.add_request",
    "vllm.v1.structured_output:StructuredOutputManager._create_grammar",
    "vllm.v1.structured_output.backend_types:StructuredOutputGrammar",
    "transfer_queue:init",
    "transfer_queue:close",
    "transfer_queue:kv_batch_get",
    "transfer_queue:async_kv_put",
    "transfer_queue:async_kv_clear",
    "transfer_queue:kv_batch_put",
    "transfer_queue:kv_clear",
    "transfer_queue:kv_list",
    "transfer_queue:KVBatchMeta",
    "vllm._custom_ops:_supports_onednn",
    "ray.util:get_node_ip_address",
    "ray.util.scheduling_strategies:NodeAffinitySchedulingStrategy",
]


# Their modules import what is not installed here (Megatron), so they are looked up in the source.
ONLY_READ = [
    "verl.utils.megatron_utils:copy_megatron_model_to_cpu",
    "verl.utils.megatron_utils:restore_megatron_model_from_cpu",
    "verl.utils.megatron_utils:DDP",
]


NONE_BEFORE_A_RUN = {"transfer_queue.interface:_TQ_CONTROLLER"}


@pytest.mark.parametrize("name", NAMES)
def test_the_name_exists(name):
    module, _, path = name.partition(":")
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{error}\nused in {', '.join(users(name))}", pytrace=False)
    assert found is not None or name in NONE_BEFORE_A_RUN


def test_the_plug_in_registers_trainer_agent_loop_and_platform():
    import verl.trainer.ppo.v1 as v1
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.plugin.platform import get_platform

    assert v1.get_trainer_cls("seamless").__name__ == "SeamlessTrainer"
    target = _agent_loop_registry["seamless_agent"]["_target_"]
    module, _, name = target.rpartition(".")
    assert inspect.isclass(getattr(importlib.import_module(module), name))
    assert get_platform().device_name == "cpu"


def test_the_trackers_that_we_look_for_are_verls():
    from verl.utils.tracking import Tracking

    assert set(_TRACKERS) == {*Tracking.supported_backend, "tracking"}


def test_each_life_of_a_run_has_a_file_of_its_own_for_verls_file_logger(tmp_path, monkeypatch):
    """verl 0.9.1 opens it for writing anew."""
    from verl.utils.tracking import FileLogger

    for number in (1, 2):
        monkeypatch.setattr(job.os, "environ", {})
        job._name_logger_file(tmp_path)
        FileLogger("project", "experiment").log({"life": number}, step=7)
    logs = [json.loads((tmp_path / f"logger-{number}.jsonl").read_text()) for number in (1, 2)]
    assert [log["data"]["life"] for log in logs] == [1, 2]
    monkeypatch.setattr(job.os, "environ", {"VERL_FILE_LOGGER_ROOT": str(tmp_path)})
    job._name_logger_file(tmp_path)
    assert FileLogger("project", "experiment").filepath == f"{tmp_path}/project/experiment.jsonl"


def test_the_estimators_are_verls():
    from verl.trainer.ppo.core_algos import AdvantageEstimator

    assert set(ESTIMATORS) == {estimator.value for estimator in AdvantageEstimator}


def test_our_platform_implements_everything_that_verl_declares():
    from seamless_verl.verl_adapter.cpu.cpu_platform import CpuPlatform

    assert not getattr(CpuPlatform, "__abstractmethods__", frozenset())
    CpuPlatform()


def test_log_probs_at_once_are_those_of_verl():
    import torch
    from verl.utils.torch_functional import logprobs_from_logits, logprobs_from_logits_naive

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 50, generator=generator) * 5
    labels = torch.randint(0, 50, (7,), generator=generator)
    assert logprobs_from_logits.__globals__["logprobs_from_logits_v2"].__module__.startswith("seamless_verl.")
    torch.testing.assert_close(logprobs_from_logits(logits, labels), logprobs_from_logits_naive(logits, labels))


def test_right_verl_samples_need_no_attention_mask():
    import torch
    from tensordict import TensorDict
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from verl.utils import tensordict_utils
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    rows = [torch.arange(1, length + 1) for length in (3, 9, 6)]
    micro_batch = TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
            "position_ids": torch.nested.as_nested_tensor([row - 1 for row in rows], layout=torch.jagged),
            "temperature": torch.ones(3),
        },
        batch_size=3,
    )
    tensordict_utils.assign_non_tensor(micro_batch, use_remove_padding=False)
    prepare = FSDPEngineWithLMHead.prepare_model_inputs
    engine = object.__new__(FSDPEngineWithLMHead)
    engine.pad_to_length = False
    ours, _ = prepare(engine, micro_batch)
    verls, _ = prepare.__wrapped__(engine, micro_batch)
    assert verls["attention_mask"] is not None
    assert "attention_mask" not in ours
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        without, with_mask = model(**ours).logits, model(**verls).logits
    for row, tokens in enumerate(rows):
        torch.testing.assert_close(without[row, : len(tokens)], with_mask[row, : len(tokens)], atol=1e-5, rtol=1e-5)


def test_a_rollout_worker_can_be_imported_before_anything_else_of_ours():
    """Ray workers unpickle it first, in the middle of which the plug-in imports our trainer."""
    import subprocess
    import sys

    module = "seamless_verl.verl_adapter.dataloader.rollout_workers"
    code = f"import {module} as ours; print(ours.NotifyingWorker.__mro__[1].__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert done.stdout.split() == ["AgentLoopWorkerTQ"], done.stderr


async def test_who_finds_no_replica_is_told_when_there_is_one():
    import asyncio

    from seamless_verl.verl_adapter.rollout import load_balancer as balancer

    metered = balancer.MeteredLoadBalancer({"a": "handle"})
    await metered.someone_serves()
    metered.remove_servers(["a"])
    waiting = asyncio.ensure_future(metered.someone_serves())
    await asyncio.sleep(0)
    assert not waiting.done()
    metered.add_servers({"b": "handle"})
    await asyncio.wait_for(waiting, 5)


async def test_all_that_wait_for_a_replica_in_one_process_ask_the_router_once():
    """Each call would hold one of the places of its actor; with all taken nobody could tell it of a new replica."""
    import asyncio
    from types import SimpleNamespace

    from seamless_verl.verl_adapter.rollout.llm_client import VersionedLLMClient

    asked: list[asyncio.Future] = []

    def remote(floor):
        asked.append(asyncio.get_running_loop().create_future())
        return asked[-1]

    client = object.__new__(VersionedLLMClient)
    client._asked = {}
    client._load_balancer = SimpleNamespace(someone_serves=SimpleNamespace(remote=remote))
    waiting = [asyncio.ensure_future(client._someone_serves()) for _ in range(1200)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # who gives up does not take the answer from the others
    await asyncio.sleep(0)
    assert len(asked) == 1
    asked[0].set_result(None)
    await asyncio.gather(*waiting[1:])
    later = asyncio.ensure_future(client._someone_serves())
    await asyncio.sleep(0)
    assert len(asked) == 2
    asked[1].set_result(None)
    await later
    others = [asyncio.ensure_future(client._someone_serves(floor)) for floor in (3, 4, 3)]
    await asyncio.sleep(0)
    assert len(asked) == 4, "once for each floor"
    asked[2].set_result(None)
    asked[3].set_result(None)
    await asyncio.gather(*others)


def test_the_load_balancer_keeps_books_on_how_long_a_replica_is_busy(monkeypatch):
    from seamless_verl.observe.time_ledger import Category
    from seamless_verl.verl_adapter.rollout import load_balancer as balancer

    now = 9.0
    monkeypatch.setattr(balancer.time, "monotonic", lambda: now)
    metered = balancer.MeteredLoadBalancer({"a": "handle", "b": "handle"})
    metered._request_id_to_server["x"] = metered._request_id_to_server["y"] = "a"

    def busy() -> dict[str, tuple[float, float]]:
        return {books.slice: (books.seconds[Category.GENERATE], books.wall_s) for books in metered.books()}

    now = 10.0
    metered.acquire_server("x")
    metered.acquire_server("y")
    now = 12.0
    metered.release_server("a")
    now = 14.0
    metered.release_server("a")
    now = 15.0
    assert busy() == {"a": (4.0, 6.0), "b": (0.0, 6.0)}
    metered.remove_servers(["b"])
    now = 20.0
    metered.acquire_server("x")
    now = 21.0
    assert busy() == {"a": (5.0, 12.0), "b": (0.0, 6.0)}
    metered.add_servers({"b": "handle"})
    now = 22.0
    assert busy() == {"a": (6.0, 13.0), "b": (0.0, 7.0)}


def _calls_of(function, names):
    """``self.NAME(…)`` and ``marked_timer(NAME, …)`` in the order of the source, with the conditions around them."""
    import ast
    import textwrap

    found = []

    class Calls(ast.NodeVisitor):
        def visit_If(self, node):
            found.append(f"if {ast.unparse(node.test)}")
            self.generic_visit(node)

        def visit_Call(self, node):
            self.generic_visit(node)
            if isinstance(node.func, ast.Name) and node.func.id == "marked_timer":
                found.append(f"timer {ast.unparse(node.args[0])}")
            elif isinstance(node.func, ast.Attribute) and node.func.attr in names:
                found.append(node.func.attr)

    Calls().visit(ast.parse(textwrap.dedent(inspect.getsource(function))))
    return found


def test_a_mini_batch_makes_verls_own_calls_in_verls_order():
    """`SeamlessTrainer._step_once` is written out; what verl adds to its own shows here."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from seamless_verl.verl_adapter.trainer.trainer import SeamlessTrainer as Ours

    names = {name for name in vars(PPOTrainer) if inspect.isfunction(vars(PPOTrainer)[name])} | {"sample"}
    verls = _calls_of(PPOTrainer._step_once, names)
    parts = {
        "_sample": [name for name in _calls_of(Ours._sample, names) if not name.startswith("if ")],
        "_balanced": ["_balance_batch"],
        "_audited_old_log_prob": ["_compute_old_log_prob"],
    }
    ours = []
    for call in _calls_of(Ours._step_once, names | parts.keys()):
        ours += parts.get(call, [call])
    assert ours[: len(verls)] == verls
    assert [call for call in ours[len(verls) :] if not call.startswith("if ")] == []


def test_a_critic_keeps_its_adapter_where_the_reference_is_the_actor_without_its_own(monkeypatch):
    """verl 0.9.1 leaves ``no_lora_adapter`` in the batch, and `infer_batch` of any worker obeys it. `_step_once` takes
    it out, until verl's `_compute_ref_log_prob` does."""
    import torch
    import verl.trainer.ppo.v1  # noqa: F401  (first, as in a run: it loads our trainer)
    from omegaconf import OmegaConf
    from tensordict import TensorDict
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1 import trainer_base

    from seamless_verl.verl_adapter.trainer.trainer import SeamlessTrainer

    told = {}

    def hears(name, then=None):
        def work(batch):
            told[name] = dict(batch.extra_info)
            if then is not None:
                raise then
            return batch

        return work

    ones = torch.nested.as_nested_tensor([torch.ones(2)], layout=torch.jagged)
    stored = TensorDict({"log_probs": ones, "response_mask": ones}, batch_size=1)
    monkeypatch.setattr(trainer_base.tq, "kv_batch_get", lambda **_: stored)
    monkeypatch.setattr(trainer_base.tq, "kv_batch_put", lambda **_: None)
    batch = KVBatchMeta(partition_id="train", keys=["p_0_0"], tags=[{}], extra_info={})
    trainer = object.__new__(SeamlessTrainer)
    trainer.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"temperature": 1.0}}})
    trainer.flight = types.SimpleNamespace(phase=lambda _: contextlib.nullcontext())
    trainer.reward_loop_manager = types.SimpleNamespace(reward_loop_worker_handles=[])
    trainer._sample = lambda metrics, count: batch
    trainer._balanced = trainer._audited_old_log_prob = lambda batch, metrics: batch
    trainer.use_reference_policy = trainer.ref_in_actor = trainer.use_critic = True
    trainer.actor_rollout_wg = types.SimpleNamespace(compute_log_prob=hears("reference"))
    trainer.critic_wg = types.SimpleNamespace(infer_batch=hears("critic", then=InterruptedError()))
    with pytest.raises(InterruptedError):
        trainer._step_once({}, {}, 1)
    assert told["reference"]["no_lora_adapter"] is True
    assert "no_lora_adapter" not in told["critic"]


def _balancing_trainer(ranks, mini_batch, critic_mini_batch=None, critic_ranks=1):
    """A trainer that can only balance; prompts have two rollouts each."""
    from omegaconf import OmegaConf

    from seamless_verl.config import SeamlessConfig
    from seamless_verl.verl_adapter.trainer.trainer import SeamlessTrainer

    config = {
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": mini_batch}, "rollout": {"n": 2}},
        "critic": {"ppo_mini_batch_size": critic_mini_batch},
        "trainer": {"critic_warmup": 0},
    }
    trainer = object.__new__(SeamlessTrainer)
    trainer.config, trainer.seamless = OmegaConf.create(config), SeamlessConfig()
    trainer.global_steps = 1
    trainer.tokenizer = types.SimpleNamespace(eos_token_id=0)
    trainer.actor_rollout_wg = types.SimpleNamespace(_dispatch_info={"actor": list(range(ranks))})
    trainer.use_critic = critic_mini_batch is not None
    trainer.critic_wg = types.SimpleNamespace(_query_dispatch_info=lambda mesh: list(range(critic_ranks)))
    return trainer


def test_verl_pads_an_update_to_mini_batches_of_actor_and_critic():
    """Why `check_batches` refuses a critic's that does not divide the actor's; may go when verl pads each alone."""
    assert _balancing_trainer(1, 2, critic_mini_batch=8)._get_required_batch_multiple(1) == 2 * 8
    assert _balancing_trainer(1, 8, critic_mini_batch=2)._get_required_batch_multiple(1) == 2 * 8


@pytest.mark.parametrize("enabled", [None, True, False])
@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_we_know_as_verl_whether_there_is_a_critic(estimator, enabled):
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic

    config = {"algorithm": {"adv_estimator": estimator}, "critic": {"enable": enabled}}
    assert uses_critic(config) == need_critic(OmegaConf.create(config))


def test_verl_cuts_a_critics_batches_by_one_key_that_its_configuration_lacks():
    """Why `check_lengths` reads that one, and no size of micro-batches; may go when verl reads its other keys."""
    import inspect
    from dataclasses import fields

    from verl.trainer.ppo.v1 import trainer_base
    from verl.workers.config import FSDPCriticConfig, FSDPEngineConfig

    assert "critic_cfg.engine.max_token_len_per_gpu = critic_cfg.ppo_infer_max_token_len_per_gpu" in inspect.getsource(
        trainer_base
    )
    (tokens,) = (field for field in fields(FSDPCriticConfig) if field.name == "ppo_infer_max_token_len_per_gpu")
    assert (tokens.default, FSDPEngineConfig(strategy="fsdp").use_dynamic_bsz) == (_CRITICS_TOKENS, True)


def test_verls_v1_trainer_hands_the_correction_to_no_loss_beside_bypass_mode():
    """Until it does: `_check_staleness` refuses what only the loss of that mode reads."""
    from verl.trainer.ppo import ray_trainer
    from verl.trainer.ppo.v1 import trainer_base, trainer_separate_async

    assert "apply_bypass_mode(" in inspect.getsource(ray_trainer), "the name under which the older trainer does"
    for module in (trainer_base, trainer_separate_async):
        assert "apply_bypass_mode" not in inspect.getsource(module)
        assert "policy_loss" not in inspect.getsource(module)


def _lengths_per_optimizer_step(batch, ranks, mini_batch_rows):
    """The lengths that each optimizer step of each rank gets, in order, cut by the iterator of verl's workers."""
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    lengths = torch.tensor([tag["seq_len"] for tag in batch.tags])
    cut = []
    for share in lengths.chunk(ranks):
        rows = TensorDict({"length": share}, batch_size=[len(share)])
        steps = tensordict_utils.make_iterator(
            rows, mini_batch_size=mini_batch_rows // ranks, epochs=1, seed=42, dataloader_kwargs={"shuffle": False}
        )
        cut.append([step["length"].tolist() for step in steps])
    return cut


def _batch_of(lengths):
    from transfer_queue import KVBatchMeta

    keys, tags = [str(row) for row in range(len(lengths))], [{"seq_len": length} for length in lengths]
    return KVBatchMeta(partition_id="train", keys=keys, tags=tags, extra_info={})


def test_rows_of_like_length_lie_side_by_side_and_every_optimizer_step_keeps_the_rows_that_verl_gives_it():
    """Two mini-batches: sessions that left a second row make more rows than one mini-batch has."""
    import random

    from seamless_verl.verl_adapter.trainer.trainer import separate_async

    lengths = random.Random(0).sample(range(400, 8000), 32)
    trainer = _balancing_trainer(ranks=2, mini_batch=8)
    ours = _lengths_per_optimizer_step(trainer._balanced(_batch_of(lengths), {}), 2, 16)
    verl = separate_async.PPOTrainerSeparateAsync._balance_batch(trainer, _batch_of(lengths), {})
    verls = _lengths_per_optimizer_step(verl, 2, 16)
    assert [len(steps) for steps in verls] == [2, 2]
    assert verls != ours
    assert ours == [[sorted(step) for step in steps] for steps in verls]


@pytest.mark.parametrize(("critic_mini_batch", "critic_ranks"), [(4, 2), (4, 1), (16, 2), (12, 1)])
def test_a_critic_with_mini_batches_of_another_size_keeps_its_rows_per_step_too(critic_mini_batch, critic_ranks):
    import random

    from seamless_verl.verl_adapter.trainer.trainer import separate_async

    lengths = random.Random(1).sample(range(400, 8000), 96)
    trainer = _balancing_trainer(2, 8, critic_mini_batch, critic_ranks)
    ours = trainer._balanced(_batch_of(lengths), {})
    verl = separate_async.PPOTrainerSeparateAsync._balance_batch(trainer, _batch_of(lengths), {})
    for ranks, mini_batch_rows in [(2, 16), (critic_ranks, 2 * critic_mini_batch)]:
        kept, given = (_lengths_per_optimizer_step(batch, ranks, mini_batch_rows) for batch in (ours, verl))
        assert [[set(step) for step in steps] for steps in kept] == [[set(step) for step in steps] for steps in given]


@pytest.mark.parametrize("critic_ranks", [2, 1])
def test_where_prefixes_are_shared_a_group_lies_on_one_rank_and_every_optimizer_step_keeps_its_rows(critic_ranks):
    import random

    from transfer_queue import KVBatchMeta

    from seamless_verl.config import SeamlessConfig
    from seamless_verl.verl_adapter.trainer.trainer import separate_async

    def batch():
        rng = random.Random(2)
        sizes = [(f"group{row // 4}_{row % 4}_0", 100 * (1 + row // 4), rng.randrange(10, 400)) for row in range(32)]
        rng.shuffle(sizes)
        tags = [{"seq_len": prompt + response, "response_len": response} for _, prompt, response in sizes]
        return KVBatchMeta(partition_id="train", keys=[key for key, *_ in sizes], tags=tags, extra_info={})

    trainer = _balancing_trainer(2, 8, 8, critic_ranks)
    trainer.seamless = SeamlessConfig(shared_prefix="on")
    ours = trainer._balanced(batch(), {})
    verl = separate_async.PPOTrainerSeparateAsync._balance_batch(trainer, batch(), {})
    for ranks in {2, critic_ranks}:
        steps = [_lengths_per_optimizer_step(each, ranks, 16) for each in (ours, verl)]
        # One optimizer step is the union of what every rank cuts off next.
        kept, given = ([sorted(itertools.chain(*parts)) for parts in zip(*cut, strict=True)] for cut in steps)
        assert kept == given
    apart = [sum(_parts_of_groups(each.keys, 8)) for each in (ours, verl)]
    assert apart[0] < apart[1] or critic_ranks == 1  # whose cuts let no row change its rank


def _parts_of_groups(keys, size):
    """Groups in each stretch of so many rows, which one rank computes together."""
    return [len({key.split("_")[0] for key in keys[first : first + size]}) for first in range(0, len(keys), size)]


def test_rows_digest_alike_whatever_carries_them_and_differ_when_anything_differs():
    import torch

    from seamless_verl.verl_adapter.rollout.verl_samples import row_digest

    row = ([1, 2], [3, 4, 5], [1, 0, 1], [-0.1, 0.0, -0.3])
    tensors = tuple(torch.tensor(part) for part in row)
    assert row_digest(*row) == row_digest(*tensors)
    changed = [
        ([1], *row[1:]),
        (row[0], [3, 4, 6], *row[2:]),
        (*row[:2], [1, 1, 1], row[3]),
        (*row[:3], [-0.1, 0.0, -0.31]),
    ]
    assert len({row_digest(*other) for other in [row, *changed]}) == 5
    assert row_digest([1, 2], [3], [1], [0.0]) != row_digest([1], [2, 3], [1], [0.0])


def _audited(monkeypatch, **changes):
    """Run the trainer's audit on a session whose rows' stored fields were changed after they were stamped."""
    import torch
    from transfer_queue import KVBatchMeta

    from seamless_verl.verl_adapter.rollout.verl_samples import row_digest
    from seamless_verl.verl_adapter.trainer import step_report

    stored = {
        "prompts": torch.tensor([1, 2]),
        "responses": torch.tensor([3, 4]),
        "response_mask": torch.tensor([1, 1]),
        "rollout_log_probs": torch.tensor([-0.5, -0.25]),
        "rm_scores": torch.tensor([0.0, 1.0]),
    }
    stamp = {"digest": row_digest(*list(stored.values())[:4]), "violations": changes.pop("violations", 0)}
    passed = {"passed": changes.pop("passed", 1.0)}
    stored |= {"extra_fields": {"seamless": stamp, "reward_extra_info": passed}, **changes}
    first = stored | {"rm_scores": torch.tensor([0.0, -7.0])}  # of two rows of a session, the last one's reward counts
    both = {name: [first[name], value] for name, value in stored.items()}
    monkeypatch.setattr(step_report.tq, "kv_batch_get", lambda **_: both)
    meter = step_report.StepMeter()
    keys = ["uid_0_0", "uid_0_1"]
    meter.audit(KVBatchMeta(partition_id="train", keys=keys, tags=[{"seq_len": 4}] * 2, extra_info={}))
    return meter.finish(step=1, total_steps=1, timing={"step": 2.0, "gen": 0.5})


def test_a_row_as_the_proxy_stamped_it_is_trained(monkeypatch):
    report = _audited(monkeypatch)
    assert (report.rows_audited, report.rollouts, report.reward, report.pass_rate) == (2, 1, 1.0, 1.0)
    assert report.tokens_per_s == 2.0


def test_beside_rows_of_verls_own_loops_without_log_probs_the_others_are_audited(monkeypatch):
    """TransferQueue gives a column only where all rows that are asked for have it."""
    import torch
    from transfer_queue import KVBatchMeta

    from seamless_verl.verl_adapter.rollout.verl_samples import row_digest
    from seamless_verl.verl_adapter.trainer import step_report

    ones = dict.fromkeys(("prompts", "responses", "response_mask", "rm_scores"), torch.tensor([1]))
    sampled = torch.tensor([-0.5])
    stamp = {"digest": row_digest([1], [1], [1], sampled), "violations": 0}
    rows = {"a_0_0": ones | {"extra_fields": {}}}
    rows["b_0_0"] = ones | {"rollout_log_probs": sampled, "extra_fields": {"seamless": stamp}}

    def get(keys, partition_id, select_fields):
        return {f: [rows[k][f] for k in keys] for f in select_fields if all(f in rows[k] for k in keys)}

    monkeypatch.setattr(step_report.tq, "kv_batch_get", get)
    meter = step_report.StepMeter()
    meter.audit(KVBatchMeta(partition_id="train", keys=[*rows], tags=[{}, {}], extra_info={}))
    report = meter.finish(step=1, total_steps=1, timing={"step": 1.0})
    assert (report.rows, report.rows_audited, report.audit_violations) == (2, 1, 0)


@pytest.mark.parametrize(("passed", "rate"), [("3/5", None), ([1, 0], None), (7, None), (0.5, 0.5), (np.True_, 1.0)])
def test_what_a_reward_calls_passed_is_a_rate_where_it_is_a_share(monkeypatch, passed, rate):
    """verl's own agent loops may call anything so."""
    from seamless_verl.verl_adapter.trainer.step_report import validation_report

    assert _audited(monkeypatch, passed=passed).pass_rate == rate
    (report,) = validation_report(1, ["s"] * 2, ["u", "v"], {"reward": [0.25, 0.25], "passed": [passed, None]})
    assert (report.metric, report.mean) == (("reward", 0.25) if rate is None else ("passed", rate / 2))


@pytest.mark.parametrize(
    "change",
    [
        {"responses": [3, 5]},
        {"prompts": [1, 3]},
        {"response_mask": [1, 0]},
        {"rollout_log_probs": [-0.5, -0.26]},
        {"violations": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_row_that_was_changed_on_the_way_ends_the_run_before_it_is_trained(monkeypatch, change):
    import torch

    from seamless_verl.verl_adapter.trainer.step_report import AuditFailed

    tensors = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in change.items()}
    with pytest.raises(AuditFailed, match="uid_0_0"):
        _audited(monkeypatch, **tensors)


def test_the_step_of_a_refused_batch_is_reported_with_the_number_of_its_rows(monkeypatch, tmp_path):
    import io
    from types import SimpleNamespace

    import torch
    import verl.trainer.ppo.v1  # noqa: F401  (first, as in a run: it loads our trainer)
    from transfer_queue import KVBatchMeta

    from seamless_verl.observe.page.html import render
    from seamless_verl.observe.reporter import STEPS, Reporter, read_records
    from seamless_verl.observe.run_folder import load_digest
    from seamless_verl.verl_adapter.rollout.attempt_watch import AttemptDesk
    from seamless_verl.verl_adapter.trainer import step_report
    from seamless_verl.verl_adapter.trainer.trainer import SeamlessTrainer
    from seamless_verl.verl_adapter.trainer.trainer_flight import TrainerFlight

    stamps = [{"digest": "of another row", "violations": 0}, {"digest": "", "violations": 2}, None]
    column = [torch.tensor([1])] * 3
    fields = dict.fromkeys(("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores"), column)
    fields["extra_fields"] = [{"seamless": stamp} if stamp else {} for stamp in stamps]
    monkeypatch.setattr(step_report.tq, "kv_batch_get", lambda **_: fields)
    terminal, logged = io.StringIO(), []
    trainer = object.__new__(SeamlessTrainer)
    trainer.meter, trainer.flight = step_report.StepMeter(), TrainerFlight(str(tmp_path))
    trainer._step_began_at = trainer.flight.recorder.now() - 2.0
    trainer._books = lambda: ()
    trainer.reporter = Reporter(tmp_path, terminal)
    trainer.global_steps, trainer.total_training_steps = 4, 9
    trainer.curriculum = None
    trainer.rows = SimpleNamespace(desk=AttemptDesk([], print))
    trainer.logger = SimpleNamespace(log=lambda data, step: logged.append((step, data["seamless/audit_violations"])))
    batch = KVBatchMeta(partition_id="train", keys=["a_0_0", "b_0_0", "c_0_0"], tags=[{}] * 3, extra_info={})
    with pytest.raises(step_report.AuditFailed, match=r"a_0_0 .*\(2 such rows\)"):
        trainer._audited_old_log_prob(batch, {})
    (record,) = read_records(tmp_path / STEPS)
    assert (record["step"], record["rows"], record["rows_audited"], record["audit_violations"]) == (4, 3, 2, 2)
    assert record["step_s"] >= 2.0
    assert "AUDIT: 2 of 3 rows" in terminal.getvalue()
    assert logged == [(4, 2)]
    trainer.flight.broke(step_report.AuditFailed("row a_0_0"))
    assert "2 rows are not what the engine returned" in render(load_digest(tmp_path))


def _with_versions(*versions):
    from transfer_queue import KVBatchMeta

    tags = [{"min_global_steps": version, "max_global_steps": version} for version in versions]
    keys = [f"uid_{number}_0" for number in range(len(versions))]
    return KVBatchMeta(partition_id="train", keys=keys, tags=[*tags], extra_info={})


def _compared(monkeypatch, *differences):
    """The step of rows of the current version whose log-probs differ so much; the last token of each is no answer's."""
    import torch

    from seamless_verl.verl_adapter.trainer import step_report

    sampled = [torch.full((len(row),), -0.5) for row in differences]
    columns = {
        "old_log_probs": [known + torch.tensor(row) for known, row in zip(sampled, differences, strict=True)],
        "rollout_log_probs": sampled,
        "response_mask": [torch.tensor([1] * (len(row) - 1) + [0]) for row in differences],
    }
    monkeypatch.setattr(step_report.tq, "kv_batch_get", lambda **_: columns)
    meter = step_report.StepMeter()
    meter.compare_log_probs(_with_versions(*[7] * len(differences)), current_version=7)
    return meter.finish(step=1, total_steps=1, timing={"step": 1.0})


def test_the_largest_difference_of_log_probs_is_that_of_any_token_that_is_trained(monkeypatch):
    """A row may train nothing: an agent loop of the user's own can mask what was cut off."""
    report = _compared(monkeypatch, [9.0], [0.0, -0.3, 9.0], [0.1, 0.0, 9.0])
    assert report.max_logprob_diff == pytest.approx(0.3)
    assert _compared(monkeypatch, [9.0]).max_logprob_diff is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_log_prob_that_is_no_number_ends_the_run(monkeypatch, value):
    from seamless_verl.verl_adapter.trainer.step_report import AuditFailed

    with pytest.raises(AuditFailed, match="row uid_1_0 has a log-prob that is not finite"):
        _compared(monkeypatch, [0.3, 0.0], [value, 0.0])


def test_a_validation_has_what_came_of_a_failed_group_and_only_verls_acc_counts_what_did_not(monkeypatch):
    """What `report_validation` and docs/running.md say."""
    from verl.trainer.ppo.metric_utils import process_validation_metrics
    from verl.trainer.ppo.v1 import replay_buffer

    from seamless_verl.verl_adapter.trainer.step_report import report_validation

    prompt = {"is_prompt": True, "status": "failure", "global_steps": 3}
    monkeypatch.setattr(replay_buffer.tq, "kv_list", lambda: {"val": {"a": prompt, "a_0_0": {"seq_len": 4}}})
    monkeypatch.setattr(replay_buffer.tq, "kv_clear", lambda **_: None)
    buffer = replay_buffer.ReplayBufferAsync("", {}, None, "drop", {})
    batch, _ = buffer.sample(global_steps=3, partition_id="val", batch_size=1)
    assert batch.keys == ["a_0_0"]

    infos = {"reward": [1.0], "acc": [1.0], "passed": [1.0]}
    found = process_validation_metrics(["sums"], ["a"], infos, expected_acc_counts={("sums", "a"): 2})["sums"]
    assert (found["acc"]["mean@2"], found["reward"]["mean@1"], found["passed"]["mean@1"]) == (0.5, 1.0, 1.0)
    told, reports = [], []
    reporter = types.SimpleNamespace(validation=reports.append, say=told.append)
    report_validation(reporter, 3, 2, ["sums"], ["a"], infos)
    assert reports[0].mean == 1.0
    assert told == [
        "validation after step 3: 1 of 2 rollouts are missing, and in none of these figures; verl's acc counts them "
        "as 0 (the reasons are in logs/)"
    ]


def test_a_validation_is_reported_on_the_scores_and_on_as_many_as_were_asked_for_whatever_rewards_and_rows_say():
    """verl 0.9.1 puts what a reward function calls ``reward`` behind a batch's scores, where workers are not ours; a
    row may name its rollouts."""
    from omegaconf import OmegaConf

    importlib.import_module("verl.trainer.ppo.v1")  # which brings in our trainer
    from seamless_verl.verl_adapter.trainer.trainer import SeamlessTrainer

    reports, told = [], []
    trainer = object.__new__(SeamlessTrainer)
    trainer.config = OmegaConf.create({"trainer": {"log_val_generations": 0}})
    trainer.global_steps = 3
    trainer.reporter = types.SimpleNamespace(validation=reports.append, say=told.append)
    infos = {"reward": [1.0, 0.5, 7.0, 7.0], "score": [1.0, 0.5]}
    expected = {("s", "u"): 1, ("s", "v"): 2}
    found = trainer._val_metrics_update(["s", "s"], ["u", "v"], infos, [1, 1], expected_acc_counts=expected)
    assert (reports[0].mean, reports[0].rollouts) == (0.75, 2)
    assert found["val-core/s/reward/mean@1"] == 0.75
    assert "1 of 3 rollouts are missing" in told[0]


def test_each_data_source_is_validated_on_what_its_reward_tells_and_what_it_leaves_out_has_not_passed():
    from seamless_verl.verl_adapter.trainer.step_report import validation_report

    infos = {"reward": [1.0, 0.0, 0.5, 0.25], "passed": [1.0, None, None, None]}
    reports = validation_report(3, ["code", "code", "math", "math"], ["a", "b", "c", "d"], infos)
    found = {report.name: (report.metric, report.mean, report.rollouts) for report in reports}
    assert found == {"code": ("passed", 0.5, 2), "math": ("reward", 0.375, 2)}


def test_verls_reward_managers_call_a_plain_number_acc():
    """Why the curriculum doubts an ``acc`` that comes alone; may go when verl tells the two apart."""
    from verl.experimental.reward_loop.reward_manager import dapo, naive

    importlib.import_module("verl.trainer.ppo.v1")  # which brings in our trainer
    from seamless_verl.verl_adapter.dataloader.curriculum_dataloader import _OF_A_PLAIN_NUMBER

    assert 'reward_extra_info["acc"] = score' in inspect.getsource(naive)
    told = set(re.findall(r'reward_extra_info\["(\w+)"\]', inspect.getsource(dapo)))
    assert told == _OF_A_PLAIN_NUMBER


def test_tasks_of_one_name_are_told_apart_and_their_gain_is_no_paired_one():
    from seamless_verl.observe.reporter import as_record
    from seamless_verl.observe.summary import _gain
    from seamless_verl.verl_adapter.trainer.step_report import validation_report

    sources, infos = ["s"] * 4 + ["t"], {"task_id": ["/0", "/0", "/0", "/1", "/0"], "reward": [1.0, 0.0, 0.0, 0.5, 1.0]}
    before, other = map(as_record, validation_report(1, sources, ["u0", "u0", "u1", "u2", "u3"], infos))
    assert (before["tasks"], before["rollouts"], before["mean"]) == (3, 4, pytest.approx(1 / 3))
    assert other["task_means"] == {"/0": 1.0}
    after, _ = map(as_record, validation_report(2, sources, ["v0", "v0", "v1", "v2", "v3"], infos))
    assert (_gain(before, after).mean, _gain(before, after).tasks) == (0.0, 3)
    assert _gain(before, after).high > 0, "an interval of paired differences would be 0"


def test_staleness_counts_from_the_first_token_and_a_replayed_row_is_fresh():
    from seamless_verl.verl_adapter.trainer import step_report

    meter = step_report.StepMeter()
    meter.count_staleness(_with_versions(7, 6, 8), current_version=7)
    report = meter.finish(step=1, total_steps=1, timing={"step": 1.0})
    assert (report.staleness_mean, report.staleness_max) == (pytest.approx(1 / 3), 1)


def test_a_row_of_a_version_that_does_not_exist_ends_the_run():
    from seamless_verl.verl_adapter.trainer import step_report

    meter = step_report.StepMeter()
    with pytest.raises(step_report.AuditFailed, match="uid_1_0 says that its first token is of version 9"):
        meter.count_staleness(_with_versions(7, 9), current_version=7)
    assert meter.finish(step=1, total_steps=1, timing={"step": 1.0}).audit_violations == 1


@pytest.mark.parametrize(("ranks", "rows"), [(1, 4), (2, 4), (8, 8)])
def test_trainer_and_rollout_are_compared_on_a_few_rows_of_the_current_version_other_ones_each_time(ranks, rows):
    from seamless_verl.verl_adapter.trainer.step_report import rows_to_compare

    batch = _with_versions(*([6, 7] * 64))
    samples = [rows_to_compare(batch, 7, ranks, 64), rows_to_compare(_with_versions(*([8, 6] * 64)), 8, ranks, 64)]
    for sample, version in zip(samples, (7, 8), strict=True):
        assert len(set(sample.keys)) == rows
        assert {tag["min_global_steps"] for tag in sample.tags} == {version}
    places = [{int(key.split("_")[1]) // 2 for key in sample.keys} for sample in samples]
    assert places[0] != places[1]
    assert batch.extra_info == {}


def test_a_sample_is_filled_up_to_equal_shares_and_empty_where_nothing_can_be_compared():
    from seamless_verl.verl_adapter.trainer.step_report import rows_to_compare

    sample = rows_to_compare(_with_versions(6, 7, 6, 7, 6, 6, 6, 6), 7, ranks=4, micro=1)
    assert len(set(sample.keys)) == 4
    assert {"uid_1_0", "uid_3_0"} < set(sample.keys)
    assert rows_to_compare(_with_versions(6, 6), 7, ranks=1, micro=1) is None


@pytest.mark.parametrize(("configured", "taken"), [(None, 6), (64, 6), (6, 6), (4, 3), (1, 1)])
def test_a_sample_puts_no_more_rows_on_a_gpu_at_a_time_than_the_user_allows(configured, taken):
    """With dynamic batch sizes nothing is configured, and verl counts tokens."""
    from omegaconf import OmegaConf
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.workers.engine.utils import prepare_micro_batches

    from seamless_verl.verl_adapter.trainer.step_report import StepMeter

    rollout = {"log_prob_micro_batch_size_per_gpu": configured}
    config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": rollout}, "algorithm": {"rollout_correction": {"bypass_mode": True}}}
    )
    computed = []

    def compute(sample, metrics):
        assert not config.algorithm.rollout_correction.bypass_mode
        computed.append(sample)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        StepMeter().compare_a_sample(_with_versions(*[7] * 384), 7, 2, config, compute)
    (sample,) = computed
    assert len(sample.keys) == 2 * 6
    assert sample.extra_info["micro_batch_size_per_gpu"] == taken
    share = TensorDict({}, batch_size=[6])
    tensordict_utils.assign_non_tensor(share, use_dynamic_bsz=False, **sample.extra_info)
    assert [len(part) for part in prepare_micro_batches(share)[0]] == [taken] * (6 // taken)


def test_the_idle_shares_of_a_step_are_those_of_the_books_between_its_beginning_and_its_end():
    from seamless_verl.observe.time_ledger import Category, SliceSeconds
    from seamless_verl.verl_adapter.trainer import step_report

    def books(name: str, pool: str, wall_s: float, idle_s: float) -> SliceSeconds:
        seconds = {**dict.fromkeys(Category, 0.0), Category.WAIT_DATA: idle_s, Category.TRAIN: wall_s - idle_s}
        return SliceSeconds(slice=name, pool=pool, devices=1, wall_s=wall_s, seconds=seconds)

    meter = step_report.StepMeter()
    meter.open_window((books("t", "trainer", 5.0, 5.0), books("r", "rollout", 5.0, 0.0)))
    meter.close_window((books("t", "trainer", 15.0, 7.5), books("r", "rollout", 15.0, 5.0)))
    report = meter.finish(step=1, total_steps=1, timing={"step": 10.0})
    assert report.idle_share == {"trainer": pytest.approx(0.25), "rollout": pytest.approx(0.5)}
    meter.open_window((books("t", "trainer", 5.0, 5.0),))  # a router of the user's own: nobody knows
    meter.close_window((books("t", "trainer", 15.0, 7.5),))
    assert meter.finish(step=2, total_steps=2, timing={"step": 10.0}).idle_share["rollout"] is None


def test_what_sharing_saved_adds_up_over_optimizer_steps_and_models():
    from types import SimpleNamespace

    from seamless_verl.verl_adapter.trainer import step_report

    model = SimpleNamespace(ppo_epochs=2, ppo_mini_batch_size=4)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(n=2), actor=model), critic=model)
    meter = step_report.StepMeter()
    meter._lengths = [(60, 20), (90, 30)]

    def told(role, tokens, computed, saved):
        figures = {"tokens": tokens, "tokens_computed": computed, "seconds_saved": saved}
        return {f"{role}/shared_prefix/{key}": value for key, value in figures.items()}

    # 16 rows are two optimizer steps of 4 x 2 rows, twice over.
    meter.count_sharing(told("actor", 100.0, 50.0, 1.0) | told("critic", 100.0, 100.0, 0.5), config, 16)
    report = meter.finish(step=1, total_steps=1, timing={"step": 10.0})
    assert (report.row_tokens, report.computed_tokens, report.sharing_saved_s) == (200, 150, 6.0)
    meter.count_sharing({}, config, 16)
    assert meter.finish(step=2, total_steps=2, timing={"step": 10.0}).computed_tokens is None


class _Scripted:
    """verl's client with scripted attempts: (tokens, version, stop reason); stands at `LLMServerClient.generate`."""

    def __init__(self, attempts):
        self.attempts = list(attempts)
        self.asked = []

    async def __call__(self, client, *, request_id, prompt_ids, sampling_params, **_):
        from verl.workers.rollout.replica import TokenOutput

        self.asked.append((list(prompt_ids), dict(sampling_params)))
        tokens, version, reason = self.attempts.pop(0)
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-0.5] * len(tokens),
            stop_reason=reason,
            extra_fields={"global_steps": version, "num_cached_tokens": 3},
        )


def _client(monkeypatch, attempts, seamless=None, **rollout):
    from omegaconf import OmegaConf

    from seamless_verl.verl_adapter.rollout import llm_client

    scripted = _Scripted(attempts)
    monkeypatch.setattr(llm_client.LLMServerClient, "generate", lambda self, **kw: scripted(self, **kw))
    ours = {"seamless": seamless} if seamless else {}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"response_length": 50, **rollout}}, **ours})
    return llm_client.VersionedLLMClient(config), scripted


async def test_an_interrupted_generation_continues_with_its_tokens_and_its_budget(monkeypatch):
    client, scripted = _client(monkeypatch, [([1, 2], 4, "aborted"), ([], 4, "aborted"), ([3], 5, "completed")])
    params = {"max_tokens": 10, "temperature": 1.0}
    output = await client.generate("r", prompt_ids=[9, 9], sampling_params=params)
    assert output.token_ids == [1, 2, 3]
    assert output.extra_fields["version_spans"] == [(4, 2), (5, 1)]
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (4, 5)
    assert [(prompt, asked["max_tokens"]) for prompt, asked in scripted.asked] == [
        ([9, 9], 10),
        ([9, 9, 1, 2], 8),
        ([9, 9, 1, 2], 8),
    ]
    assert params == {"max_tokens": 10, "temperature": 1.0}


async def test_a_replica_that_keeps_refusing_is_asked_ever_more_rarely(monkeypatch):
    refusals = [([], None, "aborted")] * 2000
    attempts = [*refusals, ([1], 4, "aborted"), ([], 4, "aborted"), ([2], 5, "completed")]
    client, _ = _client(monkeypatch, attempts)
    waits = []

    async def waited(seconds):
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", waited)
    output = await client.generate("r", prompt_ids=[9], sampling_params={})
    assert output.token_ids == [1, 2]
    assert sum(wait <= 3 for wait in itertools.accumulate(waits)) < 10
    assert waits[-3:] == [1, 0, waits[0]], "after an answer as at first"
    assert max(waits) == 1


async def test_an_interruption_at_the_last_token_of_the_budget_ends_the_generation(monkeypatch):
    client, scripted = _client(monkeypatch, [([1, 2], 4, "aborted")])
    output = await client.generate("r", prompt_ids=[9], sampling_params={"max_tokens": 2})
    assert output.stop_reason == "length"
    assert len(scripted.asked) == 1


@pytest.mark.parametrize(("asked", "told"), [(2, "length"), (3, "completed")])
async def test_an_answer_that_fills_its_budget_ended_by_length_as_under_verls_client(asked, told, monkeypatch):
    client, _ = _client(monkeypatch, [([1, 2], 4, "completed")])
    output = await client.generate("r", prompt_ids=[0], sampling_params={"max_tokens": asked})
    assert output.stop_reason == told


async def test_without_a_limit_the_configured_response_length_is_the_budget(monkeypatch):
    client, scripted = _client(monkeypatch, [([1] * 20, 1, "aborted"), ([2], 1, "completed")])
    output = await client.generate("r", prompt_ids=[9], sampling_params={})
    assert [asked["max_tokens"] for _, asked in scripted.asked] == [50, 30]
    assert output.extra_fields["version_spans"] == [(1, 21)]


async def test_an_answer_that_fills_its_engine_is_complete_and_not_asked_for_again(monkeypatch):
    """verl's server would refuse a prompt that leaves no room."""
    client, scripted = _client(monkeypatch, [([1] * 4, 1, "aborted")], max_model_len=5)
    output = await client.generate("r", prompt_ids=[9], sampling_params={})
    assert ([asked["max_tokens"] for _, asked in scripted.asked], output.stop_reason) == ([4], "length")


async def test_under_vllm_an_interrupted_answer_under_a_grammar_goes_on(monkeypatch):
    from seamless_verl.trajectory.generation import GRAMMAR_PREFIX

    attempts = [([1, 2], 4, "aborted"), ([3], 5, "aborted"), ([4], 5, "completed")]
    client, scripted = _client(monkeypatch, attempts, name="vllm")
    params = {"max_tokens": 10, "structured_outputs": object()}
    output = await client.generate("r", prompt_ids=[9], sampling_params=params)
    assert output.token_ids == [1, 2, 3, 4]
    assert output.extra_fields["version_spans"] == [(4, 2), (5, 2)]
    told = [(prompt, asked["max_tokens"], asked.get("extra_args")) for prompt, asked in scripted.asked]
    assert told == [
        ([9], 10, None),
        ([9, 1, 2], 8, {GRAMMAR_PREFIX: 2}),
        ([9, 1, 2, 3], 7, {GRAMMAR_PREFIX: 3}),
    ]


async def test_under_another_engine_an_interrupted_answer_under_a_grammar_starts_anew(monkeypatch):
    client, scripted = _client(monkeypatch, [([1, 2], 4, "aborted"), ([3, 4], 5, "completed")], name="sglang")
    params = {"max_tokens": 10, "structured_outputs": object()}
    output = await client.generate("r", prompt_ids=[9], sampling_params=params)
    assert (output.token_ids, output.log_probs) == ([3, 4], [-0.5, -0.5])
    assert output.extra_fields["version_spans"] == [(5, 2)]
    assert [(prompt, asked["max_tokens"]) for prompt, asked in scripted.asked] == [([9], 10), ([9], 10)]


async def test_a_stop_string_across_an_interruption_ends_the_answer_where_it_ends(monkeypatch):
    attempts = [([1, 2, 3], 4, "aborted"), ([4, 5, 6, 7], 5, "aborted")]
    client, scripted = _client(monkeypatch, attempts)
    texts = {1: "a", 2: "b", 3: "ST", 4: "O", 5: "P!", 6: "c", 7: "d"}
    output = await client.generate(
        "r",
        prompt_ids=[9],
        sampling_params={"max_tokens": 10, "stop": ["STOP"], "seed": 3},
        decode=lambda ids: "".join(texts[token] for token in ids),
    )
    assert (output.token_ids, output.stop_reason) == ([1, 2, 3, 4, 5], "completed")
    assert len(output.log_probs) == 5
    assert output.extra_fields["version_spans"] == [(4, 3), (5, 2)]
    assert len({asked["seed"] for _, asked in scripted.asked}) == 2  # the noise of the first attempt is not drawn again


class _Handle:
    """A replica or a balancer as Ray would hand it over: each method is called through ``.remote``."""

    def __init__(self, **methods):
        for name, method in methods.items():
            setattr(self, name, types.SimpleNamespace(remote=method))


async def test_cancelling_a_generation_frees_its_replica():
    from omegaconf import OmegaConf
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    from seamless_verl.verl_adapter.rollout.llm_client import VersionedLLMClient

    started, named, aborted = asyncio.Event(), [], []

    async def generate(*, request_id, **_):
        named.append(request_id)
        started.set()
        await asyncio.Event().wait()

    async def nothing():
        return []

    async def acquire(*, request_id):
        return "replica", replica

    replica = _Handle(generate=generate, abort_request=lambda *args, **options: aborted.append((args, options)))
    balancer = _Handle(
        require_acquire_fields=nothing,
        require_release_fields=nothing,
        acquire_server=acquire,
        release_server=lambda server_id: None,
    )
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"response_length": 50, "name": "vllm"}}})
    client = VersionedLLMClient(config, balancer)
    asking = asyncio.create_task(client.generate("r", prompt_ids=[1], sampling_params={}))
    await started.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    ((args, options),) = aborted
    assert list(args) == named
    inspect.signature(vLLMHttpServer.abort_request).bind(None, *args, **options)


async def test_a_replica_is_told_how_old_the_session_is_and_told_the_same_after_an_interruption():
    import inspect

    from omegaconf import OmegaConf
    from verl.workers.rollout.replica import TokenOutput
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    from seamless_verl.verl_adapter.rollout.llm_client import VersionedLLMClient
    from seamless_verl.verl_adapter.rollout.request_log import request_log

    asked = []

    async def generate(**options):
        asked.append(options)
        reason = "completed" if len(asked) > 1 else "aborted"
        return TokenOutput(token_ids=[7], log_probs=[0.0], stop_reason=reason, num_preempted=0)

    async def nothing():
        return []

    async def acquire(*, request_id):
        return "replica", _Handle(generate=generate)

    balancer = _Handle(
        require_acquire_fields=nothing,
        require_release_fields=nothing,
        acquire_server=acquire,
        release_server=lambda server_id: None,
    )
    rollout = {"response_length": 50, "name": "vllm", "scheduling_policy": "priority"}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    client = VersionedLLMClient(config, balancer)
    last_waits = OmegaConf.merge(config, {"seamless": {"router": {"oldest_first": False}}})
    with request_log.session("g", 0):
        began_ms = request_log.began_ms("r")
        await client.generate("r", prompt_ids=[1], sampling_params={})
        await client.generate("r", prompt_ids=[1], sampling_params={}, priority=0)  # as verl's single_turn_agent
        await client.generate("r", prompt_ids=[1], sampling_params={}, priority=5)  # somebody's own
        await VersionedLLMClient(last_waits, balancer).generate("r", prompt_ids=[1], sampling_params={}, priority=0)
    assert [options.get("priority") for options in asked] == [began_ms, began_ms, began_ms, 5, None]
    inspect.signature(vLLMHttpServer.generate).bind(None, **asked[1])


async def test_grammars_reach_vllm_and_what_vllm_refuses_is_refused():
    import time

    from ray.exceptions import RayTaskError
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from seamless_verl.proxy.engine import EngineRefused, GenerationRequest
    from seamless_verl.verl_adapter.rollout.trainer_engine import VerlEngine

    class Client:
        async def generate(self, *, sampling_params, **_):
            made = SamplingParams(**{**sampling_params, "logprobs": 0})
            assert isinstance(made.structured_outputs, StructuredOutputsParams)
            raise RayTaskError("generate", "traceback", ValueError("grammar error")).as_instanceof_cause()

    engine = VerlEngine(Client(), decode=str, max_model_len=100, stop_token_ids=frozenset({0}))
    for constraint, story in (({"json": {"type": "object"}}, "grammar error"), ({}, "one kind|none are specified")):
        request = GenerationRequest(
            request_id="r",
            session_id="s",
            prompt_ids=(1,),
            sampling={"max_tokens": 5, "structured_outputs": constraint},
            deadline=time.time() + 60,
        )
        with pytest.raises(EngineRefused, match=story):
            await engine.generate(request)


class _Router:
    """In place of the load balancer's actor."""

    def __init__(self):
        self.removed = []
        self.remove_servers = self

    async def remote(self, servers):
        self.removed += servers


async def test_a_generation_whose_replica_dies_goes_on_elsewhere_with_what_it_had(monkeypatch):
    from ray.exceptions import ActorDiedError, RayTaskError

    from seamless_verl.verl_adapter.rollout import llm_client
    from seamless_verl.verl_adapter.rollout.request_log import ReplicaCall

    class EngineDeadError(Exception):
        pass

    alone, _ = _client(monkeypatch, [], seamless={"scheduler": {"policy": None}})
    answers = [([1, 2], 4, "aborted"), ([3], 5, "completed")]
    client, scripted = _client(monkeypatch, answers, seamless={"scheduler": {"policy": "greedy"}})
    deaths = {1: ActorDiedError(), 2: RayTaskError("generate", "", EngineDeadError())}
    calls = []

    async def generate(self, **kwargs):
        number = len(calls)
        calls.append(number)
        ReplicaCall.current().routed(f"server-{number}")
        if number in deaths:
            raise deaths[number]
        return await scripted(self, **kwargs)

    monkeypatch.setattr(llm_client.LLMServerClient, "generate", generate)
    client._load_balancer = _Router()
    told = []
    monkeypatch.setattr(llm_client.request_log, "died", lambda server, reason: told.append(server))
    output = await client.generate("r", prompt_ids=[9], sampling_params={"max_tokens": 10})
    assert output.token_ids == [1, 2, 3]
    assert output.extra_fields["version_spans"] == [(4, 2), (5, 1)]
    assert told == client._load_balancer.removed == ["server-1", "server-2"]

    calls.clear()
    deaths[0] = ActorDiedError()
    with pytest.raises(ActorDiedError):  # verl's own trainer cannot go on without a replica
        await alone.generate("r", prompt_ids=[9], sampling_params={"max_tokens": 10})


async def test_what_a_replica_told_of_an_answer_before_it_died_is_kept(monkeypatch):
    from ray.exceptions import ActorDiedError
    from verl.workers.rollout.replica import TokenOutput

    from seamless_verl.verl_adapter.rollout import llm_client
    from seamless_verl.verl_adapter.rollout.request_log import ReplicaCall

    ours = {"scheduler": {"policy": "greedy"}, "supervise": {"tokens_at_risk": 2}}
    client, scripted = _client(monkeypatch, [([4], 5, "completed")], seamless=ours, name="vllm")
    asked = []

    class Dying:
        """In place of the handle of a replica's actor, whose streams are Ray's."""

        def options(self, num_returns):
            return self

        async def remote(self, every, **_):
            for token in range(2):
                part = [10 * token, 10 * token + 1]
                extra = {"version_spans": [(4, 2)]}
                yield _soon(TokenOutput(token_ids=part, log_probs=[-0.5] * 2, stop_reason="part", extra_fields=extra))
            raise ActorDiedError()

    async def generate(self, *, prompt_ids, **kwargs):
        asked.append(prompt_ids)
        if len(asked) > 1:
            return await scripted(self, prompt_ids=prompt_ids, **kwargs)
        call = ReplicaCall.current()
        call.routed("server-0")
        return await call.in_parts(types.SimpleNamespace(generate_in_parts=Dying())).generate.remote()

    monkeypatch.setattr(llm_client.LLMServerClient, "generate", generate)
    client._load_balancer = _Router()
    kept = []
    output = await client.generate("r", prompt_ids=[9], sampling_params={"max_tokens": 10}, on_progress=kept.append)
    assert asked == [[9], [9, 0, 1, 10, 11]]
    assert [list(part.token_ids) for part in kept] == [[0, 1], [10, 11]]
    assert output.token_ids == [0, 1, 10, 11, 4]
    assert output.extra_fields["version_spans"] == [(4, 4), (5, 1)]


async def _soon(output):
    return output


async def test_the_experts_of_each_attempt_stay_with_its_tokens(monkeypatch):
    from verl.workers.rollout.replica import TokenOutput

    from seamless_verl.verl_adapter.rollout import llm_client

    client, _ = _client(monkeypatch, [])
    prompt, attempts = [9, 9], [([1, 2], "aborted"), ([3], "completed")]

    async def generate(self, *, prompt_ids, **_):
        tokens, reason = attempts.pop(0)
        routed = np.array([[[token]] for token in [*prompt_ids, *tokens]])  # of the prompt, too
        known = {"routed_experts": routed, "stop_reason": reason, "extra_fields": {"global_steps": 1}}
        return TokenOutput(token_ids=tokens, log_probs=[-0.5] * len(tokens), **known)

    monkeypatch.setattr(llm_client.LLMServerClient, "generate", generate)
    output = await client.generate("r", prompt_ids=prompt, sampling_params={"max_tokens": 10})
    assert output.routed_experts.ravel().tolist() == [9, 9, 1, 2, 3]


async def test_an_error_of_the_engine_that_is_no_death_is_not_retried(monkeypatch):
    from ray.exceptions import RayTaskError

    from seamless_verl.verl_adapter.rollout import llm_client

    client, _ = _client(monkeypatch, [], seamless={"scheduler": {"policy": "greedy"}})

    async def generate(self, **_):
        raise RayTaskError("generate", "", ValueError("prompt too long"))

    monkeypatch.setattr(llm_client.LLMServerClient, "generate", generate)
    with pytest.raises(RayTaskError) as raised:
        await client.generate("r", prompt_ids=[9], sampling_params={})
    assert isinstance(raised.value.cause, ValueError)


def test_a_transfer_has_the_steps_that_we_wrote_out():
    """`GuardedCheckpointManager.update_weights` is verl's with our waits; a step that verl adds belongs there, too."""
    from verl.checkpoint_engine import CheckpointEngineManager

    source = inspect.getsource(CheckpointEngineManager.update_weights)
    steps = ["abort_replicas", "release_kv_cache_replicas", "build_process_group", "update_weights", '"finalize"']
    steps += ["resume_kv_cache_replicas", "resume_generation_replicas"]
    positions = [source.rindex(step) for step in steps]
    assert positions == sorted(positions)
    assert source.count("await self.") == 4
    assert source.count("ray.get(") == 3  # two of the transfer, one of the naive one


def test_verls_v1_trainers_read_no_reward_under_the_keys_of_older_versions():
    """Why `check_estimator` refuses them; may go when one of these files moves them."""
    from verl.experimental.reward_loop import migrate_legacy_reward_impl
    from verl.trainer import main_ppo
    from verl.trainer.ppo.v1 import trainer_base

    for module in (main_ppo, trainer_base):
        source = inspect.getsource(module)
        assert migrate_legacy_reward_impl.__name__ not in source
        assert not re.search(r"config\.(reward_model|custom_reward_function|sandbox_fusion)\b", source)
