"""Models of transformers on a trie, against each row alone: log-probs, entropy, and the gradient of every parameter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from seamless_verl.token_trie import Trie
from seamless_verl.verl_adapter.shared_prefix import attention

VOCABULARY = 97
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    initializer_range=0.2,
)
MODELS = {
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=32),
    "llama": lambda: LlamaConfig(**SHAPE),
    "moe": lambda: Qwen3MoeConfig(**SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64),
}


def model_of(kind: str, **flags: bool) -> Any:
    torch.manual_seed(0)
    attention.register()
    model = AutoModelForCausalLM.from_config(MODELS[kind](), attn_implementation="eager").train()
    if flags.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def family(rng: np.random.Generator) -> list[np.ndarray]:
    """Random depths; unshared rows, equal rows, rows that begin another."""
    rows = [rng.integers(0, VOCABULARY, rng.integers(3, 40)) for _ in range(rng.integers(1, 4))]
    for _ in range(rng.integers(0, 8)):
        stem = rows[rng.integers(len(rows))]
        rows.append(
            np.concatenate([stem[: rng.integers(2, len(stem) + 1)], rng.integers(0, VOCABULARY, rng.integers(0, 30))])
        )
    rng.shuffle(rows)  # type: ignore[arg-type]
    return rows


def measures(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[2, tokens] log-probs and entropies."""
    log_probs = logits.log_softmax(-1)
    return torch.stack([log_probs.gather(-1, labels[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)])


def alone(model: Any, rows: list[np.ndarray], prompts: list[int], weights: torch.Tensor) -> tuple[torch.Tensor, Any]:
    model.zero_grad()
    model.config._attn_implementation = "sdpa"
    found = []
    for row, prompt in zip(rows, prompts, strict=True):
        ids = torch.from_numpy(row)[None]
        found.append(measures(model(input_ids=ids, use_cache=False).logits[0, prompt - 1 : -1], ids[0, prompt:]))
    return learned(model, torch.cat(found, 1), weights)


def shared(model: Any, rows: list[np.ndarray], prompts: list[int], weights: torch.Tensor) -> tuple[torch.Tensor, Any]:
    model.zero_grad()
    model.config._attn_implementation = attention.NAME
    trie = Trie(rows)
    asked = trie.predictions([np.arange(prompt - 1, len(row) - 1) for prompt, row in zip(prompts, rows, strict=True)])
    ids, positions = (torch.from_numpy(each)[None] for each in (trie.tokens, trie.depth))
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, trie=trie).logits[0]
    found = measures(logits[asked.node], torch.from_numpy(asked.label))
    assert trie.calls == model.config.num_hidden_layers
    return learned(model, found[:, asked.of_token[asked.of_token < len(asked.label)]], weights)


def learned(model: Any, found: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, Any]:
    (found * weights).sum().backward()
    return found.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "flags"),
    [("qwen2", {}), ("qwen3", {}), ("llama", {}), ("moe", {}), ("qwen3", {"checkpointing": True})],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_a_row_does_not_notice_with_whom_it_shares(kind: str, flags: dict[str, bool]) -> None:
    rng, model = np.random.default_rng(1), model_of(kind, **flags)
    for _ in range(8):
        rows = family(rng)
        prompts = [int(rng.integers(1, len(row))) for row in rows]
        count = sum(len(row) - prompt for row, prompt in zip(rows, prompts, strict=True))
        weights = torch.from_numpy(rng.standard_normal((2, count))).float()  # one for each token of each row
        expected, gradients = alone(model, rows, prompts, weights)
        found, ours = shared(model, rows, prompts, weights)
        assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
        for name, gradient in gradients.items():
            assert (ours[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max().clamp_min(1e-3), name


@pytest.mark.parametrize(
    ("options", "story"),
    [
        ({"dropout": 0.1}, "attention dropout"),
        ({"sliding_window": 3}, "a row of 4 tokens exceeds the sliding window of 3"),
        ({"s_aux": torch.zeros(1)}, "sinks"),
        ({"softcap": 30.0}, "soft caps"),
        ({"trie": None}, "without trie="),
    ],
)
def test_what_it_would_get_wrong_is_refused(options: dict[str, Any], story: str) -> None:
    heads = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match=story):
        attention.trie_attention(None, heads, heads, heads, None, **{"trie": Trie([np.arange(4)]), **options})  # type: ignore[arg-type]


def test_the_check_at_the_start_notices_a_backward_pass_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention.check(torch.device("cpu"), torch.float32, 24) < 1e-5
    right = attention._flash_backward

    def wrong(*arguments: Any) -> Any:
        of_queries, of_keys, of_values = right(*arguments)
        return of_queries, of_keys * 1.01, of_values

    monkeypatch.setattr(attention, "_flash_backward", wrong)
    assert attention.check(torch.device("cpu"), torch.float32, 24) > 5e-3


def test_cudas_operators_take_what_they_are_given() -> None:
    """Their signatures and shapes, on tensors without memory; numbers need a GPU (`attention.check` asks for them)."""
    rows = [np.array(row) for row in ([1, 2, 3, 4], [1, 2, 5], [6, 7])]
    shape = (1, 2, len(Trie(rows)), 64)
    inputs = [torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3)]
    out = attention.TrieAttention.apply(*inputs, Trie(rows), 0.125)
    gradients = torch.autograd.grad(out, inputs, torch.empty_like(out))
    assert [(each.shape, each.dtype) for each in (out, *gradients)] == [(shape, torch.bfloat16)] * 4
