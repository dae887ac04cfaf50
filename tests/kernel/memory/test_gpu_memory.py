"""Bytes on a GPU, worked out before anything is loaded; the models' own cards say how many parameters they have."""

import pytest

from seamless_verl.memory.gpu_memory import COMFORT, GIB, Engine, ModelShape, Trained, beyond, highest_utilization

H100 = 81559 << 20  # what nvidia-smi says of "80 GB"
QWEN3 = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "num_key_value_heads": 8}
QWEN3_8B = QWEN3 | {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
QWEN3_32B = QWEN3 | {
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "intermediate_size": 25600,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B = QWEN3 | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("config", "billions", "cache_bytes_bf16"),
    [(QWEN3_8B, 8.19, 144 << 10), (QWEN3_32B, 32.76, 256 << 10), (QWEN3_30B_A3B, 30.53, 96 << 10)],
)
def test_published_models_have_the_published_number_of_parameters(config, billions, cache_bytes_bf16):
    shape = ModelShape.from_config(config)
    assert shape.parameters / 1e9 == pytest.approx(billions, abs=0.005)
    assert 2 * shape.cache_per_token == cache_bytes_bf16


def test_of_an_unknown_family_nothing_is_said():
    assert ModelShape.from_config(QWEN3_8B | {"model_type": "mamba"}) is None


def trained(config, shards, **stay):
    parameters = ModelShape.from_config(config).parameters
    stay = {"parameters_stay": True, "moments_stay": True} | stay
    return Trained(parameters=parameters, shards=shards, bytes_each=4, **stay)


def test_what_a_trainer_leaves_on_its_gpu():
    """fp32: 4 bytes of weights and 8 of moments for each parameter, over all GPUs."""
    assert trained(QWEN3_8B, 8).at_rest / 1e9 == pytest.approx(12.29, abs=0.01)
    assert trained(QWEN3_32B, 16).at_rest / 1e9 == pytest.approx(24.57, abs=0.01)
    assert trained(QWEN3_8B, 8, moments_stay=False).at_rest / 1e9 == pytest.approx(4.10, abs=0.01)
    assert trained(QWEN3_8B, 8, moments_stay=False, parameters_stay=False).at_rest == 0


def test_a_share_for_an_engine_alone_is_too_large_beside_a_trainer():
    """0.85 of 80 GB, which suits replicas with GPUs of their own, and an 8B trained on 8 GPUs."""
    resident = trained(QWEN3_8B, 8).at_rest
    assert beyond(H100, 0, 0.85) < 0
    assert beyond(H100, resident, 0.85) > 0
    assert beyond(H100, resident, 0.75) < 0


@pytest.mark.parametrize(
    ("config", "shards", "utilization"), [(QWEN3_8B, 8, 0.80), (QWEN3_32B, 16, 0.66), (QWEN3_32B, 32, 0.80)]
)
def test_the_highest_share_leaves_room_and_a_hundredth_more_does_not(config, shards, utilization):
    resident = trained(config, shards).at_rest
    assert highest_utilization(H100, resident) == utilization
    assert resident + COMFORT + utilization * H100 <= H100
    assert resident + COMFORT + (utilization + 0.01) * H100 > H100


def test_a_trainer_that_fills_the_card_leaves_no_share():
    assert highest_utilization(H100, trained(QWEN3_32B, 4).at_rest) == 0.0


def test_an_engine_needs_its_weights_and_one_row():
    shape = ModelShape.from_config(QWEN3_32B)
    row = 2 * shape.cache_per_token * 32768
    alone = Engine(utilization=0.85, weights=2 * shape.parameters, one_row=row)
    assert alone.lacks(H100) / GIB == pytest.approx(61.0 + 8.0 - 67.7, abs=0.1)
    assert Engine(utilization=0.85, weights=2 * shape.parameters // 2, one_row=row // 2).lacks(H100) < 0
