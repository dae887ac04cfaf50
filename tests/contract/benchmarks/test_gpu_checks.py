"""What the checks for the first GPU measure with, and the cheapest of them as a whole."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from benchmarks import training_workers
from benchmarks.gpu_checks import live, models
from benchmarks.gpu_checks.checksums import add, sums_of
from benchmarks.gpu_checks.registry import BY_NUMBER, Context
from seamless_verl.config import SeamlessConfig
from seamless_verl.run import check_gpu_memory, check_machine, compose, preflight
from seamless_verl.scheduling.declaration import verl_keys
from tests.contract.test_recipes import GIB, machine

ROOT = Path(__file__).parents[3]


def test_checksums_agree_across_fusing_padding_sharding_and_precision():
    import torch

    torch.manual_seed(0)
    q, k, v, embed = (torch.randn(rows, 8) for rows in (8, 4, 4, 10))
    trainer = {"model.layers.1.q": q, "model.layers.1.k": k, "model.layers.1.v": v, "model.embed": embed}
    padded = torch.cat([embed, torch.zeros(6, 8)])
    engine = {"layers.1.qkv": torch.cat([q, k, v]).bfloat16(), "embed": padded.bfloat16()}
    whole = sums_of(trainer.items(), "bfloat16")
    assert whole == sums_of(engine.items(), "bfloat16")
    halves = [{name: tensor.chunk(2)[half] for name, tensor in trainer.items()} for half in (0, 1)]
    assert whole == add(sums_of(half.items(), "bfloat16") for half in halves)


@pytest.mark.parametrize("name", ["model.layers.1.q", "model.embed"])
def test_checksums_see_a_single_number(name):
    import torch

    before = {"model.layers.1.q": torch.ones(8, 8), "model.embed": torch.ones(4, 8)}
    after = {key: tensor.clone() for key, tensor in before.items()}
    after[name][3, 5] += 1e-6
    assert sums_of(before.items(), "float32") != sums_of(after.items(), "float32")


@pytest.mark.timeout(180)
def test_a_check_runs_on_the_cpu_as_a_user_starts_it(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--platform", "cpu", "--only", "1", "--json", "record.json"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(Path.home())}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads((tmp_path / "record.json").read_text())["records"]
    assert records[0]["bar"] == "held"
    values = {record["name"]: record["value"] for record in records}
    assert values["1 updates lost, weights saved by us"] == 0
    assert values["1 updates lost, weights saved by verl"] == 1  # when this fails, verl's copies are copies


class Started(Exception):
    """Instead of a process."""


@pytest.mark.parametrize("beside", [1, 4])
@pytest.mark.parametrize("number", [number for number in BY_NUMBER if 2 < number < 13])
def test_what_is_asked_of_a_gpu_composes_and_is_not_refused(number, beside, tmp_path, monkeypatch):
    """On one card of 141 GB with verl's own packages, the commands of the checks pass all that `main` looks at."""
    commands = []

    def start(command, **_):
        commands.append(command)
        raise Started

    (tmp_path / "model").mkdir()
    shape = {"model_type": "qwen3", "vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}
    monkeypatch.setattr(
        live,
        "model_folder",
        lambda _, size: _with_config(tmp_path / size, {**shape, **models._SHAPES[models._SIZES[size]]}),
    )
    monkeypatch.setattr(live, "arithmetic_data", lambda _: tmp_path / "data.parquet")
    monkeypatch.setattr(live, "subprocess", SimpleNamespace(Popen=start, STDOUT=subprocess.STDOUT))
    monkeypatch.setattr(check_machine, "is_installed", lambda module: module not in ("cupy", "flash_attn"))
    (tmp_path / "check").mkdir()
    with pytest.raises(Started):
        BY_NUMBER[number].function()(Context(platform="gpu", folder=tmp_path / "check", beside=beside))
    (overrides,) = [command[3:] for command in commands]
    config, seamless = composed_as_given(overrides)
    for key, value in verl_keys(seamless.resources).items():  # as `main` does
        OmegaConf.update(config, key, value)
    plain = OmegaConf.to_container(config, resolve=True)
    card = replace(machine(1), accelerator_memory=141 * GIB, memory_total=128 * GIB)
    preflight.check_settings(plain, seamless, card)
    assert check_gpu_memory.check_memory(plain, card) == []


@pytest.mark.filterwarnings("ignore:.* engine is not available:UserWarning")  # verl, as it is imported
def test_the_check_of_shared_prefixes_asks_a_gpu_for_what_is_not_refused(tmp_path, monkeypatch):
    """Number 13 starts no process; the numbers themselves need the card."""
    from transformers import Qwen3Config

    asked = {}

    def worker_of(*_, **arguments):
        asked.update(arguments)
        raise Started

    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(training_workers, "model_folder", lambda _, **shape: asked.update(shape=shape))
    monkeypatch.setattr(training_workers, "worker_of", worker_of)
    with pytest.raises(Started):
        BY_NUMBER[13].function()(Context(platform="gpu", folder=tmp_path))
    assert asked["dtype"] == "bf16"
    from seamless_verl.verl_adapter.shared_prefix import trie_engine

    monkeypatch.setattr(trie_engine, "get_device_name", lambda: "cuda")
    mixed = {"param_dtype": asked["dtype"]}
    engine = SimpleNamespace(ulysses_sequence_parallel_size=1, pad_to_length=False, mixed_precision=mixed)
    trie_engine.refuse(engine, Qwen3Config(**asked["shape"]), 8192 + 512)


def _with_config(folder, shape):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def composed_as_given(overrides):
    ours = [f"hydra.searchpath=[file://{compose.our_config_dir()}]", "+seamless=default"]
    given = [override for override in overrides if not override.startswith("hydra.")]
    with initialize_config_dir(str(compose.verl_config_dir()), version_base=None):
        values = ["seamless.run_dir=/runs/x", "seamless.assets.dir=/assets"]
        config = hydra_compose("ppo_trainer", overrides=[*ours, *given[:2], *values, *given[2:]])
    return config, SeamlessConfig.from_mapping(OmegaConf.to_container(config.seamless, resolve=True))


def test_models_are_made_from_their_shapes_with_tokenizers_of_their_size(tmp_path, monkeypatch):
    """At a smaller size than on a GPU; nothing is drawn twice, and embeddings are far from indifferent."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from seamless_verl.recipes.arithmetic import assets

    monkeypatch.setattr(models, "_VOCABULARY", 320)
    monkeypatch.setattr(models, "_BLOCK", 1 << 12)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8}
    tiny = tmp_path / "tiny"
    tiny.mkdir()
    assets._tokenizer().save_pretrained(tiny)
    models._build(tiny, tmp_path / "model", {**shape, "tie_word_embeddings": True})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == model.config.vocab_size == 320
    assert tokenizer.decode(tokenizer.encode("12+7")) == "12+7"
    assert model.dtype == torch.bfloat16
    weights = dict(model.named_parameters())
    assert all(torch.isfinite(weight).all() for weight in weights.values())
    assert weights["model.embed_tokens.weight"].float().std().item() == pytest.approx(0.1, rel=0.1)
    first, second = (weights[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in (0, 1))
    assert not torch.equal(first, second)
