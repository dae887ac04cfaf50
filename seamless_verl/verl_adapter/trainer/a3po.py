"""verl's policy loss ``a3po``: decoupled PPO whose proximal policy costs no forward pass (A-3PO, arXiv 2512.06547).

    log pi_prox = a * log pi_behaviour + (1 - a) * log pi_now,    a = 1 / lag in weight versions, at most 1
    loss        = truncated (pi_prox / pi_behaviour) * clipped PPO loss with pi_now / pi_prox

Registered in every process that computes losses (`plugin`). ``old_log_prob`` holds the behaviour's log-probs (verl's
``bypass_mode``), and ``rollout_is_weights``, the only per-token input that verl passes on, holds ``a`` (`batches`).

Beside it, what verl's own losses lack where no token of a micro-batch counts: it is padding, or all tokens are too old
(`workarounds`). One token counts then, for a loss of zero with the metrics that other ranks report.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch

LOSS_MODE = "a3po"
_LARGEST_WEIGHT = 2.0


def compute_policy_loss_a3po(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss of the module's docstring, which says what the two arguments with borrowed names hold.

    All tensors are (rows, response tokens).

    Raises:
        ValueError: the interpolation weights did not arrive.
    """
    # Here, since hooks on the import of this module of verl's look for functions of ours.
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

    if rollout_is_weights is None:
        raise ValueError(
            "policy loss a3po needs the interpolation weights that seamless.staleness.correction=a3po adds"
        )
    now, weight = log_prob.detach(), rollout_is_weights
    proximal = weight * old_log_prob + (1 - weight) * now
    correction = torch.exp((proximal - old_log_prob).clamp(-20.0, 20.0)).clamp(max=_LARGEST_WEIGHT)
    vanilla: Any = compute_policy_loss_vanilla  # whose arguments verl's decorator hides
    loss, metrics = vanilla(
        old_log_prob=proximal,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
        rollout_is_weights=correction,
    )
    truncated = (correction >= _LARGEST_WEIGHT).float() * response_mask
    metrics["actor/a3po_truncated"] = (truncated.sum() / response_mask.sum().clamp(min=1)).item()
    return loss, metrics


def mend_bypass_mode(core_algos: ModuleType) -> None:
    losses, original = core_algos.POLICY_LOSS_REGISTRY, core_algos.POLICY_LOSS_REGISTRY["bypass_mode"]

    def bypass_mode(**given: Any) -> Any:
        if not given["response_mask"].any():
            given["response_mask"] = _one_counted(given["response_mask"])
            given["old_log_prob"] = given["log_prob"].detach()
            given["advantages"] = torch.zeros_like(given["advantages"])
        return original(**given)

    losses["bypass_mode"] = bypass_mode


def mend_distillation(losses: ModuleType) -> None:
    module: Any = losses
    original = module.distillation_loss
    nothing = {module.AggregationType.MIN: math.inf, module.AggregationType.MAX: -math.inf}

    def distillation_loss(config: Any, distillation_config: Any, model_output: Any, data: Any) -> Any:
        mask, data = data["response_mask"], data.copy()
        if (weights := data.get("rollout_is_weights", None)) is not None and weights.is_nested:
            data["rollout_is_weights"] = weights.to_padded_tensor(0.0)
        if (mask.values() if mask.is_nested else mask).any():
            return original(config, distillation_config, model_output, data)
        data["response_mask"] = _one_counted(mask)
        loss, metrics = original(config, distillation_config, model_output, data)
        for key, value in metrics.items():
            how = getattr(value, "aggregation", None)
            metrics[key] = 0.0 if how is None else module.Metric(how, nothing.get(how, 0.0))
        return 0 * loss.nan_to_num(), metrics

    module.distillation_loss = distillation_loss


def _one_counted(mask: torch.Tensor) -> torch.Tensor:
    mask = mask.clone()
    first = mask.values() if mask.is_nested else mask[0]
    first[0] = 1
    return mask
