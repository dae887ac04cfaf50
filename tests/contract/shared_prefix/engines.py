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

from benchmarks.training_workers import BUDGET, data_of, model_folder, worker_of
from seamless_verl.token_trie import Trie
from seamless_verl.verl_adapter.shared_prefix import plans

TOLD = ("engine", "micro-batches", "computed", "saved", "guard", "both ways", "reference computed")
TIGHT = 150
"""Tokens of a micro-batch that holds two rows where they share, and else one."""
SHAPE = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def batch(seed: int, options: list[str]) -> TensorDict:
    """Three groups of four rows under one system prompt; half of a group's rows share a first turn, too."""
    rng = np.random.default_rng(seed)

    def ids(low: int, high: int) -> np.ndarray:
        return rng.integers(0, SHAPE["vocab_size"], rng.integers(low, high))

    system, rows = ids(20, 21), []
    for _ in range(3):
        prompt, turn = np.concatenate([system, ids(10, 40)]), ids(10, 30)
        rows += [(prompt, np.concatenate([turn, ids(5, 30)]) if sample % 2 else ids(5, 50)) for sample in range(4)]
    rows = [rows[index] for index in rng.permutation(len(rows))]
    data = data_of(rows, seed, first_position=int("odd-positions" in options))
    if "row-temperature" in options:
        del data["temperature"]
        data["temperature"] = torch.from_numpy(rng.choice([0.7, 1.0], len(rows))).float()
    if "no-advantages" in options:
        data["advantages"] = data["advantages"] * 0.0
    return data


def inferred(worker: Any, data: TensorDict) -> dict[str, torch.Tensor]:
    """Log-probs and entropy, or values, where verl reads them."""
    from verl.utils import tensordict_utils as tu

    asked = data.clone()
    tu.assign_non_tensor(asked, compute_loss=False)
    output = worker.infer_batch(asked)
    found = {}
    begins, ends = (data[key].offsets().diff().tolist() for key in ("prompts", "input_ids"))
    for key in {"log_probs", "entropy", "values"} & set(output.keys()):
        rows = zip(output[key].unbind(), begins, ends, strict=True)
        found[key] = torch.cat([row[begin - 1 : end - 1] for row, begin, end in rows])
    return found


def watched(worker: Any) -> list[tuple[bool, int, int]]:
    """Filled while rows are computed both ways, with a micro-batch's way (ours), tokens, and layers recomputed."""
    engine, found = worker.engine, list[tuple[bool, int, int]]()
    both_ways, step, layers = engine._computed_both_ways, engine.forward_step, [0]

    def counting(recompute: Any, *args: Any, **kwargs: Any) -> Any:
        layers[0] += 1
        return recompute(*args, **kwargs)

    def forward_step(micro_batch: TensorDict, *args: Any, **kwargs: Any) -> Any:
        layers[0] = 0
        made = step(micro_batch, *args, **kwargs)
        rows = plans.rows_of(micro_batch["input_ids"])
        ours = plans.marked(micro_batch) is not None
        found.append((ours, len(Trie(rows)) if ours else sum(map(len, rows)), layers[0]))
        return made

    def watching(*args: Any) -> Any:
        engine.forward_step = forward_step
        told = both_ways(*args)
        engine.forward_step = step
        return told

    for module in engine.module.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = functools.partial(counting, module._gradient_checkpointing_func)
    engine._computed_both_ways = watching
    return found


def learned(worker: Any, data: TensorDict, budget: int = BUDGET) -> dict[str, Any]:
    """Loss and gradients of a batch, and what ours tells of it; the weights stay."""
    from verl.utils import tensordict_utils as tu

    flags = {"use_remove_padding": False, "use_fused_kernels": worker.engine_config.use_fused_kernels}
    flags |= {"use_dynamic_bsz": worker.engine_config.use_dynamic_bsz}
    asked, found = data.clone(), dict[str, Any]()
    tu.assign_non_tensor(asked, **flags, max_token_len_per_gpu=budget, micro_batch_size_per_gpu=4)
    with worker.engine.train_mode(zero_grad_on_exit=False):
        worker.engine.optimizer_zero_grad()
        result = worker.engine.forward_backward_batch(asked, worker.loss_fn)
        found["micro-batches"] = len(result["loss"])
        found["computed"] = result["metrics"].get("shared_prefix/computed", [1.0])[0]
        found["saved"] = result["metrics"].get("shared_prefix/seconds_saved", [0.0])[0]
        found["guard"] = [result["metrics"].get(f"shared_prefix/{key}", [None])[0] for key in ("off", "grad_norm_off")]
        found["loss"] = torch.tensor(sum(result["loss"]))
        for name, parameter in worker.engine.module.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad
                whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                found[f"gradient of {name}"] = whole.detach().clone()
        worker.engine.optimizer_zero_grad()
    return found


def stepped(worker: Any, data: TensorDict) -> dict[str, torch.Tensor]:
    """Norms of two optimizer steps."""
    from verl.utils import tensordict_utils as tu

    found = {}
    for step in range(2):
        asked = data.clone()
        tu.assign_non_tensor(asked, mini_batch_size=len(data) * worker.engine.get_data_parallel_size(), epochs=1)
        metrics = tu.get(worker.train_mini_batch(asked), "metrics")
        found[f"grad_norm of step {step}"] = torch.tensor(metrics["grad_norm"])
    return found


def observed(worker: Any, data: TensorDict, options: list[str]) -> dict[str, Any]:
    """What verl does with a batch."""
    return {
        "engine": type(worker.engine).__name__,
        "both ways": watched(worker) if hasattr(worker.engine, "_computed_both_ways") else [],
        **inferred(worker, data),
        **learned(worker, data, TIGHT if "tight" in options else BUDGET),
        **stepped(worker, data),
    }


def referred(worker: Any, data: TensorDict) -> dict[str, Any]:
    """What a reference model tells, which verl keeps in the host's memory."""
    found: dict[str, Any] = {f"reference {key}": value for key, value in inferred(worker, data).items()}
    tally = getattr(worker.engine, "_tally", {"tokens": 1, "tokens_computed": 1})
    return {**found, "reference computed": tally["tokens_computed"] / tally["tokens"]}


def main() -> None:
    options = sys.argv[1:]
    trained = [option for option in options if option != "reference"]
    torch.set_num_threads(1)
    import verl  # noqa: F401  (its plug-ins: the CPU platform, our engines)

    rank = int(os.environ["RANK"])
    data = batch(rank, options)
    with tempfile.TemporaryDirectory() as folder:
        # verl 0.9.1: FSDP2 shards an untied head by itself, and the fused forward then meets a DTensor.
        model_folder(folder, **SHAPE, tie_word_embeddings="fused" in options)
        workers = (worker_of(folder, ours=which, options=trained) for which in (False, True))
        stock, ours = (observed(worker, data, options) for worker in workers)
        if "reference" in options:
            for found, which in ((stock, False), (ours, True)):
                found |= referred(worker_of(folder, ours=which, options=options), data)
    told = {
        key: [value.abs().max().item(), (ours[key] - value).abs().max().item()]
        for key, value in stock.items()
        if isinstance(value, torch.Tensor)
    }
    for key in set(TOLD) & stock.keys():
        told[key] = [stock[key], ours[key]]
    if rank == 0:
        sys.stdout.write("\n" + json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
