"""How many bytes trainer and engine want of one GPU, before either is started: arithmetic on shapes, nothing is asked.

    card  ≥  trainer at rest (parameters, moments)  +  what its process takes anyway  +  utilization x card (the engine)

At rest means: while an engine on the same GPU generates. Gradients are gone by then (verl frees them when a training
pass ends), activations too. What is counted is a lower bound; `COMFORT` is what a run should have beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30
PROCESS = 2 * GIB
"""What a training process holds with all its tensors gone: CUDA's context, NCCL's buffers. An estimate."""
COMFORT = 4 * GIB
"""`PROCESS`, the engine's CUDA graphs and fragments: what to leave free. An estimate."""

_DENSE = frozenset(["llama", "mistral", "qwen2", "qwen3"])
_MIXED = frozenset(["mixtral", "qwen2_moe", "qwen3_moe"])
_HEAD_NORMS = frozenset(["qwen3", "qwen3_moe"])
_QKV_BIAS = frozenset(["qwen2", "qwen2_moe"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Numbers, not bytes: ``parameters`` of the language model, ``cache_per_token`` in a token's keys and values, and
    ``largest`` in one tensor of parameters."""

    parameters: int
    cache_per_token: int
    largest: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape | None:
        """From a model's ``config.json``; None for a family that is not known here.

        Families: Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen2-MoE, Qwen3-MoE. The count equals that of transformers
        (``tests/contract/test_gpu_memory.py``).
        """
        family = config.get("model_type")
        if family not in _DENSE | _MIXED:
            return None
        hidden, layers, heads = (
            int(config[key]) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head = int(config.get("head_dim") or hidden // heads)
        queries, keys = heads * head, kv_heads * head
        attention = hidden * (queries + 2 * keys) + queries * hidden
        attention += 2 * head if family in _HEAD_NORMS else 0
        attention += queries + 2 * keys if family in _QKV_BIAS or config.get("attention_bias") else 0
        attention += hidden if config.get("attention_bias") and family not in _QKV_BIAS else 0  # of the output
        sparse = _sparse_layers(config, layers) if family in _MIXED else 0
        feed_forward = (layers - sparse) * 3 * hidden * int(config["intermediate_size"])
        feed_forward += sparse * _experts(config, hidden)
        words = int(config["vocab_size"]) * hidden
        embeddings = words * (1 if config.get("tie_word_embeddings") else 2)
        total = layers * (attention + 2 * hidden) + feed_forward + embeddings + hidden
        # transformers 5 has the gates and up-projections of all experts of a layer in one tensor.
        experts = 2 * _num_experts(config) * _width(config) * hidden if sparse else 0
        return cls(parameters=total, cache_per_token=2 * layers * keys, largest=max(words, experts))


def _sparse_layers(config: Mapping[str, Any], layers: int) -> int:
    step, dense = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
    return sum(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _experts(config: Mapping[str, Any], hidden: int) -> int:
    """One layer's router and experts, with the shared one of Qwen2-MoE."""
    shared = int(config["shared_expert_intermediate_size"]) if config["model_type"] == "qwen2_moe" else 0
    each = 3 * hidden * _width(config) + hidden
    return _num_experts(config) * each + (3 * hidden * shared + hidden if shared else 0)


def _num_experts(config: Mapping[str, Any]) -> int:
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def _width(config: Mapping[str, Any]) -> int:
    return int(config.get("moe_intermediate_size") or config["intermediate_size"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A model that is trained under FSDP, on each of its GPUs.

    Args:
        parameters: of the whole model.
        shards: GPUs that share it.
        bytes_each: of a parameter; Adam's two moments have its type.
        parameters_stay, moments_stay: on the GPU while an engine beside it generates.
    """

    parameters: int
    shards: int
    bytes_each: int
    parameters_stay: bool
    moments_stay: bool

    @property
    def at_rest(self) -> int:
        """Bytes per GPU once a first step has been trained."""
        each = self.bytes_each * (int(self.parameters_stay) + 2 * int(self.moments_stay))
        return self.parameters * each // self.shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One rank of a rollout replica.

    Args:
        utilization: ``gpu_memory_utilization``, a share of the whole card.
        weights: bytes of the model on this GPU.
        one_row: bytes on this GPU of the cache of the longest row that may come.
    """

    utilization: float
    weights: int
    one_row: int

    def lacks(self, card: int) -> int:
        """Bytes by which its share is too small to serve a single row; 0 or less: it is not."""
        return self.weights + self.one_row - int(self.utilization * card)


def beyond(card: int, resident: int, utilization: float, beside: int = PROCESS) -> int:
    """Bytes by which trainer and engine together exceed the card; 0 or less: they fit."""
    return resident + beside + int(utilization * card) - card


def highest_utilization(card: int, resident: int) -> float:
    """The largest share, in hundredths, that leaves `COMFORT` free beside ``resident`` bytes; 0.0 if there is none."""
    return max(0, math.floor(100 * (card - resident - COMFORT) / card)) / 100
