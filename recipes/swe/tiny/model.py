"""The tiny Qwen3 (0.92 million parameters) and the pair of optimisers that warms it up fastest on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from seamless_verl.recipes.swe.tiny.tokenizer import MAX_LENGTH, PAD_ID, TURN_END_ID, VOCABULARY

# Coefficients of the quintic Newton-Schulz step and the number of steps, from Jordan et al. 2024, "Muon".
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


def new_model(seed: int) -> Qwen3ForCausalLM:
    """A fresh model with random weights (fp32)."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=TURN_END_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose update is orthogonalised, for matrices only (Jordan et al. 2024, "Muon").

    Matrices of one shape are orthogonalised in one batch. The update of an (m, n) matrix is scaled by
    ``max(1, m / n) ** 0.5``.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
            for (rows, columns), parameters in by_shape.items():
                updates = torch.stack([self._momentum(parameter, group["momentum"]) for parameter in parameters])
                scale = group["lr"] * max(1.0, rows / columns) ** 0.5
                for parameter, update in zip(parameters, _orthogonalised(updates), strict=True):
                    parameter.add_(update, alpha=-scale)

    def _momentum(self, parameter: torch.nn.Parameter, momentum: float) -> torch.Tensor:
        assert parameter.grad is not None
        state: dict[str, Any] = self.state[parameter]
        buffer: torch.Tensor = state.setdefault("momentum", torch.zeros_like(parameter))
        buffer.mul_(momentum).add_(parameter.grad)
        return parameter.grad + momentum * buffer


def _orthogonalised(updates: torch.Tensor) -> torch.Tensor:
    """Nearest (semi-)orthogonal matrices, roughly; shape (batch, rows, columns)."""
    tall = updates.shape[1] > updates.shape[2]
    x = updates.mT if tall else updates
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: torch.Tensor = x.mT if tall else x
    return result


def optimizers(model: torch.nn.Module, muon_lr: float, adam_lr: float) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the hidden matrices, Adam for the embedding and the norms."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    return Muon(matrices, muon_lr), torch.optim.AdamW(others, adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
