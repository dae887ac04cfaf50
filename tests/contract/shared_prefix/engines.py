"""verl's `TrainingWorker` on one batch, with the stock engine and with ours; options as arguments, ranks as torchrun.

Prints, on rank 0, a JSON object: what was compared, the largest value of the stock engine and the largest difference.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

VOCABULARY = 211
BUDGET = 300  # tokens of a micro-batch


def model_folder(folder: str, *, tied: bool) -> str:
    """A random Qwen3 on disk."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        architectures=["Qwen3ForCausalLM"],
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def batch(seed: int, options: set[str]) -> TensorDict:
    """Three groups of four rows under one system prompt; half of a group's rows share a first turn, too."""
    from verl.utils import tensordict_utils as tu

    rng = np.random.default_rng(seed)

    def ids(low: int, high: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, VOCABULARY, rng.integers(low, high)))

    def nested(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    def noise(scale: float, around: float = 0.0) -> torch.Tensor:
        return nested([around + scale * torch.from_numpy(rng.standard_normal(len(r))).float() for _, r in rows])

    system = ids(20, 21)
    rows: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(3):
        prompt, turn = torch.cat([system, ids(10, 40)]), ids(10, 30)
        rows += [(prompt, torch.cat([turn, ids(5, 30)]) if sample % 2 else ids(5, 50)) for sample in range(4)]
    rows = [rows[index] for index in rng.permutation(len(rows))]
    shift = 1 if "odd-positions" in options else 0
    tensors = {
        "input_ids": nested([torch.cat(row) for row in rows]),
        "position_ids": nested([torch.arange(len(p) + len(r)) + shift for p, r in rows]),
        "prompts": nested([p for p, _ in rows]),
        "responses": nested([r for _, r in rows]),
        "advantages": noise(1.0),
        "values": noise(0.1),
        "returns": noise(1.0),
        "old_log_probs": noise(0.2, around=-5.3),
    }
    masks = nested([torch.from_numpy(rng.integers(0, 2, len(r))).index_fill(0, torch.tensor([0]), 1) for _, r in rows])
    tensors |= {"response_mask": masks, "loss_mask": masks}
    flags: dict[str, Any] = {"calculate_entropy": True, "global_batch_size": len(rows), "global_token_num": None}
    if "row-temperature" in options:
        tensors["temperature"] = torch.from_numpy(rng.choice([0.7, 1.0], len(rows))).float()
    else:
        flags["temperature"] = 0.8
    return tu.get_tensordict(tensors, non_tensor_dict=flags)


def worker_of(folder: str, options: set[str], *, ours: bool) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        ActorConfig,
        CriticConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss, value_loss

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
        model_dtype="fp32",
        max_token_len_per_gpu=BUDGET,
        infer_max_token_len_per_gpu=BUDGET,
        micro_batch_size_per_gpu=4,
        infer_micro_batch_size_per_gpu=4,
        use_dynamic_bsz="fixed" not in options,
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    )
    critic = "critic" in options
    worker = TrainingWorker(
        config=TrainingWorkerConfig(
            model_type="value_model" if critic else "language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
            checkpoint_config=CheckpointConfig(),
        )
    )
    torch.manual_seed(0)  # the value head and LoRA's matrices are drawn at random
    worker.reset()
    sizes: dict[str, Any] = {"strategy": "fsdp2", "ppo_micro_batch_size_per_gpu": 4, "rollout_n": 4}
    if critic:
        worker.set_loss_fn(functools.partial(value_loss, CriticConfig(**sizes)))
    else:
        worker.set_loss_fn(functools.partial(ppo_loss, ActorConfig(**sizes, entropy_coeff=0.01, use_kl_loss=False)))
    return worker


def observed(worker: Any, data: TensorDict) -> dict[str, torch.Tensor]:
    """What verl does with a batch: log-probs or values, then gradients, then two optimizer steps."""
    from verl.utils import tensordict_utils as tu

    found: dict[str, Any] = {"engine": type(worker.engine).__name__}
    asked = data.clone()
    tu.assign_non_tensor(asked, compute_loss=False)
    output = worker.infer_batch(asked)
    begins, ends = (data[key].offsets().diff().tolist() for key in ("prompts", "input_ids"))
    for key in {"log_probs", "entropy", "values"} & set(output.keys()):
        rows = zip(output[key].unbind(), begins, ends, strict=True)
        found[key] = torch.cat([row[begin - 1 : end - 1] for row, begin, end in rows])
    flags = {"use_remove_padding": False, "use_fused_kernels": worker.engine_config.use_fused_kernels}
    flags |= {"use_dynamic_bsz": worker.engine_config.use_dynamic_bsz}
    asked = data.clone()
    tu.assign_non_tensor(asked, **flags, max_token_len_per_gpu=BUDGET, micro_batch_size_per_gpu=4)
    with worker.engine.train_mode(zero_grad_on_exit=False):
        worker.engine.optimizer_zero_grad()
        result = worker.engine.forward_backward_batch(asked, worker.loss_fn)
        found["micro-batches"] = len(result["loss"])
        found["computed"] = result["metrics"].get("shared_prefix/computed", [1.0])[0]
        found["loss"] = torch.tensor(sum(result["loss"]))
        for name, parameter in worker.engine.module.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad
                whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                found[f"gradient of {name}"] = whole.detach().clone()
        worker.engine.optimizer_zero_grad()
    for step in range(2):
        asked = data.clone()
        tu.assign_non_tensor(asked, mini_batch_size=len(data) * worker.engine.get_data_parallel_size(), epochs=1)
        metrics = tu.get(worker.train_mini_batch(asked), "metrics")
        found[f"grad_norm of step {step}"] = torch.tensor(metrics["grad_norm"])
    return found


def main() -> None:
    options = set(sys.argv[1:])
    torch.set_num_threads(1)
    import verl  # noqa: F401  (its plug-ins: the CPU platform, our engines)

    rank = int(os.environ["RANK"])
    data = batch(rank, options)
    with tempfile.TemporaryDirectory() as folder:
        # verl 0.9.1: FSDP2 shards an untied head by itself, and the fused forward then meets a DTensor.
        model_folder(folder, tied="fused" in options)
        stock, ours = (observed(worker_of(folder, options, ours=which), data) for which in (False, True))
    told = {
        key: [value.abs().max().item(), (ours[key] - value).abs().max().item()]
        for key, value in stock.items()
        if isinstance(value, torch.Tensor)
    }
    for key in ("engine", "micro-batches", "computed"):
        told[key] = [stock[key], ours[key]]
    if rank == 0:
        sys.stdout.write("\n" + json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
