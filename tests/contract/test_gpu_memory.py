"""The arithmetic of `seamless_verl.memory.gpu_memory` against transformers and against what verl leaves on a GPU."""

import importlib
import inspect

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.machine import Machine
from seamless_verl.memory.gpu_memory import ModelShape

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MIXED = {"num_experts": 4, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28}


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("mistral", {"head_dim": 16}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16}),
        ("mixtral", {"num_local_experts": 4}),
        ("qwen2_moe", MIXED),
        ("qwen3_moe", MIXED | {"head_dim": 16}),
        ("qwen3_moe", MIXED | {"mlp_only_layers": [0], "decoder_sparse_step": 2, "head_dim": 8}),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value) or "plain",
)
def test_parameters_are_those_that_transformers_makes(family, more):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **SMALL, **more)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = [parameter.numel() for parameter in model.parameters()]
    shape = ModelShape.from_config(config.to_dict())
    assert (shape.parameters, shape.largest) == (sum(sizes), max(sizes))


@pytest.mark.parametrize("tied", [True, False])
def test_two_versions_as_verl_sends_them_fit_into_the_shared_memory_that_is_asked_for(tied, tmp_path, monkeypatch):
    """Its state dict has a tied matrix under both names."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from seamless_verl.run import check_gpu_memory
    from seamless_verl.verl_adapter.weights import weight_store

    engine = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    assert "params = self.module.state_dict()" in inspect.getsource(engine.FSDPEngine.get_per_tensor_param)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SMALL, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path / "model")
    published = weight_store.publish(tmp_path / "store", 1, model.state_dict().items(), torch.bfloat16)
    monkeypatch.setattr(check_gpu_memory, "SHARED_MEMORY", 8 << 10)  # vectors in fp32 are part of it
    rollout = {"dtype": "bfloat16", "name": "vllm"}
    config = {
        "seamless": {"weights": {"sync": "rolling"}},
        "trainer": {"device": "cpu"},
        "actor_rollout_ref": {"model": {"path": str(tmp_path / "model")}, "rollout": rollout},
    }
    little = Machine(**dict.fromkeys(Machine.__slots__, 0) | {"shared_memory_free": 2 * published.nbytes})
    with pytest.raises(ConfigError, match="two versions of the weights"):
        check_gpu_memory.check_memory(config, little)


def test_gradients_are_gone_when_a_training_pass_of_verl_ends():
    engine = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    base = importlib.import_module("verl.workers.engine.base")
    assert 'kwargs.pop("zero_grad_on_exit", True)' in inspect.getsource(base.BaseEngineCtx.__init__)
    assert "optimizer_zero_grad" in inspect.getsource(engine.EngineTrainModeCtx.__exit__)


def test_a_reference_model_lies_on_the_host_and_costs_no_gpu():
    engine = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    source = inspect.getsource(engine.FSDPEngine._build_fsdp_module)
    assert "self.engine_config.offload_policy or self.engine_config.forward_only" in source
    assert "CPUOffload(offload_params=True)" in source


def test_replicas_with_gpus_of_their_own_are_made_with_their_own_share(monkeypatch):
    importlib.import_module("verl.trainer.ppo.v1")
    from omegaconf import OmegaConf

    from seamless_verl.config import RouterConfig
    from seamless_verl.verl_adapter.slices import standing as ours

    made = []
    monkeypatch.setattr(ours.PlacedServers, "create", lambda *, config, **_: made.append(config))
    for alone, expected in ((None, 0.7), (0.85, 0.85)):
        rollout = {"gpu_memory_utilization": 0.7, "standalone_gpu_memory_utilization": alone, "max_num_seqs": 8}
        rollout["data_parallel_size"] = 1
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
        ours.StandingServers(config, RouterConfig(), hybrid=False).start({})
        assert made[-1].actor_rollout_ref.rollout.gpu_memory_utilization == expected
        # The trainer's own replicas, which are made from it at the same time, keep theirs.
        assert config.actor_rollout_ref.rollout.gpu_memory_utilization == 0.7


def test_verl_has_the_key_and_its_v1_trainers_still_do_not_read_it():
    """When this fails, `standalone_config` may go (verl #7795)."""
    from pathlib import Path

    from verl.workers.config import RolloutConfig

    key = "standalone_gpu_memory_utilization"
    assert key in RolloutConfig.__dataclass_fields__
    v1 = Path(importlib.import_module("verl.trainer.ppo.v1").__file__).parent
    readers = [*v1.glob("*.py"), v1.parents[2] / "workers" / "rollout" / "llm_server.py"]
    assert not [file.name for file in readers if key in file.read_text(encoding="utf-8")]
