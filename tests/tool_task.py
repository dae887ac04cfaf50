"""A task for verl's own multi-turn tool agent, for two cores: sums, a tool that adds, a tiny model that calls it.

python -m seamless_verl.main $(python -m tests.tool_task FOLDER)    # builds it, then trains two steps on it
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from recipes.arithmetic import assets

_STEPS, _BATCH, _RATE = 250, 10, 4e-3
_CALL = '<tool_call>\n{{"name": "add", "arguments": {{"a": "{a:>2}", "b": "{b:>2}"}}}}\n</tool_call><|im_end|>'
_TOOL = '''"""The tool, as verl loads it."""

from verl.tools.function_tool import function_tool


@function_tool
def add(a: str, b: str) -> str:
    """Adds two numbers.

    Args:
        a: one of them
        b: the other one
    """
    return f"{int(a) + int(b):>2}"
'''
_REWARD = '''"""1 where the last answer is the sum."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return float(solution_str.strip().endswith(ground_truth))
'''


def build(folder: Path) -> list[str]:
    """Make the task; return the overrides of a run on it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tool.py").write_text(_TOOL)
    (folder / "reward.py").write_text(_REWARD)
    tokenizer = assets._tokenizer()
    tokenizer.save_pretrained(folder / "model")
    _caller(tokenizer).save_pretrained(folder / "model")
    pairs = [(a, b) for a in range(20) for b in range(20)]
    random.Random(0).shuffle(pairs)
    _write(pairs[16:], folder / "train.parquet")
    _write(pairs[:16], folder / "val.parquet")
    rollout, model = "actor_rollout_ref.rollout", folder / "model"
    return [
        "+recipe=arithmetic",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        "data.max_prompt_length=64",
        "data.max_response_length=160",
        f"actor_rollout_ref.model.path={model}",
        f"critic.model.path={model}",
        f"critic.model.tokenizer_path={model}",
        f"{rollout}.max_model_len=256",
        f"{rollout}.multi_turn.enable=true",
        f"{rollout}.multi_turn.max_assistant_turns=2",
        f"{rollout}.multi_turn.function_tool_path={folder}/tool.py",
        f"{rollout}.agent.default_agent_loop=tool_agent",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "trainer.total_training_steps=2",
    ]


def _caller(tokenizer: Any) -> Any:
    """A model that calls the tool for a sum and repeats what it answers, more or less."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model is slower on several, by far where others use the cores
    model = Qwen3ForCausalLM(_shape(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=_STEPS, pct_start=0.1)
    rng = random.Random(1)
    for _ in range(_STEPS):
        talks = [_talk(tokenizer, rng.randint(0, 19), rng.randint(0, 19)) for _ in range(_BATCH)]
        ids, labels = (torch.tensor([talk[part] for talk in talks]) for part in (0, 1))
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    torch.set_num_threads(threads)
    return model


def _shape(tokenizer: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
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


def _talk(tokenizer: Any, a: int, b: int) -> tuple[list[int], list[int]]:
    """Ids and labels of a whole conversation; -100 where the model says nothing."""
    said = [
        (f"<|im_start|>user\n{a:>2}+{b:>2}<|im_end|>\n<|im_start|>assistant\n", False),
        (_CALL.format(a=a, b=b), True),
        (f"\n<|im_start|>tool\n{a + b:>2}<|im_end|>\n<|im_start|>assistant\n", False),
        (f"{a + b:>2}<|im_end|>", True),
    ]
    ids: list[int] = []
    labels: list[int] = []
    for text, is_models in said:
        new = list(tokenizer.encode(text))
        ids += new
        labels += new if is_models else [-100] * len(new)
    return ids, labels


def _write(pairs: list[tuple[int, int]], path: Path) -> None:
    import pandas as pd

    rows = [
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": f"{a:>2}+{b:>2}"}],
            "agent_name": "tool_agent",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": index, "split": path.stem},
        }
        for index, (a, b) in enumerate(pairs)
    ]
    pd.DataFrame(rows).to_parquet(path)


if __name__ == "__main__":
    sys.stdout.write(" ".join(build(Path(sys.argv[1]).resolve())) + "\n")
