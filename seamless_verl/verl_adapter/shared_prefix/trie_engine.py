"""verl's FSDP engines on tries: what the rows of a micro-batch share is computed once, forward and backward.

Registered with verl's `EngineRegistry` under a vendor of ours (``VERL_ENGINE_VENDOR``), so the strategy stays the
user's and other backends stay verl's. The decoder sees the trie as one packed row; its head sees only what has to be
predicted; verl's own code makes log-probs and entropy of that. Back in the rows' layout, losses and metrics never know.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import verl.workers.engine.fsdp.transformer_impl as fsdp
import wrapt
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name, get_torch_device
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry

from seamless_verl.errors import ConfigError
from seamless_verl.token_trie import Ids, Predictions, Price, Shape, Trie
from seamless_verl.verl_adapter.shared_prefix import LONGEST, MODE, VENDOR, attention, guard, plans

_KEY = "seamless.shared_prefix"


class _OnTries(fsdp.FSDPEngine):
    """Goes before a stock engine; batches that it cannot lay out, or would lose by, go to the stock one as they are."""

    def _build_module(self) -> Any:
        refuse(self.engine_config, self.model_config.hf_config, int(os.environ.get(LONGEST, 0)) or None)
        check_attention(self.model_config.hf_config)
        attention.register()
        module: Any = super()._build_module()  # type: ignore[no-untyped-call]
        refuse_layers(module)
        # AutoModel.from_config copies the configuration that it is given, and attention reads the copy.
        self._configs: list[Any] = list(
            {id(each.config): each.config for each in module.modules() if hasattr(each, "config")}.values()
        )
        self._stock_attention = module.config._attn_implementation
        self._trie: Trie | None = None
        self._picked: torch.Tensor | None = None
        values = isinstance(self, fsdp.FSDPEngineWithValueHead)
        self._shape = Shape.of(self.model_config.hf_config.get_text_config(), values=values)
        self._price = Price()
        self._comparable = 0  # batches that were, or could have been, computed both ways
        self._tally = dict.fromkeys(("tokens", "tokens_computed", "seconds_saved"), 0.0)  # since the last update
        decoder: Any = module.base_model
        decoder.register_forward_pre_hook(self._hand_down, with_kwargs=True)
        decoder.register_forward_hook(self._pick)
        return module

    def _hand_down(self, _: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A hook, since the forward that verl gives models for its fused kernels drops arguments unknown to it."""
        return args, kwargs if self._trie is None else {**kwargs, "trie": self._trie}

    def _pick(self, _: torch.nn.Module, __: Any, output: Any) -> Any:
        if self._picked is not None:
            output.last_hidden_state = output.last_hidden_state[:, self._picked]
        return output

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        group: Any = self.get_data_parallel_group()  # type: ignore[no-untyped-call]
        plan = plans.plan(data, group, self._shape)
        metrics: dict[str, list[float]] = {}
        if plan is not None:
            # The price of a model that is trained holds for its passes without gradients, too.
            if forward_only == self.engine_config.forward_only and plans.could_gain(plan.work, group):
                if self._comparable % guard.EVERY == 0:
                    metrics |= self._computed_both_ways(data, loss_function, forward_only, group)
                self._comparable += 1
            if not plans.gains(plan.work, self._price.now, group):
                plan = None
        made, seconds = self._timed(data, loss_function, forward_only, plan)
        tokens = data["input_ids"].values().numel()
        self._tally["tokens"] += tokens
        self._tally["tokens_computed"] += tokens if plan is None else plan.work.computed
        self._tally["seconds_saved"] += 0.0 if plan is None else self._price.saved(plan.work, seconds)
        if not forward_only:
            metrics["computed"] = [self._tally["tokens_computed"] / self._tally["tokens"]]
            metrics |= {key: [value] for key, value in self._tally.items()}
            made["metrics"] |= {f"shared_prefix/{key}": value for key, value in metrics.items()}
            self._tally = dict.fromkeys(self._tally, 0.0)
        return made

    def _timed(self, data: TensorDict, loss_function: Any, forward_only: bool, plan: plans.Plan | None) -> Any:
        """What verl makes of the batch, and in how many seconds. ``plan``: None goes verl's way."""
        plans.mark(data, plan)
        get_torch_device().synchronize()
        began = time.perf_counter()
        made = super().forward_backward_batch(data, loss_function, forward_only)
        get_torch_device().synchronize()
        return made, time.perf_counter() - began

    def _computed_both_ways(
        self, data: TensorDict, loss_function: Any, forward_only: bool, group: Any
    ) -> Mapping[str, list[float]]:
        """Metrics of two rows, whose times set the price; nothing where gradients of earlier rows are being kept.

        A policy's gradients are compared only where a rank has rows that an advantage moves.
        """
        module: Any = self.module
        if any(parameter.grad is not None for parameter in module.parameters()):
            return {}
        every_teaches = forward_only or isinstance(self, fsdp.FSDPEngineWithValueHead)
        taught = list(range(len(data))) if every_teaches else guard.teaching(data)
        part = guard.few(data, plans.rows_of(data["input_ids"]), taught or list(range(len(data))))
        both = plans.plan(part, group, self._shape)
        assert both is not None  # nor did the whole batch stay flat
        found: dict[bool, Any] = {}
        norms: dict[bool, float] = {}
        seconds: dict[bool, list[float]] = {True: [], False: []}
        with guard.without_dropout(module):
            for ours in (True, False) * (1 if self._comparable else 2):  # the first of all warms up
                found[ours], taken = self._timed(part, loss_function, forward_only, both if ours else None)
                seconds[ours].append(taken)
                if not forward_only:
                    norms[ours] = guard.gradient_norm(module)
                    self.optimizer_zero_grad()  # type: ignore[no-untyped-call]
        self._price.compared(both.work, min(seconds[True]), min(seconds[False]))
        told = guard.differences(found[True], found[False], part)
        if norms and plans.on_any_rank(bool(taught), group):
            told["grad_norm_off"] = [guard.share_off(norms[True], norms[False])]
        return told | {"price": [self._price.now]}

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        self._trie = Trie(plans.rows_of(micro_batch["input_ids"])) if plans.marked(micro_batch) else None
        self._picked = None
        for config in self._configs:
            config._attn_implementation = attention.NAME if self._trie is not None else self._stock_attention
        if self._trie is None:
            inputs, arguments = super().prepare_model_inputs(micro_batch)  # type: ignore[misc]  # the stock engine's
            return dict(inputs), dict(arguments)
        device = micro_batch["input_ids"].device
        ids, positions = (torch.from_numpy(each)[None].to(device) for each in (self._trie.tokens, self._trie.depth))
        return {"input_ids": ids, "position_ids": positions, "attention_mask": None}, {"trie": self._trie}

    def _check_layers(self, trie: Trie) -> None:
        """verl replaces the attention of some models altogether (qwen2_vl, glm4v, …)."""
        layers = self._configs[0].get_text_config().num_hidden_layers
        if trie.calls != layers:
            problem = f"{trie.calls} of the model's {layers} layers use {attention.NAME}"
            raise ConfigError(
                _KEY, os.environ.get(MODE, "on"), f"does not know this model: {problem}", f"write {_KEY}=off"
            )


class TrieEngineWithLMHead(_OnTries, fsdp.FSDPEngineWithLMHead):
    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        trie: Trie | None = arguments.get("trie")
        if trie is None:
            return inputs, arguments
        temperature = micro_batch["temperature"]
        of_rows = temperature.tolist() if isinstance(temperature, torch.Tensor) else None
        asked = arguments["asked"] = trie.predictions(response_positions(micro_batch), of_rows)
        device = inputs["input_ids"].device
        self._picked = torch.from_numpy(asked.node).to(device)
        if tu.get_non_tensor_data(micro_batch, "use_fused_kernels", default=False):
            labels = torch.from_numpy(asked.label)[None].to(device)
            inputs |= {"shift_labels": labels, "temperature": temperature, "return_dict": True}
        return inputs, arguments

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        asked: Predictions | None = output_args.get("asked")
        if asked is None or self._picked is None:
            return dict(super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func))
        self._check_layers(output_args["trie"])
        one_row, arguments = _as_one_row(asked, micro_batch, self._picked.device)
        found = super().prepare_model_outputs(output, arguments, one_row, logits_processor_func)
        of_token = torch.from_numpy(asked.of_token).to(self._picked.device)
        offsets = micro_batch["input_ids"].offsets()
        return {key: _nested(_spread(value.values(), of_token), offsets) for key, value in found.items()}


class TrieEngineWithValueHead(_OnTries, fsdp.FSDPEngineWithValueHead):
    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        trie: Trie | None = output_args.get("trie")
        if trie is None:
            return dict(super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func))
        self._check_layers(trie)
        nodes = torch.from_numpy(np.concatenate(trie.nodes_of_row)).to(output.logits.device)
        return {"values": _nested(output.logits[0, nodes, 0], micro_batch["input_ids"].offsets())}


def refuse(engine: Any, model: Any, longest: int | None = None) -> None:
    """Refuse a model or an engine with which shared tokens would be computed wrong.

    Args:
        engine: verl's FSDPEngineConfig.
        model: the Hugging Face configuration.
        longest: tokens that a row may have; None is not known, and attention looks at every row.

    Raises:
        ConfigError: something that a shared token would get wrong or that is not built.
    """
    text = model.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    window = getattr(text, "sliding_window", None) if not kinds or "sliding_attention" in kinds else None
    computed_in = PrecisionType.to_dtype((engine.mixed_precision or {}).get("param_dtype", "bf16"))
    others = [kind.replace("_", " ") for kind in sorted(kinds - {"full_attention", "sliding_attention"})]
    _refuse(
        {
            "an accelerator that is neither a GPU of CUDA nor a CPU": get_device_name() not in ("cpu", "cuda"),
            "fp32 on a GPU (fsdp_config.mixed_precision.param_dtype): torch's flash attention takes bf16 and fp16": (
                get_device_name() == "cuda" and computed_in == torch.float32
            ),
            "sequences split over GPUs (ulysses_sequence_parallel_size)": engine.ulysses_sequence_parallel_size > 1,
            "pad_to_length": engine.pad_to_length,
            f"layers of {', '.join(others)}": bool(others),
            "router losses (output_router_logits): a shared token would count once": bool(
                getattr(text, "output_router_logits", False)
            ),
            "attention dropout: one mask per row": bool(getattr(text, "attention_dropout", 0.0)),
            "soft caps of attention (attn_logit_softcapping)": getattr(text, "attn_logit_softcapping", None)
            is not None,
            f"a sliding window of {window} tokens, shorter than a row may be (data.max_prompt_length + "
            f"data.max_response_length = {longest})": bool(window and longest and longest > window),
        }
    )


def refuse_layers(module: torch.nn.Module) -> None:
    """What no configuration tells, and the layers do.

    Raises:
        ConfigError: as `refuse`.
    """
    names = (name.rpartition(".")[2] for name, _ in module.named_parameters())
    _refuse({"attention sinks": "sinks" in names})


def _refuse(problems: Mapping[str, bool]) -> None:
    found = [name for name, there in problems.items() if there]
    if found:
        problem = f"cannot be had with {'; '.join(found)}"
        raise ConfigError(_KEY, os.environ.get(MODE, "on"), problem, f"write {_KEY}=off, or leave that out")


def check_attention(model: Any) -> None:
    """Compare attention on this device with plain attention.

    Args:
        model: the Hugging Face configuration.

    Raises:
        ConfigError: attention on this device is not what plain attention gives.
    """
    text = model.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if get_device_name() == "cpu":
        device, dtype, limit = torch.device("cpu"), torch.float32, 1e-4
    else:
        device, dtype, limit = torch.device(get_device_name(), get_device_id()), torch.bfloat16, 2e-2
    try:
        off = attention.check(device, dtype, size)
        problem = "" if off <= limit else f"its attention is off by {off:.1g} of the largest value (at most {limit:g})"
    except RuntimeError as error:  # no such kernel for this device, type or size
        problem = f"its attention does not run here ({str(error).splitlines()[0]})"
    if problem:
        raise ConfigError(_KEY, os.environ.get(MODE, "on"), problem, f"write {_KEY}=off")


def response_positions(batch: TensorDict) -> list[Ids]:
    """Where verl's losses and its callers of compute_log_prob read (no_padding_2_padding, response_from_nested)."""
    lengths = batch["input_ids"].offsets().diff().tolist()
    prompts = batch["prompts"].offsets().diff().tolist()
    return [np.arange(prompt - 1, length - 1) for prompt, length in zip(prompts, lengths, strict=True)]


def _as_one_row(asked: Predictions, micro_batch: TensorDict, device: torch.device) -> tuple[TensorDict, dict[str, Any]]:
    """What verl's code takes for the only row of a packed micro-batch."""
    temperature, count = micro_batch["temperature"], len(asked.label)
    if isinstance(temperature, torch.Tensor):
        each = temperature.to(torch.float32)[torch.from_numpy(asked.row).to(temperature.device)]
    else:
        each = torch.full((count,), float(temperature))
    labels, offsets = torch.from_numpy(asked.label).to(device), torch.tensor([0, count], device=device)
    names = ("calculate_entropy", "calculate_sum_pi_squared", "pad_mode", "use_fused_kernels")
    flags = {key: tu.get_non_tensor_data(micro_batch, key, default=None) for key in names if key in micro_batch}
    row = tu.get_tensordict(
        {"input_ids": _nested(labels, offsets)}, non_tensor_dict={**flags, "use_remove_padding": True}
    )
    return row, {
        "input_ids_rmpad_rolled": labels,
        "temperature_rmpad": each.to(device),
        "temperature_is_one": fsdp._is_scalar_unit_temperature(temperature),
        "pad_size": 0,
    }


def _spread(values: torch.Tensor, of_token: torch.Tensor) -> torch.Tensor:
    """Zero where nothing was asked; autograd sums over the rows that share a prediction."""
    return torch.cat([values, values.new_zeros(1)])[of_token]


def _nested(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
    return nested


_CHOSEN: dict[str, Any] = {"backend": ["fsdp", "fsdp2"], "device": ["cuda", "npu"], "vendor": VENDOR}
EngineRegistry.register(model_type="language_model", **_CHOSEN)(TrieEngineWithLMHead)
EngineRegistry.register(model_type="value_model", **_CHOSEN)(TrieEngineWithValueHead)
wrapt.wrap_function_wrapper(fsdp, "prepare_micro_batches", plans.grouped)
