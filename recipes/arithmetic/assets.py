"""Model, tokenizer and data of the arithmetic recipe: sums of two numbers below 20, answered by a 0.3M Qwen3.

The warm start imitates answers of which ``_RIGHT`` are right, so that there is something left to reinforce.
``python -m seamless_verl.recipes.arithmetic.assets [--cache DIR]`` builds into `folder`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seamless_verl.recipes import cache as asset_cache

_NAME = "arithmetic"
_RIGHT = 0.5
_LARGEST = 19
_STEPS, _BATCH, _RATE = 400, 64, 4e-3
_SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def folder(cache: str | None = None) -> Path:
    """Where ``model/``, ``train.parquet`` and ``val.parquet`` are, or will be once built."""
    found: Path = asset_cache.folder(_NAME, [Path(__file__)], cache)
    return found


def build(cache: str | None = None) -> Path:
    """Build unless built; return the folder."""
    built: Path = asset_cache.build(_NAME, [Path(__file__)], cache, _build)
    return built


def _build(folder: Path) -> None:
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder / "model")
    _warm_start(tokenizer).save_pretrained(folder / "model")
    pairs = [(a, b) for a in range(_LARGEST + 1) for b in range(_LARGEST + 1)]
    random.Random(0).shuffle(pairs)
    _write(pairs[80:], "train", folder / "train.parquet")
    _write(pairs[:80], "val", folder / "val.parquet")


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [*map(chr, range(32, 127)), "\n"]
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *characters])}
    core = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=_TEMPLATE,
        model_max_length=1024,
    )


def _warm_start(tokenizer: Any) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(  # type: ignore[no-untyped-call]
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=_STEPS, pct_start=0.1)
    for prompt, answer in _demonstrations(tokenizer, random.Random(1)):
        ids = torch.tensor([p + a for p, a in zip(prompt, answer, strict=True)])
        labels = ids.clone()
        labels[:, : len(prompt[0])] = -100
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def _demonstrations(tokenizer: Any, rng: random.Random) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """Batches of prompts and answers; numbers are padded to two places, so that all have one length."""
    for _ in range(_STEPS):
        prompts: list[list[int]] = []
        answers: list[list[int]] = []
        for _ in range(_BATCH):
            a, b = rng.randint(0, _LARGEST), rng.randint(0, _LARGEST)
            total = a + b if rng.random() < _RIGHT else rng.randint(max(0, a + b - 3), a + b + 3)
            prompts.append(_prompt_ids(tokenizer, a, b))
            answers.append([*tokenizer.encode(f"{total:>2}"), tokenizer.eos_token_id])
        yield prompts, answers


def _prompt_ids(tokenizer: Any, a: int, b: int) -> list[int]:
    text = tokenizer.apply_chat_template(_messages(a, b), add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text))


def _messages(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{a:>2}+{b:>2}"}]


def _write(pairs: list[tuple[int, int]], split: str, path: Path) -> None:
    import pandas as pd

    rows = [
        {
            "data_source": "arithmetic",
            "prompt": _messages(a, b),
            "agent_name": "single_turn_agent",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": index, "split": split},
        }
        for index, (a, b) in enumerate(pairs)
    ]
    pd.DataFrame(rows).to_parquet(path)


if __name__ == "__main__":
    sys.exit(asset_cache.main(build))
