"""Models with random weights, made on the spot from their shapes; nothing is downloaded.

tiny    0.3M parameters, warmed up by the arithmetic recipe     the CPU's for everything
0.6b    Qwen3-0.6B's shape, its vocabulary filled up            small, on a GPU
8b      Qwen3-8B's                                              large, on a GPU
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from filelock import FileLock

from benchmarks.gpu_checks.registry import Context

_SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
_VOCABULARY = 151_936
_POSITIONS = 32_768
_BLOCK = 1 << 24
_SIZES = {"small": "0.6b", "large": "8b"}  # on a GPU; the CPU has one size


def arithmetic_data(context: Context) -> Path:
    """The training prompts of the arithmetic recipe."""
    return _arithmetic() / "train.parquet"


def model_folder(context: Context, size: str) -> Path:
    """Model and tokenizer, ``small`` or ``large``; built the first time, then shared by the checks."""
    if not context.on_gpu:
        return _arithmetic() / "model"
    shape = _SIZES[size]
    final = context.folder.parent / f"model-{shape}"
    with FileLock(final.with_suffix(".lock")):  # checks may run side by side
        if not final.exists():
            building = final.with_suffix(".building")
            shutil.rmtree(building, ignore_errors=True)
            _build(_arithmetic() / "model", building, _SHAPES[shape])
            building.rename(final)
    return final


def _arithmetic() -> Path:
    from seamless_verl.recipes.arithmetic import assets

    return assets.build()


def _build(tiny: Path, folder: Path, shape: dict[str, Any]) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True)
    for file in tiny.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder / file.name)
    specials = _fill_vocabulary(folder / "tokenizer.json")
    config = Qwen3Config(
        **shape,
        vocab_size=_VOCABULARY,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=_POSITIONS,
        bos_token_id=None,
        eos_token_id=specials["<|im_end|>"],
        pad_token_id=specials["<|pad|>"],
        dtype="bfloat16",
    )
    with torch.device("meta"):
        empty: Any = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    model = empty.to(torch.bfloat16).to_empty(device="cpu")
    model.tie_weights()
    _fill(model)
    model.save_pretrained(folder)


def _fill(model: Any) -> None:
    """Random matrices, out of one block of numbers: drawing 8 billion of them takes minutes."""
    import torch

    torch.manual_seed(0)
    block = torch.randn(_BLOCK).to(torch.bfloat16)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if parameter.dim() < 2:
                parameter.fill_(1.0)
                continue
            # Embeddings five times as large: a model that is not indifferent has few ties between its best tokens.
            scale = 0.1 if "embed" in name or "lm_head" in name else 0.02
            flat = parameter.view(-1)
            for at in range(0, flat.numel(), _BLOCK):
                part = flat[at : at + _BLOCK]
                part.copy_(block.roll(number * 9_973 + at // _BLOCK)[: part.numel()]).mul_(scale)


def _fill_vocabulary(file: Path) -> dict[str, int]:
    """verl masks what is beyond the tokenizer in vLLM but not in the trainer, so the tokenizer has the model's size."""
    told = json.loads(file.read_text(encoding="utf-8"))
    known: dict[str, int] = told["model"]["vocab"]
    known.update({f"<{number}>": number for number in range(len(known), _VOCABULARY)})
    file.write_text(json.dumps(told), encoding="utf-8")
    return known
