"""Attention over a `Trie`, exact: no key is gathered, no mask is made, and no pair is computed in vain.

Each stretch of the trie gives two plain blocks: its own queries against its own keys (causal), and the queries of all
that hangs below it against the same keys (all of them). What a query gets from its blocks is merged by log-sum-exp.
The backward pass of a block is torch's own flash backward with the *merged* output and log-sum-exp, as in ring
attention (arXiv 2310.01889), which makes the sum of the blocks' gradients the exact gradient. On CUDA these are the
operators that torch's own context parallelism calls in the same way. `check` compares with plain attention where a
model is built; on an H100 in bfloat16 they agreed (2026-11-27).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from seamless_verl.token_trie import Trie

NAME = "seamless_trie"
"""In transformers' ``ALL_ATTENTION_FUNCTIONS``. Under a name without a mask function it passes no mask, as wanted."""


class TrieAttention(torch.autograd.Function):
    """``[1, heads, nodes, size]`` each; queries and keys have equally many heads."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, trie: Trie, scale: float) -> torch.Tensor:
        exact = torch.promote_types(q.dtype, torch.float32)  # what is merged and summed, whatever the queries are
        out, lse = torch.empty_like(q, dtype=exact), q.new_empty(q.shape[:3], dtype=exact)
        for start, stop, _ in trie.stretches:
            own = slice(start, stop)
            out[:, :, own], lse[:, :, own] = _flash(q[:, :, own], k[:, :, own], v[:, :, own], True, scale)
        for start, stop, end in trie.stretches:
            if stop == end:
                continue
            keys, below = slice(start, stop), slice(stop, end)
            part, part_lse = _flash(q[:, :, below], k[:, :, keys], v[:, :, keys], False, scale)
            merged = torch.logaddexp(lse[:, :, below], part_lse)
            weight, part_weight = ((each - merged).exp_().unsqueeze(-1) for each in (lse[:, :, below], part_lse))
            out[:, :, below].mul_(weight).addcmul_(part, part_weight)
            lse[:, :, below] = merged
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.trie, ctx.scale = trie, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(each, dtype=lse.dtype) for each in (q, k, v))
        for start, stop, end in ctx.trie.stretches:
            keys = slice(start, stop)
            for queries, causal in ((keys, True), (slice(stop, end), False)):
                if queries.start == queries.stop:
                    continue
                of_queries = tuple(each[:, :, queries] for each in (grad.to(q.dtype), q, out, lse))
                block = (*of_queries, *(each[:, :, keys] for each in (k, v)))
                part_q, part_k, part_v = _flash_backward(block, causal, ctx.scale)
                dq[:, :, queries] += part_q
                dk[:, :, keys] += part_k
                dv[:, :, keys] += part_v
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Any:
    """Output and log-sum-exp of one block."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _flash_backward(block: tuple[torch.Tensor, ...], causal: bool, scale: float) -> Any:
    """Gradients of the queries, keys and values of one block.

    Args:
        block: the gradient of the merged output, queries, merged output, merged log-sum-exp; keys, values.
    """
    grad, q, out, lse, k, v = block
    lse = lse.contiguous()  # a slice of it is not, and the CUDA kernel reads it as if it were
    if q.device.type == "cpu":
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    # Blocks of one length need no offsets, and without dropout nobody reads the state of the random numbers.
    no_offsets, no_dropout = (None, None, q.shape[2], k.shape[2]), torch.empty(2, dtype=torch.uint64, device=q.device)
    return backward(grad, q, k, v, out, lse, *no_offsets, 0.0, causal, no_dropout, no_dropout[0], scale=scale)


def check(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Compare with plain attention under a mask, on a small trie: outputs and gradients.

    Args:
        dtype: that attention will be computed in.
        size: of a head.

    Returns:
        The largest difference, as a share of the largest value.
    """
    shared, rng = np.arange(40), np.random.default_rng(0)
    rows = [np.concatenate([shared[:stem], rng.integers(40, 99, more)]) for stem, more in ((40, 9), (40, 70), (17, 5))]
    trie = Trie(rows)
    seen = torch.zeros(len(trie), len(trie), dtype=torch.bool)
    for nodes in trie.nodes_of_row:
        for at, node in enumerate(nodes):
            seen[node, nodes[: at + 1]] = True
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = torch.randn(4, 1, 2, len(trie), size, generator=generator).to(device, dtype)
    found: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    for into, exact in ((found, False), (wanted, True)):
        inputs = [each.to(torch.float32 if exact else dtype).requires_grad_() for each in (q, k, v)]
        if exact:
            scores = (inputs[0] @ inputs[1].mT * size**-0.5).masked_fill(~seen.to(device), -torch.inf)
            out = scores.softmax(-1) @ inputs[2]
        else:
            out = TrieAttention.apply(*inputs, trie, size**-0.5)  # type: ignore[no-untyped-call]
        into += [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]
    pairs = [(a.detach().float(), b.detach()) for a, b in zip(found, wanted, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def trie_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    trie: Trie | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls attention; ``trie`` is an argument of the model that its layers hand down.

    An argument and not a global: gradient checkpointing calls the layers again in the backward pass.

    Raises:
        ValueError: what would be wrong if it were computed once for several rows.
    """
    if trie is None:
        raise ValueError(f"{NAME}: the model was called without trie=")
    window = kwargs.get("sliding_window")
    if dropout:
        raise ValueError(f"{NAME}: attention dropout has one mask per row, a shared token one for all")
    if window is not None and int(trie.depth.max()) >= window:
        raise ValueError(f"{NAME}: a row of {int(trie.depth.max()) + 1} tokens exceeds the sliding window of {window}")
    if kwargs.get("s_aux") is not None or kwargs.get("softcap") is not None:
        raise ValueError(f"{NAME}: attention sinks and soft caps are not computed")
    trie.calls += 1
    if torch.is_autocast_enabled(query.device.type):  # torch's own attention is on autocast's list, ours is not
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = TrieAttention.apply(query, key, value, trie, scale)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, trie_attention)
