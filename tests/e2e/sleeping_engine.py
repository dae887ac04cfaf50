"""Runs vLLM's engine on the CPU and puts it to sleep; prints what it saw as JSON. ``python -m … MODEL``."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def weights_are_numbers(worker: Any) -> bool:
    return not any(parameter.isnan().any() for parameter in worker.model_runner.model.parameters())


def load_again(worker: Any, model: str) -> None:
    from safetensors.torch import load_file

    worker.model_runner.model.load_weights(load_file(f"{model}/model.safetensors").items())


def resident(worker: Any) -> tuple[int, int]:
    """Bytes of weights and of cache."""
    weights = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in worker.model_runner.model.parameters()}
    return sum(weights.values()), sum(cache.untyped_storage().nbytes() for cache in worker.model_runner.kv_caches)


def cache_is_empty(worker: Any) -> bool:
    return not any(cache.any() for cache in worker.model_runner.kv_caches)


def main(model: str) -> None:
    import torch
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams

    from seamless_verl.verl_adapter.weights.weight_checks import _of_worker, checksum

    engine = LLM(
        model,
        enforce_eager=True,
        dtype="float32",
        enable_sleep_mode=True,
        num_gpu_blocks_override=64,
        max_model_len=256,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    def answer() -> list[int]:
        return list(
            engine.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False)[0].outputs[0].token_ids
        )

    def ask(function: Any, *arguments: Any) -> Any:
        return engine.collective_rpc(function, args=arguments)[0]

    seen: dict[str, Any] = {"answers": [answer()], "resident": [ask(resident)]}
    engine.sleep(level=1)
    seen["resident"].append(ask(resident))
    engine.wake_up()
    seen["resident"].append(ask(resident))
    seen["empty"] = ask(cache_is_empty)
    seen["answers"].append(answer())
    took = []
    for _ in range(3):
        began = time.perf_counter()
        engine.sleep(level=2)
        slept = time.perf_counter()
        seen["resident"].append(ask(resident))
        woken = time.perf_counter()
        engine.wake_up(["weights"])
        took.append({"sleep_s": slept - began, "wake_weights_s": time.perf_counter() - woken})
        seen["numbers"] = [ask(weights_are_numbers)]
        seen["resident"].append(ask(resident))
        ask(load_again, model)
        seen["numbers"].append(ask(weights_are_numbers))
        woken = time.perf_counter()
        engine.wake_up(["kv_cache"])
        took[-1]["wake_cache_s"] = time.perf_counter() - woken
        seen["answers"].append(answer())
    stored = checksum(load_file(f"{model}/model.safetensors").values(), torch.float32)
    seen["checksums"] = [ask(_of_worker), f"{stored:016x}"]
    print(json.dumps({**seen, "took": took}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
