"""verl's own workers do the same with our engine as with verl's, on one rank and on two, and compute less."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seamless_verl.errors import ConfigError
from tests.contract.shared_prefix.engines import TIGHT, TOLD

pytestmark = pytest.mark.filterwarnings("ignore:.* engine is not available:UserWarning")  # verl, as it is imported

ROOT = Path(__file__).parents[3]


def ran(folder: Path, module: str, *options: str, ranks: int = 1) -> str:
    """What the first rank of a module beside this file prints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    environment |= {
        "VERL_PLATFORM": "cpu",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DIST_INIT_METHOD": f"tcp://127.0.0.1:{port}",
        "WG_BACKEND": "ray",
    }
    logs = [folder / f"rank-{rank}" for rank in range(ranks)]
    with ExitStack() as stack:
        processes = []
        for rank, log in enumerate(logs):
            mine = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", f"tests.contract.shared_prefix.{module}", *options]
            stream = stack.enter_context(log.open("w"))
            process = subprocess.Popen(command, cwd=ROOT, env=mine, stdout=stream, stderr=subprocess.STDOUT)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        codes = [process.wait(300) for process in processes]
    assert codes == [0] * ranks, "\n".join(log.read_text()[-3000:] for log in logs)
    return logs[0].read_text()


def compared(folder: Path, *options: str, ranks: int = 1) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(ran(folder, "engines", *options, ranks=ranks).strip().splitlines()[-1])
    return told


def assert_the_same(told: dict[str, Any]) -> None:
    figures = {key: value for key, value in told.items() if key not in TOLD}
    assert any(key.startswith("gradient of") for key in figures)
    for key, (largest, difference) in figures.items():
        limit = 1e-5 if key.split()[-1] in ("log_probs", "entropy", "values", "loss") else 1e-4
        assert difference <= limit * max(1.0 if limit == 1e-5 else 1e-6, largest), (key, largest, difference)


def test_while_rows_are_compared_dropout_is_silent_and_all_else_trains() -> None:
    import torch

    from seamless_verl.verl_adapter.shared_prefix import guard

    module = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(2, 2), torch.nn.Dropout(0.5).eval())
    with guard.without_dropout(module):
        assert [each.training for each in module] == [False, True, False]
        assert module.training, "or layers are not recomputed"
    assert [each.training for each in module] == [True, True, False]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, ("checkpointing", "reference", "tight")),
        (2, ("critic",)),
        (2, ("lora", "checkpointing", "row-temperature")),
        (1, ("fused", "fixed", "no-advantages")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_the_same_log_probs_gradients_and_steps_for_less(ranks: int, options: tuple[str, ...], tmp_path: Path) -> None:
    told = compared(tmp_path, *options, ranks=ranks)
    assert_the_same(told)
    assert told["engine"] == (
        ["FSDPEngineWithValueHead", "TrieEngineWithValueHead"]
        if "critic" in options
        else ["FSDPEngineWithLMHead", "TrieEngineWithLMHead"]
    )
    assert told["computed"][1] < 0.8
    assert told.get("reference computed", [1, 0])[1] < 0.8
    off, norm_off = told["guard"][1]
    assert 0 < off <= 1e-5, "two rows were computed both ways, and differ by rounding"
    assert norm_off is None if "no-advantages" in options else norm_off <= 1e-4
    assert told["micro-batches"][1] <= told["micro-batches"][0]
    assert told["saved"][1] > 0
    both_ways = told["both ways"][1]
    assert {ours for ours, *_ in both_ways} == {True, False}
    assert {layers for *_, layers in both_ways} == {2 if "checkpointing" in options else 0}, "memory is saved here, too"
    if "tight" in options:
        assert max(tokens for _, tokens, _ in both_ways) <= TIGHT, "the limit of a micro-batch"


def test_random_tries_are_what_verls_engine_makes_of_their_rows(tmp_path: Path) -> None:
    assert int(ran(tmp_path, "random_tries").split()[-1]) >= 15


def test_what_it_cannot_lay_out_goes_the_stock_engines_way(tmp_path: Path) -> None:
    told = compared(tmp_path, "odd-positions")
    assert told["computed"] == [1.0, 1.0]
    assert told["micro-batches"][0] == told["micro-batches"][1]
    assert {difference for key, (_, difference) in told.items() if key.startswith(("gradient", "log_"))} == {0.0}


def shape(**settings: Any) -> SimpleNamespace:
    """A model's configuration."""
    return SimpleNamespace(get_text_config=lambda: SimpleNamespace(**settings))


@pytest.mark.parametrize(
    ("engine", "model", "story"),
    [
        ({"ulysses_sequence_parallel_size": 2}, {}, "ulysses_sequence_parallel_size"),
        ({"pad_to_length": True}, {}, "pad_to_length"),
        ({}, {"layer_types": ["linear_attention", "full_attention"]}, "linear attention"),
        ({}, {"output_router_logits": True}, "router losses"),
        ({}, {"attention_dropout": 0.1}, "attention dropout"),
        ({}, {"layer_types": ["chunked_attention"]}, "chunked attention"),
        ({}, {"attn_logit_softcapping": 50.0}, "soft caps"),
        ({}, {"sliding_window": 99}, "a sliding window of 99 tokens.*= 100"),
        ({}, {"sliding_window": 99, "layer_types": ["full_attention", "sliding_attention"]}, "a sliding window of 99"),
    ],
)
def test_what_a_shared_token_would_get_wrong_is_refused(
    engine: dict[str, Any], model: dict[str, Any], story: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from seamless_verl.verl_adapter.shared_prefix import trie_engine as engines

    monkeypatch.setattr(engines, "get_device_name", lambda: "cpu")
    plain: dict[str, Any] = {"ulysses_sequence_parallel_size": 1, "pad_to_length": False}
    plain |= {"mixed_precision": {"param_dtype": "fp32"}}
    taken = shape(layer_types=["full_attention", "sliding_attention"], sliding_window=100)
    engines.refuse(SimpleNamespace(**plain), taken, 100)
    engines.refuse(SimpleNamespace(**plain), shape(layer_types=["full_attention"], sliding_window=99), 100)
    with pytest.raises(ConfigError, match=f"{story}.*seamless.shared_prefix=off"):
        engines.refuse(SimpleNamespace(**{**plain, **engine}), shape(**model), 100)
    monkeypatch.setattr(engines, "get_device_name", lambda: "cuda")
    engines.refuse(SimpleNamespace(**{**plain, "mixed_precision": None}), taken)
    with pytest.raises(ConfigError, match=r"fp32 on a GPU.*param_dtype.*seamless.shared_prefix=off"):
        engines.refuse(SimpleNamespace(**plain), taken)
    monkeypatch.setattr(engines, "get_device_name", lambda: "npu")
    with pytest.raises(ConfigError, match="neither a GPU of CUDA nor a CPU"):
        engines.refuse(SimpleNamespace(**plain), taken)


def test_sinks_are_seen_in_the_layers_of_a_model_as_it_is_built() -> None:
    import torch
    from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3Config

    from seamless_verl.verl_adapter.shared_prefix import trie_engine as engines

    small = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, head_dim=4)
    small |= dict(num_attention_heads=2, num_key_value_heads=2)
    with torch.device("meta"):
        plain, sinks = (AutoModelForCausalLM.from_config(kind(**small)) for kind in (Qwen3Config, GptOssConfig))
    engines.refuse_layers(plain)
    with pytest.raises(ConfigError, match=r"attention sinks.*seamless.shared_prefix=off"):
        engines.refuse_layers(sinks)


def test_attention_that_is_wrong_on_this_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen3Config

    from seamless_verl.verl_adapter.shared_prefix import trie_engine as engines

    monkeypatch.setattr(engines, "get_device_name", lambda: "cpu")
    engines.check_attention(Qwen3Config(head_dim=24))

    def no_kernel(*_: Any) -> float:
        raise RuntimeError("No available kernel.")

    for found, story in ((lambda *_: 0.5, "off by 0.5 of the largest value"), (no_kernel, "No available kernel")):
        monkeypatch.setattr(engines.attention, "check", found)
        with pytest.raises(ConfigError, match=f"{story}.*seamless.shared_prefix=off"):
            engines.check_attention(Qwen3Config(head_dim=24))


@pytest.mark.parametrize("temperature", [0.8, (0.8, 1.0)])
def test_what_verl_makes_of_the_answers_lies_where_the_model_is(temperature: Any) -> None:
    """On the device ``meta``, as good as a GPU for this: on one the first batch ended the run."""
    import numpy as np
    import torch
    from tensordict import TensorDict

    from seamless_verl.token_trie import Trie
    from seamless_verl.verl_adapter.shared_prefix.trie_engine import _as_one_row

    rows = [np.array([1, 2, 3, 4]), np.array([1, 2, 5])]
    asked = Trie(rows).predictions([np.array([1, 2]), np.array([1])])
    batch = TensorDict({"temperature": torch.tensor(temperature)} if isinstance(temperature, tuple) else {}, [])
    if isinstance(temperature, float):
        batch.set_non_tensor("temperature", temperature)
    row, arguments = _as_one_row(asked, batch, torch.device("meta"))
    labels, log_probs = row["input_ids"], torch.empty(len(asked.label), device="meta")
    nested = torch.nested.nested_tensor_from_jagged(log_probs, labels.offsets())  # as verl does; raises across devices
    made = [labels.values(), nested, *(value for value in arguments.values() if isinstance(value, torch.Tensor))]
    assert {each.device.type for each in made} == {"meta"}
    assert len(made) == 4


def test_a_difference_between_both_ways_is_seen_where_losses_read() -> None:
    import numpy as np
    import torch

    from seamless_verl.verl_adapter.shared_prefix import guard

    def outputs(*rows: list[float]) -> dict[str, Any]:
        return {
            "model_output": {
                "log_probs": torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)
            }
        }

    def nested(*sizes: int) -> Any:
        return torch.nested.as_nested_tensor([torch.zeros(size) for size in sizes], layout=torch.jagged)

    part: Any = {"prompts": nested(2, 1), "input_ids": nested(4, 2)}
    stock = outputs([9.0, -1.0, -2.0, 9.0], [-3.0, 9.0])  # beyond the response verl reads nothing
    ours = outputs([0.0, -1.0, -2.3, 0.0], [-3.0, 0.0])
    assert guard.differences(ours, stock, part) == {"off": [pytest.approx(0.1)]}
    assert guard.share_off(1.1, 1.0) == pytest.approx(0.1)
    assert guard.share_off(6e-8, 1e-8) < 1e-4, "rounding"
    rows = [np.array(row) for row in ([1, 2, 3], [7, 7], [1, 2, 4], [1, 9])]
    assert guard.neighbours(rows) == [0, 2]
    assert guard.neighbours(rows[:1]) == [0]


def test_gradients_are_compared_of_rows_that_have_an_advantage() -> None:
    import numpy as np
    import torch
    from tensordict import TensorDict

    from seamless_verl.verl_adapter.shared_prefix import guard

    def nested(*rows: list[float]) -> Any:
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    ids = ([1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 9])
    tensors = {"input_ids": nested(*ids), "advantages": nested([0.0, 0.0], [0.0], [0.0, -1.0], [2.0])}
    data = TensorDict(tensors, batch_size=[4])
    assert guard.teaching(data) == [2, 3]
    part = guard.few(data, [np.array(row) for row in ids], guard.teaching(data))
    assert sorted(row.tolist() for row in part["input_ids"].unbind()) == [[1, 2, 4], [1, 9]], "0 and 1 share more"
    lonely = guard.few(data, [np.array(row) for row in ids], [3])
    assert sorted(row.tolist() for row in lonely["input_ids"].unbind()) == [[1, 2, 3], [1, 9]], "as many on each rank"
    del data["advantages"]
    assert guard.teaching(data) == [0, 1, 2, 3]


def test_auto_takes_what_is_sooner_by_its_own_price_and_on_always_the_trie(monkeypatch: pytest.MonkeyPatch) -> None:
    from seamless_verl.token_trie import Work
    from seamless_verl.verl_adapter.shared_prefix import MODE, plans

    monkeypatch.setattr(plans, "get_device_id", lambda: "cpu")
    half, all_of_it = (Work(rows=10.0, trie=trie, tokens=10, computed=5) for trie in (5.0, 10.0))
    monkeypatch.setenv(MODE, "auto")
    assert [plans.could_gain(each, None) for each in (half, all_of_it)] == [True, False]
    assert [plans.gains(half, price, None) for price in (1.02, 1.9, 2.1)] == [True, True, False]
    monkeypatch.setenv(MODE, "on")
    assert plans.could_gain(all_of_it, None)
    assert plans.gains(all_of_it, 2.1, None)


@pytest.mark.parametrize(
    ("asked", "mode"), [("on", "on"), ("auto", "auto"), (True, "on"), ("off", None), (False, None)]
)
def test_workers_are_told_by_the_environment_that_verl_gives_them(asked: Any, mode: str | None) -> None:
    import verl  # noqa: F401  (its plug-ins)
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    lengths = {"max_prompt_length": 30, "max_response_length": 12}
    config = OmegaConf.create({"seamless": {"shared_prefix": asked}, "data": lengths})
    told = get_ppo_ray_runtime_env(config)["env_vars"]
    assert told.get("SEAMLESS_LONGEST_ROW") == (mode and "42")
    assert told.get("SEAMLESS_SHARED_PREFIX") == mode
    assert told.get("VERL_ENGINE_VENDOR") == (mode and "seamless")
    assert "VERL_ENGINE_VENDOR" not in get_ppo_ray_runtime_env()["env_vars"]


def test_a_mode_that_is_none_is_refused_under_verls_own_command_too() -> None:
    import verl  # noqa: F401  (its plug-ins)
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    with pytest.raises(ConfigError, match=r"seamless.shared_prefix=always: .*Fix: write"):
        get_ppo_ray_runtime_env(OmegaConf.create({"seamless": {"shared_prefix": "always"}}))
