"""verl's `TrainingWorker` on a small random model, with verl's engine or ours; for benchmarks and contract tests."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

BUDGET = 300  # tokens of a micro-batch


def model_folder(folder: str, **shape: Any) -> str:
    """A random Qwen3 on disk."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape = {"initializer_range": 0.1, **shape}
    config = Qwen3Config(**shape, max_position_embeddings=8192, architectures=["Qwen3ForCausalLM"])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def data_of(
    rows: Sequence[tuple[np.ndarray, np.ndarray]],
    seed: int = 0,
    *,
    first_position: int = 0,
    masks: Sequence[np.ndarray] | None = None,
) -> TensorDict:
    """What V1's workers get: prompts and responses, masks and all that the losses of actor and critic read.

    Args:
        masks: of each response; None draws them, with a one in each.
    """
    from verl.utils import tensordict_utils as tu

    rng = np.random.default_rng(seed)

    def nested(parts: Sequence[np.ndarray]) -> torch.Tensor:
        made: torch.Tensor = torch.nested.as_nested_tensor([torch.from_numpy(p) for p in parts], layout=torch.jagged)
        return made

    def noise(scale: float, around: float = 0.0) -> torch.Tensor:
        return nested([(around + scale * rng.standard_normal(len(r))).astype(np.float32) for _, r in rows])

    if masks is None:
        masks = [rng.integers(0, 2, len(response)) for _, response in rows]
        for mask in masks:
            mask[0] = 1
    tensors = {
        "input_ids": nested([np.concatenate(row) for row in rows]),
        "position_ids": nested([np.arange(len(p) + len(r)) + first_position for p, r in rows]),
        "prompts": nested([p for p, _ in rows]),
        "responses": nested([r for _, r in rows]),
        "advantages": noise(1.0),
        "values": noise(0.1),
        "returns": noise(1.0),
        "old_log_probs": noise(0.2, around=-5.3),
        "rollout_is_weights": noise(0.2, around=1.0),
        "response_mask": nested(masks),
        "loss_mask": nested(masks),
    }
    flags = {"calculate_entropy": True, "global_batch_size": len(rows), "global_token_num": None, "temperature": 0.8}
    return tu.get_tensordict(tensors, non_tensor_dict=flags)


def worker_of(
    folder: str, *, ours: bool, options: Sequence[str] = (), budget: int = BUDGET, dtype: str = "fp32"
) -> Any:
    """A training worker of verl's, with our engine or its own.

    Args:
        options: of checkpointing, critic, lora, fused, fixed, auto; reference: it infers only; per-row: its loss is a
            mean over rows, which masks leave finite.
        dtype: that it computes in; weights and sums of gradients are fp32.
    """
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    from seamless_verl.verl_adapter.shared_prefix import MODE, VENDOR

    os.environ |= {"VERL_ENGINE_VENDOR": VENDOR if ours else "", MODE: "auto" if "auto" in options else "on"}
    model = HFModelConfig(
        path=folder,
        load_tokenizer=False,
        use_remove_padding=False,
        lora_rank=4 if "lora" in options else 0,
        use_fused_kernels="fused" in options,
        fused_kernel_options={"impl_backend": "torch"},
        enable_gradient_checkpointing="checkpointing" in options,
        override_config={"attn_implementation": "sdpa"},
    )
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        use_torch_compile=False,
        forward_only="reference" in options,
        model_dtype="fp32",
        max_token_len_per_gpu=budget,
        infer_max_token_len_per_gpu=budget,
        micro_batch_size_per_gpu=4,
        infer_micro_batch_size_per_gpu=4,
        use_dynamic_bsz="fixed" not in options,
        mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    )
    worker = TrainingWorker(
        config=TrainingWorkerConfig(
            model_type="value_model" if "critic" in options else "language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
            checkpoint_config=CheckpointConfig(),
        )
    )
    torch.manual_seed(0)  # the value head and LoRA's matrices are drawn at random
    worker.reset()
    worker.set_loss_fn(_loss(options))
    return worker


def _loss(options: Sequence[str]) -> Any:
    """verl's loss of a worker with these options."""
    from verl.workers.config import ActorConfig, CriticConfig
    from verl.workers.utils.losses import ppo_loss, value_loss

    sizes: dict[str, Any] = {"strategy": "fsdp2", "ppo_micro_batch_size_per_gpu": 4, "rollout_n": 4}
    sizes |= {"loss_agg_mode": "seq-mean-token-mean"} if "per-row" in options else {}
    if "critic" in options:
        return functools.partial(value_loss, CriticConfig(**sizes))
    return functools.partial(ppo_loss, ActorConfig(**sizes, entropy_coeff=0.01, use_kl_loss=False))
