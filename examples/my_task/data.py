"""Makes the data, and brings a tiny model to try them with: ``python -m my_task.data``.

The first run does that by itself (``seamless.assets.module`` in the recipe), into a cache; a change of this file makes
them anew.
"""

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

from seamless_verl.recipes import cache as asset_cache
from seamless_verl.recipes.arithmetic import assets as tiny_model

LARGEST = 19


def folder(cache: str | None = None) -> Path:
    """Where ``train.parquet``, ``val.parquet`` and ``model/`` are, or will be once built."""
    return asset_cache.folder("my_task", [Path(__file__)], cache)


def build(cache: str | None = None) -> Path:
    """Build unless built; return the folder."""

    def fill(target: Path) -> None:
        import pandas as pd

        pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
        random.Random(0).shuffle(pairs)
        pd.DataFrame(rows(pairs[80:], "train")).to_parquet(target / "train.parquet")
        pd.DataFrame(rows(pairs[:80], "val")).to_parquet(target / "val.parquet")
        shutil.copytree(tiny_model.build(cache) / "model", target / "model")

    return asset_cache.build("my_task", [Path(__file__)], cache, fill)


def rows(pairs: list[tuple[int, int]], split: str) -> list[dict[str, Any]]:
    """Rows as verl reads them; ``extra_info.task`` is what `attempt` and `score` get."""
    return [
        {
            "data_source": "my_task",
            "prompt": [{"role": "user", "content": question(a, b)}],
            "agent_name": "seamless_agent",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index, "split": split, "task": json.dumps(task(a, b))},
        }
        for index, (a, b) in enumerate(pairs)
    ]


def question(a: int, b: int) -> str:
    return f"{a:>2}+{b:>2}"


def task(a: int, b: int) -> dict[str, Any]:
    return {"question": question(a, b), "remainder": (a + b) % 3, "answer": str(a + b)}


if __name__ == "__main__":
    sys.exit(asset_cache.main(build))
